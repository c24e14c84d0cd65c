"""What several test files share: small inputs for any row, small models, and comparisons."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import memsave.functional
import memsave.nn
from memsave.function import RULES, differentiable
from memsave.layers.module import DROP_INS, ROWS
from memsave.spec import TABLE, Layer

SIZE = 4  # of every axis but those of batches and kernels

every_row = pytest.mark.parametrize("row", TABLE.values(), ids=list(TABLE))


def drop_ins(cls: type[nn.Module]) -> list[type[nn.Module]]:
    """Those of a stock class, other than itself."""
    return [drop_in for drop_in in DROP_INS[cls] if drop_in is not cls]


def takes_one(cls: type[nn.Module]) -> bool:
    """Whether its ``forward`` takes one tensor. (A loss takes a target, too.)"""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return sum(p.default is p.empty for p in parameters) == 1


every_class, every_loss = (
    pytest.mark.parametrize(
        "cls",
        [cls for cls in DROP_INS if drop_ins(cls) and takes_one(cls) == one],
        ids=lambda cls: cls.__name__,
    )
    for one in (True, False)
)

#: Values for the constructor arguments that have no default, nor are options of the row.
REQUIRED = {
    "in_channels": SIZE,
    "out_channels": SIZE,
    "in_features": SIZE,
    "out_features": SIZE,
    "num_features": SIZE,
    "num_embeddings": SIZE,
    "embedding_dim": SIZE,
    "num_channels": SIZE,
    "num_groups": 2,
    "normalized_shape": SIZE,
    "kernel_size": 2,
    "output_size": 2,
    "padding": 1,
}


def _required(cls: type[nn.Module], name: str) -> Any:
    if name in REQUIRED:
        return REQUIRED[name]
    for row in ROWS[cls if cls in ROWS else drop_ins(cls)[0]]:
        if name in row.options:
            return row.options[name][0]
    raise LookupError(f"{cls.__name__} needs a {name}: give REQUIRED in tests/helpers.py a value")


#: ``torch.manual_seed``; where there is no other device, the CPU's alone: torch writes down for
#: every kind of device from where it was asked, which takes longer than most calls of a layer.
seed: Callable[[int], Any] = (
    torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
)


def ours(row: Layer) -> Callable[..., Any]:
    """The differentiable function of a row."""
    return differentiable(RULES[row.name])


def stock(row: Layer) -> Callable[..., Any]:
    """What the row must agree with."""
    return RULES[row.name].primal


def options(row: Layer) -> dict[str, Any]:
    """The default of each static option."""
    return {name: values[0] for name, values in row.options.items()}


def inputs(
    row: Layer, wrt: frozenset[str] | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """The same small arguments at each call; ``wrt`` (default: all) want a gradient."""
    wrt = frozenset(row.reads) if wrt is None else wrt
    generator = torch.Generator().manual_seed(0)
    args = {}
    for name, axes in row.args.items():
        shape = _shape(row, axes)
        if name in row.integers:
            args[name] = torch.randint(SIZE, shape, generator=generator)
            continue
        value = torch.randn(shape, generator=generator)
        value = value if name in row.reads else value.abs() + 0.5
        args[name] = value.to(dtype).requires_grad_(name in wrt)
    return args


def _shape(row: Layer, axes: str) -> tuple[int, ...]:
    """A starred axis is as many as the first argument needs to have an image's axes."""
    first, tokens = next(iter(row.args.values())).split(), axes.split()
    spatial = sum(token in ("l", "h", "w", "d") for token in first)
    rank = 2 + spatial if spatial else 4
    spare = rank - len(first) + 1 if {*first} & {*tokens} else 1  # (that of another: one)
    sizes = [[SIZE] * spare if t[0] == "*" else [2 if t in ("kl", "kh", "kw", "kd") else SIZE]
             for t in tokens]  # fmt: skip
    flat = [size for group in sizes for size in group]
    return (2, *flat[1:]) if tokens[0].lstrip("*") == "n" else tuple(flat)


def first(y: Any) -> Tensor:
    """The differentiable output."""
    return y[0] if isinstance(y, tuple) else y


def cotangent(y: Tensor) -> Tensor:
    """The same gradient of ``y`` at each call, laid out as ``y`` is."""
    generator = torch.Generator().manual_seed(1)
    return torch.empty_like(y).copy_(torch.randn(y.shape, generator=generator))


def outcome(function: Callable[..., Any], args: Sequence[Any], **options: Any) -> list[Tensor]:
    """``y`` and the gradient of each argument that wants one, with the same random numbers."""
    seed(2)
    y = first(function(*args, **options))
    wanted = [arg for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, cotangent(y))]


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result, or the type of the exception."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return type(error)


