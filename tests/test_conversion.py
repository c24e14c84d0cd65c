"""``convert`` changes how layers compute gradients and nothing else; ``revert`` undoes it.

It works in place, and whatever hangs on a model survives: parameters, buffers, hooks, tied and
repeated modules, parametrizations, optimizers, wrappers. What is left alone is listed.
"""

import copy
import functools
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import every_class, same
from strategies import functions_of_rows
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import memsave
import memsave.nn
from memsave import spec
from memsave.layers.modes import FUNCTIONS
from memsave.layers.module import ROWS, STOCK, derive


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def network() -> nn.Module:
    torch.manual_seed(0)
    return helpers.ConvNet().double()


def agree(actual: nn.Module, expected: nn.Module) -> None:
    """Equal outputs, gradients and buffers."""
    x = helpers.image()
    same(helpers.step(actual, x), helpers.step(expected, x))
    same(dict(actual.named_buffers()), dict(expected.named_buffers()))


# What converting is.


@every_class
def test_every_class_of_the_table(cls: type[nn.Module]) -> None:
    """As the root of the model too; and both ways."""
    for drop_in in helpers.drop_ins(cls):
        layer = helpers.build(cls)
        before = dict(vars(layer))
        row = ROWS[drop_in][0]
        assert memsave.convert(layer, policy=lambda module, name, rows, r=row: r) is layer
        assert type(layer) is drop_in
        assert vars(layer) == before
        x = helpers.module_input(cls)
        same(helpers.step(layer, x), helpers.step(helpers.build(cls), x))
        assert memsave.revert(layer) is layer
        assert type(layer) is cls


@every_class
def test_drop_ins_are_built_like_stock(cls: type[nn.Module]) -> None:
    for drop_in in helpers.drop_ins(cls):
        built, expected = helpers.build(drop_in), helpers.build(cls)
        x = helpers.module_input(cls)
        same(helpers.step(built, x), helpers.step(expected, x))
        assert isinstance(built, cls)
        assert repr(built) == repr(expected).replace(cls.__name__, f"memsave.{drop_in.__name__}", 1)
        assert STOCK[drop_in] is cls


def test_every_function_is_public() -> None:
    """The list that is written out, ``memsave.functional``, follows the layers."""
    missing = functions_of_rows(memsave.layers) - {*memsave.functional.__all__}
    assert not missing, "import them in memsave/functional.py, and name them in its __all__"


def test_every_module_is_public() -> None:
    """The list of modules, ``memsave.nn``, does, too. (Those made by ``derive`` have no names.)"""
    written = {cls for cls in STOCK if cls.__module__.startswith("memsave.layers.")}
    names = {cls.__name__ for cls in written if cls.__module__ != derive.__module__}
    missing = names - {*memsave.nn.__all__}
    assert not missing, "import them in memsave/nn.py, and name them in its __all__"


def test_in_place_and_back() -> None:
    model = network()
    tensors = [*model.parameters(), *model.buffers()]
    before = classes(model)
    assert memsave.convert(model) is model
    assert classes(model) != before
    now = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(tensors, now, strict=True))
    expected = network()
    agree(model, expected)
    assert memsave.revert(model) is model
    assert classes(model) == before
    agree(model, expected)


def test_idempotent() -> None:
    model = memsave.convert(network())
    once = classes(model)
    assert classes(memsave.convert(model)) == once
    memsave.revert(model)
    assert classes(memsave.revert(model)) == classes(network())


def test_repr_shows_the_package() -> None:
    assert "memsave.Conv2d(3, 8" in repr(memsave.convert(network()))
    assert "memsave" not in repr(memsave.revert(memsave.convert(network())))


def test_a_tree_of_containers() -> None:
    """Lists, dicts, modules that are shared, modules in modules of the user."""
    shared = nn.ReLU()
    model = nn.ModuleDict(
        {"list": nn.ModuleList([nn.Linear(2, 2), shared]), "again": nn.Sequential(shared)}
    )
    memsave.convert(model)
    assert model["list"][1] is model["again"][0] is shared
    assert type(shared) is memsave.nn.ReLU


# What survives.


