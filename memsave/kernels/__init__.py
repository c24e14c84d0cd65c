"""Passes over memory: bits in the place of tensors, offsets in the place of indices, norms.

Bits are one per element, in the storage order of what they describe.

One interface, whatever computes it. :mod:`memsave.kernels.reference`, in plain torch, runs
everywhere and says what each function is. The others are faster where they apply, and may be
missing: :mod:`memsave.kernels.native` on CPU, which is compiled when the package is installed, and
:mod:`memsave.kernels.cuda`, by Triton. :mod:`memsave.kernels.nodes` is another kind: not passes,
but whole layers, for the engine to call in the place of a rule.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import reference

IMPLEMENTATIONS: list[Any] = []
for _name in ("native", "cuda"):
    try:
        IMPLEMENTATIONS.append(importlib.import_module(f".{_name}", __name__))
    except ImportError:  # not compiled, or for a framework that is not there
        continue

#: Whole layers as autograd functions of C++; ``None`` where they are not compiled for this torch.
nodes: Any = None
with suppress(ImportError):
    nodes = importlib.import_module(".nodes", __name__)


def _fastest(name: str) -> Callable[..., Any]:
    """What the first implementation that applies returns; the reference's where none does."""
    function = getattr(reference, name)
    others = [getattr(one, name) for one in IMPLEMENTATIONS if hasattr(one, name)]

    def kernel(*args: Any) -> Any:
        if not is_dynamo_compiling():
            for other in others:
                result = other(*args)
                if result is not None:
                    return result
        return function(*args)

    kernel.__name__ = kernel.__qualname__ = name
    kernel.__doc__ = function.__doc__
    return kernel


def _question(name: str) -> Callable[..., bool]:
    """What the first implementation that has it answers; no, where none does."""
    answers = [getattr(one, name) for one in IMPLEMENTATIONS if hasattr(one, name)]
    return answers[0] if answers else lambda *tensors: False


#: ``are_arrays(*tensors)``: whether each is surely a plain one, strided and real, or ``None``.
#: (A look at once, where asking for each property costs more than some kernels.)
are_arrays = _question("are_arrays")
#: ``beats_batch_norm(x, copied=False)``: whether ``batch_norm`` is faster than torch's for such an
#: input, or a contiguous copy of it.
beats_batch_norm = _question("beats_batch_norm")
relu = _fastest("relu")
batch_norm = _fastest("batch_norm")
batch_norm_backward = _fastest("batch_norm_backward")
compare = _fastest("compare")
contiguous = _fastest("contiguous")
max_pool = _fastest("max_pool")
norm = _fastest("norm")
select = _fastest("select")
scale = _fastest("scale")
unpool = _fastest("unpool")
pack = _fastest("pack")
piecewise = _fastest("piecewise")
unpack = reference.unpack


def bernoulli(x: Tensor, like: reference.Like, p: float) -> Tensor:
    """As that of the reference."""
    bits = None if nodes is None or is_dynamo_compiling() else nodes.bernoulli(x, p)
    return reference.bernoulli(x, like, p, pack) if bits is None else bits


__all__ = [
    "bernoulli",
    "batch_norm",
    "batch_norm_backward",
    "compare",
    "contiguous",
    "max_pool",
    "norm",
    "pack",
    "piecewise",
    "relu",
    "scale",
    "select",
    "unpack",
    "unpool",
]
