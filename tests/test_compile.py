"""``torch.compile(fullgraph=True)``: every layer compiles, computes what stock computes, and keeps
no more than the compiled stock layer; a frozen convolution keeps less.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial

import helpers
import pytest
import torch
import torch.utils.checkpoint
from helpers import every_row, inputs, options, ours, outcome, same, stock
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering

import memsave
from memsave import function
from memsave.spec import TABLE, Layer

# torch deprecates what its own compiler does: objects of autograd functions, and TorchScript.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]

RULES = [function.RULES[name] for name in TABLE if name in function.RULES]


def _reads_its_output(row: Layer) -> bool:
    return any("y" in names for names in row.reads.values())


@pytest.fixture(autouse=True)
def _fresh_cache() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend: str = "aot_eager", **kwargs):
    return torch.compile(function, fullgraph=True, backend=backend, **kwargs)


@every_row
def test_every_layer_compiles(row: Layer) -> None:
    """For the largest mask, for that of the input alone, and for that of all others."""

    def run(function, wrt: frozenset[str]):
        torch._dynamo.reset()
        args = inputs(row, wrt)
        call = compiled(lambda *args: function(*args, **chosen))
        results = outcome(call, [*args.values()])
        free = [value for name, value in args.items() if name != first]
        return results, helpers.kept(lambda: call(*args.values()), free)

    everything, first, chosen = frozenset(row.reads), next(iter(row.args)), options(row)
    for wrt in {everything, frozenset([first]), everything - {first}} - {frozenset()}:
        (actual, actual_bytes), (expected, expected_bytes) = (
            run(ours(row), wrt),
            run(stock(row), wrt),
        )
        same(actual, expected)
        assert actual_bytes <= expected_bytes, wrt
        if row.name.startswith("conv") and "weight" not in wrt:
            assert actual_bytes == 0 < expected_bytes


@helpers.every_class
def test_every_module_compiles(cls: type[nn.Module]) -> None:
    """In one graph, and it gives what stock does."""
    x = helpers.module_input(cls)
    for own, layer in helpers.in_pairs(cls):
        for train in (True, False) if [*own.buffers()] else (True,):
            torch._dynamo.reset()
            expected = helpers.step(own.train(train), x)
            same(helpers.step(compiled(layer.train(train), "eager"), x), expected)


@pytest.mark.parametrize(
    "row", [r for r in TABLE.values() if not _reads_its_output(r)], ids=lambda row: row.name
)
def test_outputs_may_be_overwritten(row: Layer) -> None:
    """As by an activation in place that follows."""
    layer, plain, chosen = ours(row), stock(row), options(row)
    doubled = compiled(lambda *args: helpers.first(layer(*args, **chosen)).mul_(2))
    args = [*inputs(row).values()]
    expected = outcome(lambda *args: helpers.first(plain(*args, **chosen)) * 2, args)
    same(outcome(doubled, [*inputs(row).values()]), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "row",
    [row for row in helpers.compiled_rows(TABLE.values()) if row.inplace],
    ids=lambda row: row.name,
)
def test_in_place(row: Layer) -> None:
    """A part of what the program makes, and what is passed to it: who reads that later sees the
    output, of which bits are kept.
    """
    chosen, args = options(row), [*inputs(row).values()]
    weight = torch.eye(args[0].shape[-1]).double()  # (a product is not computed again)

    def within(layer: Callable, x: Tensor) -> Tensor:
        x = x @ weight
        y = layer(x[..., 1:], **{**chosen, "inplace": True})
        return torch.cat([x * 2, y], -1)

    def expected(x: Tensor) -> Tensor:
        x = x @ weight
        y = stock(row)(x[..., 1:], **chosen)
        return torch.cat([x[..., :1] * 2, y * 2, y], -1)

    call, stock_call = (compiled(partial(within, layer(row))) for layer in (ours, stock))
    same(outcome(call, args), outcome(expected, args))
    sizes = [helpers.kept(partial(f, *args), args) for f in (call, stock_call)]
    assert sizes[0] < sizes[1] if row.extras else sizes[0] == sizes[1]

    run = compiled(partial(ours(row), **{**chosen, "inplace": True}))

    def passed(x: Tensor) -> Tensor:
        x = x @ weight
        return torch.cat([run(x), x], -1)

    def twice(x: Tensor) -> Tensor:
        y = stock(row)(x @ weight, **chosen)
        return torch.cat([y, y], -1)

    same(outcome(passed, args), outcome(twice, args))
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        run(args[0].detach().requires_grad_())


@pytest.mark.parametrize("row", helpers.compiled_rows(TABLE.values()), ids=lambda row: row.name)
def test_two_in_one_graph_of_any_sizes(row: Layer) -> None:
    helpers.check_two_in_one_graph(row)


@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    "rule",
    [*RULES, *(rule._replace(node=None) for rule in RULES if rule.node is not None)],
    ids=lambda rule: f"{rule.row.name}-{'rule' if rule.node is None else 'node'}",
)
def test_compiled_autograd(rule: function.Rule) -> None:
    """Which traces the backward of a forward that was not: what that has kept is read as it is.

    (What it traces is compiled for the largest mask, and run for the input's alone.)
    """
    row, layer = rule.row, function.differentiable(rule)
    everything, first = frozenset(row.reads), frozenset([next(iter(row.reads))])
    compilers = {first: lambda graph: graph, everything: partial(torch.compile, backend="eager")}

    def gradients(wrt: frozenset[str], more: dict[str, bool]) -> tuple[torch.Tensor | None, ...]:
        args = inputs(row, wrt, dtype=torch.float32)
        torch.manual_seed(0)
        x, *others = args.values()
        y = layer(x.clone() if more else x, *others, **options(row) | more)
        y = y[0] if isinstance(y, tuple) else y
        wanted = [args[name] for name in sorted(wrt)]
        return torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)

    in_place = [{"inplace": True}] if row.inplace else []
    for wrt, compiler in compilers.items():
        for more in [{}, *in_place]:
            expected = gradients(wrt, more)
            with compiled_autograd._enable(compiler):
                actual = gradients(wrt, more)
            same(actual, expected)


#: Of each the number of autograd functions that torch.compile traces.
TRACED: dict[Callable[[], nn.Module], int] = {
    lambda: nn.Linear(6, 6): 0,
    lambda: nn.LayerNorm(6): 0,
    lambda: nn.GroupNorm(2, 4): 0,
    lambda: nn.Conv2d(4, 4, 3): 0,
    lambda: nn.BatchNorm2d(4): 0,
    lambda: nn.Dropout(0.5): 0,
    lambda: nn.PReLU(): 0,
    lambda: nn.PReLU().requires_grad_(False): 1,
    lambda: nn.Conv2d(4, 4, 3).requires_grad_(False): 1,
}


@pytest.mark.parametrize("layer", TRACED, ids=lambda layer: type(layer()).__name__)
def test_functions_are_traced_only_where_they_save(layer: Callable[[], nn.Module]) -> None:
    """They take the compiler much longer than the stock op."""
    traced = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable:
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    x = torch.randn(2, 4, 6, 6, requires_grad=True)
    compiled(memsave.convert(layer()), backend)(x)
    assert traced.count("autograd_function_apply") == TRACED[layer], traced


def frozen() -> list[nn.Module]:
    """A stock network and a converted one; only the input wants a gradient."""
    return helpers.pair(lambda: helpers.ConvNet().requires_grad_(False).eval(), torch.float32)


def kept(model: nn.Module, run, x) -> int:
    return helpers.kept(lambda: run(x), [x, *model.parameters(), *model.buffers()])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_network_in_training(backend: str) -> None:
    """Compiled, it computes what the stock model computes without, and keeps no more than it does
    when compiled.
    """
    stock_model, model = helpers.pair(lambda: helpers.ConvNet(0.0), torch.float32)
    x = helpers.image(dtype=torch.float32)
    expected = helpers.step(stock_model, x)
    stock_run, run = compiled(stock_model, backend), compiled(model, backend)
    same(helpers.step(run, x, model=model), expected, rtol=1e-3, atol=1e-4)
    same(dict(model.named_buffers()), dict(stock_model.named_buffers()))
    assert kept(model, run, x) <= kept(stock_model, stock_run, x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_frozen_network_keeps_less(backend: str) -> None:
    stock_model, model = frozen()
    x = helpers.image(dtype=torch.float32)
    expected = helpers.step(stock_model, x)
    stock_run, run = compiled(stock_model, backend), compiled(model, backend)
    same(helpers.step(run, x), expected, rtol=1e-4, atol=1e-5)
    assert kept(model, run, x) < kept(stock_model, stock_run, x)


def test_dynamic_shapes() -> None:
    """One graph for all sizes."""
    for stock_model, model in (frozen(), helpers.pair(lambda: helpers.ConvNet(0.0), torch.float32)):
        run = compiled(model, dynamic=True)
        for n, size in ((2, 8), (3, 12), (5, 16)):
            x = torch.randn(n, 3, size, size, requires_grad=True)
            with torch.compiler.set_stance("fail_on_recompile" if n > 2 else "default"):
                actual = helpers.step(run, x, model=model)
            same(actual, helpers.step(stock_model, x), rtol=1e-4, atol=1e-4)


def test_inductor_lowers_bits_of_dynamic_shapes(monkeypatch) -> None:
    """It could not tell the order of their strides."""

    def codegen(self: GraphLowering) -> None:
        raise NotImplementedError("of what is lowered")  # which would take most of the time

    monkeypatch.setattr(GraphLowering, "codegen", codegen)
    layers = nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)
    model = memsave.convert(nn.Sequential(*layers).requires_grad_(False))
    with pytest.raises(InductorError, match="of what is lowered"):
        compiled(model, "inductor", dynamic=True)(torch.randn(2, 8, 7, 7, requires_grad=True))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(half: torch.dtype) -> None:
    """The region surrounds the compiled model."""
    stock_model, model = frozen()
    x = helpers.image(dtype=torch.float32)

    def run(function):
        with torch.autocast("cpu", dtype=half):
            return helpers.step(function, x)

    expected, stock_run = run(stock_model), compiled(stock_model)
    ours_run = compiled(model)
    same(run(ours_run), expected, rtol=5e-2, atol=5e-2)

    def size(model, function):
        with torch.autocast("cpu", dtype=half):
            return kept(model, function, x)

    assert size(model, ours_run) < size(stock_model, stock_run)


class Wide(nn.Module):
    """A layer in float32 within autocast."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.layer(x.float())


PADDED = {
    "by zeros": {},
    "by a reflection": {"padding_mode": "reflect"},
    "to the same size": {"kernel_size": 4, "padding": "same"},
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("padded", PADDED)
def test_backward_outside_of_autocast(padded: str, wide: bool, trained: bool) -> None:
    """Under which the compiler traces it."""
    options = {"kernel_size": 3, "padding": 1, **PADDED[padded]}
    stock_model, model = helpers.pair(lambda: nn.Conv2d(8, 8, **options), torch.float32)
    results = []
    for layer, backend in ((stock_model, None), (model, "aot_eager")):
        layer.requires_grad_(trained)
        module = Wide(layer) if wide else layer
        x = helpers.module_input(nn.Conv2d).repeat(1, 2, 2, 2).detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = (compiled(module, backend) if backend else module)(x)
        y.float().square().sum().backward()
        results.append([y, x.grad, layer.weight.grad])
    tolerance = 1e-5 if wide else 5e-2
    same(*results, rtol=tolerance, atol=tolerance)


def test_layers_between_breaks_of_the_graph() -> None:
    """Each class is compiled for itself."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    model = memsave.convert(Net(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.0)))
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        torch.compile(model, backend="eager")(helpers.image(dtype=torch.float32))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode) -> None:
    stock_model, model = frozen()
    x = helpers.image(dtype=torch.float32)
    run = compiled(model)
    with mode():
        y = run(x)
        same(y, stock_model(x))
    assert y.grad_fn is None
    same(helpers.step(run, x), helpers.step(stock_model, x), rtol=1e-4, atol=1e-5)


def test_one_function_under_several_masks() -> None:
    """Freezing after compilation compiles anew: the mask is no constant of the graph."""
    stock_model, model = helpers.pair(lambda: helpers.ConvNet(0.0), torch.float32)
    x = helpers.image(dtype=torch.float32)
    run = compiled(model)
    # (Compiled by torch 2.11, stock does not notice that a parameter is wanted again, either.)
    reference = compiled(stock_model) if torch.__version__ < "2.12" else stock_model
    for wanted in (True, False, True):
        for each in (stock_model, model):
            each.features[0].requires_grad_(wanted)
            each.features[1].weight.requires_grad_(not wanted)
        actual = helpers.step(run, x, model=model)
        expected = helpers.step(reference, x, model=stock_model)
        same(actual, expected, rtol=1e-3, atol=1e-4)


def test_converting_what_is_compiled_already() -> None:
    """Through the wrapper that torch.compile returns, and after Module.compile()."""
    x = helpers.image(dtype=torch.float32)
    stock_model, _ = frozen()
    expected = helpers.step(stock_model, x)
    for wrap in (
        lambda model: compiled(model),
        lambda model: model.compile(fullgraph=True, backend="aot_eager") or model,
    ):
        model = wrap(frozen()[0])
        before = kept(model, model, x)
        assert memsave.convert(model) is model
        same(helpers.step(model, x), expected, rtol=1e-4, atol=1e-5)
        assert kept(model, model, x) < before
        memsave.revert(model)
        assert kept(model, model, x) == before


class ToCompile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_part_that_is_compiled_already() -> None:
    """It has no truth value, and its own layers."""
    model = nn.Sequential(torch.compile(ToCompile(), backend="eager"), nn.ReLU())
    assert [entry.status for entry in memsave.coverage(model)] == ["convertible"] * 5
    memsave.convert(model)
    assert [entry.status for entry in memsave.coverage(model)] == ["converted"] * 5


@pytest.mark.parametrize("fullgraph", [False, True])
def test_dry_runs_of_what_is_compiled_already(fullgraph: bool) -> None:
    """Of what the compiler runs, no layer tells what it keeps."""
    x, found = torch.ones(2, 4), []
    for is_compiled in (False, True):
        model = ToCompile()
        if is_compiled:
            model.compile(backend="aot_eager", fullgraph=fullgraph)
        memsave.convert(model, x)
        reports = [memsave.report(model, x, fake=fake) for fake in (True, False)]
        classes = [type(module).__name__ for module in model.modules()]
        found.append((classes, [(r.stock, r.now, r.converted) for r in reports]))
    assert found[0] == found[1]
    model(x).sum().backward()  # compiled


@pytest.mark.parametrize("first", ["convert", "compile"])
def test_what_compiles_a_layer_is_called(first: str) -> None:
    """``Module.compile()`` of a drop-in, once it is converted or before."""
    x, seen = helpers.image(), []
    layer: nn.Module = nn.ReLU()
    if first == "convert":
        memsave.convert(layer)
    layer.compile(backend=lambda graph, inputs: seen.append(graph) or graph)
    same(memsave.convert(layer)(x), x.relu())
    assert seen


def test_checkpointed_inside() -> None:
    """A converted block recomputed by a compiled graph."""
    stock_model, model = frozen()
    x = helpers.image(dtype=torch.float32)

    def run(x):
        features = torch.utils.checkpoint.checkpoint(model.features, x, use_reentrant=False)
        return model.head(features.mean((2, 3)))

    actual = helpers.step(compiled(run), x)
    same(actual, helpers.step(stock_model, x), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot: README.md says so")
def test_blocks_that_share_a_graph() -> None:
    """As of a transformer, by ``nested_compile_region``: all that a layer asks for is the same."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.LayerNorm(8), nn.RMSNorm(8), nn.Softplus(), nn.ELU(), nn.ReLU()]
    plain = nn.Sequential(*(copy.deepcopy(nn.Sequential(*layers)) for _ in range(3)))
    model = memsave.convert(copy.deepcopy(plain), policy=lambda module, name, rows: rows[-1])

    region = torch.compiler.nested_compile_region(lambda block, x: block(x))

    def shared(model: nn.Module, x: Tensor) -> Tensor:
        for block in model.children():
            x = region(block, x)
        return x

    x = torch.randn(2, 8, requires_grad=True)
    results = [outcome(compiled(partial(shared, each)), [x]) for each in (model, plain)]
    same(*results)


@pytest.mark.parametrize("transform", ["per-sample", "jvp"])
def test_transforms_inside(transform: str) -> None:
    """``torch.func`` inside of compiled code, where an autograd function has no vmap."""

    def run(model: nn.Module):
        parameters = dict(model.named_parameters())

        def loss(parameters, x):
            return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

        def per_sample(x):
            return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)

        def jvp(x):
            return torch.func.jvp(lambda x: loss(parameters, x[0]), (x,), (torch.ones_like(x),))

        chosen = {"per-sample": per_sample, "jvp": jvp}[transform]
        return compiled(chosen)(helpers.image().detach())

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())

    before, after = (run(model) for model in helpers.pair(make))
    same(after, before)


