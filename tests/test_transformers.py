"""Classes of transformers are recognised by what they compute, and nothing else is converted."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from typing import Any

import helpers
import pytest
import torch
from helpers import kept, same, step
from properties import DERIVATIVES, PROPERTIES
from strategies import accepted, label, wanted
from test_properties import holds_for
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch_backend import Torch

import memsave
from memsave import extensions
from memsave.function import RULES
from memsave.layers.module import STOCK

pytest.importorskip("transformers")

import transformers
from transformers import activations

# torch deprecates what its own compiler does: objects of autograd functions, and TorchScript.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]

extensions.load()
ROWS = [rule.row for name, rule in RULES.items() if name.startswith("transformers.")]
TORCH = Torch({row.name: RULES[row.name] for row in ROWS})
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def of(model: str, name: str) -> type[nn.Module]:
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, name)


# Its rows are rows like those of the table.


@pytest.mark.parametrize("check", PROPERTIES, ids=label)
@pytest.mark.parametrize("row", ROWS, ids=label)
def test_property(check: Any, row: Any) -> None:
    cases = accepted(TORCH, row, **PROPERTIES[check])
    holds_for(TORCH, cases, lambda case: check(TORCH, row, case), share=0.5)


@pytest.mark.parametrize("check", DERIVATIVES, ids=label)
@pytest.mark.parametrize(
    ("row", "wrt"),
    [(row, wrt) for row in ROWS for wrt in wanted(row)],
    ids=label,
)
def test_derivative(check: Any, row: Any, wrt: frozenset[str]) -> None:
    cases = accepted(TORCH, row, wrt=wrt, **DERIVATIVES[check])
    holds_for(TORCH, cases, lambda case: check(TORCH, row, case), share=0.25)


# Norms.

NORMS = [
    ("llama", "LlamaRMSNorm"),
    ("mistral", "MistralRMSNorm"),
    ("qwen2", "Qwen2RMSNorm"),
    ("qwen3", "Qwen3RMSNorm"),
    ("phi3", "Phi3RMSNorm"),
    ("gemma", "GemmaRMSNorm"),
    ("gemma2", "Gemma2RMSNorm"),
    ("gemma3", "Gemma3RMSNorm"),
    ("t5", "T5LayerNorm"),
    ("mt5", "MT5LayerNorm"),
    ("olmo2", "Olmo2RMSNorm"),
]


def norm(cls: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layer = cls(WIDTH)
    nn.init.normal_(layer.weight)
    return layer.to(dtype)


WIDTH = 48


@pytest.mark.parametrize("parameters", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize(("model", "name"), NORMS, ids=lambda value: value)
def test_norm(model: str, name: str, dtype: torch.dtype, parameters: torch.dtype) -> None:
    cls = of(model, name)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    for wants_x, wants_weight in ((True, True), (True, False), (False, True)):
        results = []
        for change in (lambda layer: layer, memsave.convert):
            layer = change(norm(cls, parameters))
            layer.weight.requires_grad_(wants_weight)
            x = x.detach().requires_grad_(wants_x)
            results.append(step(layer, x))
        stock, ours = results
        same(ours[0], stock[0], rtol=0, atol=0)
        eps = max(torch.finfo(t).eps for t in (dtype, parameters, torch.float32))
        same(ours[1:], stock[1:], rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize(("model", "name"), NORMS, ids=lambda value: value)
def test_norm_keeps_its_input_once(model: str, name: str) -> None:
    x = torch.randn(64, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    layer = norm(of(model, name), torch.bfloat16)
    stock = kept(lambda: layer(x), [x, layer.weight])
    memsave.convert(layer)
    assert type(layer).__name__ == name
    assert "memsave" in repr(layer)
    assert kept(lambda: layer(x), [x, layer.weight]) == 64 * 4  # rstd
    assert stock > 64 * WIDTH * 4  # a copy in float32


# Activations.

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "quick": activations.QuickGELUActivation,
    "new": activations.NewGELUActivation,
    "fast": activations.FastGELUActivation,
    "accurate": activations.AccurateGELUActivation,
    "gelu": activations.GELUActivation,
    "gelu in python": lambda: activations.GELUActivation(use_gelu_python=True),
    "tanh": activations.GELUTanh,
    "tanh in python": lambda: activations.GELUTanh(use_gelu_tanh_python=True),
    "silu": activations.SiLUActivation,
    "mish": activations.MishActivation,
    "torch gelu": lambda: nn.GELU("tanh"),
    "torch silu": nn.SiLU,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name: str) -> None:
    x = torch.randn(4, 6, requires_grad=True)
    layer = ACTIVATIONS[name]()
    stock = step(layer, x)
    if memsave.coverage(layer)[0].status == "convertible":
        memsave.convert(layer)
    same(step(layer, x), stock)
    assert kept(lambda: layer(x), [x]) == 0


# Gated layers.


class Config:
    """What constructors of such layers ask for."""

    hidden_size, intermediate_size, d_model, d_ff = 16, 24, 16, 24
    mlp_bias, use_bias, dropout_rate, hidden_dropout_prob = False, False, 0.0, 0.0
    hidden_act = hidden_activation = dense_act_fn = "silu"


MLPS = [
    ("llama", "LlamaMLP"),
    ("mistral", "MistralMLP"),
    ("qwen2", "Qwen2MLP"),
    ("gemma", "GemmaMLP"),
    ("phi3", "Phi3MLP"),
    ("t5", "T5DenseGatedActDense"),
    ("t5gemma", "T5GemmaMLP"),
    ("gte", "GteMLP"),
]


def mlp(model: str, name: str, act: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layer = of(model, name)(Config())
    for attribute in ("act_fn", "activation_fn", "act"):
        if hasattr(layer, attribute):
            setattr(layer, attribute, act)
    return layer


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize(("model", "name"), MLPS, ids=lambda value: value)
def test_gated_layer(model: str, name: str, act: str) -> None:
    x = torch.randn(64, 16, requires_grad=True)
    layers = [mlp(model, name, ACTIVATIONS[act]()).requires_grad_(False) for _ in range(2)]
    stock, ours = layers[0], memsave.convert(layers[1])
    assert "memsave" in repr(ours).partition("(")[0]
    same(step(ours, x), step(stock, x))
    sizes = [kept(lambda m=m: m(x), [x, *m.parameters()]) for m in (stock, ours)]
    one = 64 * 24 * 4
    assert sizes[1] == (2 * one if act != "mish" else 3 * one)
    assert sizes[0] >= 3 * one


@pytest.mark.parametrize(
    ("model", "name"), [one for one in MLPS if hasattr(mlp(*one, nn.SiLU()), "dropout")]
)
def test_dropout_within_a_gated_layer(model: str, name: str) -> None:
    layer, x = mlp(model, name, nn.SiLU()), torch.randn(64, 16, requires_grad=True)
    layer.dropout.p = 0.5
    results = []
    for change in (lambda layer: layer, memsave.convert):
        layer = change(layer)
        torch.manual_seed(0)
        results.append(step(layer, x))
    stock, ours = results
    assert "memsave" in repr(layer).partition("(")[0]
    same(ours[0], stock[0], rtol=0, atol=0)
    same(ours, stock)
    assert not torch.equal(layer.eval()(x), ours[0])


class DropsItsOutput(of("llama", "LlamaMLP")):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(Config())
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


def test_dropout_after_a_gated_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a class is another one."""
    monkeypatch.setattr(DropsItsOutput, "__module__", "transformers_modules.custom")
    layer = memsave.convert(DropsItsOutput())
    assert type(layer) is DropsItsOutput


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_of_the_activation_run(hook: str) -> None:
    layer = memsave.convert(mlp(*MLPS[0], activations.SiLUActivation()))
    seen = []
    getattr(layer.act_fn, hook)(lambda *args: seen.append(1))
    step(layer, torch.randn(3, 16, requires_grad=True))
    assert seen == [1]


