"""Fine-tuning on real data, stock and converted: the same loss curve, in less memory.

A small ResNet with dropout learns handwritten digits (scikit-learn's, 8x8 pixels, enlarged), and is
then fine-tuned on other digits, whose images have little contrast and much noise. Trainable are all
parameters, those of BatchNorm, or those of the first or last quarter of the layers (the first:
"surgical" fine-tuning, arXiv 2210.11466, for shifts of the input). Both models start from the same
weights and see the same batches; dropout draws from the same seed.

Losses are the same to the bit as long as the weights are; gradients are the same to rounding, and
training makes more of every rounding. "Off by" is the largest difference of the two loss curves at
any step: in float32, beside it for comparison that of stock from stock whose trainable weights
were one unit in the last place larger at first, and in float64, where it has to be negligible.

A step is forward, backward and the update. Its peak is the allocator's, beyond what lives before it
(parameters, data, momentum), in a process of its own. Times alternate. Accuracy is that on
corrupted digits that are in neither training set.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import memsave

from . import paper
from .harness import Experiment
from .measure import best_device, compare, peak_bytes
from .render import mib, quartiles, table
from .results import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("stock", "memsave")
NUDGED = "stock, last bits changed"
#: What is trained, as the paper calls it. (No gradient of the input is wanted here.)
TRAINED = {
    "all": "All",
    "norms": "Norm",
    "first quarter": "Surgical",
    "last quarter": "SurgicalLast",
}
TRAINING, EXACT, TIME = "training", "training in float64", "time"
PEAKS = {f"peak of {name}": name for name in MODELS}
WHAT = (TRAINING, EXACT, *PEAKS, TIME)
ROUNDING = 1e-6  # of losses, in float64
RATES = 0.02, 0.005  # of learning at first, and of fine-tuning


@dataclass(frozen=True)
class Config:
    """What is trained, on images of ``size`` pixels, for how many epochs after ``before`` others.

    ``repeats``: timed pairs of steps.
    """

    trained: tuple[str, ...] = tuple(TRAINED)
    before: int = 8
    epochs: int = 6
    batch: int = 64
    size: int = 16
    repeats: int = 15


@dataclass(frozen=True)
class Case:
    """What is trained, and what is measured: the trainings, the times, or the peak of one."""

    trained: str
    what: str
    before: int
    epochs: int
    batch: int
    size: int
    repeats: int


def cases(config: Config) -> Iterator[Case]:
    """By what is trained."""
    of = config
    for trained in of.trained:
        for what in WHAT:
            yield Case(trained, what, of.before, of.epochs, of.batch, of.size, of.repeats)


class Data(NamedTuple):
    """Images ``(n, 1, h, w)`` and their digits ``(n,)``."""

    x: Tensor
    labels: Tensor


def digits(size: int, device: torch.device) -> tuple[Data, Data, Data]:
    """To learn first; corrupted, to be fine-tuned on; and corrupted, held out. A third each."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    x = nn.functional.interpolate(x, size, mode="bilinear")
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=generator)
    corrupted = 0.3 + 0.3 * x + 0.2 * noise
    order = torch.randperm(len(x), generator=generator).chunk(3)
    parts = (
        Data(of[rows], torch.from_numpy(labels)[rows])
        for of, rows in zip((x, corrupted, corrupted), order, strict=True)
    )
    first, second, third = (Data(x.to(device), labels.to(device)) for x, labels in parts)
    return first, second, third


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if inputs == outputs
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


