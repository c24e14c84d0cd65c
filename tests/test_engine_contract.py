"""Each row as torch sees it: what the engine promises whatever surrounds a layer.

Modes (no gradient, autocast), what is kept and when it is freed, checkpointing, offloading, version
checks, ``torch.func``, forward-mode AD, subclasses, dtypes, layouts and errors are those of the
stock op, for the rows of the table. (Errors are in test_errors.py, and cases of one layer alone in
test_corner_cases.py.)
"""

import contextlib
import copy
import itertools
import pickle
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import helpers
import pytest
import torch
from helpers import every_class, every_row, first, inputs, options, ours, outcome, same, stock
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import memsave
import memsave.nn
from memsave import _context, function
from memsave.spec import TABLE, Layer

# torch compiles some of its forward-mode formulas with TorchScript, which warns.
forward_formulas = pytest.mark.filterwarnings("ignore:`torch.jit")


SIZE = helpers.SIZE


HALVES = [torch.bfloat16, torch.float16]


def both(row: Layer, run, **kwargs) -> tuple:
    """``run(function, args, options)`` for our function and for the stock op."""
    return tuple(
        run(function, [*inputs(row, **kwargs).values()], options(row))
        for function in (ours(row), stock(row))
    )


# No gradient wanted.


@every_row
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_nothing_wanted_runs_the_stock_op(row: Layer, mode) -> None:
    """The same ops, hence no extras; and no node in the graph."""
    wrt = frozenset() if mode is contextlib.nullcontext else None

    def run(function, args, options):
        with mode():
            with helpers.Ops() as ops:
                y = function(*args, **options)
            assert first(y).grad_fn is None
            return ops.names

    actual, expected = both(row, run, wrt=wrt)
    assert actual == expected


@every_row
def test_a_gradient_for_every_mask(row: Layer) -> None:
    """The engine hands out gradients for the mask alone."""
    for wrt in row.masks()[1:]:
        actual, expected = both(row, lambda f, args, opts: outcome(f, args, **opts), wrt=wrt)
        same(actual, expected)


# Autocast.


@every_row
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_autocast_gives_stock_dtypes(row: Layer, half, dtype, where: str) -> None:
    """Whatever part of a step the region surrounds."""

    def run(function, args, options):
        wanted = [arg for arg in args if arg.requires_grad]
        helpers.seed(2)
        with torch.autocast("cpu", dtype=half, enabled=where != "backward"):
            y = first(function(*args, **options))
        with torch.autocast("cpu", dtype=half, enabled=where != "forward"):
            return y, torch.autograd.grad(y, wanted, helpers.cotangent(y))

    loose = {} if where == "backward" else {"rtol": 2e-2, "atol": 2e-2}
    for wrt in row.masks()[1:]:
        actual, expected = both(row, run, wrt=wrt, dtype=dtype)
        same(actual, expected, **loose)


@every_row
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_autocast_of_what_a_layer_before_has_cast(row: Layer, half) -> None:
    """Parameters are wide. (Some ops of stock take their input back to float32.)"""
    if row.name.endswith("norm_from_output"):
        pytest.skip("drop-ins take another row for inputs of less than 32 bits")

    def run(function, args, options):
        x = args[0]
        args = [x.detach().to(half).requires_grad_(x.requires_grad), *args[1:]]
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype=half):
            y = first(function(*args, **options))
        wanted = [arg for arg in args if arg.requires_grad]
        return y, torch.autograd.grad(y, wanted, helpers.cotangent(y))

    def attempt(*args):
        return helpers.attempt(run, *args)

    for wrt in row.masks()[1:]:
        actual, expected = both(row, attempt, wrt=wrt, dtype=torch.float32)
        if not isinstance(expected, type):
            same(actual, expected, rtol=5e-2, atol=5e-2)


@every_row
@pytest.mark.parametrize("optional", [True, False])
def test_empty_batches(row: Layer, optional: bool) -> None:
    """Zeros or nan as stock has, where stock has them; the properties draw such batches seldom.

    (Of group norm with a bias and no weight, stock fails in backward by an error of its own.)
    """
    for wrt in row.masks()[1:]:
        results = []
        for layer in (stock(row), ours(row)):
            args: dict[str, Any] = {**inputs(row, wrt)}
            for name, arg in args.items():
                if row.args[name][0] == "*" or row.args[name].split()[0] == "n":
                    args[name] = arg.detach()[:0].requires_grad_(name in wrt)
                elif name in row.optional and name not in wrt and not optional:
                    args[name] = None
            results.append(helpers.attempt(outcome, layer, [*args.values()], **options(row)))
        if not isinstance(results[0], type):
            same(results[1], results[0])


@every_row
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_autocast_keeps_no_more_than_stock(row: Layer, half) -> None:
    """The best row of each op does, under each mask."""

    def kept(function, wrt) -> int:
        args = inputs(row, wrt, torch.float32)
        axes = next(iter(row.args.values()))  # of the input, and of what is no parameter
        parameters = [
            arg for name, arg in args.items() if row.args[name] != axes and name not in row.integers
        ]
        with torch.autocast("cpu", dtype=half):
            return helpers.kept(lambda: function(*args.values(), **options(row)), parameters)

    rows = [other for other in TABLE.values() if other.op == row.op]
    for wrt in row.masks()[1:]:
        actual = min(kept(ours(other), wrt) for other in rows if wrt <= other.reads.keys())
        assert actual <= kept(stock(row), wrt)


