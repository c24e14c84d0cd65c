"""PEFT's LoRA keeps its input as it comes, and bits; outputs and all else are stock's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
import torch.nn.functional as F
from helpers import cotangent, kept
from hypothesis import given, strategies as st
from properties import DERIVATIVES, PROPERTIES, check_fails_as_stock, check_implemented
from strategies import Case, accepted, flawed, label, wanted
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch_backend import Torch

import memsave
from memsave.function import RULES, differentiable
from memsave.layers.module import STOCK
from memsave.spec import LINEAR, Layer

pytest.importorskip("peft")

import peft
from peft.helpers import disable_input_dtype_casting
from peft.tuners.lora import layer as lora

from memsave.extensions.peft import CAST_LINEAR, DROPOUT_LINEAR, Linear

ROWS = (CAST_LINEAR, DROPOUT_LINEAR)
TORCH = Torch({row.name: RULES[row.name] for row in ROWS})
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
every_row = pytest.mark.parametrize("row", ROWS, ids=label)


# The rows have the properties of those of the table.


def calls(row: Layer, **domain: Any) -> st.SearchStrategy[Case]:
    """Those that stock accepts; also of x in another dtype than the weight."""

    def widened(case: Case) -> Case:
        return replace(case, dtypes={**case.dtypes, "weight": "float32"})

    some = accepted(TORCH, row, **domain)
    empty = domain.get("empty", True)
    mixed = some.map(widened).filter(lambda case: TORCH.accepts(row, case, empty=empty))
    return some if domain.get("dtypes") == ("float64",) else some | mixed


def holds_for(strategy: st.SearchStrategy[Case], check: Callable[[Case], None]) -> None:
    given(strategy)(check)()


@every_row
def test_implemented(row: Layer) -> None:
    check_implemented(TORCH, row)


@every_row
@pytest.mark.parametrize("check", PROPERTIES, ids=label)
def test_property(check: Any, row: Layer) -> None:
    holds_for(calls(row, **PROPERTIES[check]), lambda case: check(TORCH, row, case))


@pytest.mark.parametrize(
    ("check", "row", "wrt"),
    [(check, row, wrt) for check in DERIVATIVES for row in ROWS for wrt in wanted(row)],
    ids=label,
)
def test_derivative(check: Any, row: Layer, wrt: frozenset[str]) -> None:
    cases = calls(row, wrt=wrt, **DERIVATIVES[check])
    holds_for(cases, lambda case: check(TORCH, row, case))


@every_row
def test_fails_as_stock(row: Layer) -> None:
    holds_for(flawed(TORCH, row), lambda case: check_fails_as_stock(TORCH, row, case))


@every_row
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_under_autocast(row: Layer, dtype: torch.dtype) -> None:
    """To the bit, and what autocast remembers of a parameter still has a gradient."""
    options = {name: values[0] for name, values in row.options.items()}
    results = []
    for function in (differentiable(RULES[row.name]), RULES[row.name].primal):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 8, dtype=dtype, requires_grad=True)
        weight = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", dtype=BF16):
            y = function(x, weight, **options)
            other = F.linear(x.to(F32), weight)
        grads = torch.autograd.grad(y, (x, weight), cotangent(y))
        results.append([y, *grads, *torch.autograd.grad(other.sum(), (x, weight))])
    assert_same(*results)


# A model, adapted and converted.


class Attention(nn.Module):
    """Three linear layers that share an input."""

    def __init__(self, features: int, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(features, features, bias) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x) - self.v(x)


def adapted(
    *,
    features: int = 8,
    bias: bool = True,
    dtype: torch.dtype = BF16,
    wide: bool = True,
    adapters: int = 1,
    **config: Any,
) -> Any:
    """A model of PEFT. ``wide``: with the adapters in float32, whatever the dtype of the model."""
    torch.manual_seed(0)
    model: Any = Attention(features, bias).to(dtype)
    names = ["default", *map(str, range(1, adapters))]
    for k, name in enumerate(names):
        settings = {"r": 2 + k, "target_modules": ["q", "k", "v"], "init_lora_weights": False}
        settings = peft.LoraConfig(**{**settings, **config})
        if k == 0:
            model = peft.get_peft_model(model, settings, autocast_adapter_dtype=wide)
        else:
            model.add_adapter(name, settings, autocast_adapter_dtype=wide)
    model.base_model.set_adapter(names)
    return model


def converted(model: nn.Module) -> Any:
    return memsave.convert(copy.deepcopy(model))


def layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, lora.Linear)]


def activation(
    features: int = 8, dtype: torch.dtype = BF16, shape: tuple[int, ...] = (2, 3)
) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, features, generator=generator).to(dtype).requires_grad_()


def step(
    model: nn.Module, x: Tensor, *, autocast: bool = False, run: Any = None, **kwargs: Any
) -> dict[str, Tensor]:
    """Output and gradients, by name."""
    x.grad = None
    model.zero_grad()
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        y = (model if run is None else run)(x, **kwargs)
    y.backward(cotangent(y))
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y, **({} if x.grad is None else {"x": x.grad}), **grads}


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def used(y: Tensor) -> set[str]:
    """Names of our rows in the graph."""
    names = {"MemsavePeftCastLinearBackward", "MemsavePeftDropoutLinearBackward"}
    seen, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [parent for parent, _ in node.next_functions]
    return names & {node.name() for node in seen}


def ops(model: nn.Module, x: Tensor) -> list[str]:
    with helpers.Ops() as run:
        model(x)
    return run.names


def bytes_kept(model: nn.Module, x: Tensor, **options: Any) -> int:
    """By the graph of a call with a copy of ``x``, as it is an activation of a larger model."""
    with torch.autocast("cpu", dtype=BF16, **{"enabled": False, **options}):
        return kept(lambda: model(x.clone()), [*model.parameters(), x])


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of :func:`adapted`."""
    bias, use_dora = draw(st.booleans()), draw(st.integers(0, 3)) == 3
    return {
        "dtype": draw(st.sampled_from([BF16, F32, F16])),
        "wide": draw(st.booleans()),
        "r": draw(st.integers(1, 5)),
        "adapters": draw(st.sampled_from([1, 1, 2, 3])),
        "lora_dropout": draw(st.sampled_from([0.0, 0.15, 0.52])),
        "use_rslora": draw(st.booleans()),
        "bias": bias,
        "lora_bias": bias and not use_dora and draw(st.booleans()),
        "use_dora": use_dora,
    }


