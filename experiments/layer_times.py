"""Speed of every layer alone: a step of memsave and of stock in turn, and what each keeps.

A step is forward and backward. Every drop-in of :mod:`memsave.nn` is taken, some with options that
have loops or operations of their own, at three sizes of its input: 64x64, where the time is that of
the calls, to 100 MB, where it is that of the memory; and for each choice of gradients. Ratios are
medians over pairs, in a process that keeps the memory it frees; beside them stands that of the
stock layer, taken twice in each turn, to itself: what it is off 1 is noise. Kept bytes are those of
a layer whose input is an activation. Outputs and gradients are compared on the way, from the same
random numbers.
``--compare`` adds the stock layer checkpointed, both compiled, and, where ``--paper-code`` says
where it is, the paper's code. (What runs in between leaves caches cold: at 4 MB, layers that call
the same function as stock, LayerNorm of memsave and of the paper's code, take 1.03 to 1.04 of its
time then.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import memsave
from memsave.kernels.memory import FORMATS

from .harness import GIB, Experiment
from .measure import (
    again,
    best_device,
    compare,
    difference,
    keep_freed_memory,
    paired_times,
    peak_bytes,
)
from .other_savers import check_paper_code, convert_by_paper
from .render import AGAIN, matrix, mib, noise, quartiles, range_of_noise, table
from .results import Record

#: Shapes of inputs by the spatial axes of a layer; 0 is rows of features.
SHAPES = {
    "64x64": {0: (64, 64), 1: (1, 16, 256), 2: (1, 16, 16, 16), 3: (1, 16, 8, 8, 4)},
    "4 MB": {0: (1024, 1024), 1: (4, 64, 4096), 2: (4, 64, 64, 64), 3: (4, 64, 16, 16, 16)},
    "100 MB": {
        0: (24576, 1024),
        1: (24, 64, 16384),
        2: (24, 64, 128, 128),
        3: (24, 64, 32, 32, 16),
    },
}
#: Steps that are timed as one: where the time is that of the calls. (On an accelerator, so it is at
#: 4 MB.)
CALLS = {"64x64": 100}
CALLS_OF_ACCELERATOR = CALLS | {"4 MB": 20}
#: Gradients of outputs differ in rounding where sums are taken in another order.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
#: By which memsave may keep more than stock: for its parameters alone, RMSNorm keeps the input
#: (which a neighbour may keep too) and a number per row, stock the normalized input alone.
MARGIN = 0.02


def _channels(shape: Sequence[int]) -> int:
    return shape[1]


#: Arguments of the stock class from the shape of its input, by the beginning of its name.
ARGUMENTS: dict[str, Callable[[Sequence[int]], tuple[Any, ...]]] = {
    "ConvTranspose": lambda shape: (_channels(shape), _channels(shape), 3, 1, 1),
    "Conv": lambda shape: (_channels(shape), _channels(shape), 3, 1, 1),
    "BatchNorm": lambda shape: (_channels(shape),),
    "InstanceNorm": lambda shape: (_channels(shape),),
    "GroupNorm": lambda shape: (8, _channels(shape)),
    "LayerNorm": lambda shape: (shape[-1],),
    "RMSNorm": lambda shape: (shape[-1],),
    "Linear": lambda shape: (shape[-1], shape[-1]),
    "Embedding": lambda shape: (1000, shape[-1]),
    "AdaptiveMaxPool": lambda shape: (4,),
    "AdaptiveAvgPool": lambda shape: (4,),
    "MaxPool": lambda shape: (3, 2, 1),
    "AvgPool": lambda shape: (2,),
    "ReflectionPad": lambda shape: (1,),
    "ReplicationPad": lambda shape: (1,),
    "Threshold": lambda shape: (0.1, 0.0),
}
#: Layers whose name does not say how many axes they have.
AXES = {"GroupNorm": 2, "GroupNormFromOutput": 2, "PReLU": 2}
EVAL, PROBABILITIES = "eval", "probabilities"
#: Options, by what a name says behind a comma, one "and" another.
OPTIONS: dict[str, Callable[[Sequence[int]], dict[str, Any]]] = {
    EVAL: lambda shape: {},
    PROBABILITIES: lambda shape: {},
    "weights": lambda shape: {"weight": torch.linspace(0.5, 1.5, shape[1])},
    "smoothing": lambda shape: {"label_smoothing": 0.1},
    "circular": lambda shape: {"padding_mode": "circular"},
    "reflect": lambda shape: {"padding_mode": "reflect"},
}
LAYERS = (
    *memsave.nn.__all__,
    *(f"{name}, {EVAL}" for name in memsave.nn.__all__ if name.startswith("BatchNorm")),
    *(f"Conv2d, {mode}" for mode in ("circular", "reflect")),
    *(
        f"CrossEntropyLoss, {option}"
        for option in (PROBABILITIES, "weights", "smoothing", "weights and smoothing")
    ),
)


#: Of which the README of this folder tells.
IN_MOST_MODELS = (
    *("ReLU", "LeakyReLU", "ReLU6", "Hardtanh", "Dropout", "MaxPool2d"),
    *("BatchNorm2d", "BatchNorm2d, eval", "LayerNorm", "RMSNorm", "GroupNorm", "Conv2d", "Linear"),
)


@dataclass(frozen=True)
class Config:
    """Which layers, at which sizes, and how long (at least ``least`` pairs).

    ``channels_last``: how images are stored. ``paper_code`` is a checkout of the paper's code.
    """

    layers: tuple[str, ...] = LAYERS
    sizes: tuple[str, ...] = tuple(SHAPES)
    dtype: str = "float32"
    channels_last: bool = False
    compare: bool = False
    paper_code: str = ""
    seconds: float = 2.0
    least: int = 7


@dataclass(frozen=True)
class Case:
    """A layer at a size, with respect to its input, its parameters, or both."""

    layer: str
    size: str
    wanted: str
    dtype: str
    compare: bool
    paper_code: str
    seconds: float
    least: int
    channels_last: bool = False


def cases(config: Config) -> Iterator[Case]:
    """By layer, then size, then gradients."""
    check_paper_code(config.paper_code)
    if config.paper_code and not config.compare:
        raise ValueError("the paper's code is measured with --compare")
    rest = (
        *(config.dtype, config.compare, config.paper_code, config.seconds, config.least),
        config.channels_last,
    )
    for layer in config.layers:
        with torch.device("meta"):
            has_parameters = any(True for _ in stock_layer(layer, "64x64").parameters())
        choices = ["input", "parameters", "all"] if has_parameters else ["input"]
        for size in config.sizes:
            for wanted in ["all"] if layer.startswith("Embedding") else choices:
                yield Case(layer, size, wanted, *rest)


def shape_of(layer: str, size: str) -> tuple[int, ...]:
    """Of the input of a layer."""
    digit = re.search(r"(\d)d", layer)
    return SHAPES[size][int(digit[1]) if digit else AXES.get(layer, 0)]


def stock_layer(layer: str, size: str) -> nn.Module:
    """A stock layer, in train mode unless its name says otherwise."""
    name, _, option = layer.partition(", ")
    (stock,) = getattr(memsave.nn, name).__bases__
    shape = shape_of(layer, size)
    arguments = next(
        (make(shape) for start, make in ARGUMENTS.items() if name.startswith(start)), ()
    )
    options: dict[str, Any] = {}
    for one in option.split(" and ") if option else ():
        options |= OPTIONS[one](shape)
    module: nn.Module = stock(*arguments, **options)
    return module.train(option != EVAL)


# All steps have the same parameters (see :func:`again`), inputs and cotangents.


def drop_in(layer: str, module: nn.Module) -> nn.Module:
    """The memsave layer with a stock layer's parameters."""
    module = again(module)
    module.__class__ = getattr(memsave.nn, layer.partition(",")[0])
    return module


