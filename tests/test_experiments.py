"""The experiments measure right, and at the paper's scale the counts meet their targets."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental import topologies
from torch import nn

import memsave
from experiments import (
    __main__ as command_line,
    counting,
    flax_programs,
    hlo,
    layer_times,
    measure,
    paper,
    scenarios,
)
from experiments.harness import SIZES
from experiments.results import Record
from memsave import kernels
from memsave_jax import _xla


def test_peak_counts_what_lives_at_once():
    def step() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        del a
        b = torch.empty(3000, dtype=torch.uint8)
        c = torch.empty(2000, dtype=torch.uint8)
        del b
        d = torch.empty(2500, dtype=torch.uint8)
        del c, d

    assert measure.peak_bytes(step) == 5000


def test_times_come_in_turn():
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure.paired_times(steps, 20)
    turns = ["".join(order[k : k + 2]) for k in range(0, len(order), 2)]
    assert turns[0] == "ab"
    assert {*turns[1:]} == {"ab", "ba"}
    assert [len(t) for t in times.values()] == [20, 20]


def test_times_are_compared_in_pairs(monkeypatch):
    taken = {"stock": [1.0, 2.0, 4.0], "memsave": [3.0, 2.0, 2.0]}
    monkeypatch.setattr(measure, "paired_times", lambda steps, repeats, *_: taken)
    figures = measure.compare({}, 3)
    assert figures["memsave"]["ratio"] == 1.0
    assert figures["memsave"]["seconds"] == 2.0
    assert figures["memsave"]["quartiles"] == [0.5, 3.0]
    assert figures["stock"]["ratio"] == 1.0


def test_several_steps_are_timed_at_once(monkeypatch):
    """Each turn waits for the result of its last; the seconds are those of one."""
    done: list[str] = []
    seconds = iter(range(100))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: 8 * next(seconds))
    steps = {"stock": lambda: done.append("step") or len(done)}
    times = measure.paired_times(steps, 2, calls=4, wait=lambda last: done.append(f"wait {last}"))
    assert times == {"stock": [2.0, 2.0]}
    turn = ["step"] * 4
    assert done == ["step", "wait 1", *turn, "wait 6", *turn, "wait 11"]


def test_gradients_are_compared_by_their_own_size_unless_they_are_nothing():
    stock = [torch.tensor([1.0, -2.0]), torch.tensor([0.5]), torch.tensor([1e-17])]
    ours = [torch.tensor([1.0, -2.2]), torch.tensor([0.51]), torch.tensor([2e-17])]
    assert measure.difference(stock, ours) == pytest.approx(0.1)
    assert measure.difference(stock[1:], ours[1:]) == pytest.approx(0.02)
    assert measure.difference([-stock[2]], [stock[2] * 0]) == 1.0
    assert measure.difference([jnp.zeros(2)], [jnp.zeros(2)]) == 0.0
    assert measure.difference([jnp.ones(2)], [jnp.array([1.0, -1.0])]) == 2.0


class Network(nn.Module):
    """Of layers whose kernels allocate nothing but what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten(), nn.Linear(192, 64)),
            *(nn.GELU(), nn.Linear(64, 1000)),
        )
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.body(x * 2), labels)


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_counted_peak_is_that_of_the_allocator(convert, frozen, monkeypatch):
    """With the kernels that fake tensors are counted by; the others allocate less, if anything."""

    def data() -> tuple[torch.Tensor, ...]:
        return torch.randn(64, 3, 16, 16), torch.randint(1000, (64,))

    def prepare(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        model.requires_grad_(not frozen)
        inputs[0].requires_grad_(frozen)
        if convert:
            memsave.convert(model, inputs)

    counts = counting.count(Network, data, prepare)
    model, inputs = Network(), data()
    prepare(model, inputs)
    assert measure.peak_bytes(lambda: model(*inputs).backward()) <= counts.peak + 1000
    for name in kernels.__all__:
        monkeypatch.setattr(kernels, name, getattr(kernels.reference, name))
    for name in getattr(kernels.nodes, "__all__", ()):
        monkeypatch.setattr(kernels.nodes, name, lambda *args, **options: None)
    peak = measure.peak_bytes(lambda: model(*inputs).backward())
    assert peak == pytest.approx(counts.peak, abs=1000)  # numbers and such, in and out
    assert counts.data == 64 * 3 * 16 * 16 * 4 + 64 * 8
    assert counts.parameters == 4 * (192 * 64 + 64 + 64 * 1000 + 1000)
    assert counts.forward <= counts.peak


@pytest.mark.parametrize("scenario", ["All", "Input (BN eval)"])
def test_resnet101_at_paper_scale(scenario):
    """Kept bytes relative to stock, by measurement and by the table; and the peak of the step."""
    case = scenarios.Case("ResNet-101", scenario, 64, 0, True)
    figures = scenarios.measure(case)
    assert figures["kept_bytes"]["stock"] / 2**30 == pytest.approx(7.525, abs=2e-3)
    assert list(scenarios.misses([Record(case, figures, {})])) == []


def test_what_misses_its_target_is_told():
    case = scenarios.Case("ResNet-101", "Input (BN eval)", 64, 0, True)
    kept = {"stock": 1000, "memsave": 17, "limit": 16}
    figures = {"kept_bytes": kept, "peak_bytes": {"stock": 1000, "memsave": 121}}
    assert len(list(scenarios.misses([Record(case, figures, {})]))) == 3


def test_surgical_is_the_first_quarter_of_the_layers():
    with torch.device("meta"):
        model = paper.MODELS["ResNet-101"].step()
    layers = paper.layers(model)
    assert len(layers) == 209
    paper.apply("Surgical", model)
    owners = [layer for layer in layers if layer.weight.requires_grad]
    assert owners == layers[:53]
    assert owners[-1] is model.model.layer3[0].conv3
    paper.apply("SurgicalLast", model)
    assert [layer for layer in layers if layer.weight.requires_grad] == layers[-53:]


def test_embeddings_are_frozen_and_an_untied_head_is_not():
    def trained(name: str, scenario: str) -> set[str]:
        with torch.device("meta"):
            model = paper.MODELS[name].step(1)
        paper.apply(scenario, model)
        return {name for name, p in model.model.named_parameters() if p.requires_grad}

    assert trained("Mistral-7B", "Input") == {"lm_head.weight"}
    assert "lm_head.weight" not in trained("Mistral-7B", "Surgical")
    assert not any("embed" in name or "lm_head" in name for name in trained("T5-base", "All"))
    assert trained("GPT-2", "Norm") == {
        f"transformer.{name}.{kind}"
        for name in ("h.0.ln_1", "h.0.ln_2", "ln_f")
        for kind in ("weight", "bias")
    }


def test_list_names_every_experiment(capsys):
    assert command_line.main(["list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(command_line.EXPERIMENTS)
    assert all(len(line.split()) > 3 for line in printed)


@pytest.mark.parametrize("name", command_line.EXPERIMENTS)
def test_cases_are_told_apart_by_what_the_results_hold(name):
    experiment = command_line.load(name)
    assert experiment.name == name
    assert {"tiny", "default"} <= experiment.sizes.keys() <= {*SIZES}
    cases = list(experiment.cases(experiment.config("tiny")))
    assert cases
    assert len(set(cases)) == len(cases)
    for case in cases:
        assert experiment.case(**json.loads(json.dumps(dataclasses.asdict(case)))) == case


def test_programs_are_counted():
    text = """
HloModule jit_f

%fused (p: f32[8,4]) -> f32[8,4] {
  ROOT %n = f32[8,4]{1,0} negate(%p)
}

ENTRY %main (x: f32[8,4]) -> (f32[8,4], pred[8]) {
  %x = f32[8,4]{1,0} parameter(0), sharding={replicated}
  %zero = bf16[] constant(0)
  %kernel.1 = (f32[8,4]{1,0}, pred[8]{0}) fusion(%x, %x, /*index=2*/%zero), calls=%fused
  %first = f32[8,4]{1,0} get-tuple-element(%kernel.1), index=0
  %copy = u4[8,4]{1,0} copy(%first), metadata={op_name="f(x)"}
  ROOT %both = (f32[8,4]{1,0}, u8[8]{0}) tuple(%first, %copy)
}
"""
    assert [*hlo.instructions(text)] == [("fusion", 128 + 2 + 128 + 8), ("copy", 128 + 16)]


def test_programs_are_compiled_as_for_their_target(monkeypatch):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    program = hlo.compiled(lambda x: jnp.sin(x) @ jnp.cos(x), x)
    assert program.temp_bytes >= 64 * 64 * 4
    assert program.moved_bytes >= 3 * 64 * 64 * 4
    assert 2 <= program.kernels <= 4
    with hlo._as_on("gpu"):
        assert _xla.on_gpu()
        with jax.default_device(jax.devices("cpu")[0]):
            assert not _xla.on_gpu()
        with jax.default_device("cpu"):
            assert not _xla.on_gpu()
    assert not _xla.on_gpu()
    monkeypatch.setattr(topologies, "get_topology_desc", lambda *_, **__: 1 / 0)
    with pytest.raises(RuntimeError, match="takes JAX's plug-in for CUDA"):
        hlo.compiled(jnp.sin, x, target="h100")


@pytest.mark.parametrize(
    ("net", "layer", "dtype"),
    [
        ("CNN, BN train", "hard_silu", "float32"),
        ("CNN, BN train", "silu", "bfloat16"),
        ("CNN, BN eval", "relu", "float32"),
        ("CNN, BN eval", "max_pool", "float32"),
        ("MLP", "gelu", "bfloat16"),
        ("MLP", "swiglu", "float32"),
        ("MLP", "layer_norm", "float32"),
    ],
)
def test_programs_keep_less_than_those_of_stock(net, layer, dtype):
    case = flax_programs.Case(net, layer, dtype, "input", 64, "cpu")
    programs = flax_programs.measure(case)
    assert programs["memsave_jax"]["temp_bytes"] < 0.95 * programs["stock"]["temp_bytes"]


def test_every_layer_can_be_timed():
    """By its name alone, or with a line in ARGUMENTS."""
    names = {case.layer.partition(",")[0] for case in layer_times.cases(layer_times.Config())}
    assert names == {*memsave.nn.__all__}


def test_layers_are_timed_with_options():
    """What their names say behind a comma."""
    layer = partial(layer_times.stock_layer, size="64x64")
    assert layer("Conv2d, circular").padding_mode == "circular"
    assert layer("Conv2d").padding_mode == "zeros"
    loss = layer("CrossEntropyLoss, weights and smoothing")
    assert (loss.weight.shape, loss.label_smoothing) == ((64,), 0.1)
    assert layer("BatchNorm2d").training
    assert not layer("BatchNorm2d, eval").training
    case = layer_times.Case(
        "CrossEntropyLoss, probabilities", "64x64", "input", "float32", False, "", 0.01, 1
    )
    figures = layer_times.measure(case)
    assert layer_times.inputs_of(case)[1].is_floating_point()
    assert max(figures["output_off"], figures["gradients_off"]) < 1e-6


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("wanted", ["input", "parameters", "all"])
def test_layers_are_timed_beside_others_that_compute_the_same(wanted, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    case = layer_times.Case("LayerNorm", "64x64", wanted, "float32", True, "", 0.1, 3)
    steps = layer_times._variants(case)
    assert len(steps) == 6
    expected = steps["stock"].once()
    for step in steps.values():
        torch.testing.assert_close(step.once(), expected)


def test_layers_are_told_to_keep_what_they_do_within_a_model():
    case = layer_times.Case("LeakyReLU", "64x64", "input", "float32", False, "", 0.01, 1)
    figures = layer_times.measure(case)
    assert figures["kept_bytes"] == {"stock": 64 * 64 * 4, "memsave": 64 * 64 // 8}