def test_hooks_survive() -> None:
    """Of every kind, with their order."""
    models, logs = [network(), network()], []
    for model in models:
        log: list[str] = []
        conv, norm = model.features[0], model.features[1]

        def note(text: str, log=log):
            return lambda *args, **kwargs: log.append(text)

        conv.register_forward_pre_hook(note("pre"))
        conv.register_forward_hook(note("forward"))
        conv.register_full_backward_pre_hook(note("backward pre"))
        conv.register_full_backward_hook(note("backward"))
        conv.register_forward_hook(lambda module, args, y: 2 * y)
        norm.register_state_dict_pre_hook(note("state dict pre"))
        norm.register_state_dict_post_hook(note("state dict"))
        norm.register_load_state_dict_pre_hook(note("load pre"))
        norm.register_load_state_dict_post_hook(note("load"))
        conv.weight.register_hook(lambda g: 3 * g)
        conv.weight.register_post_accumulate_grad_hook(note("accumulated"))
        logs.append(log)
    memsave.convert(models[1])
    agree(models[1], models[0])
    for model in models:
        model.load_state_dict(model.state_dict())
    assert logs[0] == logs[1]
    assert len(logs[0]) == 9


def test_who_calls_modules_sees_drop_ins(monkeypatch) -> None:
    """A library that puts its own function in the place of ``Module.__call__``; before and after
    it is there.
    """
    model = memsave.convert(network()).eval()
    x, seen = helpers.image(), []
    expected, call = model(x), nn.Module.__call__

    def wrapped(self, *args, **kwargs):
        seen.append(type(self))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", wrapped)
    same(model(x), expected)
    assert {*classes(model)} - {*seen} == set()
    assert memsave.nn.Conv2d in seen
    seen.clear()
    monkeypatch.undo()
    same(model(x), expected)
    assert not seen


def test_tied_and_repeated_modules() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        other = nn.Conv2d(3, 3, 3, padding=1)
        other.weight = block[0].weight
        return nn.Sequential(block, other, block, block[0]).double()

    model = memsave.convert(make())
    assert model[0] is model[2]
    assert model[1].weight is model[0][0].weight
    assert model[3] is model[0][0]
    agree(model, make())