def same(actual: Any, expected: Any, *, layout: bool = False, **tolerance: float) -> None:
    """Assert equal structure, shapes, dtypes and, within ``tolerance``, values."""
    if isinstance(expected, type):
        assert actual is expected
        return
    torch.testing.assert_close(actual, expected, equal_nan=True, check_stride=layout, **tolerance)


def kept(run: Callable[[], Any], free: Sequence[Tensor] = ()) -> int:
    """Bytes of the distinct storages that the graph of ``run()`` holds, ``free`` not counted."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = run()  # so that no address is used twice
    for tensor in free:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    del alive
    return sum(storages.values())


class Ops(TorchDispatchMode):
    """Lists the aten ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


class ConvNet(nn.Module):
    """One of each kind of layer of a convolutional network; input ``(n, 3, 8, 8)``."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect", groups=2),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Dropout(p),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.ReLU(),
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


def pair(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """A stock model and a converted one with the same values."""
    models = []
    for change in (lambda model: model, memsave.convert):
        seed(0)
        models.append(change(make().to(dtype)))
    return models


def image(n: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """An input of :class:`ConvNet` that wants a gradient."""
    return (
        torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(3))
        .to(dtype)
        .requires_grad_()
    )


def loss_inputs() -> tuple[Tensor, Tensor]:
    """Logits that want a gradient, and classes."""
    return image(), torch.arange(128).view(2, 8, 8) % 3


def step(
    run: Callable[..., Any], *args: Any, model: nn.Module | None = None
) -> list[Tensor | None]:
    """Forward and backward: ``y``, and the gradients of inputs and parameters that want one.

    ``model`` has the parameters, if ``run`` is not a module.
    """
    model = run if model is None else model
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    wanted = [tensor for tensor in (*args, *parameters) if tensor.requires_grad]
    for tensor in wanted:
        tensor.grad = None
    seed(2)
    y = first(run(*args))
    y.backward(cotangent(y))
    return [y, *(tensor.grad for tensor in wanted)]


def build(cls: type[nn.Module], **overrides: Any) -> nn.Module:
    """A small float64 module of a stock class or drop-in, with the same values at each call."""
    parameters = inspect.signature(cls).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind < 2]
    seed(0)
    return cls(**{name: _required(cls, name) for name in required} | overrides).double()


#: With which a layer runs other code than with its defaults.
OPTIONS: dict[type[nn.Module], list[dict[str, Any]]] = {
    nn.InstanceNorm2d: [{"track_running_stats": True}],
    nn.Conv2d: [
        {"padding": 1, "padding_mode": "circular"},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": "same"},
    ],
}


def in_pairs(cls: type[nn.Module]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Layers of a stock class, and each with a drop-in."""
    for options, drop_in in product([{}, *OPTIONS.get(cls, [])], drop_ins(cls)):
        yield build(cls, **options), build(drop_in, **options)


def module_input(cls: type[nn.Module]) -> Tensor:
    """An input of ``build(cls)`` that wants a gradient, or indices."""
    generator = torch.Generator().manual_seed(4)
    if any(row.integers for row in ROWS[drop_ins(cls)[0]]):
        return torch.randint(SIZE, (2, SIZE), generator=generator)
    suffix = cls.__name__[-2:]
    dims = int(suffix[0]) if suffix in ("1d", "2d", "3d") else 2
    shape = (2, *[SIZE] * (dims + 1))
    return torch.randn(shape, generator=generator).double().requires_grad_()


def compiled_rows(rows: Iterable[Layer]) -> list[Layer]:
    """Those of which ``torch.compile`` may trace the rule: of others it traces the stock op."""
    return [row for row in rows if RULES[row.name].compiled]


def check_two_in_one_graph(row: Layer) -> None:
    """Two calls that ``torch.compile`` puts into one graph, for any sizes: there it takes numbers
    that it finds in variables for symbols, which two autograd functions cannot share.
    """
    if torch.__version__ < "2.13":
        pytest.skip("torch 2.11 writes a wrong program where a function that is passed has numbers")
    chosen = options(row)

    def twice(layer: Callable[..., Any], *args: Tensor) -> Tensor:
        return first(layer(*args, **chosen)) + first(layer(*args, **chosen))

    torch._dynamo.reset()
    call = torch.compile(partial(twice, ours(row)), fullgraph=True, backend="eager", dynamic=True)
    expected = outcome(partial(twice, stock(row)), [*inputs(row).values()])
    same(outcome(call, [*inputs(row).values()]), expected)
