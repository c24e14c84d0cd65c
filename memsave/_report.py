"""Which layer keeps how many bytes for backward, why, and what converting would save.

The bytes are measured, not estimated: the model runs forward under saved-tensor hooks, by default
on fake tensors, which have shapes and storages but no memory. Beside the measurement stands what
the table predicts; the two agree to the byte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from . import functional
from ._convert import classes_restored, coverage, layers, least, place, revert
from ._dry_run import Trainable, dry_run
from ._functional_mode import outside
from ._text import Coverage, columns, human
from ._trace import KINDS, Trace
from .layers.module import STOCK


@dataclass(frozen=True)
class Row:
    """One layer of the report. All sizes in bytes.

    ``layer`` is its class now and, if that has another name, converted.

    A tensor that several layers keep counts once, at the first: ``stock``, ``now`` and
    ``converted`` add up to the totals. The split shows all that the layer holds now.
    """

    name: str
    layer: str
    mask: tuple[str, ...]
    stock: int
    now: int
    converted: int
    parameters: int
    inputs: int
    shared: int
    owned: int
    reason: str

    @property
    def saves(self) -> int:
        """What converting would save, counted from now."""
        return self.now - self.converted


@dataclass(frozen=True)
class Report:
    """What a model keeps for backward. ``print`` it, or read ``rows``. All sizes in bytes.

    Attributes:
        rows: The layers that keep anything, in the order in which they ran.
        stock, now, converted: Totals: of the stock layers, of the model as it is, and of it
            converted; parameters, buffers and the model's inputs are not counted.
        table: The part of ``converted`` that the table predicts for its layers.
        rest: What holds the other part of ``converted``: bytes by ``"layer class: op"``.
        coverage: Which layers are converted, could be, or are skipped, and why.
    """

    rows: list[Row]
    stock: int
    now: int
    converted: int
    table: int
    rest: dict[str, int]
    coverage: Coverage = field(repr=False)

    def __str__(self) -> str:
        return self.format()

    def format(self, limit: int | None = 30) -> str:
        """The report as text, with the ``limit`` layers that keep most (``None``: all)."""
        largest = sorted(self.rows, key=lambda row: -max(row.stock, row.now, row.converted))
        chosen = set(map(id, largest[:limit]))
        shown = [row for row in self.rows if id(row) in chosen]
        hidden = [row for row in self.rows if id(row) not in chosen]
        lines = [
            ("layer", "class", "wants", *_SIZES, *KINDS, "why"),
            *(
                (
                    row.name or "(root)",
                    row.layer,
                    " ".join(row.mask) or "-",
                    *(human(getattr(row, size)) for size in (*_SIZES, *KINDS)),
                    row.reason,
                )
                for row in shown
            ),
        ]
        if hidden:
            sums = [human(sum(getattr(row, size) for row in hidden)) for size in (*_SIZES, *KINDS)]
            lines.append((f"({len(hidden)} smaller layers)", "", "", *sums, ""))
        totals = [human(getattr(self, size)) for size in ("stock", "now", "converted")]
        totals.append(human(self.now - self.converted))
        lines.append(("total", "", "", *totals, *[""] * len(KINDS), ""))
        return "\n".join([*columns(lines, range(3, len(lines[0]) - 1)), "", *self._summary()])

    def _summary(self) -> Iterator[str]:
        ratio = self.converted / self.stock if self.stock else 1.0
        yield (
            f"stock keeps {human(self.stock)}, now {human(self.now)}, "
            f"converted {human(self.converted)} ({ratio:.4f} of stock)"
        )
        yield (
            f"converted, layers of the table keep {self.converted - sum(self.rest.values()):,} B, "
            f"of which it predicts {self.table:,}"
        )
        for what, size in sorted(self.rest.items(), key=lambda item: -item[1]):
            yield f"the rest: {what} keeps {human(size)}"
        yield str(self.coverage)


_SIZES = ("stock", "now", "converted", "saves")


def report(
    model: nn.Module,
    *inputs: Any,
    trainable: Trainable | None = None,
    fake: bool = True,
    **kwargs: Any,
) -> Report:
    """Report what each layer keeps for backward: stock, now, and converted.

    The model runs forward a few times (as stock, as it is, converted in several ways) in the mode
    it is in (train or eval) and is left as it was. (Meanwhile other tensors stand in for its own,
    so no other thread may use it.) Converted means by ``convert(model, inputs)``: each layer has
    the row with which the model keeps least. The inputs' ``requires_grad`` says whether the
    gradient with respect to them is wanted.

    Args:
        model: Any module, converted or not; real, meta or fake.
        *inputs: Its inputs; real, meta or fake. Only their shapes, dtypes and devices matter.
        trainable: Dry run with other trainable parameters: ``trainable(module, name) -> bool`` gets
            the module that owns a parameter and the parameter's full name. "What would norm-only
            fine-tuning cost?" is ``lambda module, name: isinstance(module, nn.BatchNorm2d)``.
        fake: Run on fake tensors, which take neither memory nor time. ``False`` runs on the
            tensors themselves, for models whose forward depends on values.
        **kwargs: Keyword inputs.

    Raises:
        RuntimeError: The model's forward depends on values, which fake tensors do not have; or it
            may not be recorded (it calls ``torch.func.grad``); or FSDP has taken the model over.
    """
    run = functools.partial(dry_run, model, inputs, kwargs, trainable, fake)
    status = {entry.status for entry in coverage(model)}
    modules = dict(model.named_modules())
    before = {name: type(module) for name, module in modules.items()}
    now = run()
    with classes_restored(model):
        revert(model)
        with outside() as was_inside:
            stock = run() if "converted" in status or was_inside else now
    with classes_restored(model):
        place(least(model, layers(model), run))
        converted = run()
        rows = [
            _row(
                name,
                _classes(before[name], type(modules[name])),
                was_inside or type(modules[name]) in STOCK,
                stock,
                now,
                converted,
            )
            for name in {**stock.kept, **now.kept, **converted.kept}
        ]
    table = {call.module for call in converted.predictions}
    rest: dict[str, int] = {}
    for name, ops in converted.ops.items():
        for op, size in ops.items():
            if size and name not in table:
                what = f"{type(modules[name]).__name__}: {op}"
                rest[what] = rest.get(what, 0) + size
    return Report(
        rows,
        stock.total,
        now.total,
        converted.total,
        sum(converted.predicted.values()),
        rest,
        coverage(model),
    )


def _classes(now: type, converted: type) -> str:
    names = dict.fromkeys(cls.__name__ for cls in (now, converted))
    return " -> ".join(names)


def _row(name: str, layer: str, was_asked: bool, stock: Trace, now: Trace, converted: Trace) -> Row:
    calls = [call for call in converted.predictions if call.module == name]
    kinds = now.kinds.get(name, dict.fromkeys(KINDS, 0))
    if calls:
        reason = "; ".join(dict.fromkeys(call.row.reason(call.wrt) for call in calls))
    else:
        ops = [op for op, size in converted.ops.get(name, {}).items() if size]
        reason = _reason_of_ops(ops, was_asked) or "keeps nothing of its own"
    return Row(
        name,
        layer,
        tuple(dict.fromkeys(arg for call in calls for arg in call.row.reads if arg in call.wrt)),
        stock.kept.get(name, 0),
        now.kept.get(name, 0),
        converted.kept.get(name, 0),
        **kinds,
        reason=reason,
    )


def _reason_of_ops(ops: list[str], was_asked: bool) -> str:
    """Which of torch's functions keep something, that no layer has run (or left to stock)."""
    called = [op for op in ops if op.removesuffix("_") in functional.__all__]
    others = [op for op in ops if op not in called]
    reasons = {
        "stock's, as the row does not cover this call"
        if was_asked
        else "called as functions (see memsave.functional_mode)": called,
        "not in the table": others,
    }
    return "; ".join(f"{why}: {', '.join(names)}" for why, names in reasons.items() if names)