class Tied(nn.Module):
    """Of an embedding with two names (as PEFT's prompts make it) and a head of the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleDict({"embed": nn.Embedding(10, 4), "head": nn.Linear(4, 10)})
        self.base["head"].weight = self.base["embed"].weight
        self.words, self.relu = self.base["embed"], nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.base["head"](self.relu(self.words(x)))


def test_a_tied_module_of_two_names() -> None:
    model, x = Tied().requires_grad_(False), torch.arange(5)
    model.words.requires_grad_()
    expected = copy.deepcopy(model)(x)
    expected.sum().backward()
    assert {memsave.report(model, x, fake=fake).stock for fake in (False, True)} == {80}
    memsave.convert(model, x)
    assert type(model.relu) is memsave.nn.ReLUFromOutput
    assert model.base["head"].weight is model.words.weight
    same(model(x), expected, rtol=0, atol=0)


class Transformed(nn.Module):
    """Whose forward transforms functions of its layers."""

    def __init__(self, transform: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Softplus(), nn.LayerNorm(6))
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        return self.transform(self.layers)(x)


def energies(layers: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda x: layers(x).pow(2).sum())


#: Of a forward, and whether what is kept can be recorded within.
TRANSFORMS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "vmap": (torch.func.vmap, True),
    "jvp": (lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1], True),
    "grad": (energies, False),
    "vmap of grad": (lambda f: torch.func.vmap(energies(f)), False),
    "jacrev": (torch.func.jacrev, False),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is (deprecated|not)")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_within_a_forward(name: str) -> None:
    transform, is_recorded = TRANSFORMS[name]
    torch.manual_seed(0)
    model, x = Transformed(transform), torch.randn(4, 6, requires_grad=True)
    expected = model(x)
    gradient = torch.autograd.grad(expected.pow(2).sum(), x)
    if is_recorded:
        assert memsave.report(model, x).stock == memsave.report(model, x, fake=False).stock > 0
        memsave.convert(model, x)
    else:
        with pytest.raises(RuntimeError, match="hooks"):
            memsave.report(model, x, fake=False)
        with pytest.warns(UserWarning, match="first row: the model runs, but"):
            memsave.convert(model, x)
    assert type(model.layers[1]) is memsave.nn.ReLU
    y = model(x)
    same(y, expected)
    same(torch.autograd.grad(y.pow(2).sum(), x), gradient)


def test_where_nothing_may_be_recorded() -> None:
    model = Transformed(lambda layers: layers)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not now"),
        pytest.warns(UserWarning, match="not now"),
    ):
        memsave.convert(model, torch.randn(4, 6))
    assert type(model.layers[1]) is memsave.nn.ReLU


def test_inputs_that_the_model_does_not_take() -> None:
    """Its own error, and nothing converted."""
    model = Transformed(energies)
    with pytest.raises(RuntimeError) as raised:
        memsave.convert(model, torch.randn(4, 5))
    assert "shapes cannot be multiplied" in raised.value.__notes__[-1]
    assert type(model.layers[1]) is nn.ReLU


@pytest.mark.parametrize("order", ["parametrize, convert", "convert, parametrize"])
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(name: str, order: str) -> None:
    """Before or after; removed before or after; kept by revert."""
    change = getattr(parametrizations, name)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3)).double()

    def parametrized(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        change(model[0]), change(model[2])
        return model

    steps = [parametrized, memsave.convert]
    model = make()
    for apply in steps if order.startswith("param") else reversed(steps):
        model = apply(model)
    expected = parametrized(make())
    assert isinstance(model[0], memsave.nn.Conv2d)
    assert parametrize.is_parametrized(model[0], "weight")
    assert repr(model).count("memsave.") == 3
    assert repr(model).replace("memsave.", "") == repr(expected)
    agree(model, expected)
    assert [e.status for e in memsave.coverage(model)].count("converted") == 3

    restored = memsave.revert(copy.deepcopy(model))
    assert not isinstance(restored[0], memsave.nn.Conv2d)
    agree(restored, expected)
    if name != "orthogonal":
        model.load_state_dict(expected.state_dict())
    for each in (model, expected, restored):
        parametrize.remove_parametrizations(each[0], "weight")
    assert type(model[0]) is memsave.nn.Conv2d
    assert type(restored[0]) is nn.Conv2d
    x = helpers.image()
    same(model(x), expected(x))


def test_parametrized_copies_are_apart() -> None:
    """Deepcopy of a parametrized module shares its class: converting one leaves the other."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)))
    other = copy.deepcopy(model)
    memsave.convert(model)
    assert not isinstance(other[0], memsave.nn.Conv2d)
    assert repr(other).count("memsave.") == 0


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("change", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_old_style_norms(change) -> None:
    """These are forward pre-hooks that set an attribute."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).double()
        change(model[0])
        return model

    model, expected = memsave.convert(make()), make()
    assert type(model[0]) is memsave.nn.Conv2d
    agree(model, expected)
    agree(memsave.revert(model), expected)


def test_pruning() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double()
        prune.l1_unstructured(model[0], "weight", 0.5)
        return model

    model, expected = memsave.convert(make()), make()
    agree(model, expected)
    for each in (model, expected):
        prune.l1_unstructured(each[0], "bias", 0.5)
        prune.remove(each[0], "weight")
    agree(model, expected)


def test_training_flags_and_requires_grad() -> None:
    model = network()
    model.features[1].eval()
    model.features[0].requires_grad_(False)
    flags = [m.training for m in model.modules()]
    wanted = [p.requires_grad for p in model.parameters()]
    memsave.convert(model)
    assert [m.training for m in model.modules()] == flags
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert not any(m.training for m in model.eval().modules())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_go_on(optimizer) -> None:
    """Made before converting, it trains the converted model; state included."""
    models = [network(), network()]
    for model in models:
        optimize = optimizer(model.parameters(), lr=0.1)
        for k in range(4):
            if k == 2 and model is models[1]:
                memsave.convert(model)
            optimize.zero_grad()
            torch.manual_seed(k)
            model(helpers.image()).square().sum().backward()
            optimize.step()
    same(models[1].state_dict(), models[0].state_dict())


def test_state_dict_loads_both_ways() -> None:
    stock, converted = network(), memsave.convert(network())
    assert [*stock.state_dict()] == [*converted.state_dict()]
    stock.load_state_dict(converted.state_dict())
    converted.load_state_dict(stock.state_dict())
    metadata = [model.state_dict()._metadata for model in (stock, converted)]
    assert metadata[0] == metadata[1]


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "torch.save": saved,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_stay_converted(how: str) -> None:
    model = memsave.convert(network())
    twin = COPIES[how](model)
    assert classes(twin) == classes(model)
    agree(twin, network())


@every_class
def test_every_drop_in_pickles(cls: type[nn.Module]) -> None:
    for drop_in in helpers.drop_ins(cls):
        assert type(pickle.loads(pickle.dumps(helpers.build(drop_in)))) is drop_in


def test_moves_and_casts() -> None:
    """Module.to and its like."""
    model = memsave.convert(network())
    expected = network()
    for each in (model, expected):
        each.float().to(torch.float64, memory_format=torch.channels_last)
    agree(model, expected)
    meta = model.to("meta")
    assert meta(torch.empty(2, 3, 8, 8, dtype=torch.float64, device="meta")).shape == (2, 2)


# What is left alone.


class Standardized(nn.Conv2d):
    """A convolution with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class Renamed(nn.ReLU):
    """A subclass that changes nothing."""


class NormAct(nn.BatchNorm2d):
    """A layer that also activates."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_subclasses_are_left_alone_and_listed() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            Standardized(3, 4, 3), NormAct(4), Renamed(), nn.Tanh(), nn.ReLU()
        ).double()

    model = memsave.convert(make())
    kinds = [Standardized, NormAct, Renamed, nn.Tanh, memsave.nn.ReLU]
    assert classes(model)[1:] == kinds
    agree(model, make())
    listed = {entry.name: (entry.status, entry.reason) for entry in memsave.coverage(model)}
    assert listed == {
        "0": ("skipped", "subclass of Conv2d with a forward of its own"),
        "1": ("skipped", "subclass of BatchNorm2d with a forward of its own"),
        "2": ("skipped", "subclass of ReLU which may mean more than its base"),
        "3": ("skipped", "keeps what the table says as it is"),
        "4": ("converted", "rows: relu"),
    }
    text = str(memsave.coverage(model))
    assert "converted: 1" in text
    assert "subclass of Conv2d with a forward of its own: 0" in text


def test_a_forward_on_the_instance() -> None:
    """Some libraries patch one module: its forward goes on to be called."""
    layer = nn.ReLU()
    layer.forward = lambda x: x + 1
    model = memsave.convert(nn.Sequential(layer, nn.ReLU()))
    same(model(torch.zeros(2)), torch.ones(2))
    skipped, converted = memsave.coverage(model)
    assert (skipped.status, skipped.reason) == ("skipped", "its forward is replaced by another")
    assert (type(layer), converted.status) == (nn.ReLU, "converted")


@every_class
def test_a_forward_that_somebody_holds(cls: type[nn.Module]) -> None:
    """As the function that a checkpoint runs: also once the module has its stock class back."""
    x = helpers.module_input(cls)
    for layer, drop_in in helpers.in_pairs(cls):
        model = nn.Sequential(memsave.convert(drop_in))
        model[0].forward = functools.partial(checkpoint, drop_in.forward, use_reentrant=False)
        memsave.report(model, x)
        memsave.revert(model)
        assert type(drop_in) is cls
        same(*(helpers.step(module, x) for module in (model, layer)))


@pytest.mark.parametrize("cls", [nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.LayerNorm, nn.ReLU])
def test_a_forward_of_all_modules(cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """Others put theirs into a class of torch: it is called, also if that comes after."""
    owner = next(c for c in cls.__mro__ if "forward" in vars(c))
    own = owner.forward

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        return own(self, input) + 1

    def patched(model: nn.Module) -> bool:
        with torch.no_grad():
            return torch.equal(model(x), own(layer, x) + 1)

    layer, x = helpers.build(cls).eval(), helpers.module_input(cls)
    model = memsave.convert(copy.deepcopy(layer))
    monkeypatch.setattr(owner, "forward", forward)
    assert patched(model)
    assert patched(copy.deepcopy(layer))
    with pytest.warns(UserWarning, match="nothing to convert"):
        other = memsave.convert(nn.Sequential(copy.deepcopy(layer)))
    assert type(other[0]) is cls  # type: ignore[index]
    (entry,) = memsave.coverage(other)[-1:]
    assert (entry.status, entry.reason) == ("skipped", "its forward is replaced by another")
    assert patched(other)
    monkeypatch.undo()
    assert not patched(model)
    assert type(memsave.convert(other)[0]) is not cls  # type: ignore[index]
    assert helpers.kept(lambda: model(x), [x]) == helpers.kept(lambda: other(x), [x])


@every_class
def test_a_function_of_torch_in_the_place_of_which_is_another(
    cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stock's forward, ours calls what ``torch.nn.functional`` has."""
    name = next(iter(FUNCTIONS[cls]))
    theirs, x = getattr(F, name), helpers.module_input(cls)

    def run(layer: nn.Module) -> list[Tensor]:
        helpers.seed(2)
        y = layer(x)
        wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
        return [y, *torch.autograd.grad(y, wanted, helpers.cotangent(y))]

    for drop_in in helpers.drop_ins(cls):
        layer, stock = helpers.build(drop_in), helpers.build(cls)
        before, kept = run(stock), helpers.kept(lambda layer=layer: layer(x), [x])
        same(run(layer), before)
        monkeypatch.setattr(F, name, lambda *args, **kwargs: theirs(*args, **kwargs) * 3)
        expected = run(stock)
        same(expected[1], before[1] * 3)
        same(run(layer), expected)
        if cls in (nn.ReLU, nn.Conv2d, nn.LayerNorm, nn.InstanceNorm2d, nn.MaxPool2d):
            torch.compiler.reset()
            compiled = [torch.compile(model, backend="eager") for model in (layer, stock)]
            same(*map(run, compiled))
        same(run(helpers.build(drop_in)), expected)
        monkeypatch.undo()
        same(run(layer), before)
        assert helpers.kept(lambda layer=layer: layer(x), [x]) == kept


def test_padding_in_the_place_of_which_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a convolution, which ours may do by itself."""
    layers = [
        helpers.build(c, padding=1, padding_mode="reflect") for c in (nn.Conv2d, memsave.nn.Conv2d)
    ]
    x, pad = helpers.module_input(nn.Conv2d), F.pad
    before = layers[0](x)
    monkeypatch.setattr(F, "pad", lambda *args, **kwargs: pad(*args, **kwargs) * 3)
    expected, actual = (layer(x) for layer in layers)
    assert not torch.equal(expected, before)
    same(actual, expected)
    torch.compiler.reset()
    same(torch.compile(layers[1], backend="eager")(x), torch.compile(layers[0], backend="eager")(x))
    monkeypatch.undo()
    same(layers[1](x), before)


def test_a_forward_of_all_modules_before_memsave_is_imported() -> None:
    code = """
from torch import nn
own = nn.Linear.forward
def forward(self, input):
    return own(self, input) + 1
nn.Linear.forward = forward
import memsave, torch
layer, x = nn.Linear(2, 2), torch.ones(2)
model = memsave.convert(nn.Sequential(layer, nn.ReLU()))
assert type(layer) is nn.Linear and layer(x).equal(own(layer, x) + 1)
assert memsave.nn.Linear.forward(layer, x).equal(own(layer, x))
layer.__class__ = memsave.nn.Linear
assert layer(x).equal(own(layer, x) + 1)
nn.Linear.forward = own
assert layer(x).equal(own(layer, x))
layer.__class__ = nn.Linear
assert type(memsave.convert(model)[0]) is memsave.nn.Linear
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("first", ["hooks", "convert"])
@pytest.mark.parametrize("measured", [False, True])
def test_hooks_of_accelerate(first: str, measured: bool) -> None:
    """They put another forward into each module, which calls the one that they have found."""
    hooks = pytest.importorskip("accelerate.hooks")

    def add() -> None:
        for module in model:
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))

    x = torch.randn(8, 64, requires_grad=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(), nn.Softplus(), nn.LayerNorm(64))
    model.requires_grad_(False)
    stock = copy.deepcopy(model)
    changes: list[Callable[[], object]] = [
        add,
        lambda: memsave.convert(model, x if measured else None),
    ]
    for change in changes if first == "hooks" else reversed(changes):
        change()
    sizes = [helpers.kept(lambda m=m: m(x), [x, *m.parameters()]) for m in (stock, model)]
    assert sizes[1] < sizes[0]
    same(helpers.step(model, x), helpers.step(stock, x))
    memsave.revert(model)
    assert helpers.kept(lambda: model(x), [x, *model.parameters()]) == sizes[0]
    memsave.convert(model)
    hooks.remove_hook_from_submodules(model)
    assert helpers.kept(lambda: model(x), [x, *model.parameters()]) < sizes[0]
    same(helpers.step(memsave.revert(model), x), helpers.step(stock, x))


