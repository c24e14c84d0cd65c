"""Which layer keeps how many bytes for backward, why, and what converting would save.

The bytes are measured, not estimated: the model runs forward under saved-tensor hooks, by default
on fake tensors, which have shapes and storages but no memory. Beside the measurement stands what
the table predicts; the two agree to the byte.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ._convert import Coverage, convert, coverage, revert
from .function import Call, observe
from .spec import Layer

Trainable = Callable[[nn.Module, str], bool]
#: What fake tensors raise where an op depends on values.
_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


# Recording one forward pass.


@dataclass(eq=False)
class Held:
    """A tensor that autograd keeps, and who keeps it. Lives as long as the graph does."""

    tensor: Tensor
    number: int
    module: str
    op: str
    is_io: bool

    @property
    def key(self) -> int:
        return storage_key(self.tensor)

    @property
    def nbytes(self) -> int:
        return self.tensor.untyped_storage().nbytes()


@dataclass(frozen=True)
class Prediction:
    """What the table says of one layer call: bytes by residual, with storages where known."""

    module: str
    row: Layer
    wrt: frozenset[str]
    residuals: tuple[tuple[str, int | None, int], ...]


def storage_key(tensor: Tensor) -> int:
    """Identifies a tensor's storage while it lives; views of one tensor have one key."""
    return StorageWeakRef(tensor.untyped_storage()).cdata


class Frame(NamedTuple):
    """A module that is running: the storages of its inputs and what it has saved."""

    module: str
    inputs: set[int]
    held: list[weakref.ref[Held]]