def network() -> nn.Module:
    """A ResNet of six blocks: images ``(n, 1, h, w)`` to logits ``(n, 10)``."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *(Block(32, 32, 1), Block(32, 32, 1)),
        *(Block(32, 64, 2), Block(64, 64, 1)),
        *(Block(64, 128, 2), Block(128, 128, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )


class Trainer:
    """A model with its optimizer."""

    def __init__(self, step: paper.Step, rate: float) -> None:
        self.step = step
        wanted = [p for p in step.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(wanted, rate, momentum=0.9)

    def __call__(self, x: Tensor, labels: Tensor) -> Tensor:
        """Forward, backward, update; returns the loss."""
        self.optimizer.zero_grad()
        loss = self.step(x, labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self, data: Data, held_out: Data, epochs: int, batch: int) -> dict[str, list[float]]:
        """The loss of every step; the accuracy before, and after every epoch."""
        torch.manual_seed(1)
        order = torch.Generator().manual_seed(2)
        losses, accuracies = [], [accuracy(self.step, held_out)]
        for _ in range(epochs):
            rows = torch.randperm(len(data.x), generator=order)
            for some in rows.split(batch):
                losses.append(self(data.x[some], data.labels[some]).item())
            accuracies.append(accuracy(self.step, held_out))
        return {"losses": losses, "accuracies": accuracies}


def accuracy(step: paper.Step, data: Data) -> float:
    """Part of the digits that are recognised."""
    step.eval()
    with torch.no_grad():
        right = step.model(data.x).argmax(1) == data.labels
    step.train()
    return right.float().mean().item()


def prepare(name: str, case: Case, step: paper.Step, data: Data) -> Trainer:
    """A copy of a model, for fine-tuning; converted, if the name says so."""
    step = copy.deepcopy(step)
    paper.apply(TRAINED[case.trained], step)
    if name == NUDGED:
        for parameter in step.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.nextafter(torch.full_like(parameter, torch.inf)).detach()
    if name == "memsave":
        memsave.convert(step, (data.x[: case.batch], data.labels[: case.batch]))
    return Trainer(step, RATES[1])


def measure(case: Case) -> dict[str, Any]:
    """Curves, times, or a peak."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for CUDA to be deterministic
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    device = best_device()
    step = paper.Step(network(), lambda model, x: model(x)).to(device)
    data = digits(case.size, device)
    if case.what in (TRAINING, EXACT):
        return _training(case, step, *data)
    x, labels = (of[: case.batch] for of in data[1])
    if case.what in PEAKS:
        train = prepare(PEAKS[case.what], case, step, data[1])
        forget = train.optimizer.zero_grad
        train(x, labels)
        forget()
        return {"peak_bytes": peak_bytes(partial(train, x, labels), x.device, forget)}
    steps = {name: partial(prepare(name, case, step, data[1]), x, labels) for name in MODELS}
    return {"times": compare(steps, case.repeats)}


def _training(case: Case, step: paper.Step, first: Data, data: Data, test: Data) -> dict[str, Any]:
    """Learn the clean digits; then the others, by each model from there."""
    Trainer(step, RATES[0]).fit(first, test, case.before, case.batch)
    if case.what == EXACT:
        step = step.double()
        data, test = (of._replace(x=of.x.double()) for of in (data, test))
    trainers = {name: prepare(name, case, step, data) for name in MODELS}
    report = memsave.report(trainers["stock"].step, data.x[: case.batch], data.labels[: case.batch])
    if case.what == TRAINING:
        trainers[NUDGED] = prepare(NUDGED, case, step, data)
    return {
        "kept_bytes": {"stock": report.stock, "memsave": report.converted},
        "curves": {
            name: of.fit(data, test, case.epochs, case.batch) for name, of in trainers.items()
        },
    }


# What it looks like.


def _runs(records: Sequence[Record[Case]]) -> dict[Case, dict[str, dict[str, Any]]]:
    """Figures by run (as the case of its training) and by what was measured."""
    runs: dict[Case, dict[str, dict[str, Any]]] = {}
    for record in records:
        run = replace(record.case, what=TRAINING)
        runs.setdefault(run, {what: {} for what in WHAT})
        runs[run][record.case.what] = record.figures
    return runs


def _off(figures: dict[str, Any], name: str = "memsave") -> float:
    """The largest difference of a loss curve from stock's."""
    losses = (figures["curves"][of]["losses"] for of in ("stock", name))
    return max(abs(a - b) for a, b in zip(*losses, strict=True))


def _peaks(run: dict[str, dict[str, Any]]) -> tuple[int, int] | None:
    stock, ours = (run[what].get("peak_bytes") for what in PEAKS)
    return None if stock is None or ours is None else (stock, ours)


def show(records: Sequence[Record[Case]]) -> str:
    """How far the trainings are apart, and what they take."""
    runs = _runs(records)
    curves = table(
        (
            *("trainable", "steps", "accuracy before", "after: stock", "memsave"),
            *("first loss off by", "float32 loss off by", "last bits changed", "in float64"),
        ),
        (_curve_cells(case, run) for case, run in runs.items() if run[TRAINING]),
    )
    costs = table(
        (
            *("trainable", "kept MiB: stock", "memsave", "ratio"),
            *("peak MiB: stock", "memsave", "ratio", "ms: stock", "memsave", "ratio", "quartiles"),
        ),
        (_cost_cells(case, run) for case, run in runs.items()),
    )
    return f"{curves}\n{costs}"


