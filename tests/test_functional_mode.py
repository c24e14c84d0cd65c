"""``functional_mode``: under it torch's functions are memsave's, and nothing else changes.

Which functions those are is found by name, here from ``memsave.functional`` again.
"""

import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import helpers
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import same
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import memsave.functional
from memsave._functional_mode import STAND_INS, functional_mode
from memsave.function import observe

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Block(nn.Module):
    """Of a residual network that calls functions."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.norm2 = nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o)
        self.weight = nn.Parameter(torch.randn(o, i, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return torch.relu(self.norm2(self.conv2(y)) + torch.conv2d(x, self.weight))


class ResNet(nn.Module):
    """Input ``(n, 3, 8, 8)``, with functions of all homes."""

    def __init__(self) -> None:
        super().__init__()
        self.block1, self.block2 = Block(3, 8), Block(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.block1(x), 2)
        x = F.dropout(self.block2(x), 0.3, self.training)
        x = F.layer_norm(x, x.shape[1:]).relu_()
        return self.head(F.avg_pool2d(x, 4).flatten(1))


def network() -> nn.Module:
    torch.manual_seed(0)
    return ResNet().double()


def kept(run: Callable[[], Any], model: nn.Module, x: Tensor) -> int:
    torch.manual_seed(2)
    return helpers.kept(run, [*model.parameters(), *model.buffers(), x])


def rows(run: Callable[[], Any]) -> list[str]:
    """The rows of the layers that are called."""
    called: list[str] = []
    with observe(lambda call: called.append(call.row.name)):
        run()
    return called


def served(stock: Callable[..., Any]) -> bool:
    return stock in STAND_INS


class Triple(TorchFunctionMode):
    """Has ``relu`` and ``max_pool2d`` mean something else, and lists the functions that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        y = func(*args, **(kwargs or {}))
        return y * 3 if func.__name__ in ("relu", "max_pool2d") else y


@pytest.mark.parametrize("inside", [True, False])
def test_modes_of_others(inside: bool) -> None:
    """They see torch's functions, and what they have them mean holds."""
    model, x = network(), torch.randn(2, 3, 8, 8).double().requires_grad_()

    def run(own: bool) -> tuple[Any, list[str]]:
        mode, ours = Triple(), functional_mode() if own else contextlib.nullcontext()
        torch.manual_seed(2)
        with ours if inside else mode, mode if inside else ours:
            y = model(x)
        return torch.autograd.grad(y.sum(), [x, *model.parameters()]), mode.names

    (expected, names), (actual, names_of_ours) = run(False), run(True)
    same(actual, expected)
    assert names_of_ours == names
    with Triple(), functional_mode():
        rows_of_ours = rows(lambda: model(x))
    assert rows_of_ours == rows(functional_mode()(lambda: model(x))) != []


# Which functions.


def test_every_function_stands_in_for_its_namesakes() -> None:
    for name in memsave.functional.__all__:
        if hasattr(F, name):
            assert STAND_INS[getattr(F, name)] is getattr(memsave.functional, name)
    ours = {getattr(memsave.functional, name) for name in memsave.functional.__all__}
    assert {*STAND_INS.values()} <= {
        *ours,
        *(f for f in STAND_INS.values() if f.__name__ == "<lambda>"),
    }


