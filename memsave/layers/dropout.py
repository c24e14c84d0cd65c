"""Dropout, ``y = x * kept / (1 - p)``, drawing the same numbers as stock under the same seed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels, spec
from ..function import Grads, Mask, Saved, Shapes, define, is_plain_gradient, outside_of_vmap
from ..kernels.reference import Like
from .module import drop_in


def _primal(x: Tensor, *, p: float, inplace: bool = False) -> Tensor:
    return F.dropout(x, p, True, inplace)


def _fused(x: Tensor, inplace: bool) -> bool:
    """Whether stock uses its fused kernel, which draws other numbers than ``bernoulli_``."""
    return x.device.type in ("cuda", "xpu") and not inplace


def _fwd(
    wrt: Mask, x: Tensor, *, p: float, inplace: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    if _fused(x, inplace):
        y, kept = torch.native_dropout(x, p, True)
        return y, {"kept": kernels.pack(kept, Like.of(y))}
    # On CPU the numbers do not depend on the dtype that they are drawn in; elsewhere they may.
    kept = torch.empty_like(x, dtype=torch.bool if x.device.type == "cpu" else x.dtype)
    kept.bernoulli_(1 - p)
    like = Like.of(x if inplace else kept)
    bits = kernels.pack(kept.bool(), like)
    noise = kernels.unpack(bits, like, 1, x.dtype, over=1 - p)
    return (x.mul_(noise) if inplace else noise.mul_(x)), {"kept": bits}


def _apply(g: Tensor, noise: Tensor) -> Tensor:
    """``g * noise``, in the place of ``noise`` unless it is to be differentiated."""
    return noise.mul_(g) if is_plain_gradient(g) else g * noise


def _bwd(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float, inplace: bool = False
) -> Grads:
    like = shapes["y"]
    assert like is not None
    # The fused kernel multiplies by the rounded reciprocal, the other op divides.
    one, over = (1 / (1 - p), 1) if _fused(g, inplace) else (1, 1 - p)
    return {"x": _apply(g, kernels.unpack(saved["kept"], like, one, g.dtype, over))}


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _fwd_rng(
    wrt: Mask, x: Tensor, *, p: float, inplace: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    state = _generator(x.device).get_state()
    return _primal(x, p=p, inplace=inplace), {"rng_state": state}


def _bwd_rng(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float, inplace: bool = False
) -> Grads:
    like = shapes["x"]
    assert like is not None
    ones = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=g.device).fill_(1)
    generator = _generator(g.device)
    now = generator.get_state()
    generator.set_state(saved["rng_state"])
    try:
        with outside_of_vmap():
            noise = _primal(ones, p=p, inplace=inplace)
    finally:
        generator.set_state(now)
    return {"x": _apply(g, noise)}


# Regenerating the mask draws every random number twice. Where both rows are timed, the row of bits
# is the faster (`python -m experiments run dropout_rows`), so it is the default.
_dropout = define(spec.DROPOUT, _primal, _bwd, _fwd, compiled=False)
_dropout_from_rng = define(spec.DROPOUT_FROM_RNG, _primal, _bwd_rng, _fwd_rng, compiled=False)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.dropout`, with the same random numbers. Keeps one bit per
    element.

    Args:
        input: Any shape and floating dtype; overwritten if ``inplace``.
        p: Probability of an element to be zeroed; a constant factor where it is 0 or 1.
    """
    if training and 0 < p < 1:
        return _dropout(input, p=p, inplace=inplace)
    return F.dropout(input, p, training, inplace)


@drop_in(spec.DROPOUT)
class Dropout(nn.Dropout):
    """As :class:`torch.nn.Dropout`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, self.inplace)


@drop_in(spec.DROPOUT_FROM_RNG)
class DropoutFromRng(nn.Dropout):
    """As :class:`torch.nn.Dropout`. Keeps the state of the random generator alone."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and 0 < self.p < 1:
            return _dropout_from_rng(input, p=self.p, inplace=self.inplace)
        return F.dropout(input, self.p, self.training, self.inplace)