class Recorder(TorchFunctionMode):
    """Context manager: records every tensor that autograd saves, by module and op.

    Args:
        model: Whose submodules to attribute tensors to; ``None`` attributes by op only.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self._names = {} if model is None else {m: name for name, m in model.named_modules()}
        self._frames = [Frame("", set(), [])]
        self._op = ""
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        self._count = 0
        self._references: list[StorageWeakRef] = []  # so that no address is used twice
        self._stack = ExitStack()
        self.predictions: list[Prediction] = []

    def __enter__(self) -> Recorder:
        for module in self._names:
            before = module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        self._stack.enter_context(observe(self._observe))
        self._stack.enter_context(saved_tensors_hooks(self._pack, lambda held: held.tensor))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self._op = self._op, func.__name__ if self._op == "" else self._op
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._op = outer

    def held(self) -> list[Held]:
        """What the graph holds now, in the order in which it was saved."""
        return sorted(self._held, key=lambda held: held.number)

    def _note(self, values: Any) -> set[int]:
        tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
        references = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._references += references
        return {reference.cdata for reference in references}

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._frames.append(Frame(self._names[module], self._note((args, kwargs)), []))

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        frame = self._frames.pop()
        outputs = self._note(output)
        for reference in frame.held:
            held = reference()
            if held is not None:
                held.is_io |= held.key in outputs

    def _pack(self, tensor: Tensor) -> Held:
        frame = self._frames[-1]
        is_input = storage_key(tensor) in frame.inputs
        self._count += 1
        # Detached: an output would hold the node that holds it, and the graph would never die.
        held = Held(tensor.detach(), self._count, frame.module, self._op, is_input)
        self._held.add(held)
        frame.held.append(weakref.ref(held))
        return held

    def _observe(self, call: Call) -> None:
        arrays = {name: array for name, array in call.arrays.items() if array is not None}
        bits = call.row.saved_bits(
            call.wrt,
            {name: tuple(array.shape) for name, array in arrays.items()},
            {name: array.itemsize * 8 for name, array in arrays.items()},
            call.options,
        )
        residuals = tuple(
            (name, None if name in call.row.extras else storage_key(arrays[name]), size // 8)
            for name, size in bits.items()
        )
        self.predictions.append(Prediction(self._frames[-1].module, call.row, call.wrt, residuals))


# A model's state for a dry run.


def _dry_state(
    model: nn.Module, trainable: Trainable | None, fake: FakeTensorMode | None
) -> dict[str, Tensor]:
    """Stand-ins for parameters and buffers, with the wanted ``requires_grad``."""
    modules = dict(model.named_modules(remove_duplicate=False))
    state: dict[str, Tensor] = {}
    made: dict[Tensor, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = modules[name.rpartition(".")[0]]
        wanted = parameter.requires_grad if trainable is None else trainable(owner, name)
        if parameter not in made:
            made[parameter] = _stand_in(parameter, fake, copy=False).requires_grad_(wanted)
        elif wanted:
            made[parameter].requires_grad_()
        state[name] = made[parameter]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer not in made:
            made[buffer] = _stand_in(buffer, fake, copy=True)
        state[name] = made[buffer]
    return state


def _stand_in(tensor: Tensor, fake: FakeTensorMode | None, *, copy: bool) -> Tensor:
    if fake is None:
        return tensor.detach().clone() if copy else tensor.detach()
    # A meta tensor has no device of its own; any serves.
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _run(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    trainable: Trainable | None,
    fake: bool,
) -> Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    state = _dry_state(model, trainable, mode)

    def stand_in(tensor: Tensor) -> Tensor:
        return _stand_in(tensor, mode, copy=False).requires_grad_(tensor.requires_grad)

    inputs, kwargs = tree_map_only(Tensor, stand_in, (inputs, kwargs))
    with torch.random.fork_rng(enabled=not fake), torch.enable_grad(), Recorder(model) as recorder:
        try:
            with mode or nullcontext():
                output = torch.func.functional_call(model, state, inputs, kwargs)
        except _NEEDS_VALUES as error:
            raise RuntimeError(
                "the model's forward depends on values, which fake tensors do not have; "
                "memsave.report(..., fake=False) runs it on the real ones"
            ) from error
    free = {storage_key(tensor) for tensor in state.values()}
    given = {
        storage_key(value) for value in tree_leaves((inputs, kwargs)) if isinstance(value, Tensor)
    }
    trace = Trace(recorder.held(), recorder.predictions, free, given)
    del output
    return trace


class Trace:
    """What one forward pass keeps: per layer, in total, and as the table predicts it."""

    def __init__(
        self,
        held: list[Held],
        predictions: list[Prediction],
        parameters: set[int],
        inputs: set[int],
    ) -> None:
        self.predictions = predictions
        #: Bytes by layer, each storage counted once, at the first layer that keeps it.
        self.kept: dict[str, int] = {}
        #: All that a layer holds, by kind, whoever else holds it.
        self.kinds: dict[str, dict[str, int]] = {}
        self.ops: dict[str, dict[str, int]] = {}
        seen: set[int] = set()
        per_layer: set[tuple[str, int]] = set()
        for item in held:
            key, size, name = item.key, item.nbytes, item.module
            first = key not in seen and key not in parameters and key not in inputs
            self.kept[name] = self.kept.get(name, 0) + first * size
            ops = self.ops.setdefault(name, {})
            ops[item.op] = ops.get(item.op, 0) + first * size
            seen.add(key)
            if (name, key) in per_layer:
                continue
            per_layer.add((name, key))
            kinds = self.kinds.setdefault(name, dict.fromkeys(KINDS, 0))
            kinds[_kind(item, parameters, inputs)] += size
        self.total = sum(self.kept.values())
        self.predicted = _predict(predictions, parameters | inputs)


KINDS = ("parameters", "inputs", "shared", "owned")


def _kind(item: Held, parameters: set[int], inputs: set[int]) -> str:
    if item.key in parameters:
        return "parameters"
    if item.key in inputs:
        return "inputs"
    return "shared" if item.is_io else "owned"


def _predict(predictions: list[Prediction], free: set[int]) -> dict[str, int]:
    """Bytes by layer that the table predicts, each storage counted once."""
    seen = set(free)
    predicted: dict[str, int] = {}
    for call in predictions:
        for _, key, size in call.residuals:
            if key is None or key not in seen:
                predicted[call.module] = predicted.get(call.module, 0) + size
            if key is not None:
                seen.add(key)
    return predicted


# The report.


@dataclass(frozen=True)
class Row:
    """One layer of the report. All sizes in bytes.

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
                    *(_human(getattr(row, size)) for size in (*_SIZES, *KINDS)),
                    row.reason,
                )
                for row in shown
            ),
        ]
        if hidden:
            sums = [_human(sum(getattr(row, size) for row in hidden)) for size in (*_SIZES, *KINDS)]
            lines.append((f"({len(hidden)} smaller layers)", "", "", *sums, ""))
        totals = [_human(getattr(self, size)) for size in ("stock", "now", "converted")]
        totals.append(_human(self.now - self.converted))
        lines.append(("total", "", "", *totals, *[""] * len(KINDS), ""))
        return "\n".join([*_columns(lines), "", *self._summary()])

    def _summary(self) -> Iterator[str]:
        ratio = self.converted / self.stock if self.stock else 1.0
        yield (
            f"stock keeps {_human(self.stock)}, now {_human(self.now)}, "
            f"converted {_human(self.converted)} ({ratio:.4f} of stock)"
        )
        yield (
            f"of the converted bytes the table predicts {self.table:,} of "
            f"{self.converted - sum(self.rest.values()):,}"
        )
        for what, size in sorted(self.rest.items(), key=lambda item: -item[1]):
            yield f"the rest: {what} keeps {_human(size)}"
        yield str(self.coverage)


