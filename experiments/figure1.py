"""The paper's Figure 1: peak memory against depth, of a network of L equal layers.

A tensor X of 512 MiB goes through L = 1 to 10 layers, each of which keeps its size: convolutions,
BatchNorm in both modes, or linear layers, without a bias. X wants no gradient; of the layers all
do, none, the fourth ("4"), or the fourth and those after it ("4+").

Counted are the tensors of a step on fake tensors, with parameters and data. The *forward peak* is
what the paper shows: it measured the forward pass on a GPU. What it has above our count of stock
is the same in every row of one kind of layer, whatever is trainable: workspaces of the GPU's
libraries, not tensors of the step. The *peak of the step* goes over the backward pass too, and
includes the gradients. Where nothing is trainable there is no backward pass. *Slopes* are those of
the forward peak from the sixth layer on, when what "4" keeps has levelled off.

A frozen layer after the fourth needs its weight alone for the gradient of its input, and stock
keeps its input all the same (but for linear layers). Only BatchNorm in train mode reads it: there
is nothing to be saved.

Measured are peaks of the allocator, at a size that fits, also of stock under ``torch.compile``. On
CPU they include copies of inputs and outputs in another layout, which oneDNN makes for
convolutions. The compiler computes layers of BatchNorm again in the backward pass instead of
keeping their inputs, so it may be below what is possible without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo  # takes a second: here, not in the process of every case
from torch import Tensor, nn

import memsave
from memsave import spec

from .counting import count
from .harness import Experiment
from .measure import best_device, peak_bytes
from .render import mib, table
from .results import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Bytes of X, counted.
X = 1 << 29
#: Depth from which the peak goes on as it does for ever.
STEADY = 6
#: Results are compared on so many times fewer elements, in float64. (Where the rest of the network
#: hides the scale of what is before it, as BatchNorm does, gradients in float32 are noise.)
COMPARED = 1 << 11
#: Largest difference of gradients then, as part of the largest element.
ROUNDING = 1e-8
#: Bytes that do not count: statistics of BatchNorm, of which each pass may need another one.
STATISTICS = 1 << 10


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        make: Makes one.
        shape: Of X, of 2^27 elements.
        row: What the table says of it.
        train: The mode.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    row: spec.Layer
    train: bool = True


def _conv(cls: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: cls(8, 8, 3, padding=1, bias=False)


def _batch_norm() -> nn.Module:
    """With other values than ones and zeros, which would hide wrong gradients."""
    layer = nn.BatchNorm2d(8)
    for values in (*layer.parameters(), layer.running_mean, layer.running_var):
        assert isinstance(values, Tensor)
        nn.init.uniform_(values, 0.5, 1.5)
    return layer


_SHAPES = ((4096, 8, 4096), (256, 8, 256, 256), (64, 8, 64, 64, 64))
KINDS = {
    "conv1d": Kind(_conv(nn.Conv1d), _SHAPES[0], spec.CONV1D),
    "conv2d": Kind(_conv(nn.Conv2d), _SHAPES[1], spec.CONV2D),
    "conv3d": Kind(_conv(nn.Conv3d), _SHAPES[2], spec.CONV3D),
    "conv_transpose1d": Kind(_conv(nn.ConvTranspose1d), _SHAPES[0], spec.CONV_TRANSPOSE1D),
    "conv_transpose2d": Kind(_conv(nn.ConvTranspose2d), _SHAPES[1], spec.CONV_TRANSPOSE2D),
    "conv_transpose3d": Kind(_conv(nn.ConvTranspose3d), _SHAPES[2], spec.CONV_TRANSPOSE3D),
    "bn2d train": Kind(_batch_norm, _SHAPES[1], spec.BATCH_NORM_TRAIN),
    "bn2d eval": Kind(_batch_norm, _SHAPES[1], spec.BATCH_NORM_EVAL, train=False),
    "linear": Kind(lambda: nn.Linear(256, 256, bias=False), (512, 1024, 256), spec.LINEAR),
}
#: Whether the layer at a place, from 1 on, is trainable.
TRAINABLE: dict[str, Callable[[int], bool]] = {
    "all": lambda place: True,
    "4+": lambda place: place >= 4,
    "4": lambda place: place == 4,
    "none": lambda place: False,
}
IMPLEMENTATIONS = ("stock", "memsave", "compiled")

#: Published slope in MiB per layer, and peak in MiB at L = 10. arXiv 2404.12406, Figure 1.
PUBLISHED = {
    ("conv2d", "stock", "all"): (512, 6336),
    ("conv2d", "stock", "none"): (0, 2240),
    ("conv2d", "stock", "4+"): (512, 5311),
    ("conv2d", "stock", "4"): (512, 5312),
    ("conv2d", "paper", "4"): (0, 2753),
    ("conv1d", "stock", "4"): (512, 5311),
    ("conv1d", "paper", "4"): (0, 2752),
    ("conv_transpose2d", "stock", "4"): (512, 5315),
    ("conv_transpose2d", "paper", "4"): (1, 2757),
    ("bn2d eval", "stock", "4"): (511, 4795),
    ("bn2d eval", "paper", "4"): (0, 2237),
    ("bn2d train", "stock", "4"): (512, 4796),
    ("bn2d train", "paper", "4"): (513, 4796),
    ("linear", "stock", "4"): (0, 2242),
}


class Network(nn.Module):
    """Equal layers one after the other. The loss is the sum of what comes out.

    Args:
        trainable: A key of ``TRAINABLE``.
        depth: L.
    """

    def __init__(self, kind: Kind, trainable: str, depth: int) -> None:
        super().__init__()
        layers = nn.Sequential(*(kind.make() for _ in range(depth))).train(kind.train)
        for place, layer in enumerate(layers, 1):
            layer.requires_grad_(TRAINABLE[trainable](place))
        self.layers: Callable[[Tensor], Tensor] = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


# The experiment.


@dataclass(frozen=True)
class Config:
    """What is counted for all depths up to ``depth``, and measured at it.

    ``shrink``: Measured with so many times fewer elements than 2^27.
    """

    kinds: tuple[str, ...] = tuple(KINDS)
    trainable: tuple[str, ...] = tuple(TRAINABLE)
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    depth: int = 10
    shrink: int = 512


@dataclass(frozen=True)
class Case:
    """A network."""

    kind: str
    trainable: str
    implementation: str
    depth: int
    shrink: int


def cases(config: Config) -> Iterator[Case]:
    """By kind of layer."""
    for kind in config.kinds:
        for trainable in config.trainable:
            for implementation in config.implementations:
                # What cannot be counted is measured twice where it has to have a slope.
                twice = implementation == "compiled" and trainable == "4"
                depths = [STEADY] * twice + [config.depth]
                for depth in dict.fromkeys(depths):
                    yield Case(kind, trainable, implementation, depth, config.shrink)


def memory(case: Case) -> int:
    """On CPU, stock takes up to ``depth + 5`` tensors."""
    return (case.depth + 6) * X // case.shrink + (2 << 30)


def measure(case: Case) -> dict[str, Any]:
    """Counts for all depths; peaks at one, or why there are none; and differences from stock."""
    figures: dict[str, Any] = {}
    if case.implementation != "compiled":
        figures["counted"] = [counts(case, depth) for depth in range(1, case.depth + 1)]
    try:
        figures["measured"] = peaks(case)
    except Exception as error:
        if case.implementation != "compiled":
            raise
        said = f"{type(error).__name__}: {error}".splitlines()
        figures["error"] = " ".join(said[:2])
    if case.implementation == "memsave":
        figures["differences"] = differences(case)
    return figures


def counts(case: Case, depth: int) -> dict[str, int]:
    """Bytes of a step, of tensors of full size."""
    kind = KINDS[case.kind]

    def prepare(network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if case.implementation == "memsave":
            memsave.convert(network, inputs)

    counted = count(
        lambda: Network(kind, case.trainable, depth), lambda: (torch.empty(kind.shape),), prepare
    )
    return counted._asdict()


def shrunk(shape: Sequence[int], factor: int) -> list[int]:
    """Of so many times fewer elements: fewer examples, and then smaller along the largest axis."""
    batch = min(shape[0], factor)
    sizes = [shape[0] // batch, *shape[1:]]
    sizes[sizes.index(max(sizes[1:]), 1)] //= factor // batch
    return sizes


def _data(case: Case, shrink: int) -> Tensor:
    torch.manual_seed(0)
    device = best_device()
    return torch.randn(shrunk(KINDS[case.kind].shape, shrink), device=device)


def peaks(case: Case) -> dict[str, Any]:
    """Allocator peaks in bytes, above parameters and data."""
    x = _data(case, case.shrink)
    network = _network(case, case.implementation, x)
    _step(network, x)  # compiles
    network.zero_grad()
    forward = peak_bytes(lambda: network(x), x.device)
    peak = peak_bytes(lambda: _step(network, x), x.device, network.zero_grad)
    return {
        "parameters": sum(p.nbytes for p in (*network.parameters(), *network.buffers())),
        "data": x.nbytes,
        "forward": forward,
        "peak": peak,
    }


def _network(case: Case, implementation: str, x: Tensor) -> Network:
    from torch._inductor import config

    torch.manual_seed(1)
    network = Network(KINDS[case.kind], case.trainable, case.depth).to(x)
    if implementation == "memsave":
        memsave.convert(network, x)
    if implementation == "compiled":
        # In this process: it ends without waiting for others.
        with config.patch(compile_threads=1):
            network.layers = torch.compile(network.layers, dynamic=False)
            _step(network, x)
    return network


def _step(network: Network, x: Tensor) -> None:
    loss = network(x)
    if loss.requires_grad:
        loss.backward()


def differences(case: Case) -> dict[str, float]:
    """Of outputs and of gradients from stock, to the largest element."""
    x = _data(case, max(case.shrink, COMPARED)).double()
    stock, ours = (_results(_network(case, name, x), x) for name in ("stock", "memsave"))
    return {
        what: max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*both, strict=True))
        for what, both in {
            "output": (ours[:1], stock[:1]),
            "gradient": (ours[1:], stock[1:]),
        }.items()
        if both[0]
    }


def _results(network: Network, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of a loss that has another one at every element."""
    y = network.layers(x)
    if y.requires_grad:
        y.backward(x)
    gradients = [p.grad for p in network.parameters() if p.grad is not None]
    return [y.detach(), *gradients]