def test_sync_batch_norm() -> None:
    """Left alone; and a converted model converts to it."""
    model = memsave.convert(nn.Sequential(nn.SyncBatchNorm(4), nn.ReLU()))
    assert type(model[0]) is nn.SyncBatchNorm
    converted = memsave.convert(network())
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(converted)
    assert type(synced.features[1]) is nn.SyncBatchNorm
    assert type(synced.features[0]) is memsave.nn.Conv2d
    same(synced.state_dict(), network().state_dict())


LAZY = {
    "convolution": (lambda: nn.LazyConv2d(4, 3), memsave.nn.Conv2d),
    "transposed": (lambda: nn.LazyConvTranspose2d(4, 3), memsave.nn.ConvTranspose2d),
    "norm": (nn.LazyBatchNorm2d, memsave.nn.BatchNorm2d),
    "linear": (lambda: nn.LazyLinear(4), memsave.nn.Linear),
}


@pytest.mark.parametrize("kind", LAZY)
def test_lazy_modules(kind: str) -> None:
    """They become drop-ins upon the first forward, unless reverted before; or after."""
    make, drop_in = LAZY[kind]
    x = torch.randn(2, 3, 5, 5)

    def materialized(layer: nn.Module) -> type:
        layer(x)
        return type(layer)

    layer = memsave.convert(make())
    assert type(layer) is type(make())
    assert memsave.coverage(layer)[0].status == "converted"
    assert materialized(layer) is drop_in
    assert type(memsave.revert(layer)) is STOCK[drop_in]
    assert materialized(memsave.convert(memsave.convert(make()))) is drop_in
    assert materialized(memsave.revert(memsave.convert(make()))) is STOCK[drop_in]
    assert materialized(make()) is STOCK[drop_in]  # others stay as they are


