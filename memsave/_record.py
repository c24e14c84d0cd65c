"""Recording a forward pass: the tensors that autograd keeps, by layer and op, and what the table
predicts of them.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .function import Call, observe
from .layers.module import OF_RECORDERS
from .spec import Layer


@dataclass(eq=False)
class ModuleCall:
    """A call of a module, and the storages of its inputs and outputs."""

    module: str
    inputs: list[int]
    outputs: list[int]


class Place(NamedTuple):
    """Names a tensor alike in every run: an input or output of the n-th call of a module."""

    module: str
    time: int
    port: str
    position: int


@dataclass(eq=False)
class Held:
    """A tensor that autograd keeps, and who keeps it. Lives as long as the graph does."""

    tensor: Tensor
    version: int
    number: int
    call: ModuleCall
    op: str
    is_io: bool = False

    @property
    def module(self) -> str:
        return self.call.module

    @property
    def is_stale(self) -> bool:
        """Whether it has been overwritten since, so that backward will fail."""
        return self.tensor._version != self.version

    @property
    def key(self) -> int:
        return storage_key(self.tensor)

    @property
    def nbytes(self) -> int:
        return sum(part.untyped_storage().nbytes() for part in _parts(self.tensor))


@dataclass(frozen=True)
class Prediction:
    """What the table says of one layer call: bytes by residual, with storages where known."""

    module: str
    row: Layer
    wrt: frozenset[str]
    residuals: tuple[tuple[str, int | None, int], ...]


def storage_key(tensor: Tensor) -> int:
    """Identifies a tensor's storage while it lives; views of one tensor have one key."""
    return _reference(tensor).cdata


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(_parts(tensor)[-1].untyped_storage())


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor itself, or those of which a sparse one is made; the values come last.

    (Of a wrapper of ``torch.func``, those of what it wraps.)
    """
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


class Recorder(TorchFunctionMode):
    """Context manager: records every tensor that autograd saves, by module and op.

    Args:
        model: Whose submodules to attribute tensors to; ``None`` attributes by op only.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self._names = {} if model is None else {m: name for name, m in model.named_modules()}
        self._running = [ModuleCall("", [], [])]
        self._saving: list[list[weakref.ref[Held]]] = [[]]
        self._op = ""
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        self._count = 0
        self._thread = get_ident()
        self._references: list[StorageWeakRef] = []  # so that no address is used twice
        self._stack = ExitStack()
        self.calls: list[ModuleCall] = []
        self.predictions: list[Prediction] = []

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:  # which undoes what there was, if torch refuses one
            # Hooks that are seen would change what is kept: a layer may do without its activation.
            before = register_module_forward_pre_hook(self._enter)
            after = register_module_forward_hook(self._leave, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
            OF_RECORDERS.update((before.id, after.id))
            stack.callback(OF_RECORDERS.difference_update, (before.id, after.id))
            # remove() forgets this one (torch 2.13), and torch.compile would warn of a global hook.
            stack.callback(_global_forward_hooks_with_kwargs.pop, after.id, None)
            stack.enter_context(observe(self._observe))
            stack.enter_context(saved_tensors_hooks(self._pack, lambda held: held.tensor))
            super().__enter__()
            self._stack = stack.pop_all()
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

    def _note(self, values: Any) -> list[int]:
        tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
        references = [_reference(tensor) for tensor in tensors]
        self._references += references
        return [reference.cdata for reference in references]

    def _watches(self, module: nn.Module) -> bool:
        """Whether a call of it is one to record. (Hooks see those of all threads.)"""
        return get_ident() == self._thread and module in self._names

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._watches(module):
            self._running.append(ModuleCall(self._names[module], [], []))
            self.calls.append(self._running[-1])
            self._saving.append([])

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._watches(module):
            return
        while self._running[-1].module != self._names[module]:  # left by an exception
            self._running.pop()
            self._saving.pop()
        call = self._running.pop()
        call.inputs, call.outputs = self._note((args, kwargs)), self._note(output)
        for reference in self._saving.pop():
            held = reference()
            if held is not None:
                held.is_io = held.key in (*call.inputs, *call.outputs)

    def _pack(self, tensor: Tensor) -> Held:
        call = self._running[-1]
        self._count += 1
        # Detached: an output would hold the node that holds it, and the graph would never die.
        held = Held(tensor.detach(), tensor._version, self._count, call, self._op)
        self._held.add(held)
        self._saving[-1].append(weakref.ref(held))
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
        self.predictions.append(Prediction(self._running[-1].module, call.row, call.wrt, residuals))
