"""Time and measured peak of a step in the paper's scenarios: memsave and stock PyTorch in turn.

Forward and backward, in one process, in turn; the ratio is the median over pairs, with its
quartiles. Beside it stands that of the stock model, taken twice in each turn, to itself: what it is
off 1 is noise. Kept bytes are those that the allocator has handed out when the forward pass is
done, and not got back; peaks are those over the whole step, beyond what lives before it
(parameters, data): each in a process of its own. Compilers, checkpointing and the paper's code
stand beside in ``other_savers``. Outputs and gradients are compared on the way: the loss has to be
the same to the bit, gradients to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch

import memsave

from . import paper
from .counting import count
from .harness import GIB, Experiment
from .measure import compare, difference, keep_freed_memory, kept_bytes, peak_bytes
from .render import AGAIN, matrix, mib, noise, quartiles, range_of_noise, table
from .results import Record
from .subject import Subject

MODELS = (
    *("ResNet-50", "ResNet-101", "VGG-16", "MobileNetV3", "EfficientNetV2-L", "ConvNeXt"),
    *("ViT", "BERT", "T5-base", "Mistral-7B"),
)
VARIANTS = ("stock", "memsave")
#: Of the whole-step peak, at any size.
PEAK_TARGETS = {("ResNet-101", "Input (BN eval)"): 0.12}


@dataclass(frozen=True)
class Config:
    """Which models in which scenarios, and how often.

    ``batch`` of images, and a ``larger_batch`` for ``small_models``, of which the calls of Python
    take a part that shows; ``short_steps`` vary more, and are taken more often; ``sequences`` of a
    transformer (0: the paper's), one batch or several; ``layers`` those of a transformer (0: as
    published); ``size`` of images in pixels; whether to ``keep_freed`` memory (see measure.py).
    """

    models: tuple[str, ...] = MODELS
    scenarios: tuple[str, ...] = tuple(paper.SCENARIOS)
    batch: int = 4
    small_models: tuple[str, ...] = ("MobileNetV3",)
    larger_batch: int = 32
    short_steps: tuple[str, ...] = ("MobileNetV3", "ViT")
    sequences: tuple[int, ...] = (2,)
    layers: int = 4
    size: int = 224
    repeats: int = 7
    keep_freed: bool = False


@dataclass(frozen=True)
class Case:
    """A model in a scenario, and what is measured: the time of both, or the memory of one."""

    model: str
    scenario: str
    what: str
    batch: int
    layers: int
    size: int
    repeats: int
    keep_freed: bool = False


def cases(config: Config) -> Iterator[Case]:
    """Memory, then times."""
    for name in config.models:
        model = paper.MODELS[name]
        images = model.width is None
        batches = [size or model.batch for size in ([config.batch] if images else config.sequences)]
        if config.batch and name in config.small_models:
            batches.append(config.larger_batch)
        size = config.size if images else paper.SEQUENCE
        with torch.device("meta"):
            step = model.step(1)
        wanted = [scenario for scenario in config.scenarios if paper.apply(scenario, step)]
        for batch, scenario, what in product(batches, wanted, (*VARIANTS, "time")):
            short = name in config.short_steps and batch != config.larger_batch
            repeats = 4 * config.repeats if short else config.repeats
            sizes = batch, config.layers, size, repeats
            yield Case(name, scenario, what, *sizes, config.keep_freed)


def converted(stock: Subject) -> Subject:
    """Of the same parameters and data."""
    ours = stock.again()
    memsave.convert(ours.step, (ours.x, ours.labels))
    return ours


def measure(case: Case) -> dict[str, Any]:
    """What the allocator has handed out after a forward pass, and at most in a step; or the times
    of both in turn.
    """
    if case.keep_freed:
        keep_freed_memory()
    stock = Subject.of(case.model, case.scenario, case.batch, case.layers, case.size)
    if case.what in VARIANTS:
        one = stock if case.what == "stock" else converted(stock)
        device = one.x.device
        return {
            "kept_bytes": kept_bytes(one.forward, device),
            "peak_bytes": peak_bytes(one, device, one.forget),
        }
    ours = converted(stock)
    loss, gradients = stock().item(), stock.gradients()
    other, our_gradients = ours().item(), ours.gradients()
    off = difference(gradients.values(), our_gradients.values())
    del gradients, our_gradients
    steps: dict[str, Callable[[], Any]] = {"stock": stock, "memsave": ours, AGAIN: stock}
    return {
        "times": compare(steps, case.repeats),
        "loss": loss,
        "loss_off": abs(loss - other),
        "gradient_off": off,
    }


@cache
def _bytes(model: str, batch: int, layers: int, size: int) -> int:
    """What a step of stock takes with everything trainable."""
    of = paper.MODELS[model]
    with paper.without_values():
        counts = count(
            lambda: of.step(layers or None),
            lambda: of.data(batch, size),
            lambda step, inputs: paper.apply("All", step),
        )
    return sum((2 * counts.parameters, counts.data, counts.peak))


def memory(case: Case) -> int:
    """With a half more for kernels' own buffers, and a GiB for torch."""
    return _bytes(case.model, case.batch, case.layers, case.size) * 3 // 2 + GIB


