"""The paper's table: bytes kept and peak memory of a step, per model and scenario, at its sizes.

Exact counts on fake tensors of the whole architectures: needs neither the memory nor a GPU. The
limit is what the table of ``memsave.spec`` says that the layers' gradients read, with what is kept
by layers outside of it. The paper measured the peak of the forward pass on a GPU, with parameters
and data; the last columns are this, counted, and as published. They differ:

- ResNets and EfficientNet, stock: by 0.1 GiB, for cuDNN and the allocator's rounding.
- "Input", "Norm", "Surgical": the paper's code keeps a byte for every element of a ReLU and indices
  of eight bytes for max pooling, where a bit and a byte are enough. In "All" it keeps these
  masks beside the outputs, which the next layer keeps anyway: more than stock.
- EfficientNet has neither: both spare the same.
- T5: attention was computed step by step then and kept its scores; "eager attention" is like this.
  (1.7 GiB of stock we cannot explain; a copy of the logits would have 2.0.)
- Mistral: transformers expanded keys and values to all heads for attention (1.5 GiB more), and
  copied the logits to float32. The paper's code has its RMSNorm, neither the gated layers nor the
  loss.

Where only norms without ReLUs or dropout are left to be changed (ViT, BERT in eval mode), stock
keeps what has to be kept, but for some statistics. ViT's forward peak is 1 % above stock there:
the norms' outputs are kept then instead of their inputs, which live as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memsave

from . import paper
from .counting import count
from .harness import Experiment
from .render import gib, matrix, table
from .results import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Largest ratios to stock: of bytes kept, of the peak of the whole step.
TARGETS = {
    ("ResNet-101", "All"): (0.975, 1.0),
    ("ResNet-101", "Input"): (0.531, 1.0),
    ("ResNet-101", "Input (BN eval)"): (0.0165, 0.12),
    ("ResNet-101", "Norm"): (0.531, 1.0),
    ("ResNet-101", "Surgical"): (0.745, 1.0),
    ("ResNet-101", "SurgicalLast"): (0.60, 1.0),
    ("Mistral-7B", "Norm"): (0.65, 1.0),
    ("Mistral-7B", "Input"): (0.70, 1.0),
}


@dataclass(frozen=True)
class Config:
    """Which models in which scenarios.

    ``batch`` 0 is the paper's; ``layers`` are those of a transformer, 0 as published. ``dropout``:
    models with dropout that the paper has in eval mode also in train mode.
    """

    models: tuple[str, ...] = tuple(paper.MODELS)
    scenarios: tuple[str, ...] = tuple(paper.SCENARIOS)
    batch: int = 0
    layers: int = 0
    dropout: bool = True


@dataclass(frozen=True)
class Case:
    """A model in a scenario."""

    model: str
    scenario: str
    batch: int
    layers: int
    train: bool


def cases(config: Config) -> Iterator[Case]:
    """By model; without the scenarios that make no sense there."""
    for name in config.models:
        model = paper.MODELS[name]
        with FakeTensorMode():
            step = model.step(config.layers or None)
        modes = [True, False] if config.dropout and _drops(step) else [model.train]
        for train, scenario in product(modes, config.scenarios):
            if paper.apply(scenario, step):
                yield Case(name, scenario, config.batch or model.batch, config.layers, train)


def _drops(step: nn.Module) -> bool:
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in step.modules()) and not step.training


def measure(case: Case) -> dict[str, Any]:
    """Bytes kept by stock, converted, and at the limit; and counts of a step of both."""
    model = paper.MODELS[case.model]
    make, data = partial(model.step, case.layers or None), partial(model.data, case.batch)

    def prepare(convert: bool, step: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        step.train(case.train)
        paper.apply(case.scenario, step)
        inputs[0].requires_grad_(paper.SCENARIOS[case.scenario].input)
        if convert:
            memsave.convert(step, inputs)

    with paper.without_values():
        with torch.device("meta"):
            step, inputs = make(), data()
        prepare(False, step, inputs)
        report = memsave.report(step, *inputs)
        stock, ours = (count(make, data, partial(prepare, convert)) for convert in (False, True))
    return {
        "kept_bytes": {
            "stock": report.stock,
            "memsave": report.converted,
            "limit": report.table + sum(report.rest.values()),
        },
        "parameter_bytes": stock.parameters,
        "data_bytes": stock.data,
        "forward_bytes": {"stock": stock.forward, "memsave": ours.forward},
        "peak_bytes": {"stock": stock.peak, "memsave": ours.peak},
        "rest": report.rest,
    }


def _ratios(record: Record[Case]) -> tuple[float, float]:
    """Of bytes kept, and of the peak of a step."""
    sizes = (record.figures[what] for what in ("kept_bytes", "peak_bytes"))
    kept, peak = (size["memsave"] / size["stock"] if size["stock"] else 1.0 for size in sizes)
    return kept, peak


def show(records: Sequence[Record[Case]]) -> str:
    """A row per model and scenario."""
    return table(
        (
            *("model (batch)", "gradients wanted", "kept GiB: stock", "memsave", "limit", "ratio"),
            *("peak of the step GiB: stock", "memsave", "ratio"),
            *("forward peak and all: stock", "memsave", "published stock", "published paper"),
        ),
        map(_line, records),
    )


def _line(record: Record[Case]) -> Iterator[str]:
    case, figures = record.case, record.figures
    yield f"{case.model} ({case.batch}{', train' if not _is_in_papers_mode(case) else ''})"
    yield case.scenario
    kept, peak = _ratios(record)
    yield from (gib(size) for size in figures["kept_bytes"].values())
    yield f"{kept:.4f}"
    yield from (gib(size) for size in figures["peak_bytes"].values())
    yield f"{peak:.4f}"
    around = figures["parameter_bytes"] + figures["data_bytes"]
    yield from (gib(around + size, 2) for size in figures["forward_bytes"].values())
    published = paper.published(case.model, case.scenario)
    shown = published[:2] if published and _is_as_published(case) else ()
    yield from (f"{size:.2f}" for size in shown)
    yield from [""] * (2 - len(shown))


def summary(records: Sequence[Record[Case]]) -> str:
    """Ratios by model and scenario."""
    cells = {}
    for record in records:
        kept, peak = _ratios(record)
        model = f"{record.case.model}{'' if _is_in_papers_mode(record.case) else ', train'}"
        cells[model, record.case.scenario] = f"{kept:.3f}, {peak:.3f}"
    return matrix("kept, peak of the step", cells)


def _is_as_published(case: Case) -> bool:
    full = case.batch == paper.MODELS[case.model].batch and not case.layers
    return full and _is_in_papers_mode(case)


def _is_in_papers_mode(case: Case) -> bool:
    return case.train == paper.MODELS[case.model].train


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """What is above its target, above stock, or not at the limit of the table."""
    for record in records:
        what = f"{record.case.model}, {record.case.scenario}"
        place = (record.case.model, record.case.scenario)
        targets = TARGETS.get(place, (1.0, 1.0)) if _is_as_published(record.case) else (1.0, 1.0)
        for name, ratio, target in zip(("kept", "peak"), _ratios(record), targets, strict=True):
            if ratio > target:
                yield f"{what}: {name} {ratio:.4f} of stock, target {target}"
        kept = record.figures["kept_bytes"]
        if kept["memsave"] != kept["limit"]:
            yield f"{what}: keeps {kept['memsave']} bytes, the table says {kept['limit']}"


def plot(records: Sequence[Record[Case]]) -> Figure:
    """Ratios to stock: a panel per scenario, a pair of bars per model."""
    import matplotlib.pyplot as plt

    records = [record for record in records if _is_in_papers_mode(record.case)]
    models = list(dict.fromkeys(record.case.model for record in records))
    scenarios = list(dict.fromkeys(record.case.scenario for record in records))
    figure, axes = plt.subplots(
        1,
        len(scenarios),
        figsize=(2 + 2 * len(scenarios), 1 + 0.4 * len(models)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, scenario in zip(axes[0], scenarios, strict=True):
        for record in records:
            if record.case.scenario == scenario:
                kept, peak = _ratios(record)
                place = models.index(record.case.model)
                axis.barh(place - 0.2, kept, 0.38, color="tab:green", label="kept")
                axis.barh(place + 0.2, peak, 0.38, color="tab:blue", label="peak of the step")
        axis.axvline(1, color="tab:gray", linewidth=0.8)
        axis.set(title=scenario, yticks=range(len(models)), yticklabels=models, xlim=(0, 1.1))
    axes[0, 0].invert_yaxis()
    figure.legend(*_legend(axes[0, 0]), loc="outside lower center", ncols=2)
    figure.suptitle("memory, ratio to stock PyTorch")
    return figure


def _legend(axis: Any) -> tuple[list[Any], list[str]]:
    handles, labels = axis.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    return [*first.values()], [*first]


SMALL = ("ResNet-18", "ResNet-101", "ViT", "T5-base", "Mistral-7B")
EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(
            ("ResNet-18", "Mistral-7B"), ("Input", "Norm"), batch=2, layers=1, dropout=False
        ),
        "quick": Config(SMALL, layers=2, dropout=False),
        "default": Config(),
    },
    choices=paper.CHOICES,
    libraries=("torchvision",),
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    plot=plot,
    summary=summary,
    exact=True,
    accelerator=False,
)
