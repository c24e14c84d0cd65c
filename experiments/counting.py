"""Exact counts of a step's memory without the memory: on fake tensors, storage by storage."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Context manager: bytes of the storages that ops make, while they live.

    Layers run by their reference kernels there (those of the CPU need less, for max pooling).
    What a kernel allocates inside and frees again (oneDNN's and cuDNN's workspaces) is not seen.

    Attributes:
        now, peak: Bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        outside = {_key(value) for value in given if isinstance(value, Tensor)} - self._known
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and _key(value) not in outside:
                self._note(value)
        return result

    def _note(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._known:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Counts(NamedTuple):
    """Bytes: of parameters and buffers, of the data, and what a step takes beyond them.

    ``forward`` and ``peak`` are the largest at any time, in the forward pass and in all of the step
    (which includes the gradients).
    """

    parameters: int
    data: int
    forward: int
    peak: int


def count(
    make: Callable[[], nn.Module],
    data: Callable[[], tuple[Tensor, ...]],
    prepare: Callable[[nn.Module, tuple[Tensor, ...]], Any],
) -> Counts:
    """Count the bytes of one forward and backward pass.

    Args:
        make: Makes the model, on fake tensors; its output is the loss.
        data: Makes its inputs.
        prepare: Says which gradients are wanted, and converts the model.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = make(), data()
        prepare(model, inputs)
        with LiveBytes() as live:
            loss = model(*inputs)
            forward = live.peak
            if loss.requires_grad:
                loss.backward()
            del loss
    state = {_key(t): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    return Counts(
        sum(state.values()),
        sum(x.untyped_storage().nbytes() for x in inputs),
        forward,
        live.peak,
    )
