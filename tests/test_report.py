"""The report: it measures what autograd keeps, agrees with the table, and says why."""

import collections
import functools
import gc
import random
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import TestCase

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import same
from torch import nn
from torch.nn.utils import parametrize

import memsave
import memsave.nn
from memsave import function
from memsave._record import Recorder, storage_key


class Net(nn.Module):
    """One of each layer of the paper, an op outside the table, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.gelu = nn.GELU()
        self.drop = nn.Dropout(0.3)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.drop(self.gelu(self.pool(x))) + self.pool(x)
        return self.head(torch.sigmoid(self.up(x)).mean((2, 3)))


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def measured(model: nn.Module, x: torch.Tensor) -> int:
    """An independent count: storages behind every saved tensor, without parameters and input."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)
    free = {storage_key(t) for t in (*model.parameters(), *model.buffers(), x)}
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in saved}
    del y
    return sum(size for key, size in sizes.items() if key not in free)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("wants_input", [False, True])
@pytest.mark.parametrize("trainable", [False, True])
def test_totals_are_what_autograd_keeps(training, wants_input, trainable):
    model = Net().train(training).requires_grad_(trainable)
    x = torch.randn(2, 3, 16, 16, requires_grad=wants_input)
    report = memsave.report(model, x)
    assert report.stock == report.now == measured(model, x)
    assert report.converted == measured(memsave.convert(model), x)
    assert report.table + sum(report.rest.values()) == report.converted
    for column in ("stock", "now", "converted"):
        assert sum(getattr(row, column) for row in report.rows) == getattr(report, column)
    converted = memsave.report(model, x)
    assert (converted.stock, converted.now) == (report.stock, report.converted)


def test_prediction_and_measurement_can_differ(monkeypatch):
    """An engine that saves a tensor more than the row says is found out."""
    model = memsave.convert(frozen(Net()).eval())
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    honest = memsave.report(model, x)
    save = torch.autograd.function.FunctionCtx.save_for_backward

    def leaky(ctx, *tensors):
        save(ctx, *tensors, torch.ones(10))

    monkeypatch.setattr(torch.autograd.function.FunctionCtx, "save_for_backward", leaky)
    report = memsave.report(model, x)
    assert report.table == honest.table
    assert report.converted >= honest.converted + 40