@given(
    configurations(),
    st.sampled_from([(), (5,), (2, 3), (2, 1, 3), (0, 2)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_gradients_equal_stock(
    configuration: dict[str, Any],
    shape: tuple[int, ...],
    train: bool,
    autocast: bool,
    wants_x: bool,
) -> None:
    """Those of the adapters to the bit; that of x with one active adapter to the bit."""
    stock = adapted(**configuration).train(train)
    model = converted(stock)
    x = activation(dtype=configuration["dtype"], shape=shape).requires_grad_(wants_x)
    actual, expected = (step(m, x, autocast=autocast) for m in (model, stock))
    assert ("x" in actual) == wants_x
    if configuration["adapters"] > 1 and wants_x:
        ours, its = actual.pop("x"), expected.pop("x")
        scale = its.abs().max() if its.numel() else torch.tensor(0.0)
        assert ours.dtype == its.dtype
        torch.testing.assert_close(ours, its, rtol=0, atol=4e-2 * max(1.0, scale.item()))
    assert_same(actual, expected)
    if configuration["use_dora"]:
        assert not used(actual["y"])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("lora_dropout", [0.0, 0.1])
@pytest.mark.parametrize("adapters", [1, 2])
def test_keeps_what_the_rows_say(adapters: int, lora_dropout: float, autocast: bool) -> None:
    """Of one x in bfloat16: itself, and per adapter bits and what the second factor reads."""
    model = adapted(features=1024, r=8, lora_dropout=lora_dropout, adapters=adapters)
    x = activation(1024, shape=(1, 64))
    stock = bytes_kept(model, x, enabled=autocast)
    row = DROPOUT_LINEAR if lora_dropout else CAST_LINEAR
    shapes = {"x": tuple(x.shape), "weight": (8, 1024), "y": (1, 64, 8)}
    down = row.saved_bits(row.reads, shapes, {"x": 16, "weight": 32, "y": 16}, {"p": lora_dropout})
    shapes = {"x": (1, 64, 8), "weight": (1024, 8), "bias": None, "y": tuple(x.shape)}
    width = 16 if autocast else 32
    up = LINEAR.saved_bits({"x", "weight"}, shapes, {"x": width, "weight": width})
    up["weight"] *= autocast  # a copy; otherwise the parameter
    each = down.get("kept", 0) + sum(up.values())
    ours = bytes_kept(memsave.convert(model), x, enabled=autocast)
    assert 8 * ours == down["x"] + 3 * adapters * each
    assert ours < stock


@pytest.mark.parametrize(("lora_dropout", "stock_keeps"), [(0.0, 6.1), (0.1, 12.1)])
def test_one_input_for_queries_keys_and_values(lora_dropout: float, stock_keeps: float) -> None:
    """At most 1.2 times its bytes. (Of the bits, stock has a float32 each on CPU.)"""
    model = adapted(features=4096, r=8, lora_dropout=lora_dropout)
    x = activation(4096, shape=(1, 64))
    assert bytes_kept(model, x) / x.nbytes == pytest.approx(stock_keeps, abs=0.1)
    assert bytes_kept(memsave.convert(model), x) / x.nbytes <= 1.2


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("lora_dropout", [0.0, 0.1])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_alone_keeps_no_more_than_stock(
    dtype: torch.dtype, wide: bool, lora_dropout: float, autocast: bool
) -> None:
    """In every dtype. (Where a cast makes x smaller, stock keeps what is smaller, and so do we.)"""
    model = adapted(features=64, dtype=dtype, wide=wide, lora_dropout=lora_dropout)
    layer, x = layers(model)[0], activation(64, dtype, shape=(1, 64))
    if not wide and dtype == F32:
        layer.lora_A.to(BF16)
        layer.lora_B.to(BF16)
    stock = bytes_kept(layer, x, enabled=autocast)
    memsave.convert(model)
    assert bytes_kept(layer, x, enabled=autocast) <= stock


@pytest.mark.parametrize("lora_dropout", [0.0, 0.1])
@pytest.mark.parametrize("wants", ["x", "weight", "both"])
def test_a_slice_of_a_permuted_input(wants: str, lora_dropout: float) -> None:
    """Neither dense nor in order, which the properties do not draw."""
    stock = adapted(lora_dropout=lora_dropout)
    for layer in layers(stock):
        layer.lora_A.requires_grad_(wants != "x")
    model, x = converted(stock), activation(shape=(5, 4)).requires_grad_(wants != "weight")
    results = [step(m, x, run=lambda x, m=m: m(x[:, ::2].transpose(0, 1))) for m in (model, stock)]
    assert_same(*results)


# What is not plain LoRA: PEFT's own forward runs.


def hook(name: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in layers(model):
            getattr(layer, name).default.register_forward_hook(lambda module, args, y: 2 * y)

    return change


def forward_of_its_own(model: Any) -> None:
    for layer in layers(model):
        module = layer.lora_A.default
        module.forward = lambda x, stock=module.forward: 2 * stock(x)


def dropout(**attributes: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for layer in layers(model):
            vars(layer.lora_dropout.default).update(attributes)

    return change


def second_in_float64(model: Any) -> None:
    for layer in layers(model):
        layer.lora_A["1"].double()
        layer.lora_B["1"].double()


def normalized(model: Any) -> None:
    for layer in layers(model):
        weight_norm(layer.lora_A.default)


def biased(model: Any) -> None:
    for layer in layers(model):
        layer.lora_A["default"].bias = nn.Parameter(torch.ones(2))


UNUSUAL: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "bias of lora_A": ({}, biased),
    "dora": ({"use_dora": True}, lambda model: None),
    "merged": ({}, lambda model: model.base_model.merge_adapter()),
    "disabled": ({}, lambda model: model.base_model.disable_adapter_layers()),
    "none active": ({}, lambda model: model.base_model.set_adapter([])),
    "hook on lora_A": ({}, hook("lora_A")),
    "hook on lora_dropout": ({"lora_dropout": 0.1}, hook("lora_dropout")),
    "forward of its own": ({}, forward_of_its_own),
    "inplace": ({"lora_dropout": 0.5}, dropout(inplace=True)),
    "drops all": ({"lora_dropout": 0.5}, dropout(p=1.0)),
    "of two dtypes": ({"adapters": 2}, second_in_float64),
    "parametrized": ({}, normalized),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_unusual_is_as_stock(case: str) -> None:
    config, change = UNUSUAL[case]
    results = []
    for convert in (lambda model: model, memsave.convert):
        model = convert(adapted(**config))
        change(model)
        results.append(step(model, activation()))
    assert_same(*results)
    assert not used(results[1]["y"])


@pytest.mark.parametrize("cls", [nn.Linear, nn.Dropout])
def test_a_forward_of_all_modules(cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which somebody has put in the place of theirs, after the model is converted."""
    stock = adapted(lora_dropout=0.5)
    model, own = converted(stock), cls.forward
    seen = 0

    def forward(self: nn.Module, x: Tensor) -> Any:
        nonlocal seen
        seen += 1
        return 2 * own(self, x)

    monkeypatch.setattr(cls, "forward", forward)
    results = []
    for each in (stock, model):
        seen = 0
        results.append({**step(each, activation()), "seen": seen})
    assert results[0]["seen"]
    assert_same(*results)


def test_adapters_by_name_are_as_stock() -> None:
    stock = adapted(adapters=2).eval()
    model, x = converted(stock), activation()
    actual, expected = (step(m, x, adapter_names=["1", "__base__"]) for m in (model, stock))
    assert_same(actual, expected)
    assert not used(actual["y"])


def test_without_casts_is_as_stock() -> None:
    stock = adapted()
    model, x = converted(stock), activation()
    with disable_input_dtype_casting(stock), disable_input_dtype_casting(model):
        actual, expected = (step(m, x, autocast=True) for m in (model, stock))
    assert_same(actual, expected)
    assert not used(actual["y"])


def test_nothing_to_save() -> None:
    """Without gradients, or if the adapter is of the dtype of x, the stock ops run."""
    stock = adapted(adapters=2)
    with torch.no_grad():
        assert ops(converted(stock), activation()) == ops(stock, activation())
    model = memsave.convert(adapted())
    assert not used(memsave.convert(adapted(dtype=F32))(activation(dtype=F32)))
    assert used(model(activation())) == {"MemsavePeftCastLinearBackward"}
    dropping = memsave.convert(adapted(lora_dropout=0.1))
    assert used(dropping(activation())) == {"MemsavePeftDropoutLinearBackward"}
    assert used(dropping.eval()(activation())) == {"MemsavePeftCastLinearBackward"}


def test_subclasses_are_left_alone() -> None:
    """Those of quantized layers have a forward of their own."""
    model = adapted()
    for layer in layers(model):
        layer.__class__ = type("Quantized", (lora.Linear,), {"forward": lambda self, x: x})
    memsave.convert(model)
    entries = [entry for entry in memsave.coverage(model) if entry.layer == "Quantized"]
    assert [entry.status for entry in entries] == ["skipped"] * 3
    assert "forward of its own" in entries[0].reason


# All that a model of PEFT can do, it can do converted.

both_dropouts = pytest.mark.parametrize("lora_dropout", [0.0, 0.1])


def test_converts_and_reverts() -> None:
    model = adapted()
    state = copy.deepcopy(model.state_dict())
    memsave.convert(model)
    assert [type(layer) for layer in layers(model)] == [Linear] * 3
    assert "lora.memsave.Linear(" in repr(model)
    assert type(layers(model)[0].base_layer) is memsave.nn.Linear
    assert_same(dict(model.state_dict()), dict(state))
    memsave.revert(model)
    assert [type(layer) for layer in layers(model)] == [lora.Linear] * 3
    assert not {type(module) for module in model.modules()} & STOCK.keys()


@both_dropouts
def test_adapts_a_converted_model(lora_dropout: float) -> None:
    stock = adapted(lora_dropout=lora_dropout)
    base = memsave.convert(copy.deepcopy(stock).unload())
    config = stock.peft_config["default"]
    model = memsave.convert(peft.get_peft_model(base, config))
    model.load_state_dict(stock.state_dict())
    x = activation()
    assert_same(step(model, x), step(stock, x))


@both_dropouts
def test_adapters_come_and_go(lora_dropout: float) -> None:
    models = [adapted(lora_dropout=lora_dropout), adapted(lora_dropout=lora_dropout)]
    memsave.convert(models[1])
    results: list[list[Any]] = [[], []]
    for model, found in zip(models, results, strict=True):
        torch.manual_seed(3)
        config = copy.deepcopy(model.peft_config["default"])
        model.add_adapter("new", config)
        model.set_adapter("new")
        found.append(step(model, activation()))
        model.delete_adapter("default")
        found.append(step(model, activation()))
        model.merge_adapter()
        found.append(step(model, activation()))
        model.unmerge_adapter()
        found.append(step(model, activation()))
    assert_same(*results)
    assert used(results[1][1]["y"])


def test_merges_and_unloads() -> None:
    stock = adapted()
    model, x = converted(stock), activation()
    actual, expected = model.merge_and_unload(), stock.merge_and_unload()
    assert_same(actual(x), expected(x))
    assert_same(dict(actual.state_dict()), dict(expected.state_dict()))


@pytest.mark.filterwarnings("ignore:Could not find a config file:UserWarning")
def test_saves_and_loads(tmp_path: Path) -> None:
    stock = adapted()
    model, x = converted(stock), activation()
    model.save_pretrained(tmp_path)
    base = copy.deepcopy(stock).unload()
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path), is_trainable=True)
    assert_same(step(memsave.convert(loaded), x), step(stock, x))


@both_dropouts
def test_copies_and_pickles(lora_dropout: float) -> None:
    model, x = memsave.convert(adapted(lora_dropout=lora_dropout)), activation()
    expected = step(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(layer) for layer in layers(twin)] == [Linear] * 3
        assert_same(step(twin, x), expected)


@both_dropouts
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpoints(use_reentrant: bool, lora_dropout: float, autocast: bool) -> None:
    stock = adapted(lora_dropout=lora_dropout)
    model, x = converted(stock), activation()
    actual = step(
        model,
        x,
        autocast=autocast,
        run=lambda x: checkpoint(model, x, use_reentrant=use_reentrant),
    )
    assert_same(actual, step(stock, x, autocast=autocast))


@both_dropouts
def test_offloads(lora_dropout: float) -> None:
    """All that is kept goes through the hooks on saved tensors, and can be freed."""
    stock = adapted(lora_dropout=lora_dropout)
    model, x = converted(stock), activation()
    with torch.autograd.graph.save_on_cpu():
        actual = step(model, x)
    assert_same(actual, step(stock, x))
    y = model(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@both_dropouts
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles(lora_dropout: float, autocast: bool) -> None:
    """To what the stock model compiles to."""
    x, results = activation(), []
    for model in (stock := adapted(lora_dropout=lora_dropout), converted(stock)):
        torch._dynamo.reset()
        run = torch.compile(model.base_model.model, fullgraph=True, backend="aot_eager")
        result = step(model, x, run=run, autocast=autocast)
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            results.append((result, kept(lambda run=run: run(x), [*model.parameters(), x])))
    assert_same(*results)
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [True, False])
def test_exports(strict: bool) -> None:
    """Op by op what the stock model is exported to."""
    stock = adapted(adapters=2)
    programs = [
        torch.export.export(model.base_model.model, (activation().detach(),), strict=strict)
        for model in (stock, converted(stock))
    ]
    expected, actual = ([str(n.target) for n in program.graph.nodes] for program in programs)
    assert actual == expected
    assert_same(*(program.module()(activation()) for program in programs))


@pytest.mark.filterwarnings("ignore:`torch.jit")
@both_dropouts
def test_function_transforms(lora_dropout: float) -> None:
    stock = adapted(lora_dropout=lora_dropout)
    x, results = activation(), []
    for model in (stock, converted(stock)):
        state = dict(model.named_parameters())

        def loss(state: Any, x: Tensor, model: nn.Module = model) -> Tensor:
            return torch.func.functional_call(model, state, x).float().square().sum()

        torch.manual_seed(0)
        grads = torch.func.grad(loss)({k: v.detach() for k, v in state.items()}, x.detach())
        batch = torch.stack([x.detach(), -x.detach()])
        each = torch.func.vmap(loss, (None, 0), randomness="same")(state, batch)
        tangent = torch.func.jvp(lambda x, f=loss, s=state: f(s, x), (x,), (x,))
        results.append((grads, each, tangent))
    assert_same(*results)


@both_dropouts
def test_second_derivatives(lora_dropout: float) -> None:
    """Also through the cast."""
    stock = adapted(lora_dropout=lora_dropout, dtype=F32)
    for layer in layers(stock):
        layer.lora_A.double()
        layer.lora_B.double()
    x, results = activation(dtype=F32), []
    for model in (stock, converted(stock)):
        wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
        torch.manual_seed(0)
        y = model(x)
        grads = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
        again = torch.autograd.grad(sum(grad.square().sum() for grad in grads), wanted)
        results.append([*grads, *again])
    assert used(y)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@both_dropouts
def test_report_predicts_what_is_kept(lora_dropout: float) -> None:
    model, x = adapted(features=64, lora_dropout=lora_dropout), activation(64)
    report = memsave.report(model, x)
    assert report.stock == kept(lambda: model(x), [*model.parameters(), x])
    memsave.convert(model)
    assert report.converted == kept(lambda: model(x), [*model.parameters(), x])
    assert report.table + sum(report.rest.values()) == report.converted


# (PEFT asks transformers for checkpoints by an old name.)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_a_language_model_in_training() -> None:
    """Under autocast, with checkpoints; and a step of an optimizer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    ids = torch.arange(12).view(2, 6)
    losses: list[list[float]] = []
    for convert in (lambda model: model, only_lora):
        torch.manual_seed(0)
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM", lora_dropout=0.1, target_modules="all-linear"
        )
        model = transformers.LlamaForCausalLM(config).to(BF16)
        model = convert(peft.get_peft_model(model, settings)).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        losses.append([])
        for _ in range(3):
            with torch.autocast("cpu", dtype=BF16):
                loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][0] > losses[0][-1]


def only_lora(model: nn.Module) -> nn.Module:
    return memsave.convert(model, filter_fn=lambda module, name: type(module) is lora.Linear)