def test_hooks_of_all_modules_see_the_activation() -> None:
    layer = memsave.convert(mlp(*MLPS[0], activations.SiLUActivation()))
    seen = []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        step(layer, torch.randn(3, 16, requires_grad=True))
    finally:
        handle.remove()
    assert layer.act_fn in seen


def test_an_activation_with_another_forward() -> None:
    layer = mlp(*MLPS[0], activations.SiLUActivation())
    layer.act_fn.forward = torch.tanh
    x = torch.randn(3, 16, requires_grad=True)
    expected = step(layer, x)
    same(step(memsave.convert(layer), x), expected)


def test_pickles_of_layers_that_somebody_else_registers_for() -> None:
    """What they are must not depend on the place among those that are offered."""
    layer = memsave.convert(mlp(*MLPS[0], activations.SiLUActivation()))

    @memsave.register(memsave.spec.SWIGLU)
    class Other(STOCK[type(layer)]):
        pass

    try:
        saved = pickle.dumps(layer)
    finally:
        memsave.unregister(Other)
    assert type(pickle.loads(saved)) is type(layer)


def test_children_are_called() -> None:
    """They may be anything: adapters, quantized layers."""
    layer = memsave.convert(mlp(*MLPS[0], activations.SiLUActivation()))
    layer.up_proj = nn.Sequential(layer.up_proj, nn.Tanh())
    plain = memsave.revert(copy.deepcopy(layer))
    x = torch.randn(3, 16, requires_grad=True)
    same(step(layer, x), step(plain, x))


