"""Which swap brings what: each group of layers converted alone, and one after the other.

Bytes kept for backward, and the peak of a step above parameters and data, as ratios to stock: exact
counts on fake tensors at the paper's sizes. The layers are converted with example inputs: each of
them gets the row with which the whole model, most of it stock, keeps least.

The savings do not add up, because layers share tensors. What a convolution keeps in vain is the
output of a ReLU, which keeps it too: converting the convolutions alone frees nothing that the ReLUs
do not hold, nor does converting the ReLUs free what the convolutions hold; both together do. It is
the same with BatchNorm and the convolution before it, if something after it holds its input. So the
sum of what each group saves alone is less than what all save together. It is more where two groups
can both spare a tensor that only one need not keep.

In order, each column converts its group and those to the left of it. "gradients" is the largest
difference from stock in any of these conversions, to the largest element, in float64 on two small
inputs (of transformers, a single layer; not where this takes too much memory).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import memsave
from memsave.layers.module import ROWS, STOCK, offered

from . import paper
from .counting import count
from .harness import Experiment
from .measure import difference
from .render import gib, table
from .results import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Groups of layers in the order of conversion, by parts of the names of their ops. What has none
#: of these names is an activation.
GROUPS = {
    "conv, linear": ("conv", "linear"),
    "norm": ("norm",),
    "activation": (),
    "pooling": ("pool",),
    "dropout": ("dropout",),
    "gated": ("glu",),
    "loss": ("cross_entropy",),
    "rest": ("embedding", "pad"),
}
#: Models whose layers form chains or residual networks, where the choice of rows is the least.
EXACT_CHOICE = ("ResNet-18", "ResNet-50", "ResNet-101", "ResNeXt101_64x4d", "VGG-16")
#: Largest difference of gradients in float64.
ROUNDING = 1e-8
#: Parameters of the largest model whose gradients are compared.
COMPARED = 3e8


@dataclass(frozen=True)
class Config:
    """Which models in which scenarios.

    ``batch`` 0 is the paper's; ``layers`` are those of a transformer, 0 as published.
    """

    models: tuple[str, ...] = ("ResNet-101",)
    scenarios: tuple[str, ...] = tuple(paper.SCENARIOS)
    more_models: tuple[str, ...] = ("VGG-16", "MobileNetV3", "T5-base", "Mistral-7B")
    more_scenarios: tuple[str, ...] = ("All", "Input", "Input (BN eval)", "Norm")
    batch: int = 0
    layers: int = 0


@dataclass(frozen=True)
class Case:
    """A model in a scenario."""

    model: str
    scenario: str
    batch: int
    layers: int


def cases(config: Config) -> Iterator[Case]:
    """By model; without the scenarios that make no sense there."""
    scenarios = {
        **dict.fromkeys(config.more_models, config.more_scenarios),
        **dict.fromkeys(config.models, config.scenarios),
    }
    for name in dict.fromkeys((*config.models, *config.more_models)):
        model = paper.MODELS[name]
        with torch.device("meta"):
            step = model.step(config.layers or None)
        for scenario in scenarios[name]:
            if paper.apply(scenario, step):
                yield Case(name, scenario, config.batch or model.batch, config.layers)


def memory(case: Case) -> int:
    """Gradients of the largest models are compared in float64."""
    return 6 << 30


def group(module: nn.Module) -> str | None:
    """That of a layer which has drop-ins, or is one."""
    drop_ins = offered(STOCK.get(type(module), type(module)))
    if not drop_ins:
        return None
    op = ROWS[drop_ins[0]][0].op
    named = (name for name, words in GROUPS.items() if any(word in op for word in words))
    return next(named, "activation")


def groups(model: nn.Module) -> list[str]:
    """Those in which something can be converted, in order."""
    modules = dict(model.named_modules())
    found = {
        group(modules[entry.name])
        for entry in memsave.coverage(model)
        if entry.status == "convertible"
    }
    return [name for name in GROUPS if name in found]


# Measuring.


def measure(case: Case) -> dict[str, Any]:
    """Bytes kept, and the peak, of stock, with each group alone, and with the first groups."""
    warnings.simplefilter("ignore")
    logging.disable()
    with paper.without_values():
        with torch.device("meta"):
            step = paper.MODELS[case.model].step(case.layers or None)
        names = groups(step)
        chosen = {
            "stock": (),
            **{f"alone: {name}": (name,) for name in names},
            **{f"in order: {name}": tuple(names[: k + 1]) for k, name in enumerate(names)},
        }
        measured = {converted: _bytes(case, converted) for converted in set(chosen.values())}
    return {
        "groups": names,
        "bytes": {what: measured[converted] for what, converted in chosen.items()},
        "gradient_difference": _difference(case, [*measured]),
    }


def _convert(step: nn.Module, inputs: tuple[Tensor, ...], converted: Sequence[str]) -> None:
    if converted:
        memsave.convert(step, inputs, filter_fn=lambda module, name: group(module) in converted)


def _bytes(case: Case, converted: Sequence[str]) -> dict[str, int]:
    """Kept, and the peak of a step, with some groups converted."""
    model = paper.MODELS[case.model]
    make, data = partial(model.step, case.layers or None), partial(model.data, case.batch)

    def prepare(step: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        paper.apply(case.scenario, step)
        inputs[0].requires_grad_(paper.SCENARIOS[case.scenario].input)
        _convert(step, inputs, converted)

    with torch.device("meta"):
        step, inputs = make(), data()
    prepare(step, inputs)
    return {
        "kept": memsave.report(step, *inputs).now,
        "peak": count(make, data, prepare).peak,
    }


def _difference(case: Case, conversions: Sequence[Sequence[str]]) -> float | None:
    """The largest of loss and gradients from stock."""
    model = paper.MODELS[case.model]
    with torch.device("meta"):
        size = sum(p.numel() for p in model.step(1).parameters())
    if size > COMPARED:
        return None
    torch.manual_seed(0)
    step = model.step(1).double()
    x, labels = model.data(2, 64 if model.width is None else 16)
    x = x.double().requires_grad_(paper.SCENARIOS[case.scenario].input)
    paper.apply(case.scenario, step)
    wanted = [t for t in (x, *step.parameters()) if t.requires_grad]

    def results(converted: Sequence[str]) -> list[Tensor]:
        _convert(step, (x, labels), converted)
        torch.manual_seed(1)
        loss = step(x, labels)
        gradients = torch.autograd.grad(loss, wanted)
        memsave.revert(step)
        return [loss.detach(), *gradients]

    stock = results(())
    return max(difference(stock, results(converted)) for converted in conversions)


# What is shown.


def ratios(record: Record[Case], what: str, way: str) -> list[float]:
    """To stock, of bytes kept or the peak, by group: each alone, or in order."""
    sizes = record.figures["bytes"]
    names = record.figures["groups"]
    stock = sizes["stock"][what]
    return [sizes[f"{way}: {name}"][what] / stock if stock else 1.0 for name in names]


def show(records: Sequence[Record[Case]]) -> str:
    """A table per model."""
    models = list(dict.fromkeys(record.case.model for record in records))
    return "\n".join(
        _table(model, [record for record in records if record.case.model == model])
        for model in models
    )


def _table(model: str, records: Sequence[Record[Case]]) -> str:
    names = records[0].figures["groups"]
    header = (
        *("gradients wanted", "of", "stock GiB", "converted"),
        *names,
        *("saved by each alone, sum", "saved by all", "gradients"),
    )
    lines = [
        [*_line(record, what, way)]
        for record in records
        for what in ("kept", "peak")
        for way in ("alone", "in order")
    ]
    return f"{model}, batch {records[0].case.batch}:\n\n{table(header, lines)}"


def _line(record: Record[Case], what: str, way: str) -> Iterator[str]:
    first = way == "alone"
    yield record.case.scenario if first and what == "kept" else ""
    yield what if first else ""
    yield gib(record.figures["bytes"]["stock"][what]) if first else ""
    yield way
    of = ratios(record, what, way)
    yield from (f"{ratio:.4f}" for ratio in of)
    yield f"{sum(1 - ratio for ratio in of):.4f}" if first else ""
    yield "" if first else f"{1 - of[-1]:.4f}"
    difference = record.figures["gradient_difference"]
    shown = first and what == "kept" and difference is not None
    yield f"{difference:.1e}" if shown else ""


def summary(records: Sequence[Record[Case]]) -> str:
    """Of the first model: what is kept with one group after the other."""
    first = records[0]
    rows = [
        (record.case.scenario, *(f"{ratio:.3f}" for ratio in ratios(record, "kept", "in order")))
        for record in records
        if record.case.model == first.case.model
    ]
    header = (f"{first.case.model}, bytes kept", *(f"+ {n}" for n in first.figures["groups"]))
    return table(header, rows)


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """What is above stock; more groups that keep more; and other gradients than stock's."""
    for record in records:
        case = f"{record.case.model}, {record.case.scenario}"
        stock = record.figures["bytes"]["stock"]
        for way, sizes in record.figures["bytes"].items():
            for what, size in sizes.items():
                if size > stock[what]:
                    yield f"{case}, {way}: {what} {size / stock[what]:.4f} of stock"
        if record.case.model in EXACT_CHOICE:
            in_order = ratios(record, "kept", "in order")
            pairs = zip(record.figures["groups"][1:], in_order, in_order[1:], strict=False)
            for name, before, after in pairs:
                if after > before:
                    yield f"{case}: keeps more with {name}, {after:.4f} after {before:.4f}"
        difference = record.figures["gradient_difference"]
        if difference is not None and not difference <= ROUNDING:
            yield f"{case}: gradients differ from stock's by {difference:.1e}"