@every_row
def test_autocast_stays_as_it_is(row: Layer) -> None:
    """After a layer has been traced with its backward."""
    args, layer = inputs(row, frozenset(row.reads), dtype=torch.float32), ours(row)
    chosen = options(row)

    def run(*args):
        y = layer(*args, **chosen)
        return y, torch.is_autocast_enabled("cpu")

    with torch.autocast("cpu"):
        y, is_enabled = compiled(run)(*args.values())
    assert is_enabled
    helpers.first(y).sum().backward()


def of_data(x: Tensor) -> Tensor:
    """All of it, as the compiler cannot know."""
    return x[x.detach().sum((1, 2, 3)) > -torch.inf]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3).requires_grad_(False),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(3, 4, 2).requires_grad_(False),
        nn.GroupNorm(1, 3),
    ],
    ids=str,
)
def test_sizes_that_depend_on_data(layer: nn.Module) -> None:
    stock_model, model = helpers.pair(lambda: nn.Sequential(copy.deepcopy(layer)))
    x = helpers.image()
    expected = helpers.step(lambda x: stock_model(of_data(x)), x, model=stock_model)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = compiled(lambda x: model(of_data(x)))
        same(helpers.step(run, x, model=model), expected)


def test_empty_batches() -> None:
    """Of a layer whose backward asks whether there is anything."""
    model = memsave.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)))
    x = torch.zeros(0, 3, 8, 8, requires_grad=True)
    compiled(model.requires_grad_(False))(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
@pytest.mark.parametrize(
    "layer",
    [nn.Tanhshrink(), nn.RMSNorm(8), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")],
    ids=str,
)
def test_complex_numbers_are_left_to_stock(layer: nn.Module) -> None:
    stock_model, model = helpers.pair(lambda: nn.Sequential(copy.deepcopy(layer)), torch.complex128)
    x = torch.complex(helpers.image(), helpers.image().flip(0)).detach().requires_grad_()
    expected, actual = (
        torch.autograd.grad(run(x).abs().square().sum(), x)
        for run in (stock_model, compiled(model))
    )
    same(actual, expected)


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Hardtanh(), nn.Threshold(0.1, 0.0)], ids=str)
def test_nested_tensors_are_left_to_stock(layer: nn.Module) -> None:
    parts = [torch.randn(size, 8) for size in (2, 5, 3)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged).requires_grad_()
    y = compiled(memsave.convert(nn.Sequential(copy.deepcopy(layer))))(x)
    y.values().sum().backward()
    same(
        x.grad.values(),
        torch.autograd.functional.vjp(lambda x: layer(x).sum(), torch.cat(parts))[1],
    )