# What is shown.

Rows = dict[tuple[str, str], dict[str, Record[Case]]]


def _deepest(records: Sequence[Record[Case]]) -> Rows:
    """By kind and what is trainable: the deepest network by implementation."""
    rows: Rows = {}
    for record in sorted(records, key=lambda record: record.case.depth):
        case = record.case
        rows.setdefault((case.kind, case.trainable), {})[case.implementation] = record
    order = [(kind, trainable) for kind in KINDS for trainable in TRAINABLE]
    return {place: rows[place] for place in order if place in rows}


def _full(counted: dict[str, int], what: str) -> int:
    """A peak with parameters and data."""
    return counted[what] + counted["parameters"] + counted["data"]


def slope(counted: Sequence[dict[str, int]], what: str = "forward") -> float | None:
    """Bytes per layer, without parameters, from the steady depth on."""
    if len(counted) <= STEADY:
        return None
    return (counted[-1][what] - counted[STEADY - 1][what]) / (len(counted) - STEADY)


def show(records: Sequence[Record[Case]]) -> str:
    """Counts with what is published beside them; measured peaks; and what failed."""
    rows = _deepest(records)
    return "\n".join([_counted(rows), _measured(rows, records), *_remarks(records)])


def summary(records: Sequence[Record[Case]]) -> str:
    """The counts where one layer is trainable."""
    return _counted({place: row for place, row in _deepest(records).items() if place[1] == "4"})