@pytest.mark.parametrize("measure", [memsave.convert, memsave.report])
def test_lazy_modules_must_be_initialized_to_be_measured(measure: Callable[..., object]) -> None:
    model, x = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU()), torch.randn(2, 3, 5, 5)
    with pytest.raises(RuntimeError, match=r"\['0'\] are lazy.*run the model once"):
        measure(model, x)
    assert type(model[1]) is nn.ReLU
    model(x)
    assert type(model[0]) is nn.Conv2d
    measure(model, x)


def test_a_lazy_module_that_becomes_no_other() -> None:
    class Lazy(LazyModuleMixin, nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = memsave.convert(nn.Sequential(Lazy(), nn.ReLU()))
    assert [type(module) for module in model] == [Lazy, memsave.nn.ReLU]


# Choosing.


def test_filter_fn() -> None:
    """Called with each convertible module and its name."""
    seen = []

    def only_first(module: nn.Module, name: str) -> bool:
        seen.append((name, type(module)))
        return name == "features.0"

    model = memsave.convert(network(), filter_fn=only_first)
    assert type(model.features[0]) is memsave.nn.Conv2d
    assert type(model.features[1]) is nn.BatchNorm2d
    assert ("features.1", nn.BatchNorm2d) in seen
    statuses = {entry.name: entry.status for entry in memsave.coverage(model)}
    assert statuses["features.0"] == "converted"
    assert statuses["features.1"] == "convertible"
    agree(model, network())


def test_policy() -> None:
    """Chooses among the rows of one op; layers with one row alone do not ask."""
    offered = {}

    def policy(module: nn.Module, name: str, rows: tuple[spec.Layer, ...]) -> spec.Layer:
        offered[name] = rows
        return rows[-1]

    model = memsave.convert(network(), policy=policy)
    assert offered["features.2"] == (spec.RELU, spec.RELU_FROM_OUTPUT)
    assert "features.0" not in offered
    assert type(model.features[2]) is memsave.nn.ReLUFromOutput
    assert type(model.features[7]) is memsave.nn.DropoutFromRng
    agree(model, network())
    assert classes(memsave.revert(model)) == classes(network())


def test_a_bad_policy_converts_nothing() -> None:
    model = network()

    def policy(module, name, rows):
        return rows[0] if name == "features.2" else spec.LINEAR

    with pytest.raises(ValueError, match=r"policy chose <row linear> for 'features.6'"):
        memsave.convert(model, policy=policy)
    assert classes(model) == classes(network())


def test_nothing_to_convert_warns() -> None:
    with pytest.warns(UserWarning, match="found nothing to convert"):
        memsave.convert(nn.Sequential(nn.Tanh()))
    with pytest.warns(UserWarning, match="found nothing to convert"):
        memsave.convert(network(), filter_fn=lambda module, name: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memsave.convert(memsave.convert(network()))


@pytest.mark.parametrize("model", [nn.functional.relu, nn.ReLU, None, [nn.ReLU()]])
def test_not_a_module(model) -> None:
    with pytest.raises(TypeError, match=r"needs a torch.nn.Module"):
        memsave.convert(model)


# Wrappers. (DistributedDataParallel: test_distributed; torch.compile: test_compile.)


def test_inside_wrappers() -> None:
    model = network()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    memsave.convert(averaged)
    assert type(averaged.module.features[0]) is memsave.nn.Conv2d
    assert type(model.features[0]) is nn.Conv2d
    averaged.update_parameters(model)
    agree(averaged.module, network())
    memsave.convert(nn.DataParallel(model))
    assert type(model.features[0]) is memsave.nn.Conv2d


@pytest.mark.parametrize("fake", [True, False])
def test_data_parallel(fake: bool) -> None:
    """Whose root ``functional_call`` refuses."""
    x, inner = helpers.image(), network()
    wrapped = memsave.convert(nn.DataParallel(inner), x)
    assert any(type(module).__module__.startswith("memsave") for module in inner.modules())
    agree(wrapped.module, network())
    report, alone = memsave.report(wrapped, x, fake=fake), memsave.report(inner, x, fake=fake)
    names = ["module" + "." * bool(row.name) + row.name for row in alone.rows]
    assert [row.name for row in report.rows] == names
    assert (report.stock, report.now, report.table) == (alone.stock, alone.now, alone.table)


def test_shared_memory() -> None:
    model = memsave.convert(network()).share_memory()
    assert all(p.is_shared() for p in model.parameters())
    agree(model, network())


def test_a_model_without_layers_for_inputs_warns() -> None:
    with pytest.warns(UserWarning, match="found nothing to convert"):
        memsave.convert(nn.Sequential(nn.Flatten()), torch.randn(2, 3))


def test_a_convolution_of_its_own_is_a_forward_of_its_own() -> None:
    class Own(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(input, weight * 2, bias)

    (entry,) = memsave.coverage(Own(3, 4, 3))
    assert entry.reason == "subclass of Conv2d with a forward of its own"


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_convolution_of_its_own_that_derives_from_ours(is_frozen: bool) -> None:
    class Own(memsave.nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(input, weight * 2, bias)

    layer = Own(3, 4, 3).requires_grad_(not is_frozen)
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    same(layer(x), nn.functional.conv2d(x, layer.weight * 2, layer.bias))


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("is_eval_norm", [False, True])
def test_a_tensor_in_the_place_of_a_parameter(name: str, is_eval_norm: bool) -> None:
    """As libraries of meta-learning put it: among the attributes, which are found first."""
    layer = nn.BatchNorm2d(3).eval() if is_eval_norm else nn.Conv2d(3, 3, 1)
    layer.requires_grad_(False)
    x = torch.randn(2, 3, 4, 4, requires_grad=True)
    other = getattr(layer, name) + 1
    layer.__dict__[name] = other
    expected = layer(x)
    same(memsave.convert(layer)(x), expected)
    del layer.__dict__[name], layer._parameters[name]
    setattr(layer, name, other)
    same(layer(x), expected)


def test_attributes_that_compare_by_element() -> None:
    layer = nn.ReLU()
    layer.table, layer.other = np.zeros(3), torch.zeros(3)
    assert type(memsave.convert(layer)) is memsave.nn.ReLU
