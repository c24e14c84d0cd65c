"""Exporting and tracing a converted model gives what it gives for the stock model.

``torch.export``, ONNX, ``torch.jit`` and ``torch.fx``; in eval and, where stock can, in train mode.
"""

import copy
import io
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import helpers
import onnxruntime
import pytest
import torch
from functorch.compile import aot_function, nop
from helpers import every_class, same
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import memsave
from memsave.layers.module import ROWS

# torch deprecates TorchScript, on which its tracers and the older ONNX exporter rest.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


def networks(train: bool = False) -> list[nn.Module]:
    return [m.train(train) for m in helpers.pair(helpers.ConvNet, torch.float32)]


def targets(program: torch.export.ExportedProgram) -> list[str]:
    ops = ("placeholder", "call_function")
    return [str(node.target) for node in program.graph.nodes if node.op in ops]


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool, train: bool) -> None:
    """The graph is that of the stock model, op by op."""
    x = helpers.image(dtype=torch.float32).detach()
    batch = {"x": {0: torch.export.Dim("batch", min=2)}}
    programs = [
        torch.export.export(model, (x,), strict=strict, dynamic_shapes=batch)
        for model in networks(train)
    ]
    expected, actual = map(targets, programs)
    assert actual == expected
    if not train:
        x = torch.cat([x, x])
        same(programs[1].module()(x), networks()[0](x))


@every_class
def test_export_of_each_layer(cls: type[nn.Module]) -> None:
    """The network above has not every class."""
    x = helpers.module_input(cls).detach()
    for drop_in in helpers.drop_ins(cls):
        program = torch.export.export(helpers.build(drop_in).eval(), (x,))
        expected = torch.export.export(helpers.build(cls).eval(), (x,))
        assert targets(program) == targets(expected)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        nn.LayerNorm([3, 4]),
        nn.RMSNorm([3, 4]),
        nn.Conv1d(2, 2, 3, padding="same"),
        nn.Conv1d(2, 2, 3, padding="same", padding_mode="circular"),
    ],
    ids=repr,
)
def test_export_of_options_that_drop_ins_reckon_with(layer: nn.Module, strict: bool) -> None:
    """Several axes, taken as one; padding by a name, taken as numbers."""
    shape = (2, 2, 8) if isinstance(layer, nn.Conv1d) else (2, 5, 3, 4)
    x, sizes = torch.randn(shape), ({0: torch.export.Dim.DYNAMIC},)
    expected = torch.export.export(layer, (x,), dynamic_shapes=sizes, strict=strict)
    converted = memsave.convert(copy.deepcopy(layer))
    program = torch.export.export(converted, (x,), dynamic_shapes=sizes, strict=strict)
    assert targets(program) == targets(expected)


@pytest.mark.filterwarnings("ignore:.*legacy TorchScript-based ONNX:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The feature will be removed:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Constant folding:UserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnx(dynamo: bool, tmp_path) -> None:
    stock_model, model = networks()
    x = helpers.image(dtype=torch.float32).detach()
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), file, dynamo=dynamo, input_names=["x"])
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x.numpy()})
    same(torch.from_numpy(y), stock_model(x).detach(), rtol=1e-4, atol=1e-5)


def test_jit_trace() -> None:
    stock_model, model = networks()
    x = helpers.image(dtype=torch.float32)
    traced = torch.jit.trace(model, (x,))
    assert "Memsave" not in str(traced.inlined_graph)
    same(helpers.step(traced, x), helpers.step(stock_model, x))
    same(dict(traced.state_dict()), dict(stock_model.state_dict()))


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python")
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@every_class
def test_jit_trace_of_each_layer(cls: type[nn.Module], train: bool) -> None:
    """Which torch traces twice, and compares."""
    x = helpers.module_input(cls)
    for own, layer in helpers.in_pairs(cls):
        if train and cls.__name__.startswith(("Dropout", "AlphaDropout")):
            return  # of which torch compares the numbers that they draw
        expected = helpers.step(torch.jit.trace(own.train(train), x), x)
        same(helpers.step(torch.jit.trace(layer.train(train), x), x), expected)