def _rows(records: Sequence[Record[Case]]) -> dict[tuple[str, str], dict[str, Record[Case]]]:
    """By model, batch and number of layers where it is cut, and scenario."""
    rows: dict[tuple[str, str], dict[str, Record[Case]]] = {}
    for record in records:
        case = record.case
        cut = paper.MODELS[case.model].said(case.layers)
        rows.setdefault((f"{case.model} ({case.batch}{cut})", case.scenario), {})[case.what] = (
            record
        )
    return rows


def show(records: Sequence[Record[Case]]) -> str:
    """A row per model and scenario."""
    return table(
        (
            *("model (batch)", "gradients wanted", "seconds of stock", "time ratio", "quartiles"),
            *("stock to itself", "quartiles"),
            *("kept MiB: stock", "memsave", "ratio", "peak MiB: stock", "memsave", "ratio"),
            *("published time ratio", "gradients off by"),
        ),
        (_line(name, scenario, row) for (name, scenario), row in _rows(records).items()),
    )


def _line(name: str, scenario: str, row: dict[str, Record[Case]]) -> Iterator[str]:
    yield name
    yield scenario
    if "time" in row:
        times = row["time"].figures["times"]
        yield f"{times['stock']['seconds']:.3f}"
        yield f"{times['memsave']['ratio']:.3f}"
        yield quartiles(times["memsave"])
        yield from noise(times)
    else:
        yield from ("",) * 5
    for what in ("kept_bytes", "peak_bytes"):
        sizes = [row[variant].figures[what] for variant in VARIANTS if variant in row]
        if len(sizes) == 2:
            yield from (mib(size) for size in sizes)
            yield f"{sizes[1] / sizes[0]:.4f}"
        else:
            yield from ("", "", "")
    published = paper.published(next(iter(row.values())).case.model, scenario)
    yield f"{published[3] / published[2]:.3f}" if published else ""
    yield f"{row['time'].figures['gradient_off']:.0e}" if "time" in row else ""


def summary(records: Sequence[Record[Case]]) -> str:
    """Ratios of times by model (batch) and scenario, and of stock's to themselves, from to."""
    times = {
        place: row["time"].figures["times"]
        for place, row in _rows(records).items()
        if "time" in row
    }
    cells = {place: f"{of['memsave']['ratio']:.2f}" for place, of in times.items()}
    for name in {name: None for name, _ in times}:
        of_name = (of for (other, _), of in times.items() if other == name)
        cells[name, "stock to itself"] = range_of_noise(of_name)
    return matrix("time, ratio to stock", cells)


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Peaks above stock's or the target, and losses that differ. (Times are shown, not judged.)"""
    for (name, scenario), row in _rows(records).items():
        what = f"{name}, {scenario}"
        if "time" in row and row["time"].figures["loss_off"] > 0:
            yield f"{what}: the losses differ by {row['time'].figures['loss_off']}"
        if row.keys() >= {*VARIANTS}:
            stock, ours = (row[variant].figures["peak_bytes"] for variant in VARIANTS)
            target = PEAK_TARGETS.get((row["stock"].case.model, scenario), 1.0)
            if ours > target * stock:
                yield f"{what}: peak {ours / stock:.4f} of stock, target {target}"


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(("ResNet-18",), ("Input", "Norm"), batch=2, size=64, repeats=1),
        "quick": Config(
            ("ResNet-50",), ("All", "Input (BN eval)", "Norm"), batch=2, size=128, repeats=3
        ),
        "default": Config(),
        "paper": Config(tuple(paper.MODELS), batch=0, sequences=(0,), layers=0, repeats=15),
    },
    choices=paper.CHOICES,
    libraries=("torchvision",),
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    summary=summary,
    memory=memory,
)