@pytest.mark.parametrize("name", ["layer_norm", "group_norm", "rms_norm"])
def test_autocast_that_widens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is on accelerators, where stock norms run in float32; on CPU stock's do not."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA"):
        pytest.skip("not this one, in this version of torch")
    monkeypatch.setattr(_context, "_NARROW", set())
    row = TABLE[name]
    args = inputs(row, dtype=torch.bfloat16)
    wide = [arg.detach().float().requires_grad_() for arg in args.values()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = outcome(ours(row), [*args.values()], **options(row))
    expected = outcome(stock(row), wide, **options(row))
    same(actual, [expected[0], *(grad.bfloat16() for grad in expected[1:])])


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_autocast_of_a_network(half) -> None:
    """Rows are tested one by one above: here casts are cached across layers."""

    def run(model: nn.Module):
        torch.manual_seed(0)
        x = helpers.image(dtype=torch.float32)
        with torch.autocast("cpu", dtype=half):
            y = model(x)
            loss = y.float().square().sum()
        loss.backward()
        return y, [x.grad, *(p.grad for p in model.parameters())]

    expected, actual = map(run, helpers.pair(helpers.ConvNet, torch.float32))
    same(actual, expected, rtol=5e-2, atol=5e-2)


# The graph: what is kept, hooks, versions, freeing.


@every_row
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(row: Layer, reentrant: bool) -> None:
    def backward(y, args):
        y.backward(helpers.cotangent(y))
        return y, [arg.grad for arg in args if arg.requires_grad]

    def run(function, args, options):
        torch.manual_seed(2)
        y = checkpoint(
            lambda *args: first(function(*args, **options)), *args, use_reentrant=reentrant
        )
        return helpers.attempt(backward, y, args)  # (instance_norm's statistics are in the way)

    actual, expected = both(row, run)
    same(actual, expected)


class Functions(TorchFunctionMode):
    """Sees functions, and does nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@helpers.every_class
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", [Functions, helpers.Ops, memsave.functional_mode])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_checkpoint_that_runs_again_in_another_mode(cls, frozen: bool, mode, where: str) -> None:
    """What it keeps, and in which order, must be the same."""
    for drop_in in helpers.drop_ins(cls):
        results = []
        for layer in map(helpers.build, (cls, drop_in)):
            for parameter in layer.parameters():
                parameter.requires_grad_(not frozen)
            x = helpers.module_input(cls)
            helpers.seed(2)
            with mode() if where == "forward" else contextlib.nullcontext():
                y = checkpoint(layer, x, use_reentrant=False)
            if not y.requires_grad:
                continue
            with mode() if where == "backward" else contextlib.nullcontext():
                y.backward(helpers.cotangent(y))
            results.append([y, *(t.grad for t in (x, *layer.parameters()))])
        if results:
            same(*results)


@contextlib.contextmanager
def within_vmap() -> Iterator[None]:
    """Which maps nothing."""
    torch._C._functorch._vmap_increment_nesting(1, "error")
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


@helpers.every_class
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("transform", [within_vmap, forward_ad.dual_level])
def test_checkpoint_that_runs_again_within_a_transform(cls, transform, where: str) -> None:
    """That is of nothing which the layer reads, as ``vmap`` over backward."""

    def run(layer: nn.Module) -> tuple[Tensor, ...]:
        x = helpers.module_input(cls)
        wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
        helpers.seed(2)
        with transform() if where == "forward" else contextlib.nullcontext():
            y = checkpoint(layer, x, use_reentrant=False)
        with transform() if where == "backward" else contextlib.nullcontext():
            return torch.autograd.grad(y, wanted, helpers.cotangent(y))

    for drop_in in helpers.drop_ins(cls):
        expected, actual = (helpers.attempt(run, helpers.build(c)) for c in (cls, drop_in))
        same(actual, expected)  # (or they raise alike: vmap has its own meaning of random numbers)


class Names(TorchFunctionMode):
    """Lists the functions that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return self.meant(func, args, kwargs or {})

    def meant(self, func, args, kwargs):
        return func(*args, **kwargs)


def is_layer(func: Callable[..., Any], y: Any) -> bool:
    return isinstance(y, Tensor) and y.requires_grad and func.__name__ != "__get__"


class Triple(Names):
    """Has functions return something else."""

    def meant(self, func, args, kwargs):
        y = func(*args, **kwargs)
        return y * 3 if is_layer(func, y) else y


class Halve(Names):
    """Has functions read something else."""

    def meant(self, func, args, kwargs):
        args = (args[0] / 2, *args[1:]) if is_layer(func, args[0]) else args
        return func(*args, **kwargs)


class Options(Names):
    """Gives functions other numbers."""

    def meant(self, func, args, kwargs):
        args = [value / 2 if type(value) is float else value for value in args]
        kwargs = {n: value / 2 if type(value) is float else value for n, value in kwargs.items()}
        return func(*args, **kwargs)


def within(mode: Names, layer: nn.Module, x: Tensor) -> tuple[Any, list[str]]:
    """What a layer returns in a mode, the gradients and buffers, and the functions that run."""
    helpers.seed(2)
    with mode:
        y = layer(x)
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    grads = torch.autograd.grad(y, wanted, helpers.cotangent(y))
    return [y, *grads, *layer.buffers()], mode.names


@helpers.every_class
@pytest.mark.parametrize("mode", [Names, Triple, Halve, Options])
@pytest.mark.parametrize("training", [True, False])
def test_modes_see_the_functions_of_stock(cls, mode, training: bool) -> None:
    """And what they have them mean holds."""
    for drop_in in helpers.drop_ins(cls):
        layers = (helpers.build(c).train(training) for c in (cls, drop_in))
        expected, actual = (within(mode(), layer, helpers.module_input(cls)) for layer in layers)
        same(actual[0], expected[0])
        assert actual[1] == expected[1]


@pytest.mark.parametrize("mode", [Names, Triple])
@pytest.mark.parametrize("tracking", [True, False])
@pytest.mark.parametrize("cls", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_modes_and_what_a_norm_counts(cls, mode, tracking: bool) -> None:
    results = []
    for made in (cls, *helpers.drop_ins(cls)):
        layer = helpers.build(made, track_running_stats=True)
        layer.track_running_stats = tracking
        results.append(within(mode(), layer, helpers.module_input(cls))[0])
    for actual in results[1:]:
        same(actual, results[0])


@pytest.mark.parametrize("mode", [Names, Triple, Halve])
def test_modes_see_the_functions_of_a_padded_convolution(mode) -> None:
    x, options = helpers.module_input(nn.Conv2d), {"padding": 1, "padding_mode": "reflect"}
    layers = (helpers.build(cls, **options) for cls in (nn.Conv2d, memsave.nn.Conv2d))
    expected, actual = (within(mode(), layer, x) for layer in layers)
    same(actual[0], expected[0])
    assert actual[1] == expected[1]


@pytest.mark.parametrize("padding_mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_checkpoint_of_a_padded_convolution_in_another_mode(padding_mode: str, where: str) -> None:
    results, modes = [], {"forward": contextlib.nullcontext, "backward": contextlib.nullcontext}
    modes[where] = Names
    for cls in (nn.Conv2d, memsave.nn.Conv2d):
        layer = helpers.build(cls, padding=1, padding_mode=padding_mode)
        x = helpers.module_input(nn.Conv2d)
        with modes["forward"]():
            y = checkpoint(layer, x, use_reentrant=False)
        with modes["backward"]():
            y.backward(helpers.cotangent(y))
        results.append([y, x.grad, layer.weight.grad])
    same(*results)


class Counts(nn.Module):
    """A weight that is another each time that it is asked for, as of spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * self.calls


def test_modes_and_a_weight_that_is_computed_anew_each_time() -> None:
    results = []
    for cls in (nn.Conv2d, memsave.nn.Conv2d):
        layer = helpers.build(cls)
        nn.utils.parametrize.register_parametrization(layer, "weight", Counts())
        results.append(within(Names(), layer, helpers.module_input(nn.Conv2d))[0])
    same(*results)


def test_modes_and_a_norm_that_counts_nothing() -> None:
    """Where what is there must not be overwritten, as in ``torch.func``."""
    x, results = helpers.module_input(nn.BatchNorm2d).detach(), []
    for cls in (nn.BatchNorm2d, memsave.nn.BatchNorm2d):
        layer = helpers.build(cls).eval()
        with Names():
            results.append(torch.func.grad(lambda x, layer=layer: layer(x).sum())(x))
    same(*results)


def test_a_mode_that_only_looks_changes_nothing_of_what_is_kept() -> None:
    model, x = memsave.convert(helpers.ConvNet().double()), helpers.image()
    held = [*model.parameters(), *model.buffers(), x]
    expected = helpers.kept(lambda: model(x), held)
    with Names():
        assert helpers.kept(lambda: model(x), held) == expected
    assert expected < helpers.kept(lambda: memsave.revert(model)(x), held)


def test_per_sample_gradients_by_expanded_weights() -> None:
    """A class of tensors that knows the functions of layers, and nothing else."""
    image, sequence = torch.randn(3, SIZE, SIZE, SIZE), torch.randn(3, SIZE)
    for layer, x in (
        (nn.Linear(SIZE, 2), sequence),
        (nn.Conv2d(SIZE, 2, 3), image),
        (nn.Conv2d(SIZE, 2, 3, padding=1, padding_mode="reflect"), image),
        (nn.LayerNorm(SIZE), sequence),
        (nn.GroupNorm(2, SIZE), image),
        (nn.InstanceNorm2d(SIZE, affine=True), image),
    ):
        gradients = []
        for model in (copy.deepcopy(layer), memsave.convert(copy.deepcopy(layer))):
            call_for_per_sample_grads(model)(x).sum().backward()
            gradients.append([p.grad_sample for p in model.parameters()])
        same(gradients[1], gradients[0])


class Shows(Tensor):
    """Lists the functions that run on it, as of a class that knows but some."""

    names: list[str]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.names.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@helpers.every_class
def test_classes_of_tensors_see_the_functions_of_stock(cls: type[nn.Module]) -> None:
    x = helpers.module_input(cls).detach().as_subclass(Shows)
    for layers in helpers.in_pairs(cls):
        names, results = [], []
        for layer in layers:
            helpers.seed(2)
            Shows.names = []
            results.append(layer(x))
            names.append(Shows.names)
        assert names[1] == names[0]
        same(results[1], results[0])


@every_row
def test_selective_checkpoint(row: Layer) -> None:
    """That saves what every op returns, which none may overwrite then."""

    def context() -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_SAVE)

    def run(function, args, options):
        torch.manual_seed(2)
        y = checkpoint(
            lambda *args: first(function(*args, **options)),
            *args,
            use_reentrant=False,
            context_fn=context,
        )
        wanted = [arg for arg in args if arg.requires_grad]
        return helpers.attempt(torch.autograd.grad, y, wanted, helpers.cotangent(y))

    actual, expected = both(row, run)
    same(actual, expected)  # (or they raise alike: stock's random ops overwrite what they make)


@every_row
def test_retain_graph(row: Layer) -> None:
    args = inputs(row)
    wanted = [args[name] for name in row.reads]
    y = first(ours(row)(*args.values(), **options(row)))
    g = helpers.cotangent(y)
    same(
        torch.autograd.grad(y, wanted, g, retain_graph=True),
        torch.autograd.grad(y, wanted, g),
    )


@every_row
def test_a_second_backward_raises_as_stock(row: Layer) -> None:
    def run(function, args, options):
        wanted = [arg for arg in args if arg.requires_grad]
        y = first(function(*args, **options))
        torch.autograd.grad(y, wanted, helpers.cotangent(y))
        return helpers.attempt(torch.autograd.grad, y, wanted, helpers.cotangent(y))

    for wrt in row.masks()[1:]:
        actual, expected = both(row, run, wrt=wrt)
        same(actual, expected)


@every_row
def test_save_on_cpu(row: Layer) -> None:
    def run(function, args, options):
        with save_on_cpu():
            return outcome(function, args, **options)

    actual, expected = both(row, run)
    same(actual, expected)


@every_row
def test_saved_tensors_survive_disk(row: Layer) -> None:
    """Everything goes through the hooks of the user, who may keep it elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        names = map(str, itertools.count())

        def pack(tensor: Tensor) -> Path:
            path = Path(folder, next(names))
            torch.save(tensor, path)
            return path

        def run(function, args, options):
            with saved_tensors_hooks(pack, torch.load):
                return outcome(function, args, **options)

        actual, expected = both(row, run)
    same(actual, expected)


@every_row
def test_what_is_kept_may_not_change(row: Layer) -> None:
    """The stock error; and what is not kept may change."""
    for wrt in row.masks()[1:]:
        for name in (*row.args, "y"):
            args = inputs(row, wrt)
            torch.manual_seed(2)
            y = first(ours(row)(*args.values(), **options(row)))
            g = helpers.cotangent(y)
            with torch.no_grad():
                {**args, "y": y}[name].mul_(2)
            wanted = [arg for arg in args.values() if arg.requires_grad]
            if name in row.saves(wrt):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    torch.autograd.grad(y, wanted, g)
            else:
                expected = outcome(stock(row), [*inputs(row, wrt).values()], **options(row))
                same(torch.autograd.grad(y, wanted, g), tuple(expected[1:]))


@every_row
def test_the_output_may_be_overwritten(row: Layer) -> None:
    """By a layer with ``inplace=True``, say. (By more layers than with stock, which keeps more.)"""
    for wrt in row.masks()[1:]:
        if "y" in row.saves(wrt):
            continue
        args = [*inputs(row, wrt).values()]
        actual = outcome(lambda *args: first(ours(row)(*args, **options(row))).mul_(3), args)
        args = [*inputs(row, wrt).values()]
        expected = outcome(lambda *args: 3 * first(stock(row)(*args, **options(row))), args)
        same(actual, expected)


@every_row
def test_anomaly_mode(row: Layer) -> None:
    def run(function, args, options):
        with torch.autograd.detect_anomaly(check_nan=True):
            return outcome(function, args, **options)

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        actual, expected = both(row, run)
    same(actual, expected)


@every_row
def test_hooks_on_tensors_see_stock_gradients(row: Layer) -> None:
    def run(function, args, options):
        seen = []
        for arg in args:
            if arg.requires_grad:
                arg.register_hook(lambda g: seen.append(g) or 2 * g)
                arg.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        torch.manual_seed(2)
        y = first(function(*args, **options))
        y.register_hook(lambda g: 3 * g)
        y.backward(helpers.cotangent(y))
        return len(seen), [arg.grad for arg in args if arg.requires_grad]

    actual, expected = both(row, run)
    same(actual, expected)


@every_row
def test_batched_gradients(row: Layer) -> None:
    """``is_grads_batched`` runs backward under vmap."""

    def run(function, args, options):
        wanted = [arg for arg in args if arg.requires_grad]
        torch.manual_seed(2)
        y = first(function(*args, **options))
        g = torch.stack([helpers.cotangent(y), torch.ones_like(y)])
        return torch.autograd.grad(y, wanted, g, is_grads_batched=True)

    for wrt in row.masks()[1:]:
        actual, expected = both(row, run, wrt=wrt)
        same(actual, expected)


@every_row
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_tensors_that_escaped_from_a_transform(row: Layer) -> None:
    """They are wrappers of what ``torch.func`` has left, and say that they want a gradient."""

    def run(function, args, options):
        escaped = []

        def leak(*args):
            escaped.extend(args)
            return sum(arg.sum() for arg in args if arg.is_floating_point())

        given = [place for place, arg in enumerate(args) if arg is not None]
        wanted = tuple(k for k, place in enumerate(given) if args[place].requires_grad)
        torch.func.grad(leak, wanted)(*[args[place].detach() for place in given])
        for place, arg in zip(given, escaped, strict=True):
            args[place] = arg
        torch.manual_seed(2)
        y = first(function(*args, **options))
        return [y, torch.tensor(y.requires_grad)]

    actual, expected = both(row, run)
    same(actual, expected)


@every_row
def test_gradient_penalty(row: Layer) -> None:
    """Second derivatives where the incoming gradient has none, as in ``create_graph=True``."""

    def run(function, args, options):
        wanted = [arg for arg in args if arg.requires_grad]
        torch.manual_seed(2)
        y = first(function(*args, **options))
        grads = torch.autograd.grad(y, wanted, helpers.cotangent(y), create_graph=True)
        penalty = sum(g.square().sum() for g in grads) + y.sum()
        return helpers.attempt(torch.autograd.grad, penalty, wanted, allow_unused=True)

    for wrt in row.masks()[1:]:
        actual, expected = both(row, run, wrt=wrt)
        if expected is RuntimeError:  # (stock hardsigmoid has no second derivative)
            assert isinstance(actual, tuple)
        else:
            same(actual, expected)


def test_double_backward_of_a_network() -> None:
    """The properties cover single rows; here second derivatives flow through several."""

    def run(model: nn.Module):
        x = helpers.image()
        torch.manual_seed(0)
        parameters = list(model.parameters())
        loss = model(x).square().sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [x, *parameters], allow_unused=True)

    expected, actual = map(run, helpers.pair(helpers.ConvNet))
    same(actual, expected)


# torch.func and forward-mode AD.


def functional(row: Layer, function):
    """A function of the differentiable arguments, for torch.func; and their values.

    Running statistics are left out where they may be: torch.func cannot update them in place.
    """
    args = {name: value.detach() for name, value in inputs(row).items()}
    fixed = {
        name: None if name in row.optional else value
        for name, value in args.items()
        if name not in row.reads
    }
    names = list(row.reads)

    def of(*values):
        helpers.seed(2)
        named = {**fixed, **dict(zip(names, values, strict=True))}
        return first(function(*(named[name] for name in row.args), **options(row)))

    return of, tuple(args[name] for name in names)


TRANSFORMS = {
    "grad": lambda f, args: torch.func.grad(lambda *a: f(*a).square().sum(), (0,))(*args),
    "vjp": lambda f, args: torch.func.vjp(f, *args)[1](torch.ones_like(f(*args))),
    "jvp": lambda f, args: torch.func.jvp(f, args, args),
    "jacrev": lambda f, args: torch.func.jacrev(f, tuple(range(len(args))))(*args),
    "vmap": lambda f, args: torch.func.vmap(
        f, (0, *[None] * (len(args) - 1)), randomness="different"
    )(torch.stack([args[0]] * 2), *args[1:]),
    "per-sample": lambda f, args: torch.func.vmap(
        torch.func.grad(lambda *a: f(*a).square().sum()),
        (0, *[None] * (len(args) - 1)),
        randomness="same",
    )(torch.stack([args[0]] * 2), *args[1:]),
}


@forward_formulas
@every_row
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func(row: Layer, transform: str) -> None:
    results = [
        TRANSFORMS[transform](*functional(row, function)) for function in (ours(row), stock(row))
    ]
    same(*results)


@forward_formulas
@every_row
def test_forward_mode(row: Layer) -> None:
    def run(function, args, options):
        torch.manual_seed(2)
        with forward_ad.dual_level():
            dual = [
                forward_ad.make_dual(arg, torch.ones_like(arg)) if arg.requires_grad else arg
                for arg in args
            ]
            return tuple(forward_ad.unpack_dual(first(function(*dual, **options))))

    actual, expected = both(row, run)
    same(actual, expected)


@forward_formulas
@pytest.mark.parametrize("transform", ["grad", "per-sample", "jvp", "jacrev", "hessian"])
def test_torch_func_of_a_converted_model(transform: str) -> None:
    """``functional_call`` swaps parameters under a module, which rows alone do not show."""

    def run(model: nn.Module):
        model.eval()
        x = helpers.image(3).detach()
        state = {name: p.detach() for name, p in model.named_parameters()}
        head = {name: p for name, p in state.items() if name.startswith("head")}

        def f(parameters, x):
            return torch.func.functional_call(model, {**state, **parameters}, (x,)).square().mean()

        def one(parameters, x):
            return f(parameters, x[None])

        return {
            "grad": lambda: torch.func.grad(f)(state, x),
            "per-sample": lambda: torch.func.vmap(torch.func.grad(one), (None, 0))(state, x),
            "jvp": lambda: torch.func.jvp(f, (state, x), (state, x)),
            "jacrev": lambda: torch.func.jacrev(f, argnums=1)(state, x),
            "hessian": lambda: torch.func.hessian(f)(head, x),
        }[transform]()

    expected, actual = map(run, helpers.pair(helpers.ConvNet))
    same(actual, expected)


# Tensors that are not plain.


class Logged(Tensor):
    """A subclass that sees every torch function."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs or {})


@every_row
def test_subclass_with_torch_function(row: Layer) -> None:
    """It sees the stock op called, and its class survives."""

    def run(function, args, options):
        torch.manual_seed(2)
        x = args[0].detach().as_subclass(Logged).requires_grad_()
        Logged.calls = []
        y = first(function(x, *args[1:], **options))
        calls = [name for name in Logged.calls if name != "__get__"]
        (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return type(y), calls, y.as_subclass(Tensor), g.as_subclass(Tensor)

    actual, expected = both(row, run)
    assert actual[:2] == expected[:2]
    same(actual[2:], expected[2:])


@every_row
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, *HALVES, torch.complex64, torch.int64],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_dtypes(row: Layer, dtype) -> None:
    """What stock gives for each, an error included."""

    def run(function, args, options):
        wanted = args[0].is_floating_point() or args[0].is_complex()
        for name, arg in zip(row.args, args, strict=True):
            arg.requires_grad_(wanted and name in row.reads)
        if not wanted:
            return helpers.attempt(lambda: first(function(*args, **options)))
        return helpers.attempt(outcome, function, args, **options)

    actual, expected = both(row, run, wrt=frozenset(), dtype=dtype)
    loose = {"rtol": 2e-2, "atol": 2e-2} if dtype in HALVES else {}
    same(actual, expected, **loose)


@every_row
def test_mixed_dtypes(row: Layer) -> None:
    """A float32 layer given another dtype: bf16 input is fine for some, an error for others."""

    def run(function, args, options):
        args = [args[0].detach().bfloat16().requires_grad_(), *args[1:]]
        return helpers.attempt(outcome, function, args, **options)

    if row.wide:  # not for these
        return
    actual, expected = both(row, run, dtype=torch.float32)
    same(actual, expected, rtol=2e-2, atol=2e-2)


@every_row
def test_channels_last(row: Layer) -> None:
    """Output and gradients have the memory format of stock."""
    x = next(iter(inputs(row).values()))
    if x.ndim not in (4, 5):
        assert x.ndim < 4  # which has no channels_last format
        return
    fmt = torch.channels_last if x.ndim == 4 else torch.channels_last_3d

    def run(function, args, options):
        args = [
            arg.detach().contiguous(memory_format=fmt).requires_grad_(arg.requires_grad)
            if arg.ndim == x.ndim
            else arg
            for arg in args
        ]
        results = outcome(function, args, **options)
        return results, [result.stride() for result in results]

    for wrt in row.masks()[1:]:
        if "num_groups" in row.options and "x" not in wrt:
            continue  # stock group_norm crashes (see tests/torch_backend.py)
        actual, expected = both(row, run, wrt=wrt)
        same(actual, expected)


@every_row
def test_strided_inputs_and_gradients(row: Layer) -> None:
    """Sliced input, expanded gradient."""

    def run(function, args, options):
        x = args[0].detach()
        x = torch.stack([x, x], -1)[..., 0].requires_grad_()
        torch.manual_seed(2)
        y = first(function(x, *args[1:], **options))
        wanted = [x, *(arg for arg in args[1:] if arg.requires_grad)]
        return y, torch.autograd.grad(y, wanted, torch.ones((), dtype=y.dtype).expand(y.shape))

    actual, expected = both(row, run)
    same(actual, expected)


@every_row
def test_meta_tensors(row: Layer) -> None:
    """Shapes and dtypes without memory, as for measuring a model that is too large."""

    def run(function, args, options):
        args = [arg.detach().to("meta").requires_grad_(arg.requires_grad) for arg in args]
        y = first(function(*args, **options))
        grads = torch.autograd.grad(y, [arg for arg in args if arg.requires_grad], y)
        return [(t.shape, t.dtype, t.device) for t in (y, *grads)]

    actual, expected = both(row, run)
    assert actual == expected


#: What a module is made of, and an attribute that somebody sets later.
SET_LATER: list[tuple[str, tuple[Any, ...], str, Any]] = [
    *(("BatchNorm2d", (4,), "training", value) for value in (1, 0)),
    *(("Conv2d", (4, 4, 3), "kernel_size", value) for value in (3, None, [3, 3], (3, 3, 3))),
    *(("ConvTranspose2d", (4, 4, 3), "kernel_size", value) for value in (3, None, [3, 3])),
    *(
        ("Conv2d", (4, 4, 3, 1, 1, 1, 1, True, padding_mode), "weight", None)
        for padding_mode in ("zeros", "circular", "reflect")
    ),
    *(
        ("Conv2d", (4, 4, 3, 1, 1, 1, 1, True, padding_mode), "padding", (2, 0))
        for padding_mode in ("zeros", "circular", "reflect")
    ),
    *(("GroupNorm", (2, 4), "num_groups", value) for value in (0, -1, True, 1)),
    *(("GroupNorm", (2, 4), "eps", value) for value in (None, 1)),
    *(("LayerNorm", (4,), "eps", value) for value in (None, 1)),
    *(("RMSNorm", (4,), "eps", value) for value in (None, 1)),
]


@pytest.mark.parametrize(("name", "arguments", "attribute", "value"), SET_LATER)
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_attributes_that_are_set_later(
    name: str, arguments: tuple[Any, ...], attribute: str, value: Any
) -> None:
    """They are taken, or refused, as by stock."""
    results = []
    drop_ins = (getattr(memsave.nn, name), getattr(memsave.nn, f"{name}FromOutput", None))
    for cls in (getattr(nn, name), *filter(None, drop_ins)):
        torch.manual_seed(0)
        module, x = cls(*arguments), torch.randn(2, 4, 4, 4, requires_grad=True)
        setattr(module, attribute, value)
        y = helpers.attempt(module, x)
        results.append(y if isinstance(y, type) else (y, *torch.autograd.grad(y.square().sum(), x)))
    for actual in results[1:]:
        same(actual, results[0])


@every_row
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_tangents_of_gradients(row: Layer) -> None:
    """Forward-mode AD through backward, of a forward that had none."""

    def run(call: Any, args: Any, options: Any) -> Any:
        torch.manual_seed(0)
        y = first(call(*args, **options))
        g, tangent = helpers.cotangent(y), torch.ones_like(y)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(g, tangent)
            return forward_ad.unpack_dual(torch.autograd.grad(y, args[0], dual)[0])

    if not next(iter(inputs(row).values())).is_floating_point():
        return
    actual, expected = both(
        row, partial(helpers.attempt, run), wrt=frozenset([next(iter(row.args))])
    )
    if expected is NotImplementedError:  # (stock has no such derivative)
        return
    same(actual.primal, expected.primal)
    same(actual.tangent, expected.tangent)


@pytest.mark.parametrize("cls", ["ReLU", "ReLUFromOutput", "Dropout", "DropoutFromRng"])
def test_inplace_overwrites_and_is_seen_by_version_checks(cls: str) -> None:
    """What another layer has kept may not be overwritten: the stock error."""
    layer = getattr(memsave.nn, cls)(inplace=True)
    x = torch.randn(3, requires_grad=True)
    y = x * 1
    assert layer(y) is y
    z = x.sin()
    w = z.square()
    layer(z)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()


def test_an_empty_batch() -> None:
    """The rows' sizes are all positive."""
    for module in (nn, memsave.nn):
        x = torch.randn(0, 3, 8, 8, requires_grad=True)
        y = module.ReLU()(module.MaxPool2d(2)(module.Conv2d(3, 4, 3)(x)))
        y.sum().backward()
        assert y.shape == (0, 4, 3, 3)
        assert x.grad.shape == x.shape


# Modules.


class Criterion(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(x, target)


@forward_formulas  # (of torch.jit.script)
@helpers.every_loss
def test_losses_are_converted_and_exported(cls: type[nn.Module]) -> None:
    """As other layers are in test_conversion and test_export: their call takes a target, too."""
    x, target = helpers.loss_inputs()
    expected = helpers.step(helpers.build(cls), x, target)
    for drop_in in helpers.drop_ins(cls):
        layer = memsave.convert(helpers.build(cls))
        assert type(layer) is drop_in is type(pickle.loads(pickle.dumps(layer)))
        same(helpers.step(layer, x, target), expected)
        same(helpers.step(torch.jit.script(layer), x, target), expected)
        traced = fx.symbolic_trace(Criterion(layer))
        assert [node.op for node in traced.graph.nodes].count("call_module") == 1
        same(helpers.step(traced, x, target), expected)
        programs = [torch.export.export(each, (x.detach(), target)) for each in (layer, cls())]
        one, other = ([str(node.target) for node in program.graph.nodes] for program in programs)
        assert one == other
        assert type(memsave.revert(layer)) is cls


def has_rule(y: Tensor) -> bool:
    """Whether it comes out of a rule (and maybe a view)."""
    nodes = [y.grad_fn, *(node for node, _ in y.grad_fn.next_functions)]
    return any(node is not None and "Memsave" in node.name() for node in nodes)


#: Modules, shapes of their inputs, and the gradients for which the stock op keeps no more bytes.
NO_MORE = [
    (memsave.nn.BatchNorm1d(6), (4, 6), "input weight all"),
    (memsave.nn.BatchNorm2d(6), (2, 6, 4, 3), "input weight all"),
    (memsave.nn.BatchNorm2d(6).eval(), (2, 6, 4, 3), "weight all"),
    (memsave.nn.LayerNorm((4, 3)), (2, 6, 4, 3), "input weight all"),
    (memsave.nn.LayerNorm(3, bias=False), (2, 6, 4, 3), "input weight all"),
    (memsave.nn.LayerNorm(3, elementwise_affine=False), (2, 6, 4, 3), "input weight all"),
    (memsave.nn.GroupNorm(2, 6), (2, 6, 4, 3), "input weight all"),
    (memsave.nn.GroupNorm(2, 6, affine=False), (2, 6, 4, 3), "input weight all"),
    (memsave.nn.InstanceNorm2d(6), (2, 6, 4, 3), "input all"),
    (memsave.nn.InstanceNorm2d(6, affine=True), (2, 6, 4, 3), ""),
    (memsave.nn.InstanceNorm2d(6, track_running_stats=True), (2, 6, 4, 3), ""),
    (memsave.nn.Conv2d(6, 4, 3), (2, 6, 4, 3), "weight all"),
    (memsave.nn.Conv2d(6, 4, 3, padding="same"), (2, 6, 4, 3), "weight all"),
    (memsave.nn.Conv2d(6, 4, 2, padding="same"), (2, 6, 4, 3), ""),
    (memsave.nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), (2, 6, 4, 3), ""),
    (parametrizations.weight_norm(memsave.nn.Conv2d(6, 4, 3)), (2, 6, 4, 3), "all"),
    (memsave.nn.ConvTranspose2d(6, 4, 3, stride=2), (2, 6, 4, 3), "weight all"),
    (memsave.nn.PReLU(6), (2, 6, 4, 3), "weight all"),
]


@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "all"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last, None])
@pytest.mark.parametrize(("layer", "shape", "no_more"), NO_MORE, ids=lambda v: type(v).__name__)
def test_modules_are_stock_where_that_keeps_no_more(layer, shape, no_more, layout, wanted) -> None:
    """Bytes, that is: parameters and buffers, to which stock refers, live anyway."""
    x = torch.randn(shape)
    if layout is None:
        x = torch.stack([x, x], -1)[..., 0]
    elif len(shape) == 4:
        x = x.to(memory_format=layout)
    x.requires_grad_(wanted in ("input", "all"))
    for name, parameter in layer.named_parameters():
        own = "weight" if name.startswith("parametrizations") else name
        parameter.requires_grad_(wanted in (own, "all"))
    free = [*layer.parameters(), *layer.buffers()]
    y = layer(x)
    if not y.requires_grad:
        return
    is_tuple = len(getattr(layer, "normalized_shape", ())) > 1
    with function.observe(lambda call: None):
        ruled = layer(x)
        is_view = is_tuple and layout is not torch.contiguous_format  # of which the rule has a copy
        assert has_rule(ruled) or wanted == "all" or is_view
        by_rule = helpers.kept(lambda: layer(x), free)
    assert y.equal(ruled)
    assert helpers.kept(lambda: layer(x), free) == by_rule
    is_copied = (layout is None and isinstance(layer, nn.GroupNorm)) or (
        layout is not torch.contiguous_format and isinstance(layer, nn.InstanceNorm2d)
    )
    is_last = layout is torch.channels_last and isinstance(layer, nn.GroupNorm)
    crashes = is_last and wanted == "weight"  # in torch 2.13
    assert has_rule(y) != (wanted in no_more and not is_copied and not crashes)