# What is not recognised.


class Louder(nn.Module):
    """An RMS norm in all but a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (1.001 * x.float() * rstd).to(x.dtype)


class OnlyWhenTrained(Louder):
    def forward(self, x: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * rstd).to(x.dtype) * (2 if self.training else 1)


class WithAnOption(Louder):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return scale * self.weight * (x.float() * rstd).to(x.dtype)


class Plain(Louder):
    def forward(self, x: Tensor) -> Tensor:
        rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x.float() * rstd).to(x.dtype)


class Widens(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


@pytest.mark.parametrize(
    ("cls", "recognised"),
    [
        *((cls, False) for cls in (Louder, OnlyWhenTrained, WithAnOption, Widens)),
        (Plain, True),
    ],
)
def test_what_computes_something_else_is_left_alone(cls: type[nn.Module], recognised: bool) -> None:
    cls = type("New", (cls,), {"__module__": "transformers.models.new.modeling_new"})
    model = nn.Sequential(cls(), nn.Linear(4, 4))
    memsave.convert(model)
    assert (type(model[0]) is not cls) == recognised
    (entry,) = [entry for entry in memsave.coverage(model) if entry.name == "0"]
    assert entry.status == ("converted" if recognised else "skipped")


def test_classes_of_the_users_own_are_left_alone() -> None:
    """Whatever they compute."""
    model = nn.Sequential(Plain(), nn.Linear(4, 4))
    memsave.convert(model)
    assert type(model[0]) is Plain


def test_a_weight_that_broadcasts() -> None:
    stock = of("llama", "LlamaRMSNorm")(33)
    ours = memsave.convert(nn.Sequential(copy.deepcopy(stock)))[0]
    assert type(ours) is not type(stock)
    x = torch.tensor([[-2.0], [0.5]], requires_grad=True)
    same(*(torch.autograd.grad(layer(x).square().sum(), x) for layer in (ours, stock)))


class WithAProperty(Plain):
    """Of which no instance can be made by setting its attributes."""

    weight = property(lambda self: torch.ones(4))


def test_what_cannot_be_made_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(WithAProperty, "__module__", "transformers.models.new.modeling_new")
    model = nn.Sequential(WithAProperty.__new__(WithAProperty), nn.ReLU())
    nn.Module.__init__(model[0])
    assert type(memsave.convert(model)[0]) is WithAProperty


def test_recognising_draws_no_random_numbers(monkeypatch) -> None:
    """Nor does it touch the generators of devices."""
    from memsave.layers.module import _asked

    def fail(*_: Any) -> None:
        raise AssertionError

    layer = mlp("olmo2", "Olmo2MLP", nn.SiLU())
    monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
    state = torch.get_rng_state()
    _asked.clear()
    memsave.convert(layer)
    assert torch.equal(torch.get_rng_state(), state)


# Whole models.

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "use_cache": False,
}
T5 = {
    **{"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
    **{"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "use_cache": False},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", TINY),
    "gemma": ("GemmaForCausalLM", TINY),
    "bert": ("BertForMaskedLM", TINY),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}),
    "t5": ("T5ForConditionalGeneration", T5),
}


def model(name: str, **more: Any) -> nn.Module:
    cls, options = MODELS[name]
    cls = getattr(transformers, cls)
    torch.manual_seed(0)
    return cls(cls.config_class(**options | more))


def loss(model: nn.Module) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.arange(48).view(2, 24) % 60 + 1
    return model(input_ids=tokens, labels=tokens).loss


def gradients(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    value = loss(model)
    value.backward()
    return [value, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("wants", ["all", "norms"])
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, wants: str, mode: str) -> None:
    net = model(name).train(mode == "train")
    if wants == "norms":
        for path, parameter in net.named_parameters():
            parameter.requires_grad_("norm" in path.lower() or ".ln_" in path)
    expected, classes = gradients(net), [type(module) for module in net.modules()]
    sizes = [kept(lambda: loss(net), [*net.parameters()])]
    tokens = torch.ones(2, 24, dtype=torch.long)
    for example_inputs in (None, {"input_ids": tokens, "labels": tokens}):
        memsave.convert(net, example_inputs)
        ours = gradients(net)
        same(ours[0], expected[0], rtol=0, atol=0)
        same(ours, expected, rtol=1e-4, atol=1e-6)
        sizes.append(kept(lambda: loss(net), [*net.parameters()]))
    assert sizes[2] <= min(sizes)
    if name in ("llama", "gemma", "t5"):
        assert sizes[1] < 0.9 * sizes[0]
    memsave.revert(net)
    assert [type(module) for module in net.modules()] == classes


def test_copies_and_checkpointing() -> None:
    net = memsave.convert(model("llama"))
    expected = gradients(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert [type(module) for module in other.modules()] == [
            type(module) for module in net.modules()
        ]
        same(gradients(other), expected)
    getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)()
    same(gradients(net.train()), expected)


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_checkpoints_that_somebody_watches(where: str) -> None:
    """As a counter of operations does: what runs again keeps what it kept the first time."""
    net = memsave.convert(model("llama"))
    expected = gradients(net)
    getattr(net, "activation_checkpointing_enable", net.gradient_checkpointing_enable)()
    net.train().zero_grad()
    seen: list[nn.Module] = []

    def watched(name: str, run: Callable[[], Any]) -> Any:
        hook = register_module_forward_hook(lambda module, *_: seen.append(module))
        if where not in (name, "both"):
            hook.remove()
        result = run()
        hook.remove()
        return result

    value = watched("forward", lambda: loss(net))
    watched("backward", value.backward)
    same([value, *(p.grad for p in net.parameters())], expected)
    assert (net.model.layers[0].mlp.act_fn in seen) == (where != "backward")


def test_saves_and_loads(tmp_path) -> None:
    net = memsave.convert(model("llama"))
    net.save_pretrained(tmp_path)
    loaded = type(net).from_pretrained(tmp_path)
    assert memsave.coverage(loaded)
    same(gradients(memsave.convert(loaded)), gradients(net))


@pytest.mark.parametrize("part", ["mlp", "norm"])
def test_tracers_see_the_stock_layer(part: str) -> None:
    net = memsave.convert(model("llama"))
    layer = net.model.layers[0].mlp if part == "mlp" else net.model.norm
    x = torch.randn(2, 5, 32)
    y = layer(x)
    traced = [
        torch.jit.trace(layer, x),
        torch.jit.script(layer),
        fx.symbolic_trace(layer),
        torch.export.export(layer, (x,)).module(),
        torch.compile(layer, fullgraph=True, backend="aot_eager"),
        torch.vmap(layer),
    ]
    for other in traced:
        same(other(x), y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("row", helpers.compiled_rows(ROWS), ids=label)
def test_two_in_one_graph_of_any_sizes(row: Any) -> None:
    helpers.check_two_in_one_graph(row)


@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_a_whole(name: str, dynamic: bool) -> None:
    net = memsave.convert(model(name, num_hidden_layers=1))
    expected = gradients(net)
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    net.zero_grad()
    value = loss(compiled)
    value.backward()
    same([value, *(p.grad for p in net.parameters())], expected, rtol=1e-4, atol=1e-6)


class Int8(nn.Linear):
    """As a quantized layer: its weight says nothing of what it takes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.scale, weight = layer.weight.detach().abs().max() / 127, layer.weight.detach()
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale).mT


def test_a_gated_layer_with_a_quantized_part() -> None:
    """What it takes is not cast to the dtype of its weight."""
    layer, x = mlp("t5", "T5DenseGatedActDense", nn.SiLU()), torch.randn(64, 16, requires_grad=True)
    layer.wo = Int8(layer.wo)
    expected = step(layer, x)
    same(step(memsave.convert(layer), x), expected)


@pytest.mark.parametrize("inside", [lambda: torch.device("meta"), FakeTensorMode])
@pytest.mark.parametrize("home", ["transformers.models.new.modeling_new", "transformers_modules.a"])
def test_recognised_where_tensors_have_no_values(inside: Callable[[], Any], home: str) -> None:
    """As a large model is made on the meta device, or of fake tensors; in code of a hub, too."""
    cls = type("New", (Louder,), {"forward": Plain.forward, "__module__": home})
    with inside():
        model = memsave.convert(nn.Sequential(cls()))
    assert type(model[0]) is not cls