# The figure.


def plot(records: Sequence[Record[Case]]) -> Figure:
    """A panel per model and scenario, waterfalls from stock to all converted."""
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(record.case.model for record in records))
    scenarios = list(dict.fromkeys(record.case.scenario for record in records))
    figure, axes = plt.subplots(
        *(len(models), len(scenarios)),
        figsize=(1 + 2.4 * len(scenarios), 1 + 2.2 * len(models)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for record in records:
        place = models.index(record.case.model), scenarios.index(record.case.scenario)
        _waterfall(axes[place], record)
    figure.suptitle(
        "bytes kept, ratio to stock: groups converted one after the other (bars: what each takes "
        "away), each alone (marks)"
    )
    return figure


def _waterfall(axis: Axes, record: Record[Case]) -> None:
    names = record.figures["groups"]
    after, alone = (ratios(record, "kept", way) for way in ("in order", "alone"))
    before = [1.0, *after[:-1]]
    for place, (high, low) in enumerate(zip(before, after, strict=True)):
        axis.bar(place, high - low, 0.8, bottom=low, color="tab:green")
        axis.plot([place - 0.4, place + 1.4], [low, low], color="tab:gray", linewidth=0.8)
    axis.bar(len(names), after[-1], 0.8, color="tab:gray")
    axis.plot(range(len(names)), alone, "kx", markersize=5)
    axis.set_axis_on()
    axis.set(title=f"{record.case.model}, {record.case.scenario}", ylim=(0, 1.05))
    axis.title.set_fontsize(8)
    axis.set_xticks(range(len(names) + 1), [*names, "all"], rotation=60, ha="right", fontsize=7)


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(("ResNet-18",), ("Input (BN eval)",), ("T5-base",), ("Norm",), 2, 1),
        "quick": Config(
            *(("ResNet-18",), ("Input (BN eval)",), ("Mistral-7B",), ("Norm",)), layers=2
        ),
        "default": Config(),
    },
    choices=paper.CHOICES | {"more_models": paper.MODELS, "more_scenarios": paper.SCENARIOS},
    libraries=("torchvision",),
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    plot=plot,
    summary=summary,
    memory=memory,
    exact=True,
    accelerator=False,
)
