"""What results look like: Markdown tables, plots, and the page that shows all of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import results
from .harness import Experiment
from .results import Record, Section

PAGE = "README.md"
#: A name of stock where it is taken twice in each turn: what its ratio to itself is off 1 is noise.
AGAIN = "stock again"


def table(header: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [[cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in lines]
    cells.insert(1, ["-" * width for width in widths])
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def matrix(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    """A Markdown table of cells by the names of their rows and columns, each in order."""
    rows, columns = (dict.fromkeys(place[axis] for place in cells) for axis in (0, 1))
    lines = [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    return table((corner, *columns), lines)


def gib(size: float, digits: int = 3) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:.{digits}f}"


def mib(size: float, digits: int = 1) -> str:
    """Bytes in MiB."""
    return f"{size / 2**20:.{digits}f}"


def quartiles(times: Mapping[str, Any]) -> str:
    """Of what :func:`experiments.measure.compare` says of a step, from the lower to the upper."""
    return " to ".join(f"{ratio:.3f}" for ratio in times["quartiles"])


def noise(times: Mapping[str, Any]) -> Iterator[str]:
    """Two cells: the ratio of stock to itself, and its quartiles; empty where it was not taken."""
    yield f"{times[AGAIN]['ratio']:.3f}" if AGAIN in times else ""
    yield quartiles(times[AGAIN]) if AGAIN in times else ""


def range_of_noise(all_times: Iterable[Mapping[str, Any]]) -> str:
    """From the least to the largest ratio of stock to itself, in medians."""
    ratios = [times[AGAIN]["ratio"] for times in all_times if AGAIN in times]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""


def sections(experiment: Experiment[Any, Any], folder: Path) -> dict[Section, list[Record]]:
    """The records of an experiment by size, options and device."""
    found: dict[Section, list[Record]] = {}
    for record in experiment.typed(results.read(folder, experiment.name)):
        found.setdefault(results.section(record), []).append(record)
    return found


def plot(experiment: Experiment[Any, Any], folder: Path) -> list[Path]:
    """Save the figures of an experiment, one per section."""
    if experiment.plot is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    paths = []
    for key, records in sections(experiment, folder).items():
        paths.append(folder / _image(experiment.name, key))
        experiment.plot(records).savefig(paths[-1], dpi=100)
    return paths


def _name(key: Section) -> str:
    """Of a section."""
    size, options, device = key
    return f"{size} {options}".rstrip() + f", on {device}"


def _image(name: str, key: Section) -> str:
    size, options, device = key
    words = [name, *[size] * (size != "default"), *options.split(), device]
    text = "-".join(word.strip("-") for word in words if word != "x86_64")
    return re.sub(r"[^\w.-]+", "_", text) + ".png"


def page(experiments: Iterable[Experiment[Any, Any]], folder: Path) -> Path:
    """Write the page with the tables and plots of all results."""
    text = ["# Results", "Made by `python -m experiments plot` from the files in this folder."]
    for experiment in experiments:
        found = sections(experiment, folder)
        if found:
            doc = sys.modules[experiment.measure.__module__].__doc__ or ""
            text += [f"## {experiment.name}", doc]
        for key, records in found.items():
            text += _section(experiment, key, records, folder)
    path = folder / PAGE
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(part.strip("\n") for part in text) + "\n")
    return path


#: In a text: what stands between is made from the results of an experiment at a size.
_BLOCK = re.compile(r"(<!-- results of (\w+)(?:, (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def fill(text: str, experiment: Callable[[str], Experiment[Any, Any]], folder: Path) -> str:
    """A Markdown text with its summaries of results made anew, and the commands under them."""

    def block(found: re.Match[str]) -> str:
        begin, name, size, end = found.groups()
        of = experiment(name)
        measured = {
            key: [record for record in records if of.summarized(record.case)]
            for key, records in sections(of, folder).items()
            if key[0] == (size or "default")
        }
        shown = {key: records for key, records in measured.items() if records}
        parts = []
        for key, records in shown.items():
            parts += [f"Size {_name(key)}:"] if len(shown) > 1 else []
            parts += _summary(of, records)
        return "".join([begin, *(f"\n{part.strip()}\n" for part in parts), "\n", end])

    return _BLOCK.sub(block, text)


def _summary(experiment: Experiment[Any, Any], records: list[Record]) -> Iterable[str]:
    yield (experiment.summary or experiment.table)(records)
    commands = _commands(record.settings["command"] for record in records)
    devices = dict.fromkeys(_device(record) for record in records)
    yield f"({'; '.join(f'`.venv/bin/{c}`' for c in commands)}, on {', '.join(devices)})"


def _commands(given: Iterable[str]) -> Iterable[str]:
    """Of those that measured a table in parts, one for all. (The page has them as they were.)"""
    commands = dict.fromkeys(command.replace(" --again", "") for command in given)
    if len(commands) == 1:
        return commands
    return dict.fromkeys(re.sub(r" --only ('[^']*'|\S+)", "", command) for command in commands)


def _section(
    experiment: Experiment[Any, Any], key: Section, records: list[Record], folder: Path
) -> Iterable[str]:
    if key[:2] != ("default", ""):
        yield f"### {experiment.name}, {_name(key)}"
    for command in dict.fromkeys(record.settings["command"] for record in records):
        yield f"    {command}"
    taken = dict.fromkeys(_versions(record) for record in records)
    yield f"Measured with {'; '.join(taken)}."
    yield experiment.table(records)
    image = _image(experiment.name, key)
    if (folder / image).exists():
        yield f"![{experiment.name}]({image})"


def _versions(record: Record) -> str:
    hidden = ("size", "options", "command", "source", "device", "processor")
    said = [f"{name} {value}" for name, value in record.settings.items() if name not in hidden]
    return f"{', '.join(said)} on {_device(record)}"


def _device(record: Record) -> str:
    model = record.settings.get("processor")  # of which older records do not tell
    return record.settings["device"] + (f" ({model})" if model else "")