_SIZES = ("stock", "now", "converted", "saves")


def _human(size: int) -> str:
    """Bytes, in a unit that leaves one to four digits before the point."""
    if abs(size) < 10_000:
        return f"{size} B"
    for unit in ("KiB", "MiB", "GiB"):
        size_in_unit = size / 1024 ** (1 + ("KiB", "MiB", "GiB").index(unit))
        if abs(size_in_unit) < 1024 or unit == "GiB":
            break
    return f"{size_in_unit:.2f} {unit}"


def _columns(lines: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [
            cell.rjust(width) if 3 <= k < len(line) - 1 else cell.ljust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def report(
    model: nn.Module,
    *inputs: Any,
    trainable: Trainable | None = None,
    fake: bool = True,
    **kwargs: Any,
) -> Report:
    """Report what each layer keeps for backward: stock, now, and converted.

    The model runs forward up to three times (as stock, as it is, converted) in the mode it is in
    (train or eval) and is left as it was. The inputs' ``requires_grad`` says whether the gradient
    with respect to them is wanted.

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
        RuntimeError: The model's forward depends on values, which fake tensors do not have.
    """
    run = functools.partial(_run, model, inputs, kwargs, trainable, fake)
    status = {entry.status for entry in coverage(model)}
    modules = dict(model.named_modules())
    now = run()
    with _classes_restored(model):
        stock = _with(revert, model, run) if "converted" in status else now
    with _classes_restored(model):
        converted = _with(convert, model, run) if "convertible" in status else now
        rows = [
            _row(name, modules, stock, now, converted)
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


def _with(change: Callable[[nn.Module], nn.Module], model: nn.Module, run: Callable[[], Trace]):
    change(model)
    return run()


@contextmanager
def _classes_restored(model: nn.Module) -> Iterator[None]:
    classes = [(module, module.__class__) for module in model.modules()]
    try:
        yield
    finally:
        for module, cls in classes:
            module.__class__ = cls


def _row(
    name: str, modules: Mapping[str, nn.Module], stock: Trace, now: Trace, converted: Trace
) -> Row:
    calls = [call for call in converted.predictions if call.module == name]
    kinds = now.kinds.get(name, dict.fromkeys(KINDS, 0))
    if calls:
        reason = "; ".join(dict.fromkeys(call.row.reason(call.wrt) for call in calls))
    else:
        ops = [op for op, size in converted.ops.get(name, {}).items() if size]
        reason = f"not in the table: {', '.join(ops)}" if ops else "keeps nothing of its own"
    return Row(
        name,
        type(modules[name]).__name__,
        tuple(dict.fromkeys(arg for call in calls for arg in call.row.reads if arg in call.wrt)),
        stock.kept.get(name, 0),
        now.kept.get(name, 0),
        converted.kept.get(name, 0),
        **kinds,
        reason=reason,
    )