@pytest.mark.parametrize("layer", [memsave.nn.Conv2d(3, 4, 3), memsave.nn.PReLU(3)])
def test_no_copies_of_parameters_are_kept_under_autocast(layer) -> None:
    """The stock op keeps the weight in the lower precision; its gradient reads the input alone."""
    x = torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", cache_enabled=False):
        assert helpers.kept(lambda: layer(x), [x]) == x.nbytes // 2


class Doubling(dict):
    """Of parameters: it gives others than it has, as those do that gather shards."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return None if value is None else nn.Parameter(value.detach() * 2)


@pytest.mark.parametrize("place", ["attribute", "dictionary"])
@every_class
def test_weights_that_lie_elsewhere(
    cls: type[nn.Module], place: str, by_nodes_and_by_rules
) -> None:
    """Where a module's attributes are found first, or behind a dictionary of another class."""

    def make() -> nn.Module:
        module = helpers.build(cls)
        if place == "dictionary":
            vars(module)["_parameters"] = Doubling(module._parameters)
        elif isinstance(weight := getattr(module, "weight", None), Tensor):
            vars(module)["weight"] = weight.detach() * 2
        return module

    module, x = make(), helpers.module_input(cls)
    module.__class__ = helpers.drop_ins(cls)[0]
    same(module(x), make()(x), rtol=0, atol=0)