class After(nn.Sequential):
    """A layer of something that no variable has."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1)


@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python")
@every_class
def test_jit_trace_of_layers_within(cls: type[nn.Module]) -> None:
    """The graph has the same names with gradients and without, which torch compares."""
    x = helpers.module_input(cls)
    for drop_in in helpers.drop_ins(cls):
        torch.jit.trace(After(helpers.build(drop_in).eval()), (x,))


@pytest.mark.parametrize("compiler", ["script", "trace"])
def test_part_in_torchscript(compiler: str) -> None:
    """It is left as it is, also by dry runs."""
    x = helpers.image(dtype=torch.float32)
    part = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
    part = torch.jit.script(part) if compiler == "script" else torch.jit.trace(part, x)
    model, cls = nn.Sequential(nn.GroupNorm(1, 3), part, nn.ReLU()), type(part)
    expected = helpers.step(model, x)
    for fake in (True, False):
        assert memsave.report(model, x, fake=fake).rows
    memsave.convert(model, x)
    assert (type(part), type(model[2])) == (cls, memsave.nn.ReLU)
    same(helpers.step(model, x), expected)


@every_class
def test_jit_script(cls: type[nn.Module]) -> None:
    """Stock modules are compiled in place of the drop-ins. (torch leaves them in the model, whoever
    provides them, so converting is to be done again.)
    """
    for drop_in in helpers.drop_ins(cls):
        layer = helpers.build(drop_in)
        row = ROWS[drop_in][0]
        model = nn.Sequential(layer).eval()

        def chosen(*_: object, row=row) -> object:
            return row

        scripted = torch.jit.script(model)
        assert type(layer) is drop_in
        x = helpers.module_input(cls)
        for run in (scripted, model, memsave.convert(model, policy=chosen)):
            same(helpers.step(run, x), helpers.step(helpers.build(cls).eval(), x))
        assert type(model[0]) is drop_in


def test_jit_script_of_a_network() -> None:
    """Script modules share the parameters, and have both modes."""
    stock_model, model = networks(train=True)
    scripted = torch.jit.script(model)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    for loaded in (scripted, torch.jit.load(file)):
        x = helpers.image(dtype=torch.float32)
        loaded.eval()
        same(loaded(x), networks()[0](x))
    scripted.train()
    x = helpers.image(dtype=torch.float32)
    same(helpers.step(scripted, x), helpers.step(stock_model, x))
    same(dict(model.named_buffers()), dict(stock_model.named_buffers()))


# torch.fx


def nodes(traced: fx.GraphModule) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in traced.graph.nodes]


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_fx(train: bool) -> None:
    """The same graph, of nodes that call the drop-ins: gradients, savings and buffers included.

    The mode is not part of the graph.
    """
    stock_model, model = networks(not train)
    stock_traced, traced = fx.symbolic_trace(stock_model), fx.symbolic_trace(model)
    assert nodes(traced) == nodes(stock_traced)
    x = helpers.image(dtype=torch.float32)
    stock_model.train(train)
    traced.train(train)
    same(helpers.step(traced, x), helpers.step(stock_model, x))
    same(dict(traced.named_buffers()), dict(stock_model.named_buffers()))
    assert helpers.kept(lambda: traced(x)) < helpers.kept(lambda: stock_model(x))


@every_class
def test_fx_of_one_layer(cls: type[nn.Module]) -> None:
    """As the root of what is traced it is no leaf: what its forward does is."""
    for own, layer in helpers.in_pairs(cls):
        expected = helpers.attempt(fx.symbolic_trace, own)
        if isinstance(expected, fx.GraphModule):
            assert nodes(fx.symbolic_trace(layer)) == nodes(expected)


def test_fx_takes_keywords_and_hooks() -> None:
    """Hooks of a leaf run when the graph runs, once, and not when it is traced."""

    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(input=x)

    model = memsave.convert(Keywords())
    seen = []
    model.norm.register_forward_hook(lambda module, args, y: seen.append(type(y)))
    traced = fx.symbolic_trace(model)
    assert seen == []
    traced(torch.randn(2, 3, 4, 4))
    assert seen == [Tensor]
    assert model.norm.num_batches_tracked == 1


def test_fx_tracer_with_leaves_of_its_own() -> None:
    """Tracers that record where each node comes from see drop-ins as they see stock modules."""

    class Paths(fx.Tracer):
        def __init__(self) -> None:
            super().__init__()
            self.paths: list[str] = []

        def call_module(self, m, forward, args, kwargs):
            self.paths.append(self.path_of_module(m))
            return super().call_module(m, forward, args, kwargs)

    paths = []
    for model in networks():
        tracer = Paths()
        graph = tracer.trace(model)
        assert all(node.meta.get("nn_module_stack") for node in graph.find_nodes(op="call_module"))
        paths.append(tracer.paths)
    assert paths[0] == paths[1]


def test_fx_interpreter_and_transform() -> None:
    """A pass that edits the graph of a converted model."""
    stock_model, model = networks()
    traced = fx.symbolic_trace(model)
    (output,) = traced.graph.find_nodes(op="output")
    with traced.graph.inserting_before(output):
        output.args = (traced.graph.call_function(operator.neg, output.args),)
    traced.recompile()
    x = helpers.image(dtype=torch.float32)
    same(fx.Interpreter(traced).run(x), -stock_model(x))


def test_convert_a_traced_model() -> None:
    """And an unlifted export, whose layers are functions, has nothing to convert."""
    stock_model, _ = networks()
    traced = memsave.convert(fx.symbolic_trace(stock_model))
    x = helpers.image(dtype=torch.float32)
    same(helpers.step(traced, x), helpers.step(networks()[0], x))
    program = torch.export.export(networks()[0], (x.detach(),))
    with pytest.warns(UserWarning, match="found nothing to convert"):
        memsave.convert(program.module())


def test_make_fx() -> None:
    """The ops below autograd, backward included."""
    x = helpers.image(dtype=torch.float32).detach()

    def traced(model: nn.Module) -> fx.GraphModule:
        def gradient(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            return torch.autograd.grad(model(x).sum(), x)[0]

        return make_fx(gradient)(x)

    expected, actual = (traced(model)(x) for model in networks())
    same(actual, expected)


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@every_class
def test_make_fx_of_each_layer(cls: type[nn.Module], mode: str) -> None:
    """The program may be differentiated, and draws from torch's generator of random numbers."""
    x = helpers.module_input(cls)

    def results(layer: nn.Module, is_recorded: bool) -> Any:
        def run(x: Tensor) -> list[Tensor]:
            y = layer(x)
            wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
            return [y, *torch.autograd.grad(y.square().sum(), wanted)]

        if is_recorded:
            run = make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=True)(x)
        torch.manual_seed(0)
        return run(x)

    for own, layer in helpers.in_pairs(cls):
        if not isinstance(helpers.attempt(results, own, True), type):  # (as it asks for numbers)
            same(results(layer, True), results(own, False))


@pytest.mark.parametrize("drop_in", helpers.drop_ins(nn.RMSNorm))
def test_make_fx_of_any_sizes(drop_in: type[nn.Module]) -> None:
    """(What other stock layers do asks for the numbers.)"""

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(layer(x).square().sum(), x)[0]

    layer = helpers.build(drop_in)
    x = helpers.module_input(nn.RMSNorm).detach()
    trace = make_fx(gradient, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    x, traced = torch.cat([x, x + 1]), trace(x)
    same(traced(x), gradient(x))


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd:UserWarning")
@every_class
def test_aot_autograd_alone(cls: type[nn.Module]) -> None:
    """Without the compiler in front of it, which would trace the rules."""
    x = helpers.module_input(cls)

    def step(layer: nn.Module, run: Callable[..., Tensor]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        y = run({**dict(layer.named_parameters()), **dict(layer.named_buffers())}, x)
        wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
        return dict(enumerate((y, *torch.autograd.grad(y.square().sum(), wanted))))

    for drop_in in helpers.drop_ins(cls):
        stock, layer = helpers.build(cls), helpers.build(drop_in)
        traced = aot_function(partial(functional_call, layer), fw_compiler=nop)
        same(step(layer, traced), step(stock, partial(functional_call, stock)))