@lru_cache(maxsize=1)
def inputs_of(case: Case) -> tuple[Tensor, ...]:
    """Of a layer: rows or images, or indices; and the target of a loss."""
    generator = torch.Generator().manual_seed(0)
    shape, device = shape_of(case.layer, case.size), best_device()
    if case.layer.startswith("Embedding"):
        return (torch.randint(1000, shape[:1], generator=generator).to(device),)
    x = _stored(case, torch.randn(shape, generator=generator).to(device, dtype_of(case)))
    x.requires_grad_(case.wanted != "parameters")
    if case.layer.endswith(PROBABILITIES):
        target = torch.randn(shape, generator=generator).to(device, dtype_of(case))
        return x, target.softmax(1)
    if case.layer.startswith("CrossEntropy"):
        return x, torch.randint(shape[1], shape[:1], generator=generator).to(device)
    return (x,)


@lru_cache(maxsize=1)
def cotangent_of(case: Case, shape: torch.Size) -> Tensor:
    """The gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    return _stored(case, torch.randn(shape, generator=generator).to(best_device(), dtype_of(case)))


def _stored(case: Case, images: Tensor) -> Tensor:
    own = FORMATS.get(images.ndim) if case.channels_last else None
    return images.contiguous(memory_format=own or torch.contiguous_format)


class OfActivation(nn.Module):
    """A layer of copies of the inputs, as in a model: the user's own cost nothing to keep."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        """The output of the layer."""
        y: Tensor = self.layer(*(x.clone() for x in inputs))
        return y


