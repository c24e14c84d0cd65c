"""Squares, as an experiment: what the tests of the harness run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch  # as every experiment does, so that the processes of cases need not

from experiments.harness import Experiment
from experiments.render import table
from experiments.results import Record


@dataclass(frozen=True)
class Config:
    """Numbers, and a folder in which a file ``2 raises`` or ``2 dies`` makes the second fail."""

    numbers: tuple[int, ...] = (1, 2, 3)
    folder: str = ""
    gib: float = 0.0
    unused: int = 0


@dataclass(frozen=True)
class Case:
    """A number."""

    number: int
    folder: str
    gib: float


def cases(config: Config) -> Iterator[Case]:
    """One per number."""
    return (Case(number, config.folder, config.gib) for number in config.numbers)


def measure(case: Case) -> dict[str, Any]:
    """The square, and the process. A file says how a case fails."""
    for path in Path(case.folder).glob(f"{case.number} *") if case.folder else ():
        if path.name.endswith("dies"):
            os._exit(1)
        raise ValueError(f"no square of {case.number}")
    return {"square": torch.tensor(case.number).square().item(), "process": os.getpid()}


def show(records: Sequence[Record[Case]]) -> str:
    """A row per number."""
    rows = [(str(r.case.number), str(r.figures["square"])) for r in records]
    return table(("number", "square"), rows)


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Squares above 100."""
    return (f"{r.case.number}" for r in records if r.figures["square"] > 100)


def plot(records: Sequence[Record[Case]]) -> Any:
    """A curve."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([r.figures["square"] for r in records])
    return figure


EXPERIMENT = Experiment(
    sizes={"quick": Config((4,)), "default": Config()},
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    plot=plot,
    libraries=("tyro",),
    choices={"numbers": range(1000)},
    memory=lambda case: int(case.gib * 2**30),
    exact=True,
)