def _curve_cells(case: Case, run: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    stock, ours = (run[TRAINING]["curves"][name] for name in MODELS)
    return (
        case.trained,
        str(len(stock["losses"])),
        f"{stock['accuracies'][0]:.3f}",
        *(f"{curve['accuracies'][-1]:.3f}" for curve in (stock, ours)),
        f"{abs(stock['losses'][0] - ours['losses'][0]):.1e}",
        f"{_off(run[TRAINING]):.1e}",
        f"{_off(run[TRAINING], NUDGED):.1e}",
        f"{_off(run[EXACT]):.1e}" if run[EXACT] else "",
    )


def _cost_cells(case: Case, run: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    kept = run[TRAINING].get("kept_bytes")
    cells = [case.trained]
    for sizes in ((kept["stock"], kept["memsave"]) if kept else None, _peaks(run)):
        stock, ours = sizes or (0, 0)
        cells += [mib(stock), mib(ours), f"{ours / stock:.4f}"] if sizes else [""] * 3
    times = run[TIME].get("times")
    if not times:
        return (*cells, *[""] * 4)
    cells += [f"{times[name]['seconds'] * 1e3:.1f}" for name in MODELS]
    return (*cells, f"{times['memsave']['ratio']:.3f}", quartiles(times["memsave"]))


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Curves that are apart by more than rounding, no progress, and memory above stock's."""
    for case, run in _runs(records).items():
        if run[EXACT] and _off(run[EXACT]) > ROUNDING:
            yield f"{case.trained}: losses in float64 are off by {_off(run[EXACT]):g}"
        yield from _stuck(case, run[TRAINING]["curves"]) if run[TRAINING] else ()
        kept = run[TRAINING].get("kept_bytes")
        if kept and kept["memsave"] > kept["stock"]:
            yield f"{case.trained}: keeps {kept['memsave']} bytes, stock {kept['stock']}"
        stock, ours = _peaks(run) or (0, 0)
        if ours > stock:
            yield f"{case.trained}: peak of {ours} bytes, stock {stock}"


def _stuck(case: Case, curves: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    first, other = (curves[name]["losses"][0] for name in MODELS)
    if first != other:
        yield f"{case.trained}: the first losses are {first} and {other}"
    for name in MODELS:
        before, *_, after = curves[name]["accuracies"]
        if after <= before:
            yield f"{case.trained}, {name}: accuracy went from {before:.3f} to {after:.3f}"


def plot(records: Sequence[Record[Case]]) -> Figure:
    """Loss and accuracy, a column by what is trained: memsave's curve upon stock's."""
    import matplotlib.pyplot as plt

    runs = {case: run[TRAINING] for case, run in _runs(records).items() if run[TRAINING]}
    figure, axes = plt.subplots(
        2,
        len(runs) or 1,
        figsize=(3.2 * (len(runs) or 1), 5),
        squeeze=False,
        sharey="row",
        layout="constrained",
    )
    styles = {"stock": ("tab:gray", 5.0, "-"), "memsave": ("tab:green", 1.5, "--")}
    for (loss, right), (case, figures) in zip(axes.T, runs.items(), strict=False):
        for name, (colour, width, style) in styles.items():
            curve = figures["curves"][name]
            look = {"color": colour, "linewidth": width, "linestyle": style, "label": name}
            loss.plot(range(1, 1 + len(curve["losses"])), curve["losses"], **look)
            right.plot(curve["accuracies"], **look)
        loss.set(title=f"trained: {case.trained}", xlabel="step", yscale="log")
        right.set(xlabel="epoch", ylim=(0, 1))
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("accuracy, held out")
    axes[0, 0].legend()
    return figure


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(("first quarter",), before=1, epochs=2, size=8, repeats=1),
        "quick": Config(("norms",), before=4, epochs=3, repeats=5),
        "default": Config(),
        "paper": Config(size=32),
    },
    choices={"trained": TRAINED},
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    plot=plot,
)
