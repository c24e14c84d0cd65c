"""The two rows of dropout against stock: time of forward + backward, and bytes kept.

One keeps a bit per element, the other the state of the random generator, whose numbers it draws
again in backward. Under the same seed both have to drop what stock drops: outputs and gradients are
compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import memsave

from .harness import Experiment
from .measure import best_device, compare, keep_freed_memory
from .render import AGAIN, quartiles, table
from .results import Record

LAYERS: dict[str, type[nn.Dropout]] = {
    "stock": nn.Dropout,
    "dropout": memsave.nn.Dropout,
    "dropout_from_rng": memsave.nn.DropoutFromRng,
}
P = 0.1


@dataclass(frozen=True)
class Config:
    """Numbers of elements, and how often each layer is timed."""

    elements: tuple[int, ...] = (1 << 14, 1 << 20, 1 << 24)
    repeats: int = 31


@dataclass(frozen=True)
class Case:
    """All rows upon so many elements, in turn."""

    elements: int
    repeats: int


def cases(config: Config) -> Iterator[Case]:
    """By size."""
    for elements in config.elements:
        yield Case(elements, config.repeats)


def measure(case: Case) -> dict[str, Any]:
    """Times, bytes kept, and differences from stock, by row."""
    keep_freed_memory()
    device = best_device()
    x = torch.randn(case.elements, device=device, requires_grad=True)
    g = torch.randn(case.elements, device=device)
    layers = {name: layer(P) for name, layer in LAYERS.items()}
    results = {name: _results(layer, x, g) for name, layer in layers.items()}
    stock, steps = results["stock"], {n: _step(layer, x, g) for n, layer in layers.items()}
    return {
        "kept_bytes": {name: memsave.report(layer, x).now for name, layer in layers.items()},
        "off": {name: max(map(_off, stock, of)) for name, of in results.items()},
        "times": compare({AGAIN: steps["stock"], **steps}, case.repeats),
    }


def _step(layer: nn.Module, x: Tensor, g: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        x.grad = None
        y = layer(x)
        y.backward(g)
        return y.detach()

    return step


def _results(layer: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of x, from the same seed."""
    torch.manual_seed(0)
    y = _step(layer, x, g)()
    assert x.grad is not None
    return y, x.grad


def _off(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def show(records: Sequence[Record[Case]]) -> str:
    """A row per size and row of the table."""
    return table(
        ("elements", "row", "ms", "ratio to stock", "quartiles", "kept bytes", "off by"),
        [_cells(record, name) for record in records for name in record.figures["times"]],
    )


def _cells(record: Record[Case], name: str) -> tuple[str, ...]:
    figures, times = record.figures, record.figures["times"][name]
    return (
        str(record.case.elements),
        name,
        f"{times['seconds'] * 1e3:.3f}",
        f"{times['ratio']:.3f}",
        "" if name == "stock" else quartiles(times),
        str(figures["kept_bytes"][name]) if name in LAYERS else "",
        f"{figures['off'][name]:g}" if name in LAYERS else "",
    )


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Bits that are not a bit per element, and what is not stock's output or gradient."""
    for record in records:
        elements, kept = record.case.elements, record.figures["kept_bytes"]
        if kept["dropout"] != -(-elements // 8):
            yield f"dropout of {elements} elements keeps {kept['dropout']} bytes"
        for name, off in record.figures["off"].items():
            if off:
                yield f"{name} of {elements} elements is off by {off:g}"


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config((1 << 14,), repeats=3),
        "quick": Config(repeats=9),
        "default": Config(),
        "paper": Config((1 << 14, 1 << 20, 1 << 24, 1 << 28)),
    },
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    memory=lambda case: (1 << 30) + 32 * case.elements,
)
