"""``convert(model, example_inputs)`` gives each layer the row with which the model keeps least."""

from __future__ import annotations

import copy
import itertools
from collections import UserDict
from typing import Any

import pytest
import torch
from helpers import ConvNet, image, kept, same, step
from hypothesis import given, strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import memsave
import memsave.nn
from memsave import _choose, spec
from memsave._choose import Option
from memsave._convert import _candidates

# The choice alone.


@st.composite
def forests(draw: st.DrawFn) -> tuple[dict[str, list[Option | None]], dict[int, int]]:
    """Layers between tensors that form a forest, with options that keep some of the two."""
    options: dict[str, list[Option | None]] = {}
    count = draw(st.integers(1, 6))
    for y in range(1, count + 1):
        ends = (draw(st.sampled_from([y - 1, y - 1, *range(y)])), y)
        option = st.builds(
            Option, st.frozensets(st.sampled_from(ends)), st.sampled_from((0, 0, 1, 2, 5))
        )
        some = st.lists(option | st.none(), min_size=1, max_size=3).filter(any)
        options[str(y)] = draw(some)
    free = draw(st.frozensets(st.integers(0, count), max_size=2))
    sizes = {t: draw(st.integers(1, 9)) for t in range(count + 1) if t not in free}
    return options, sizes


@given(forests())
def test_is_the_least_of_all_in_forests(
    forest: tuple[dict[str, list[Option | None]], dict[int, int]],
) -> None:
    options, sizes = forest
    places = [[k for k, option in enumerate(its) if option] for its in options.values()]
    every = [dict(zip(options, choice, strict=True)) for choice in itertools.product(*places)]
    least = min(_choose.total(choice, options, sizes) for choice in every)
    assert _choose.total(_choose.choose(options, sizes), options, sizes) == least


def test_changes_several_layers_at_once() -> None:
    """From the first options, and from the last, no change of one layer keeps less."""
    own, c, d = Option(frozenset(), 3), Option(frozenset("c"), 0), Option(frozenset("d"), 0)
    options = {"1": [own, c], "2": [own, c], "3": [d, own], "4": [d, own]}
    assert _choose.choose(options, {"c": 4, "d": 4}) == {"1": 1, "2": 1, "3": 0, "4": 0}


def test_of_two_equals_the_earlier() -> None:
    x, y = (Option(frozenset({t}), 0) for t in "xy")
    for order in ([x, y], [y, x]):
        assert _choose.choose({"norm": order}, {"x": 8, "y": 8}) == {"norm": 0}


def test_no_layers() -> None:
    assert _choose.choose({}, {}) == {}


# The choice for chains of real layers.

WIDTH = 8
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "frozen norm": lambda: nn.RMSNorm(WIDTH).requires_grad_(False),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "hardtanh": nn.Hardtanh,
    "dropout": nn.Dropout,
}


def chain(names: list[str]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[LAYERS[name]() for name in names])


def bytes_of(model: nn.Module, x: Tensor) -> int | None:
    """What is kept; ``None`` where backward fails, as a residual has been overwritten."""

    def run() -> Tensor:
        torch.manual_seed(1)
        return model(x)

    try:
        run().sum().backward()
    except RuntimeError:
        return None
    return kept(run, [x, *model.parameters()])


def may_be_overwritten(model: nn.Module, x: Tensor) -> bool:
    """Whether backward succeeds where the caller has written to the output."""
    try:
        model(x).mul_(2).sum().backward()
    except RuntimeError:
        return False
    return True


@given(st.lists(st.sampled_from([*LAYERS]), min_size=1, max_size=4), st.booleans())
def test_is_the_least_of_all_in_chains(names: list[str], wants_input: bool) -> None:
    model, x = chain(names), torch.randn(4, WIDTH, requires_grad=wants_input)
    if bytes_of(model, x) is None or not any(t.requires_grad for t in (x, *model.parameters())):
        return
    every, is_free = [], may_be_overwritten(model, x)
    for classes in itertools.product(*[_candidates(layer) for layer in model]):
        other = chain(names)
        for layer, cls in zip(other, classes, strict=True):
            layer.__class__ = cls
        if may_be_overwritten(other, x) >= is_free:
            every.append(bytes_of(other, x))
    chosen = memsave.convert(chain(names), x)
    assert bytes_of(chosen, x) == min(size for size in every if size is not None)
    same(step(chosen, x), step(chain(names), x))


# What it goes by.


def classes(model: nn.Module) -> list[type]:
    return [type(layer) for layer in model]  # type: ignore[attr-defined]


def test_goes_by_who_wants_a_gradient() -> None:
    """A trainable neighbour keeps the output anyway, so bits would be a cost."""
    x = torch.randn(4, WIDTH)
    assert classes(memsave.convert(chain(["linear", "relu", "linear"]), x)) == [
        memsave.nn.Linear,
        memsave.nn.ReLUFromOutput,
        memsave.nn.Linear,
    ]
    model = memsave.convert(chain(["linear", "relu", "frozen"]), x)
    assert classes(model)[1] is memsave.nn.ReLU