def _counted(rows: Rows) -> str:
    header = (
        *("layer", "trainable", "L", "MiB per layer: stock", "memsave"),
        *("published stock", "published paper", "forward peak MiB: stock", "memsave"),
        *("published stock", "published paper", "(above ours)"),
        *("peak of the step MiB: stock", "memsave", "ratio"),
    )
    lines = [
        [*_counted_line(place, *(row[name].figures["counted"] for name in ("stock", "memsave")))]
        for place, row in rows.items()
        if {"stock", "memsave"} <= row.keys()
    ]
    return f"Counted, X of {mib(X, 0)} MiB:\n\n{table(header, lines)}"


def _counted_line(place: tuple[str, str], *both: list[dict[str, int]]) -> Iterator[str]:
    kind, trainable = place
    published = [PUBLISHED.get((kind, name, trainable)) for name in ("stock", "paper")]
    at_ten = len(both[0]) == 10
    yield from (kind, trainable, str(len(both[0])))
    yield from (_or_blank(slope(counted), lambda size: mib(size, 0)) for counted in both)
    yield from (_or_blank(value, lambda value: str(value[0])) for value in published)
    forward = [_full(counted[-1], "forward") for counted in both]
    yield from (mib(size, 0) for size in forward)
    yield from (_or_blank(value if at_ten else None, lambda v: str(v[1])) for value in published)
    above = published[0] and at_ten and published[0][1] - forward[0] / (1 << 20)
    yield _or_blank(above or None, lambda value: f"{value:.0f}")
    peak = [_full(counted[-1], "peak") for counted in both]
    yield from (mib(size, 0) for size in peak)
    yield f"{peak[1] / peak[0]:.3f}"


