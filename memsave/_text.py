"""What converters and reports print, of both packages. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Status = Literal["converted", "convertible", "skipped"]


class Entry(NamedTuple):
    """One layer of a model: its name and class, whether it is converted, and why not."""

    name: str
    layer: str
    status: Status
    reason: str


class Coverage(list[Entry]):
    """What a converter has done, or could do, to each layer of a model. Prints as a table."""

    def __str__(self) -> str:
        lines = []
        for status in ("converted", "convertible", "skipped"):
            entries = [entry for entry in self if entry.status == status]
            groups: dict[tuple[str, str], list[str]] = {}
            for entry in entries:
                groups.setdefault((entry.layer, entry.reason), []).append(entry.name or "(root)")
            lines.append(f"{status}: {len(entries)}")
            for (layer, reason), names in groups.items():
                shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                because = f" - {reason}" if reason else ""
                lines.append(f"  {len(names):4} x {layer}{because}: {shown}")
        return "\n".join(lines)


def human(size: int) -> str:
    """Bytes, in a unit that leaves one to four digits before the point."""
    if abs(size) < 10_000:
        return f"{size} B"
    in_unit, unit = size / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if abs(in_unit) >= 1024:
            in_unit, unit = in_unit / 1024, larger
    return f"{in_unit:.2f} {unit}"


def columns(lines: Sequence[tuple[str, ...]], to_the_right: range) -> Iterator[str]:
    """Lines of cells of one width each; of which columns the cells are numbers."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if k in to_the_right else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