def test_examples_that_are_no_leaves_may_be_overwritten() -> None:
    x = torch.randn(4, WIDTH, requires_grad=True) * 1
    model = memsave.convert(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)), x)
    assert isinstance(model[1], memsave.nn.Linear)
    assert x._version == 0


def test_stock_layers_may_be_least() -> None:
    """Of what is an input of the model, and so alive. (And nothing warns.)"""
    x = torch.randn(4, WIDTH, requires_grad=True)
    assert type(memsave.convert(chain(["leaky"]), x)[0]) is nn.LeakyReLU
    assert type(memsave.convert(chain(["leaky"]))[0]) is memsave.nn.LeakyReLU


def test_chooses_anew() -> None:
    x = torch.randn(4, WIDTH)
    model = memsave.convert(chain(["linear", "relu", "linear"]))
    assert classes(model)[1] is memsave.nn.ReLU
    assert classes(memsave.convert(model, x))[1] is memsave.nn.ReLUFromOutput
    assert classes(memsave.convert(model))[1] is memsave.nn.ReLUFromOutput
    model[2].requires_grad_(False)
    assert classes(memsave.convert(model, x))[1] is memsave.nn.ReLU
    assert classes(memsave.revert(model))[1] is nn.ReLU


def test_an_output_that_is_overwritten_is_not_kept() -> None:
    x = torch.randn(4, WIDTH)
    names = ["linear", "norm", "relu in place", "linear"]
    model = memsave.convert(chain(names), x)
    assert type(model[1]) is memsave.nn.LayerNorm
    same(step(model, x), step(chain(names), x))
    names[2] = "relu"
    assert type(memsave.convert(chain(names), x)[1]) is memsave.nn.LayerNormFromOutput


@pytest.mark.parametrize("last", ["norm", "elu", "relu", "tanh"])
def test_what_the_model_returns_may_be_overwritten(last: str) -> None:
    """By its caller, as of stock: which keeps its output of the last two alone."""
    x = torch.randn(4, WIDTH)
    model = memsave.convert(chain(["linear", last]), x)
    stock = may_be_overwritten(chain(["linear", last]), x)
    assert stock == (last in ("norm", "elu"))
    assert may_be_overwritten(model, x) >= stock
    # What another layer keeps in any case, nobody may overwrite.
    model = nn.ModuleDict({"first": chain(["linear", "relu"]), "then": chain(["linear"])})
    model.forward = lambda x: (y := model["first"](x), model["then"](y))  # type: ignore[assignment]
    memsave.convert(model, x)
    assert type(model["first"][1]) is memsave.nn.ReLUFromOutput  # type: ignore[index]


def test_layers_that_are_used_twice() -> None:
    torch.manual_seed(0)
    act = nn.ReLU()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), act)
    x = torch.randn(4, WIDTH)
    stock, plain = bytes_of(model, x) or 0, bytes_of(memsave.convert(model), x) or 0
    assert bytes_of(memsave.convert(model, x), x) in range(min(stock, plain) + 1)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("wants", ["all", "input", "norms"])
def test_never_above_stock(mode: str, wants: str) -> None:
    x = image(dtype=torch.float32).detach().requires_grad_(wants == "input")
    sizes = {}
    for name in ("stock", "plain", "chosen"):
        torch.manual_seed(0)
        model = ConvNet().train(mode == "train").requires_grad_(wants == "all")
        for layer in model.modules():
            if wants == "norms" and isinstance(layer, nn.BatchNorm2d):
                layer.requires_grad_(True)
        if name != "stock":
            memsave.convert(model, x if name == "chosen" else None)
        sizes[name] = kept(lambda model=model: model(x), [x, *model.parameters()])
    assert sizes["chosen"] <= min(sizes["stock"], sizes["plain"])


# How it is called.


class Two(nn.Module):
    """Of two inputs, the second by keyword; the number of rows may depend on values."""

    def __init__(self, by_values: bool = False) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.ReLU()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.by_values = by_values

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.by_values and x.sum() > 0:
            return self.norm(x)
        return self.norm(self.act(self.linear(x)) * scale)


@pytest.mark.parametrize("by_values", [False, True])
@pytest.mark.parametrize("form", [tuple, dict, UserDict])  # (A tokenizer returns a UserDict.)
def test_inputs(by_values: bool, form: Any) -> None:
    x, scale = -torch.rand(4, WIDTH), torch.ones(WIDTH)
    model = Two(by_values)
    mean, drawn = model.norm.running_mean.clone(), torch.get_rng_state()
    memsave.convert(model, (x, scale) if form is tuple else form({"x": x, "scale": scale}))
    assert type(model.act) is memsave.nn.ReLU
    assert torch.equal(model.norm.running_mean, mean)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert model.linear.weight.grad is None


def test_meta_tensors() -> None:
    with torch.device("meta"):
        model, x = chain(["linear", "relu", "linear"]), torch.empty(4, WIDTH)
    assert type(memsave.convert(model, x)[1]) is memsave.nn.ReLUFromOutput