@pytest.mark.parametrize("name", [n for n in memsave.functional.__all__ if hasattr(F, n)])
def test_signatures_are_those_of_torch(name: str) -> None:
    """Names, order and defaults, of what ``torch.nn.functional`` says of itself."""
    try:
        theirs = inspect.signature(getattr(F, name)).parameters
    except ValueError:  # a builtin
        return
    ours = inspect.signature(getattr(memsave.functional, name)).parameters
    if any(p.kind not in BY_POSITION for p in theirs.values()):  # max_pool2d: two functions
        theirs = inspect.signature(getattr(F, f"{name}_with_indices")).parameters
    assert [*ours] == [*theirs]
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_homes() -> None:
    """By name, and only where the arguments are the same."""
    for stock in (F.relu, torch.relu, Tensor.relu, torch.relu_, Tensor.relu_, F.leaky_relu_):
        assert served(stock)
    for stock in (F.batch_norm, F.conv2d, F.max_pool2d, torch.max_pool2d, F.linear, torch.prelu):
        assert served(stock)
    for other in (torch.batch_norm, torch.instance_norm, torch.add, F.multi_head_attention_forward):
        assert not served(other)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "F.relu": lambda x, w, b: F.relu(x),
    "F.relu in place": lambda x, w, b: F.relu(x * 1, inplace=True),
    "torch.relu": lambda x, w, b: torch.relu(input=x),
    "x.relu": lambda x, w, b: x.relu(),
    "x.relu_": lambda x, w, b: (x * 1).relu_(),
    "F.leaky_relu_": lambda x, w, b: F.leaky_relu_(x * 1, 0.2),
    "F.hardtanh": lambda x, w, b: F.hardtanh(x, max_val=0.5),
    "F.threshold": lambda x, w, b: F.threshold(x, 0.1, value=0.3),
    "F.dropout": lambda x, w, b: F.dropout(x * 1, 0.3, True, True),
    "torch.dropout": lambda x, w, b: torch.dropout(x, p=0.3, train=True),
    "F.dropout2d": lambda x, w, b: F.dropout2d(x, p=0.3),
    "F.conv2d": lambda x, w, b: F.conv2d(x, w, b, 2, padding=1),
    "torch.conv2d": lambda x, w, b: torch.conv2d(input=x, weight=w, bias=b, stride=[1, 2]),
    "F.max_pool2d": lambda x, w, b: F.max_pool2d(x, 2, padding=1),
    "F.max_pool2d with indices": lambda x, w, b: F.max_pool2d(x, 2, return_indices=True),
    "F.max_pool2d_with_indices": lambda x, w, b: F.max_pool2d_with_indices(x, 2),
    "torch.max_pool2d": lambda x, w, b: torch.max_pool2d(x, 2, stride=[]),
    "F.avg_pool2d": lambda x, w, b: F.avg_pool2d(x, 2, []),
    "F.adaptive_avg_pool2d": lambda x, w, b: F.adaptive_avg_pool2d(x, (2, None)),
    "F.adaptive_max_pool2d": lambda x, w, b: F.adaptive_max_pool2d(x, 2, return_indices=True),
    "torch.adaptive_max_pool1d": lambda x, w, b: torch.adaptive_max_pool1d(x[0], 2),
    "F.cross_entropy": lambda x, w, b: F.cross_entropy(x[:, 0], x[:, 1, 0].long().abs() % 4),
    "F.batch_norm": lambda x, w, b: F.batch_norm(x, None, None, b, b, training=True),
    "torch.batch_norm": lambda x, w, b: torch.batch_norm(
        x, b, b, b.detach(), b.detach().square(), False, 0.1, 1e-5, True
    ),
    "F.layer_norm": lambda x, w, b: F.layer_norm(x, (4,), weight=b),
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, (4,), b, b, 1e-5, False),
    "F.group_norm": lambda x, w, b: F.group_norm(x, 2, b, bias=b),
    "F.instance_norm": lambda x, w, b: F.instance_norm(x, weight=b),
    "F.rms_norm": lambda x, w, b: F.rms_norm(x, [4], b),
    "F.prelu": lambda x, w, b: F.prelu(x, b),
    "F.logsigmoid": lambda x, w, b: F.logsigmoid(x),
    "F.pad": lambda x, w, b: F.pad(x, (1, 1, 2, 0), mode="reflect"),
    "F.pad with a value": lambda x, w, b: F.pad(x, (1, 1), value=2.0),
    "F.linear": lambda x, w, b: F.linear(x, w[0, 0], bias=None),
    "torch.add": lambda x, w, b: torch.add(x, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    """Outputs to the bit and gradients to rounding, however the function is called."""
    call, generator = CALLS[name], torch.Generator().manual_seed(0)

    def run(mode: bool) -> Any:
        generator.manual_seed(0)
        shapes = (2, 4, 4, 4), (4, 4, 4, 4), (4,)
        args = [torch.randn(s, generator=generator).double().requires_grad_() for s in shapes]
        torch.manual_seed(2)
        if mode:
            with functional_mode():
                result = call(*args)
        else:
            result = call(*args)
        y = helpers.first(result)
        return result, torch.autograd.grad(y, args, helpers.cotangent(y), allow_unused=True)

    (actual, grads), (expected, stock_grads) = run(True), run(False)
    same(actual, expected, rtol=0, atol=0)
    same(grads, stock_grads)


def test_in_place() -> None:
    for call in (lambda y: F.relu(y, True), torch.relu_, Tensor.relu_, F.hardtanh_):
        y = torch.randn(4, requires_grad=True) * 1
        with functional_mode():
            assert call(y) is y
        assert y.grad_fn.name().startswith("Memsave")


@pytest.mark.parametrize("call", [F.softshrink, F.logsigmoid, torch.hardshrink])
def test_outputs_that_are_given(call: Callable[..., Tensor]) -> None:
    """They have no gradient."""
    x, y = torch.randn(4), torch.empty(4)
    with functional_mode():
        assert call(x, out=y) is y
    same(y, call(x))


def test_errors_are_those_of_torch() -> None:
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    calls = (
        lambda: F.relu(x, 1, 2, 3),
        lambda: F.conv2d(x, torch.randn(4, 2, 3, 3)),
        lambda: F.dropout(x, 1.5),
        lambda: F.max_pool2d(x, 9),
        lambda: F.batch_norm(x, None, None),
        lambda: F.relu(None),  # type: ignore[arg-type]
    )
    for call in calls:
        with functional_mode():
            actual = helpers.attempt(call)
        assert isinstance(actual, type)
        assert actual is helpers.attempt(call)


# A model.


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_model_keeps_less_and_computes_the_same(training: bool, frozen: bool) -> None:
    """Backward runs outside."""
    stock, ours = network().train(training), network().train(training)
    x = helpers.image()
    for model in (stock, ours):
        model.requires_grad_(not frozen)

    def run(x: Tensor) -> Tensor:
        with functional_mode():
            return ours(x)

    actual, expected = helpers.step(run, x, model=ours), helpers.step(stock, x)
    same(actual[0], expected[0], rtol=0, atol=0)
    same(actual[1:], expected[1:])
    same(dict(ours.named_buffers()), dict(stock.named_buffers()))
    share = kept(lambda: run(x), ours, x) / kept(lambda: stock(x), stock, x)
    assert share < (0.7 if frozen else 0.85)


def test_as_a_decorator() -> None:
    """Of a forward that calls itself, too."""

    class Decorated(ResNet):
        @functional_mode()
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return super().forward(x) + (self(x, again=False) if again else 0)

    class Plain(ResNet):
        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            return super().forward(x) + (self(x, again=False) if again else 0)

    x, models = helpers.image(), []
    for cls in (Decorated, Plain):
        torch.manual_seed(0)
        models.append(cls().double())
    same(helpers.step(models[0], x), helpers.step(models[1], x))
    assert kept(lambda: models[0](x), models[0], x) < kept(lambda: models[1](x), models[1], x)
    assert torch._C._len_torch_function_stack() == 0


def test_nested_and_entered_twice() -> None:
    model, x, mode = network(), helpers.image(), functional_mode()
    expected = helpers.step(network(), x)
    once = kept(lambda: functional_mode()(model)(x), model, x)

    def nested(x: Tensor) -> Tensor:
        with mode, mode, functional_mode():
            return model(x)

    assert kept(lambda: nested(x), model, x) == once
    same(helpers.step(nested, x, model=network_like(model)), expected)
    with mode:
        assert rows(lambda: F.relu(x)) == ["relu"]
    assert rows(lambda: F.relu(x)) == []


def network_like(model: nn.Module) -> nn.Module:
    """The model itself, as at first."""
    model.load_state_dict(network().state_dict())
    return model


def test_an_exception_ends_it() -> None:
    x = helpers.image()

    @functional_mode()
    def failing() -> None:
        assert rows(lambda: F.relu(x)) == ["relu"]
        raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert rows(lambda: F.relu(x)) == []


def test_without_gradients_torch_runs() -> None:
    x = torch.randn(4, requires_grad=True)
    for without in (torch.no_grad(), torch.inference_mode()):
        with without, functional_mode():
            assert rows(lambda: F.relu(x)) == []


def test_it_holds_in_its_thread() -> None:
    x, seen = torch.randn(4, requires_grad=True), {}

    def work(name: str, mode: Any) -> None:
        with mode:
            seen[name] = rows(lambda: F.relu(x))

    with functional_mode():
        thread = threading.Thread(target=work, args=("other", torch.enable_grad()))
        thread.start()
        thread.join()
        work("this", torch.enable_grad())
    assert seen == {"this": ["relu"], "other": []}


def test_other_modes_see_what_they_saw() -> None:
    """One entered before sees what memsave calls, and one entered inside what the model calls."""

    class Log(TorchFunctionMode):
        def __init__(self) -> None:
            self.names: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x, outside, inside = torch.randn(4, requires_grad=True), Log(), Log()
    with outside, functional_mode(), inside:
        y = F.relu(x)
    assert inside.names == ["relu"]
    assert "relu" in outside.names
    assert y.grad_fn.name() == "MemsaveReluBackward"


def test_subclasses_see_torch_functions() -> None:
    class Named(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            names.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    names: list[Any] = []
    x = torch.randn(2, 3, 4, 4).as_subclass(Named)
    with functional_mode():
        y = F.layer_norm(x, (4,))
    assert type(y) is Named
    assert names[0] is F.layer_norm
    with functional_mode():
        traced = torch.fx.symbolic_trace(nn.LayerNorm(4))
    assert any(
        node.op == "call_module" or node.target is F.layer_norm for node in traced.graph.nodes
    )


# With the rest of torch.


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpoint(reentrant: bool, inside: bool) -> None:
    """What runs again in backward, which runs outside or inside; and the mode in a checkpoint."""
    stock, ours, x = network(), network(), helpers.image()

    def checkpointed(model: Callable[..., Tensor], x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)

    expected = helpers.step(lambda x: checkpointed(stock, x), x, model=stock)
    if inside:
        with functional_mode():
            actual = helpers.step(lambda x: checkpointed(ours, x), x, model=ours)
    else:
        run = functional_mode()(lambda x: checkpointed(ours, x))
        actual = helpers.step(run, x, model=ours)
    same(actual, expected)
    ours = network()
    within = functional_mode()(ours.forward)
    same(helpers.step(lambda x: checkpointed(within, x), x, model=ours), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    stock, ours, x = network().float(), network().float(), helpers.image(dtype=torch.float32)

    def cast(model: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return torch.autocast("cpu", dtype)(model)

    run = functional_mode()(cast(ours))
    actual, expected = helpers.step(run, x, model=ours), helpers.step(cast(stock), x, model=stock)
    same(actual[0], expected[0], rtol=0, atol=0)
    same(actual[1:], expected[1:], rtol=0.05, atol=0.05)


def test_double_backward() -> None:
    """All of it inside, where backward calls torch's functions, too."""
    model, x = network().eval(), helpers.image()

    def second(mode: bool) -> list[Tensor]:
        forward = functional_mode()(model) if mode else model
        (dx,) = torch.autograd.grad(forward(x).square().sum(), x, create_graph=True)
        return [dx, *torch.autograd.grad(dx.square().sum(), model.block1.conv1.weight)]

    expected = second(False)
    same(second(True), expected)
    with functional_mode():
        same(second(True), expected)


def test_functorch_and_export() -> None:
    model, x = network().eval(), helpers.image().detach()
    expected = torch.func.grad(lambda x: model(x).sum())(x)
    with functional_mode():
        same(torch.func.grad(lambda x: model(x).sum())(x), expected)
        same(torch.func.vmap(F.relu)(x), F.relu(x))
        same(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("where", ["around", "inside", "as a decorator"])
def test_compile(where: str) -> None:
    """One graph; it keeps no more than stock's, and with frozen convolutions less."""
    stock, ours, x = network().eval(), network().eval(), helpers.image()
    for model in (stock, ours):
        model.requires_grad_(False)

    def compiled(model: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(model, fullgraph=True, backend="aot_eager")

    def inside(x: Tensor) -> Tensor:
        with functional_mode():
            return ours(x)

    run = {
        "around": lambda: functional_mode()(compiled(ours)),
        "inside": lambda: compiled(inside),
        "as a decorator": lambda: compiled(functional_mode()(ours.forward)),
    }[where]
    torch._dynamo.reset()
    try:
        call, expected_call = run(), compiled(stock)
        same(helpers.step(call, x, model=ours), helpers.step(expected_call, x, model=stock))
        now, before = kept(lambda: call(x), ours, x), kept(lambda: expected_call(x), stock, x)
        assert now < before
    finally:
        torch._dynamo.reset()


def test_a_converted_model() -> None:
    """Its modules keep what they kept, and the functions that it calls keep less."""
    ours, x = memsave.convert(network()), helpers.image()
    before = kept(lambda: ours(x), ours, x)
    with functional_mode():
        assert kept(lambda: ours(x), ours, x) < before
        actual = helpers.step(network_like(ours), x)
    same(actual, helpers.step(network(), x))


def test_rows_that_were_chosen_stay() -> None:
    """A converted layer runs its own row, not that of the function by which stock computes it."""
    model = memsave.convert(nn.ReLU(), policy=lambda module, name, rows: rows[-1])
    x = torch.randn(9, requires_grad=True)
    with functional_mode():
        assert rows(lambda: model(x)) == ["relu_from_output"]
