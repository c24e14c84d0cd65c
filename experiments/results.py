"""Results on disk: one JSON-lines file per experiment, and the finished cases of a run under way.

In the file, a line with settings (versions, device, size, options, command) stands before the cases
that were measured with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

Case = TypeVar("Case")
FOLDER = Path(__file__).parent / "results"
PACKAGES = ("memsave", "memsave_jax")
SOURCES = (".py", ".c", ".cpp", ".h")


@dataclass(frozen=True)
class Record(Generic[Case]):
    """A case, its figures, and the settings they were measured with."""

    case: Case
    figures: dict[str, Any]
    settings: dict[str, Any]


Plain = Record[dict[str, Any]]


LIBRARIES = {"torch": ("torch", "transformers"), "jax": ("jax", "jaxlib", "flax")}


def settings(
    backend: str, accelerator: bool = True, libraries: Sequence[str] = ()
) -> dict[str, Any]:
    """Versions, device, threads and kernels that a result is taken with, and of which source.

    Args:
        backend: "torch" or "jax".
        accelerator: Whether it is measured on one where there is one.
        libraries: Others that have a part in it.
    """
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in (*LIBRARIES[backend], *libraries)},
        "device": device(backend) if accelerator else platform.machine(),
        "processor": processor(),
        "threads": threads(backend),
        **({"kernels": _kernels()} if backend == "torch" else {}),
        "source": _source(),
    }


def threads(backend: str) -> int:
    """How many the CPU's operations have: by default one for each processor of the process."""
    affinity = getattr(os, "sched_getaffinity", None)
    usual = os.cpu_count() or 1 if affinity is None else len(affinity(0))
    return int(os.environ.get("OMP_NUM_THREADS", usual)) if backend == "torch" else usual


def _kernels() -> str:
    """Which of memsave's kernels are there: what was compiled when it was installed."""
    from memsave import kernels

    names = [module.__name__.rpartition(".")[2] for module in kernels.IMPLEMENTATIONS]
    return "+".join([*names, *["nodes"] * (kernels.nodes is not None)]) or "none"


def state() -> dict[str, str]:
    """The day, and the commit that is checked out, with a plus where code differs from it."""
    return {"date": datetime.now(UTC).date().isoformat(), "commit": _commit()}


@cache
def _commit() -> str:
    root = Path(__file__).parents[1]

    def git(*words: str) -> str:
        with suppress(OSError):  # no git
            done = subprocess.run(("git", *words), cwd=root, capture_output=True, text=True)
            return done.stdout.strip()
        return ""

    code = (*PACKAGES, ":(glob)experiments/*.py")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(git("status", "-s", "--", *code))


def device(backend: str) -> str:
    """The name of the accelerator, or of the kind of processor."""
    if backend == "jax":
        import jax

        kind = jax.devices()[0].device_kind
        return platform.machine() if kind == "cpu" else kind
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()


def processor() -> str:
    """The model, where the system names it."""
    models = Path("/proc/cpuinfo")
    text = models.read_text() if models.exists() else ""
    found = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


@cache
def _source() -> str:
    """A digest of the library's code: results of another state of it are not gone on with."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((Path(__file__).parents[1] / package).rglob("*")):
            if path.suffix in SOURCES:
                digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def free_memory(accelerator: bool = True) -> int:
    """Bytes that may be taken: of the accelerator where there is one, if it is measured there."""
    import torch

    if accelerator and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    import psutil

    return psutil.virtual_memory().available


# The file of an experiment.


Section = tuple[str, str, str]


def section(record: Record[Any]) -> Section:
    """What is shown in one table: what was measured at one size, by the same options, and where."""
    taken = record.settings
    return taken["size"], taken.get("options", ""), taken["device"]


def read(folder: Path, name: str) -> list[Plain]:
    """All records of an experiment."""
    path = folder / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records, taken = [], {}
    for line in map(json.loads, lines):
        if "settings" in line:
            taken = line["settings"]
        else:
            records.append(Record(line["case"], line["figures"], taken))
    return records


def replace(folder: Path, name: str, fresh: Sequence[Plain], whole: bool) -> None:
    """Put records in the place of older ones of the same section; those of a new one at the end.

    Args:
        whole: Whether these are all cases, so that others are not measured any more.
    """
    if not fresh:
        return

    def place(record: Plain) -> tuple[str, ...]:
        return section(record) if whole else (*section(record), _text(record.case))

    older = read(folder, name)
    if whole:
        places = {place(record) for record in fresh}
        others = [record for record in older if place(record) not in places]
        replaced = (k for k, record in enumerate(older) if place(record) in places)
        at = next(replaced, len(others))  # those before the first stay before it
        records = [*others[:at], *fresh, *others[at:]]
    else:
        new = {place(record): record for record in fresh}
        records = [new.pop(place(record), record) for record in older] + [*new.values()]
    _write(folder / f"{name}.jsonl", "".join(_lines(records)))


def _lines(records: Sequence[Plain]) -> Iterator[str]:
    taken = None
    for record in records:
        if record.settings != taken:
            taken = record.settings
            yield json.dumps({"settings": taken}) + "\n"
        yield json.dumps({"case": record.case, "figures": record.figures}) + "\n"


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _write(path: Path, text: str) -> None:
    """All or nothing, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    new.write_text(text)
    new.replace(path)


# Finished cases, a file each.


@dataclass(frozen=True)
class Parts:
    """The finished cases of a run that is not finished: files in a hidden folder."""

    folder: Path
    name: str
    size: str

    @property
    def path(self) -> Path:
        """The hidden folder."""
        return self.folder / ".parts" / f"{self.name}.{self.size}"

    def _file(self, case: dict[str, Any]) -> Path:
        return self.path / f"{hashlib.sha256(_text(case).encode()).hexdigest()[:24]}.json"

    def write(self, record: Plain, **told: str) -> None:
        """Keep a finished case, and with its settings what else is to be told of it."""
        taken = {**record.settings, "size": self.size, **told}
        line = {"case": record.case, "figures": record.figures, "settings": taken}
        _write(self._file(record.case), json.dumps(line))

    def read(self, case: dict[str, Any]) -> Plain | None:
        """The record of a case, if it is finished."""
        path = self._file(case)
        return Record(**json.loads(path.read_text())) if path.exists() else None

    def forget(self, cases: Iterable[dict[str, Any]]) -> None:
        """Remove the records of these cases. (Others may be of another run that was stopped.)"""
        for case in cases:
            self._file(case).unlink(missing_ok=True)
        with suppress(OSError):  # it is not there, or not empty
            self.path.rmdir()