class Step:
    """Forward and backward of a layer, wrapped somehow.

    Attributes:
        module: The layer.
        wanted: What gradients are wanted of.
    """

    def __init__(
        self,
        case: Case,
        module: nn.Module,
        wrapped: Callable[[nn.Module], Callable[..., Tensor]] = lambda module: module,
    ) -> None:
        self.module = module.to(best_device(), dtype_of(case))
        module.requires_grad_(case.wanted != "input")
        self.inputs = inputs_of(case)
        self.wanted = [t for t in (*module.parameters(), *self.inputs) if t.requires_grad]
        self._calls = calls_of(case)
        self._call = wrapped(self.module)
        y = self.forward()
        self._g = cotangent_of(case, y.shape)

    def forward(self) -> Tensor:
        """The output, from the same random numbers every time."""
        torch.manual_seed(0)
        return self._call(*self.inputs)

    def once(self) -> tuple[Tensor, ...]:
        """The output and the gradients."""
        y = self.forward()
        return (y.detach(), *torch.autograd.grad(y, self.wanted, self._g))

    def __call__(self) -> None:
        """As often as is timed at once; with new random numbers."""
        for _ in range(self._calls):
            torch.autograd.grad(self._call(*self.inputs), self.wanted, self._g)


def calls_of(case: Case) -> int:
    """How many are timed at once here."""
    by_size = CALLS if best_device().type == "cpu" else CALLS_OF_ACCELERATOR
    return by_size.get(case.size, 1)


def dtype_of(case: Case) -> torch.dtype:
    """Of the layer and its input."""
    return getattr(torch, case.dtype)


def _checkpointed(module: nn.Module) -> Callable[..., Any]:
    return partial(checkpoint, module, use_reentrant=False)


def _compiled(budget: float, module: nn.Module) -> Callable[..., Tensor]:
    """Compiled by a budget (see :func:`experiments.strategies.compile_with_budget`)."""

    def call(*inputs: Tensor) -> Tensor:
        return module(*inputs)

    # Of a code of its own: the compiler would take what it has made of another.
    own = FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    compiled = torch.compile(own)
    at_first = iter([functorch_config.patch(activation_memory_budget=budget)])

    def run(*inputs: Tensor) -> Tensor:
        with next(at_first, nullcontext()):
            return compiled(*inputs)

    return run


def _variants(case: Case) -> dict[str, Step]:
    torch.manual_seed(0)
    stock = stock_layer(case.layer, case.size)
    steps = {"stock": Step(case, stock), "memsave": Step(case, drop_in(case.layer, stock))}
    if case.compare:
        steps["checkpoint"] = Step(case, again(stock), _checkpointed)
        for budget in (1.0, 0.5):
            name = f"torch.compile, budget {budget}"
            steps[name] = Step(case, again(stock), partial(_compiled, budget))
        steps["memsave, compiled"] = Step(case, drop_in(case.layer, stock), partial(_compiled, 1.0))
        if case.paper_code:
            try:
                theirs = convert_by_paper(case.paper_code, nn.Sequential(again(stock)))
                steps["paper's code"] = Step(case, theirs)
            except Exception:  # of which there are many: see other_savers
                pass
    return steps


def _pairs(case: Case, steps: dict[str, Step]) -> int:
    """How often all fit into the time."""
    (times,) = zip(*paired_times(steps, 1).values(), strict=True)
    return max(case.least, min(2001, int(case.seconds / sum(times))))