@pytest.mark.parametrize("row", [row for row in TABLE.values() if row.inplace], ids=repr)
def test_a_hook_that_raises_where_a_layer_overwrites(row: Layer, by_nodes_and_by_rules) -> None:
    """Its backward raises, too: what it reads has not been kept."""

    def refuse(tensor: Tensor) -> Tensor:
        raise ZeroDivisionError

    x, *rest = inputs(row).values()
    z = x * 1
    with saved_tensors_hooks(refuse, lambda tensor: tensor), pytest.raises(ZeroDivisionError):
        ours(row)(z, *rest, **{**options(row), "inplace": True})
    if type(z.grad_fn).__name__ != "MulBackward0":
        with pytest.raises((RuntimeError, KeyError)):
            z.sum().backward()


@helpers.every_class
def test_gradients_within_a_transform(cls) -> None:
    """Of a graph that was made outside of it, by a plain gradient."""
    for drop_in in helpers.drop_ins(cls):
        results = []
        for one in (cls, drop_in):
            torch.manual_seed(0)
            layer, x = helpers.build(one), helpers.module_input(cls)
            torch.manual_seed(1)
            y = layer(x)
            if not y.requires_grad:
                return
            wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]

            def total(scale, y=y, wanted=wanted):
                grads = torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)
                return sum((grad * scale).sum() for grad in grads)

            results.append(helpers.attempt(torch.func.grad(total), torch.tensor(1.0)))
        same(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_without_a_shape() -> None:
    results = []
    for layer in (nn.LayerNorm(6), memsave.nn.LayerNorm(6)):
        layer.weight.requires_grad_(False)
        y = layer(torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)]))
        sum(one.sum() for one in y.unbind()).backward()
        results.append([*y.unbind(), layer.bias.grad])
    same(*results)


@helpers.every_class
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device(cls, device: str, by_nodes_and_by_rules) -> None:
    """Of what is made, which the tensors of a layer do not follow; kernels run as without one."""
    for drop_in in helpers.drop_ins(cls):
        outcomes = []
        for context in (contextlib.nullcontext(), torch.device(device)):
            layer, x = helpers.build(drop_in), helpers.module_input(cls)
            torch.manual_seed(2)
            with context:
                y = layer(x)
                node = type(y.grad_fn)
                y.backward(y.detach().cos())
            outcomes.append((node, y, [t.grad for t in (x, *layer.parameters())]))
        (expected_node, *expected), (node, *actual) = outcomes
        same(actual, expected, rtol=0, atol=0)
        assert node is expected_node


@helpers.every_class
def test_where_saved_tensors_may_be_overwritten(cls, by_nodes_and_by_rules) -> None:
    """A mode of torch's that follows what every operation writes to."""
    for drop_in in helpers.drop_ins(cls):
        results = []
        for one in (cls, drop_in):
            layer, x = helpers.build(one), helpers.module_input(cls)
            torch.manual_seed(2)
            with torch.autograd.graph.allow_mutation_on_saved_tensors():
                results.append(helpers.step(layer, x))
        same(results[1], results[0])