def _or_blank(value: Any, text: Callable[[Any], str]) -> str:
    return "" if value is None else text(value)


def _measured(rows: Rows, records: Sequence[Record[Case]]) -> str:
    names = [name for name in IMPLEMENTATIONS if any(name in row for row in rows.values())]
    header = (
        *("layer", "trainable", "L"),
        *(f"{what}: {name}" for what in ("forward peak", "peak of the step") for name in names),
        "compiled, forward, per layer",
    )
    lines, sizes = [], set()
    for place, row in rows.items():
        found = {name: record.figures.get("measured") for name, record in row.items()}
        cells = [
            _or_blank(found.get(name), lambda size, what=what: f"{_in_x(size, what):.2f}")
            for what in ("forward", "peak")
            for name in names
        ]
        depth = str(max(record.case.depth for record in row.values()))
        per_layer = _or_blank(_measured_slope(place, records), lambda size: f"{size:.2f}")
        lines.append((*place, depth, *cells, per_layer))
        sizes |= {mib(size["data"], 2) for size in found.values() if size}
    size = " and ".join(sorted(sizes))
    title = f"Measured, with data and without parameters, as multiples of X, of {size} MiB:"
    return f"{title}\n\n{table(header, lines)}"


def _measured_slope(place: tuple[str, str], records: Sequence[Record[Case]]) -> float | None:
    """X per layer of the forward peak, compiled, from two depths."""
    found = {
        r.case.depth: _in_x(r.figures["measured"], "forward")
        for r in records
        if (r.case.kind, r.case.trainable, r.case.implementation) == (*place, "compiled")
        and "measured" in r.figures
    }
    low, high = min(found, default=0), max(found, default=0)
    return (found[high] - found[low]) / (high - low) if high > low else None


def _in_x(measured: dict[str, int], what: str) -> float:
    """A peak with data, without parameters, which are small only where X is large."""
    return (measured[what] + measured["data"]) / measured["data"]


def _remarks(records: Sequence[Record[Case]]) -> Iterator[str]:
    found = [r.figures["differences"] for r in records if "differences" in r.figures]
    for what, named in (("output", "an output"), ("gradient", "a gradient")):
        largest = max((of[what] for of in found if what in of), default=None)
        if largest is not None:
            yield (
                f"Largest difference of {named} from stock, in float64 and to the largest "
                f"element: {largest:.1e}.\n"
            )
    for record in records:
        if "error" in record.figures:
            yield f"Not measured: {record.case}: {record.figures['error']}\n"


# Targets.


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Counts above stock's or the table's, and results that are not stock's."""
    for (kind, trainable), row in _deepest(records).items():
        what = f"{kind}, {trainable}"
        if {"stock", "memsave"} <= row.keys():
            stock, ours = (row[name].figures["counted"] for name in ("stock", "memsave"))
            yield from (f"{what}: {miss}" for miss in _above(stock, ours))
        if trainable == "4" and "memsave" in row:
            found, limit = slope(row["memsave"].figures["counted"]), kept_when_frozen(kind)
            if found is not None and found > limit + STATISTICS:
                yield f"{what}: {mib(found)} MiB per frozen layer, the table says {mib(limit)}"
    for record in records:
        for what, limit in (("output", 0.0), ("gradient", ROUNDING)):
            found = record.figures.get("differences", {}).get(what, 0.0)
            if not found <= limit:
                yield f"{record.case}: {what} differs from stock's by {found:.1e}"