def measure(case: Case) -> dict[str, Any]:
    """Times, kept bytes, peaks, and how far memsave's outputs and gradients are from stock's."""
    keep_freed_memory()
    steps = _variants(case)
    stock, ours = steps["stock"], steps["memsave"]
    (y, *grads), (our_y, *our_grads) = stock.once(), ours.once()
    report = memsave.report(OfActivation(ours.module), *ours.inputs)
    figures = {
        "calls": calls_of(case),
        "output_off": difference([y.double()], [our_y.double()]),
        "gradients_off": difference([g.double() for g in grads], [g.double() for g in our_grads]),
        "kept_bytes": {"stock": report.stock, "memsave": report.now},
        "peak_bytes": {n: peak_bytes(step.once, y.device) for n, step in steps.items()},
    }
    del y, grads, our_y, our_grads
    return {**figures, "times": compare({**steps, AGAIN: stock}, _pairs(case, steps))}


def show(records: Sequence[Record[Case]]) -> str:
    """A row per case."""
    others = [name for record in records for name in record.figures["times"]]
    others = [name for name in dict.fromkeys(others) if name not in ("stock", "memsave", AGAIN)]
    return table(
        (
            *("layer", "input", "gradients", "ms of stock", "time ratio", "quartiles"),
            *("stock to itself", "quartiles"),
            *("kept MiB: stock", "memsave", "peak, ratio", *(f"time of {name}" for name in others)),
        ),
        (_line(record, others) for record in records),
    )


def _line(record: Record[Case], others: Sequence[str]) -> Iterator[str]:
    case, figures = record.case, record.figures
    times, kept, peak = figures["times"], figures["kept_bytes"], figures["peak_bytes"]
    yield from (case.layer, case.size, case.wanted)
    calls = figures.get("calls", CALLS.get(case.size, 1))
    yield f"{times['stock']['seconds'] * 1e3 / calls:.3f}"
    yield f"{times['memsave']['ratio']:.3f}"
    yield quartiles(times["memsave"])
    yield from noise(times)
    yield from (mib(kept[name], 3) for name in ("stock", "memsave"))
    yield f"{peak['memsave'] / peak['stock']:.3f}"
    for name in others:
        yield f"{times[name]['ratio']:.2f}" if name in times else ""


def summary(records: Sequence[Record[Case]]) -> str:
    """Ratios of times of the layers that most models have, by size and gradients."""
    cells = {
        (record.case.layer, f"{record.case.size}: {record.case.wanted}"): (
            f"{record.figures['times']['memsave']['ratio']:.2f}"
        )
        for record in records
    }
    for layer in {record.case.layer: None for record in records}:
        times = (record.figures["times"] for record in records if record.case.layer == layer)
        cells[layer, "stock to itself"] = range_of_noise(times)
    return matrix("time, ratio to stock", cells)


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Outputs that are not stock's, gradients further than rounding, and more kept than stock."""
    for record in records:
        figures, kept = record.figures, record.figures["kept_bytes"]
        what = f"{record.case.layer}, {record.case.size}, {record.case.wanted}"
        if figures["output_off"]:
            yield f"{what}: the output differs by {figures['output_off']:.1e}"
        if figures["gradients_off"] > TOLERANCE[record.case.dtype]:
            yield f"{what}: the gradients differ by {figures['gradients_off']:.1e}"
        if kept["memsave"] > kept["stock"] * (1 + MARGIN):
            yield f"{what}: keeps {kept['memsave']} bytes, stock {kept['stock']}"


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(("ReLU", "LayerNorm"), ("64x64",), seconds=0.2, least=3),
        "quick": Config(
            ("ReLU", "Dropout", "MaxPool2d", "BatchNorm2d, eval", "LayerNorm", "Conv2d"),
            ("64x64", "4 MB"),
            seconds=0.5,
            least=5,
        ),
        "default": Config(),
    },
    choices={"layers": LAYERS, "sizes": SHAPES, "dtype": TOLERANCE},
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    summary=summary,
    summarized=lambda case: case.layer in IN_MOST_MODELS and not case.compare,
    memory=lambda case: 6 * GIB if case.size == "100 MB" else 2 * GIB,
)