class Functions(nn.Module):
    """One that memsave has, and one that it has not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2 * F.relu(x)).cos()


def test_functions_of_the_table_are_told_from_others():
    x = torch.randn(4, 64, requires_grad=True)
    plain = memsave.report(Functions(), x)
    assert plain.rows[0].reason == (
        "called as functions (see memsave.functional_mode): relu; not in the table: cos"
    )
    assert (plain.stock, plain.now) == (2048, 2048)
    with memsave.functional_mode():
        inside = memsave.report(Functions(), x)
    assert inside.rows[0].reason == "x reads positive"
    assert (inside.stock, inside.now) == (2048, 1024 + 32)


def test_rows_say_which_gradient_reads_what():
    model = frozen(Net()).train()
    model.norm.weight.requires_grad_()
    rows = {r.name: r for r in memsave.report(model, torch.randn(2, 3, 16, 16)).rows}
    assert rows["norm"].mask == ("weight",)
    assert rows["norm"].reason == "weight reads x, mean, rstd"
    assert rows["relu"].mask == ("x",)
    assert rows["relu"].reason == "x reads positive"
    assert rows["gelu"].reason == "not in the table: gelu"
    activation = 2 * 8 * 16 * 16
    # Stock keeps the input of the norm (no model input), two vectors; converted the same.
    assert rows["norm"].converted == 4 * activation + 2 * 4 * 8
    assert rows["relu"].stock == 4 * activation
    assert rows["relu"].converted == activation // 8
    assert rows["relu"].saves == 4 * activation - activation // 8


def test_split_by_kind():
    """Parameters are free, the model's input is the user's, x may be shared, extras are owned."""
    model = memsave.convert(
        nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.ReLU(), nn.Linear(8, 2))
    )
    x = torch.randn(2, 3, 8, 8)
    rows = {row.name: row for row in memsave.report(model, x).rows}
    assert (rows["0"].inputs, rows["0"].shared, rows["0"].owned) == (4 * x.numel(), 0, 0)
    assert (rows["1"].shared, rows["1"].owned) == (0, 2 * 4 * 8 * 8 // 8)
    assert (rows["2"].shared, rows["2"].parameters) == (4 * 2 * 4 * 8 * 8, 4 * 8 * 2)


def test_dry_run_with_other_trainable_parameters():
    model = Net()
    x = torch.randn(2, 3, 16, 16)
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    norm = memsave.report(model, x, trainable=lambda module, name: module is model.norm)
    frozen(model)
    model.norm.requires_grad_()
    assert norm == memsave.report(model, x)
    model.requires_grad_()
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    names: list[str] = []
    memsave.report(model, x, trainable=lambda module, name: bool(names.append(name)))
    assert set(names) == {name for name, _ in model.named_parameters()}


def test_leaves_the_model_as_it_was():
    model = Net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    classes = [type(module) for module in model.modules()]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for fake in (True, False):
        memsave.report(model, torch.randn(2, 3, 16, 16), fake=fake)
        torch.manual_seed(0)
        assert torch.equal(torch.get_rng_state(), state)
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert [type(module) for module in model.modules()] == classes
        assert all(p.grad is None for p in model.parameters())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_restores_classes_after_an_error():
    model = Net()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError):
        memsave.report(model, torch.randn(2, 5, 16, 16))
    assert [type(module) for module in model.modules()] == classes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_real_meta_and_fake_agree():
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    real = memsave.report(Net(), x)
    assert real == memsave.report(Net(), x, fake=False)
    assert real == memsave.report(Net().to("meta"), x.to("meta").detach().requires_grad_())
    assert real == memsave.report(Net().to("meta"), x)
    with torch._subclasses.FakeTensorMode():
        assert real == memsave.report(Net(), torch.empty(2, 3, 16, 16, requires_grad=True))


class Reads(nn.Module):
    """Branches on a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) if x.sum() > 0 else x


def test_forward_that_depends_on_values():
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="fake=False"):
        memsave.report(Reads(), x)
    with pytest.warns(UserWarning, match="nothing to convert"):
        memsave.convert(Reads())
    assert memsave.report(Reads(), x, fake=False).stock == 16