def _above(stock: list[dict[str, int]], ours: list[dict[str, int]]) -> Iterator[str]:
    for depth, (theirs, own) in enumerate(zip(stock, ours, strict=True), 1):
        for what in ("forward", "peak"):
            if own[what] > theirs[what] + STATISTICS:
                yield f"{what} at L = {depth} is {own[what]} bytes, stock {theirs[what]}"


def kept_when_frozen(kind: str) -> int:
    """Bytes of inputs and outputs that the gradient of x alone reads, by the table."""
    reads = KINDS[kind].row.saves(frozenset({"x"}))
    return X * len({"x", "y"} & set(reads))


# The figure.

_COLORS = {"stock": "tab:gray", "memsave": "tab:green", "compiled": "tab:orange"}
_WIDTHS = {"stock": 4.0, "memsave": 1.5}  # of lines, ours upon stock's
_STYLES: dict[str, Any] = {"all": "-", "4+": "--", "4": "-.", "none": ":"}


def plot(records: Sequence[Record[Case]]) -> Figure:
    """A row per kind of layer: counts as lines, measured peaks as marks."""
    import matplotlib.pyplot as plt

    kinds = [kind for kind in KINDS if any(record.case.kind == kind for record in records)]
    figure, axes = plt.subplots(
        *(len(kinds), 2),
        figsize=(10, 1 + 2.4 * len(kinds)),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for kind, pair in zip(kinds, axes, strict=True):
        for what, title, axis in zip(
            ("forward", "peak"), ("forward pass", "whole step"), pair, strict=True
        ):
            _panel(axis, [r for r in records if r.case.kind == kind], what)
            axis.set(title=f"{kind}, {title}", ylim=(0, None))
        pair[0].set_ylabel("peak / X")
    for axis in axes[-1]:
        axis.set_xlabel("layers")
    figure.legend(*_legend(), loc="outside lower center", ncols=4)
    return figure


def _panel(axis: Axes, records: Sequence[Record[Case]], what: str) -> None:
    for (kind, trainable), row in _deepest(records).items():
        for name, record in row.items():
            if "counted" in record.figures:
                peak = [counted[what] / X + 1 for counted in record.figures["counted"]]
                (line,) = axis.plot(range(1, len(peak) + 1), peak, color=_COLORS[name])
                line.set(linestyle=_STYLES[trainable], linewidth=_WIDTHS[name])
        for name in ("stock", "paper"):
            published = PUBLISHED.get((kind, name, trainable))
            if published and what == "forward":
                axis.plot(10, published[1] * (1 << 20) / X, "kx", markersize=5)
    for record in records:
        if "measured" in record.figures:
            peak = _in_x(record.figures["measured"], what)
            color = _COLORS[record.case.implementation]
            axis.plot(record.case.depth, peak, "o", color=color, markersize=4, fillstyle="none")


def _legend() -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    marks = {
        **{name: Line2D([], [], color=color) for name, color in _COLORS.items()},
        "measured": Line2D([], [], color="k", marker="o", linestyle="", fillstyle="none"),
        **{
            f"trainable: {name}": Line2D([], [], color="k", linestyle=style)
            for name, style in _STYLES.items()
        },
        "published": Line2D([], [], color="k", marker="x", linestyle=""),
    }
    return [*marks.values()], [*marks]


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(
            *(("conv2d", "bn2d eval"), ("4",), ("stock", "memsave")), depth=7, shrink=4096
        ),
        "quick": Config(("conv2d", "bn2d eval"), ("4",), shrink=1024),
        "default": Config(),
        "paper": Config(shrink=1),
    },
    choices={"kinds": KINDS, "trainable": TRAINABLE, "implementations": IMPLEMENTATIONS},
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    plot=plot,
    summary=summary,
    memory=memory,
)