def test_filter_fn() -> None:
    x = torch.randn(4, WIDTH)
    model = chain(["linear", "relu", "linear", "relu"])
    memsave.convert(model, x, filter_fn=lambda module, name: name == "1")
    assert classes(model) == [nn.Linear, memsave.nn.ReLUFromOutput, nn.Linear, nn.ReLU]


def test_by_a_policy_alone() -> None:
    """Of rows that take time a policy must say so; and not besides example inputs."""
    x = torch.randn(1 << 16, WIDTH, requires_grad=True)
    model = memsave.convert(chain(["frozen", "dropout"]), x)
    assert type(model[1]) is memsave.nn.Dropout

    def policy(module: nn.Module, name: str, rows: Any) -> Any:
        return spec.DROPOUT_FROM_RNG if spec.DROPOUT_FROM_RNG in rows else rows[0]

    with pytest.raises(ValueError, match="not by both"):
        memsave.convert(chain(["dropout"]), x, policy=policy)
    assert type(memsave.convert(chain(["dropout"]), policy=policy)[0]) is memsave.nn.DropoutFromRng


def test_a_forward_that_fails_converts_nothing() -> None:
    model = chain(["linear", "relu"])
    with pytest.raises(RuntimeError):
        memsave.convert(model, torch.randn(4, WIDTH + 1))
    assert classes(model) == [nn.Linear, nn.ReLU]


def test_the_report_says_what_it_saves() -> None:
    x = torch.randn(4, WIDTH)
    model = chain(["linear", "relu", "linear"])
    report = memsave.report(model, x)
    assert classes(model) == [nn.Linear, nn.ReLU, nn.Linear]
    assert report.converted == report.table == bytes_of(memsave.convert(model, x), x)


def test_norms_whose_output_does_not_tell_their_input() -> None:
    """Now: their parameters are looked at while the rows are chosen."""
    model, x = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH)),
        torch.ones(8, WIDTH),
    )
    model.append(nn.Linear(WIDTH, WIDTH))
    nn.init.zeros_(model[2].weight)
    before = bytes_of(model, x)
    expected = memsave.report(model, x).converted
    assert type(memsave.convert(model, x)[2]) is not memsave.nn.LayerNormFromOutput
    assert bytes_of(model, x) == expected <= before


@pytest.mark.parametrize("act", [nn.ELU, lambda: nn.CELU(0.5), nn.SELU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_slopes_of_which_the_output_has_too_few_digits(act: Any, dtype: torch.dtype) -> None:
    """In 16 bits gradients are stock's to the bit."""
    stock = nn.Sequential(*chain(["linear"]), act(), *chain(["linear"])).to(dtype)
    x = torch.randn(64, WIDTH).to(dtype)
    model = memsave.convert(copy.deepcopy(stock), x)
    is_stock = dtype is torch.bfloat16
    assert (classes(model)[1] is type(stock[1])) == is_stock
    same(step(model, x), step(stock, x), **({"rtol": 0, "atol": 0} if is_stock else {}))


def test_a_forward_that_fake_tensors_cannot_follow() -> None:
    """Some ops know less of them (as those of mixtures of experts do)."""

    class Strict(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, FakeTensor):
                raise RuntimeError("expected other inputs")
            return super().forward(x)

    x = torch.randn(4, WIDTH)
    model = nn.Sequential(Strict(), *chain(["linear", "relu", "linear"]))
    assert type(memsave.convert(model, x)[2]) is memsave.nn.ReLUFromOutput


def test_outputs_of_a_layer_that_is_used_twice_are_told_apart() -> None:
    """The first is kept anyway, the second not."""

    class Doubled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    act = nn.ReLU()
    model = Doubled(nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), act)
    memsave.convert(model, torch.randn(4, WIDTH))
    assert type(act) is memsave.nn.ReLU


def test_a_layer_that_can_keep_nothing() -> None:
    """Backward fails, as it does of stock; but nobody has asked for it."""

    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            y = self.norm(h)
            h.zero_()
            return y.mul_(2)

    model = memsave.convert(Overwrites(), torch.randn(4, WIDTH))
    assert type(model.norm) is memsave.nn.LayerNorm


def test_the_last_options_where_layers_form_no_forest() -> None:
    """From the others, no change of one layer keeps less."""
    both, nothing, own = Option(frozenset("xy"), 0), Option(frozenset(), 0), Option(frozenset(), 3)
    options = {"1": [both, nothing], "2": [both, own]}
    assert _choose.choose(options, {"x": 2, "y": 2}) == {"1": 1, "2": 1}


def test_layers_in_a_ring() -> None:
    x, y, z = (Option(frozenset(t), 0) for t in "xyz")
    options, sizes = {"1": [x, y], "2": [y, z], "3": [z, x]}, {"x": 2, "y": 3, "z": 4}
    assert _choose.total(_choose.choose(options, sizes), options, sizes) == 5


def test_norms_on_meta() -> None:
    """Of which nobody can read the weights: as if they were those of a trained model."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to("meta")
    memsave.convert(model, torch.ones(2, 4, device="meta"))
    assert type(model[1]) is memsave.nn.LayerNormFromOutput
