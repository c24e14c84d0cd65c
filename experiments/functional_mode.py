"""What ``memsave.functional_mode`` costs: time of a torch call, and of a step of a ResNet.

The ResNet calls functions for all that has no parameters. With the mode and without alternate in
one process, from the same seed; the last column is the largest difference of the loss, and of the
gradients relative to the largest element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memsave
from memsave import functional

from .harness import Experiment
from .measure import best_device, compare, difference
from .render import quartiles, table
from .results import Record

CALLS = 1000
TRAINED, FROZEN = "ResNet, all trainable", "ResNet, input gradient"
ROUNDING = 1e-5


@dataclass(frozen=True)
class Config:
    """Images of ``size`` pixels in a batch, and how often each is timed."""

    batch: int = 16
    size: int = 64
    repeats: int = 31


@dataclass(frozen=True)
class Case:
    """A torch call, or a step of a model."""

    what: str
    batch: int
    size: int
    repeats: int


def cases(config: Config) -> Iterator[Case]:
    """Calls, then steps."""
    for what in (*CALLED, TRAINED, FROZEN):
        yield Case(what, config.batch, config.size, config.repeats)


class Block(nn.Module):
    """A residual block that calls functions for all that has no parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Eight blocks; input ``(n, 3, h, w)``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        widths = (32, 32, 64, 128, 256)
        self.blocks = nn.ModuleList(
            block
            for i, o in pairwise(widths)
            for block in (Block(i, o, 1 if i == o else 2), Block(o, o, 1))
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1), 0.1, self.training))


#: Calls upon a small tensor, and one that wants a gradient, so that most of their time is Python's.
CALLED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "torch.add, which it leaves alone": lambda x, wanted: torch.add(x, x),
    "x.shape": lambda x, wanted: x.shape,
    "F.relu without a gradient": lambda x, wanted: F.relu(x),
    "F.relu": lambda x, wanted: F.relu(wanted),
    "memsave.functional.relu": lambda x, wanted: functional.relu(wanted),
}


def measure(case: Case) -> dict[str, Any]:
    """Times without the mode ("stock") and with it; of a step, also how far they are apart."""
    torch.manual_seed(0)
    device = best_device()
    if case.what in CALLED:
        call = CALLED[case.what]
        x, wanted = torch.randn(4).to(device), torch.randn(4).to(device).requires_grad_()
        return _times(lambda: call(x, wanted), case.repeats, CALLS)
    model = ResNet().to(device).requires_grad_(case.what == TRAINED)
    x = torch.randn(case.batch, 3, case.size, case.size, device=device)
    step = Step(model, x.requires_grad_(case.what == FROZEN))
    (loss, stock), (other, ours) = (_under(mode, step.results)() for mode in (False, True))
    return {
        **_times(step, case.repeats, 1),
        "loss_off": abs(loss - other),
        "gradient_off": difference(stock, ours),
    }


class Step:
    """A step of the ResNet, always from the same seed."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        self.labels = torch.randint(10, x.shape[:1], device=x.device)

    def __call__(self) -> Tensor:
        """One forward and backward pass; returns the loss."""
        torch.manual_seed(1)
        self.model.zero_grad()
        self.x.grad = None
        loss = F.cross_entropy(self.model(self.x), self.labels)
        loss.backward()
        return loss

    def results(self) -> tuple[float, list[Tensor]]:
        """The loss, and all gradients."""
        loss = self().item()
        leaves = (*self.model.parameters(), self.x)
        return loss, [leaf.grad for leaf in leaves if leaf.grad is not None]


def _times(function: Callable[[], Any], repeats: int, calls: int) -> dict[str, Any]:
    steps = {"stock": _under(False, function, calls), "mode": _under(True, function, calls)}
    times = compare(steps, repeats)
    return {"times": {name: {**of, "seconds": of["seconds"] / calls} for name, of in times.items()}}


def _under(mode: bool, function: Callable[[], Any], calls: int = 1) -> Callable[[], Any]:
    def run() -> Any:
        with memsave.functional_mode() if mode else nullcontext():
            for _ in range(calls - 1):
                function()
            return function()

    return run


def show(records: Sequence[Record[Case]]) -> str:
    """A row per call, in microseconds, and per step of the ResNet, in milliseconds."""
    return table(
        ("", "without", "with", "ratio", "quartiles", "off by"),
        map(_cells, records),
    )


def _cells(record: Record[Case]) -> tuple[str, ...]:
    times, is_call = record.figures["times"], record.case.what in CALLED
    scale, unit = (1e6, "us") if is_call else (1e3, "ms")
    return (
        record.case.what,
        *(f"{of['seconds'] * scale:.2f} {unit}" for of in times.values()),
        f"{times['mode']['ratio']:.3f}",
        quartiles(times["mode"]),
        "" if is_call else f"{_off(record):.0e}",
    )


def _off(record: Record[Case]) -> float:
    return max(record.figures.get(name, 0.0) for name in ("loss_off", "gradient_off"))


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Losses or gradients that are not those without the mode."""
    for record in records:
        if _off(record) > ROUNDING:
            yield f"{record.case.what}: loss or gradients are off by {_off(record):g}"


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(batch=2, size=32, repeats=3),
        "quick": Config(repeats=9),
        "default": Config(),
    },
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
)