def _bfloat16_alone(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(f"bfloat16, not {x.dtype}")


#: Whose kernel for fake tensors refuses what others take, as torch's own of grouped products does.
TWICE = "memsave_tests::twice"
LIBRARY = torch.library.Library("memsave_tests", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")
LIBRARY.impl("twice", _bfloat16_alone, "Meta")
torch.library.register_autograd(TWICE, lambda ctx, g: 2 * g, lib=LIBRARY)


class Twice(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.ops.memsave_tests.twice(x))


def test_forward_that_fake_kernels_refuse():
    """A report says what else there is; convert goes that way, and nothing else tells of it."""
    x = torch.randn(8, 16, requires_grad=True)
    with TestCase().assertNoLogs("torch._subclasses.fake_tensor", "ERROR"):
        with pytest.raises(RuntimeError, match="bfloat16") as caught:
            memsave.report(Twice(nn.ReLU()), x)
        assert "fake=False" in caught.value.__notes__[0]
        assert type(memsave.convert(Twice(nn.ReLU()), x)[0]) is memsave.nn.ReLU
    assert memsave.report(Twice(nn.ReLU()), x, fake=False).stock


def test_names_unconverted_ops_that_hold_the_rest():
    report = memsave.report(frozen(Net()).eval(), torch.randn(2, 3, 16, 16, requires_grad=True))
    assert set(report.rest) == {"GELU: gelu", "Net: sigmoid"}
    text = str(report)
    assert "the rest: GELU: gelu keeps" in text
    assert "skipped: 1" in text


def test_prints_as_a_table():
    report = memsave.report(Net(), torch.randn(2, 3, 16, 16))
    header, *lines = report.format(limit=None).splitlines()
    assert header.split()[:4] == ["layer", "class", "wants", "stock"]
    assert [line.split()[0] for line in lines[: len(report.rows)]] == [
        row.name or "(root)" for row in report.rows
    ]
    short = report.format(limit=2)
    assert f"({len(report.rows) - 2} smaller layers)" in short


def test_keyword_inputs_and_nested_outputs():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, *, a: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
            return {"y": self.relu(a * scale)}

    report = memsave.report(Named(), a=torch.randn(8, requires_grad=True), scale=2.0)
    assert (report.stock, report.converted) == (32, 1)


def test_tied_parameters_count_as_one():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    x = torch.randn(3, 4)
    assert memsave.report(model, x).stock == measured(model, x)


def test_recorder_counts_only_what_the_graph_still_holds():
    x = torch.randn(8, requires_grad=True)
    with Recorder() as recorder:
        y = x.exp()
        z = x.sin()
    assert [held.op for held in recorder.held()] == ["exp", "sin"]
    del y
    gc.collect()
    assert [held.op for held in recorder.held()] == ["sin"]
    del z


class Square(nn.Module):
    """A layer outside of the table that keeps its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


class Both(nn.Module):
    """Two layers keep one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.square, self.norm = nn.Linear(4, 4), Square(), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.square(x) + self.norm(x)


def test_a_tensor_that_two_layers_keep_counts_once() -> None:
    report = memsave.report(Both(), torch.randn(8, 4))
    assert report.rest == {"Square: mul": 8 * 4 * 4}
    assert report.table == 2 * 8 * 4  # mean and rstd
    assert report.converted == report.table + sum(report.rest.values())


def test_leaves_no_hooks_behind() -> None:
    """Of those on all modules, torch itself forgets to remove a part."""
    memsave.report(Both(), torch.randn(8, 4))
    assert not torch.nn.modules.module._has_any_global_hook()


def test_leaves_no_hooks_behind_if_it_fails() -> None:
    """As where torch refuses hooks of what is saved."""
    x = torch.randn(8, 4)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not now"),
        pytest.raises(RuntimeError, match="not now"),
    ):
        memsave.report(Both(), x)
    assert not torch.nn.modules.module._has_any_global_hook()
    assert not function._observers


def test_layers_without_parameters() -> None:
    layer = memsave.convert(nn.BatchNorm2d(3, affine=False))
    report = memsave.report(layer, torch.randn(2, 3, 4, 4, requires_grad=True))
    assert report.converted == report.table == 2 * 3 * 4


class Remembering(nn.Module):
    """A layer under two names, and a forward that keeps things."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(4)
        self.again = self.layer
        self.table = None
        self.shapes: list[torch.Size] = []
        self.tables: dict[int, torch.Tensor] = {}
        self.nested: dict[str, list[torch.Tensor]] = {"a": []}
        self.register_buffer("mask", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        self.mask = self.tables[4] = x > 0
        self.shapes.append(x.shape)
        self.newly = x
        self.nested["a"].append(x)
        self.__class__ = Remembered
        with torch.no_grad():
            x.abs_()
            self.layer.weight.mul_(2)
        # As PEFT does to the parameters that it targets.
        parametrize.register_parametrization(self.layer, "weight", nn.Identity())
        y = self.again(self.layer(x) * self.table)
        parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)
        return y


class Remembered(Remembering):
    """What it becomes, as lazy modules do."""


@pytest.mark.parametrize(
    ("dry_run", "needs_values"),
    [
        (memsave.report, False),
        (partial(memsave.report, fake=False), True),
        (memsave.convert, False),
        (memsave.convert, True),
    ],
)
def test_a_dry_run_leaves_no_trace_in_the_model(dry_run, needs_values):
    model = Remembering()
    if needs_values:
        model.register_forward_hook(lambda module, inputs, y: y * y.sum().item())
    weight, shapes, tables = model.layer.weight, model.shapes, model.tables
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = vars(model).keys()
    x = -torch.ones(2, 4)
    dry_run(model, x)
    assert x.equal(-torch.ones(2, 4))
    assert vars(model).keys() == names
    assert (model.table, model.mask) == (None, None)
    assert model.shapes is shapes == []
    assert model.tables is tables == {}
    assert model.nested == {"a": []}
    assert model.layer.weight is weight
    assert type(model) is Remembering
    assert dict(model.layer.named_parameters()).keys() == {"weight", "bias"}
    assert isinstance(model.layer, nn.BatchNorm1d)
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(type(after[name]) is torch.Tensor for name in state)
    torch.testing.assert_close(after, state, rtol=0, atol=0)


def test_what_other_threads_do_meanwhile_is_not_reported():
    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other = threading.Thread(target=lambda: train(torch.ones(9, requires_grad=True)))
            other.start()
            other.join()
            return x * 1

    def train(x: torch.Tensor) -> None:
        kept.append(act(x))  # of this very model, too
        kept[-1].sum().backward()

    kept: list[torch.Tensor] = []
    act = memsave.nn.LeakyReLU()
    model = nn.Sequential(nn.Linear(16, 16), act, Waits())
    report = memsave.report(model, torch.ones(16))
    assert len(kept) > 0
    assert report.table == report.now == report.converted == 2


class Draws(nn.Module):
    """State that is neither parameter nor buffer, and random numbers from everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ReLU()
        self.average = torch.zeros(4)
        self.averages = {"a": torch.zeros(4)}
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.add_(1 + random.random())
        self.averages["a"].add_(1 + np.random.rand())
        torch.rand(4, generator=self.generator)
        return self.layer(x)

    def state(self) -> object:
        average, averages = self.average.clone(), self.averages["a"].clone()
        _, numbers, place, *_ = np.random.get_state()
        drawn = random.getstate(), numbers.tolist(), place, torch.get_rng_state()
        return average, averages, self.generator.get_state(), drawn


@pytest.mark.parametrize("fake", [True, False])
def test_a_dry_run_draws_nothing(fake: bool) -> None:
    model = Draws()
    before = model.state()
    memsave.report(model, torch.ones(4, requires_grad=True), fake=fake)
    memsave.convert(model, torch.ones(4, requires_grad=True))
    same(model.state(), before)


class Graph(nn.Module):
    """As of a graph network: an adjacency that is an input, and one that is an attribute."""

    def __init__(self, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.adjacency = nn.Linear(4, 4), adjacency

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.relu(adjacency @ self.layer(self.adjacency @ x))


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors(layout: torch.layout) -> None:
    adjacency = torch.eye(3).to_sparse(layout=layout)
    model, x = Graph(adjacency), torch.ones(3, 4)
    for fake in (True, False):
        report = memsave.report(model, x, adjacency, fake=fake)
        assert report.rows[0].stock == x.nbytes
    memsave.convert(model, (x, adjacency))
    assert type(model.layer) is memsave.nn.Linear


@pytest.mark.parametrize("fake", [True, False])
def test_inference_mode(fake: bool) -> None:
    """It holds where it is called: there is a graph within the dry run."""
    with torch.inference_mode():
        model, x = Net(), torch.ones(2, 3, 8, 8)
        report = memsave.report(model, x, fake=fake)
        memsave.convert(model, x)
        assert torch.is_inference_mode_enabled()
    assert report.converted < report.stock


def test_what_a_module_made_in_inference_mode() -> None:
    """It has no version that could tell whether it was overwritten."""
    model = Net()
    with torch.inference_mode():
        model.cache = torch.ones(3)
    assert memsave.report(model, torch.ones(2, 3, 8, 8)).stock


class Remembers(nn.Module):
    """All that it can, in its forward."""

    def __init__(self, ones: Callable[[int], torch.Tensor], needs_values: bool) -> None:
        super().__init__()
        self.ones = ones
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.last = collections.deque(range(2), maxlen=2)
        self.seen = collections.defaultdict(list)
        self.count = collections.Counter(calls=1)
        self.random, self.generator = random.Random(0), np.random.default_rng(0)
        self.more = {"numpy": (np.random.RandomState(0), np.zeros(2))}
        self.state = torch.zeros(2), [0]
        self.hidden = [nn.BatchNorm1d(4), nn.Linear(4, 4)]
        self.__dict__["teacher"] = nn.BatchNorm1d(4)
        self.needs_values = needs_values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.hidden[1](self.hidden[0](self.layer(x))) + self.ones(4) + self.teacher(x)
        self.hidden[0].last = y.detach()
        self.last.append(y.detach())
        self.seen["y"].append(y.detach())
        self.count["calls"] += 1
        generator, array = self.more["numpy"]
        array += generator.rand()
        self.state[0].add_(1)
        self.state[1].append(y.detach())
        if self.needs_values and y.sum().item() > 1e9:
            return y
        return y * self.random.random() * self.generator.random()


@pytest.mark.parametrize("needs_values", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_what_a_forward_remembers(needs_values: bool, half: bool) -> None:
    """In containers of every kind, modules that are not registered, its own generators, arrays of
    NumPy, functions that are cached, and the weights that autocast keeps.
    """
    torch.manual_seed(0)
    ones = functools.cache(torch.ones)
    plain, model = (Remembers(ones, needs_values) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    model.hidden[1].load_state_dict(plain.hidden[1].state_dict())
    x = torch.randn(3, 4)
    with torch.autocast("cpu", enabled=half):
        memsave.convert(model, x)
        memsave.report(model, x, fake=not needs_values)
        assert type(ones(4)) is torch.Tensor
        assert [*model.last] == [0, 1]
        assert (model.seen, model.count["calls"], model.state[1]) == ({}, 1, [0])
        same([model.state[0], *model.more["numpy"][1]], [torch.zeros(2), 0.0, 0.0])
        same(model(x), plain(x))
        same(model.more["numpy"][1], plain.more["numpy"][1])
    for of_plain, of_model in ((plain.hidden[0], model.hidden[0]), (plain.teacher, model.teacher)):
        same([*of_model.buffers()], [*of_plain.buffers()])


@pytest.mark.parametrize("fake", [True, False])
def test_what_is_said_of_a_parameter(fake: bool) -> None:
    """As the scale of a quantized weight."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.weight.scale

    model = nn.Sequential(Scaled(4, 4), nn.LeakyReLU())
    model[0].weight.scale = 2.0
    assert memsave.report(model, torch.ones(3, 4), fake=fake).converted


def test_a_dict_that_is_one_input() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ReLU()

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.layer(batch["x"])

    with pytest.raises(TypeError, match="unexpected keyword argument 'x'") as raised:
        memsave.convert(Takes(), {"x": torch.ones(3)})
    assert "A dict gives the inputs by keyword" in "".join(raised.value.__notes__)
    memsave.convert(Takes(), ({"x": torch.ones(3)},))


def test_a_dry_run_within_another() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.part = memsave.nn.ReLU(), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.part is None:
                self.part = memsave.convert(nn.Sequential(nn.ReLU()), x)
            return self.layer(x * 2)

    assert memsave.report(Lazy(), torch.ones(80, requires_grad=True)).converted == 80 // 8


def test_a_model_that_is_offloaded() -> None:
    """Its parameters are elsewhere, and come with each call."""
    accelerate = pytest.importorskip("accelerate")

    model = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 8))
    x = torch.ones(2, 8)
    expected = model(x)
    accelerate.cpu_offload(model, torch.device("cpu"))
    memsave.convert(model, x)
    assert memsave.report(model, x, fake=False).rows[1].layer == "LeakyReLU"
    assert [p.device.type for p in model.parameters()] == ["meta"] * 4
    same(model(x), expected)


class Cache:
    """As that of keys and values, which a forward fills."""

    def __init__(self) -> None:
        self.lengths: list[int] = []


class Fills(nn.Linear):
    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.lengths.append(len(x))
        return super().forward(x) * len(cache.lengths)


def test_what_a_forward_fills_is_left_as_it_was():
    cache, model = Cache(), Fills(4, 4)
    memsave.report(model, torch.ones(2, 4), cache=cache)
    with pytest.warns(UserWarning, match="nothing to convert"):
        memsave.convert(model, {"x": torch.ones(2, 4), "cache": cache})
    assert cache.lengths == []


def test_classes_that_were_asked_about_may_go():
    def asked() -> weakref.ref:
        class Local(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x

        memsave.report(Local(), torch.ones(3))
        return weakref.ref(Local)

    local = asked()
    gc.collect()
    assert local() is None


class Applies(nn.Module):
    """``call(self.part, *inputs)``."""

    def __init__(self, part: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.part, self.call = part, call

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.call(self.part, *inputs)


def test_a_call_of_another_thread_that_has_not_ended():
    """What is kept meanwhile is not that module's."""
    entered, ended = threading.Event(), threading.Event()

    def waits(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            ended.wait()
        return x

    def runs(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=part, args=(x.detach(),))
        other.start()
        entered.wait()
        try:
            return x.exp()
        finally:
            ended.set()
            other.join()

    model = Applies(Applies(nn.Identity(), waits), runs)
    report = memsave.report(model, torch.ones(16, requires_grad=True))
    assert {row.name: row.now for row in report.rows} == {"": 64}


def test_a_part_that_fails_and_is_done_without():
    def fails(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ValueError

    def tries(part: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        try:
            return part[0](x)
        except ValueError:
            return part[1](x)

    parts = nn.ModuleList([Applies(nn.Identity(), fails), nn.ReLU()])
    model = Applies(Applies(parts, tries), lambda part, x: part(x).exp())
    report = memsave.report(model, torch.ones(16, requires_grad=True))
    assert {row.name: row.converted for row in report.rows} == {"part.part.1": 2, "": 64}


def test_an_input_by_keyword_is_shared():
    parts = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)])
    model = Applies(parts, lambda parts, x: parts[1](input=parts[0](x)))
    rows = {row.name: row for row in memsave.report(model, torch.ones(4, 8)).rows}
    assert (rows["part.1"].shared, rows["part.1"].owned) == (128, 2 * 4 * 4)


def test_tied_parameters_of_which_one_name_is_wanted():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    x = torch.randn(3, 4)
    for name in ("0.weight", "1.weight"):
        report = memsave.report(model, x, trainable=lambda module, other, n=name: other == n)
        assert report.now == memsave.report(model, x).now > 0


def test_a_class_that_convert_would_change():
    """Without example inputs, a ReLU keeps its bits even where a trained layer keeps its output."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    for layer in ("ReLU -> ReLUFromOutput", "ReLUFromOutput"):
        assert [row.layer for row in memsave.report(model, torch.ones(2, 4)).rows][1] == layer
        memsave.convert(model, torch.ones(2, 4))


def test_calls_that_a_converted_layer_leaves_to_stock():
    """They are not for want of a conversion."""
    x = torch.randn(4, 8, requires_grad=True)
    (row,) = memsave.report(memsave.convert(nn.CrossEntropyLoss()), x, x.softmax(1)).rows
    assert row.reason == "stock's, as the row does not cover this call: cross_entropy"
    with memsave.functional_mode():
        (row,) = memsave.report(Calls(F.cross_entropy), x, x.softmax(1)).rows
    assert row.reason == "stock's, as the row does not cover this call: cross_entropy"
    (row,) = memsave.report(Calls(F.cross_entropy), x, x.softmax(1)).rows
    assert row.reason == "called as functions (see memsave.functional_mode): cross_entropy"


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def test_inputs_that_are_parts_of_the_model():
    model = Applies(nn.Linear(4, 4), lambda part, x, head: head(x))
    report = memsave.report(model, torch.ones(2, 4, requires_grad=True), model.part)
    assert [(row.name, row.parameters, row.now) for row in report.rows] == [("part", 64, 0)]


def test_inputs_that_cannot_be_copied():
    def locks(part: nn.Module, x: torch.Tensor, lock: Any) -> torch.Tensor:
        with lock:
            return x.exp()

    x = torch.ones(16, requires_grad=True)
    assert memsave.report(Applies(nn.Identity(), locks), x, threading.Lock()).now == 64


def test_modes_of_others_hold_in_a_report():
    devices = []

    def asks(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        devices.append(torch.get_default_device().type)
        return F.relu(x)

    model, x = Applies(nn.Identity(), asks), torch.randn(2, 3, requires_grad=True)
    with torch.device("meta"), memsave.functional_mode():
        memsave.report(model, x)
        assert torch.get_default_device().type == "meta"
    assert {*devices} == {"meta"}


def test_what_keeps_parameters_alone_keeps_nothing():
    """It is named neither as what holds the rest, nor in a reason."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = nn.Sequential(Scale(), nn.ReLU())
    report = memsave.report(model, torch.randn(2, 3, requires_grad=True))
    assert report.rest == {}
    assert report.rows[0].reason == "keeps nothing of its own"
