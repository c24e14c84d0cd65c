"""Dropout, ``y = x * kept / (1 - p)``, drawing the same numbers as stock under the same seed."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import _disable_current_modes

from .. import kernels, spec
from .._context import is_plain, is_plain_gradient, is_recorded, outside_of_vmap
from ..function import Grads, Mask, Saved, Shapes, by_attributes, define
from ..kernels.memory import empty_result
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
    bits, like = _draw(x, 1 - p, inplace)
    return kernels.scale(x, bits, like, _factor(p, x.dtype), 0.0, inplace), {"kept": bits}


def _draw(x: Tensor, p: float, inplace: bool) -> tuple[Tensor, Like]:
    """Bits of what is kept, in the order of the output."""
    like = Like.of(x if inplace else empty_result(x, device="meta"))
    return kernels.bernoulli(x, like, p), like


@lru_cache(maxsize=64)
def _factor(p: float, dtype: torch.dtype) -> float:
    """``1 / (1 - p)``, as torch rounds it."""
    with _disable_current_modes():  # in which tensors may have no values
        return torch.ones((), dtype=dtype, device="cpu").div_(1 - p).item()


def _scale(g: Tensor, bits: Tensor, like: Like, factor: float) -> Tensor:
    """``g * factor`` where a bit is set, else ``g * 0``."""
    if is_plain_gradient(g):
        return kernels.scale(g, bits, like, factor, 0.0)
    return g * kernels.unpack(bits, like, factor, g.dtype)


def _bwd(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float, inplace: bool = False
) -> Grads:
    like = shapes["y"]
    if not _fused(g, inplace):
        return {"x": _scale(g, saved["kept"], like, _factor(p, g.dtype))}
    # The fused kernel multiplies by the reciprocal, in at least float32.
    wide = torch.promote_types(g.dtype, torch.float32)
    return {"x": _scale(g.to(wide), saved["kept"], like, 1 / (1 - p)).to(g.dtype)}


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _fwd_rng(
    wrt: Mask, x: Tensor, *, p: float, inplace: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    default = _generator(x.device)
    if x.device.type != "cpu":
        state = default.get_state()
        return _primal(x, p=p, inplace=inplace), {"rng_state": state}
    # From a generator of its own: between a look at the state and a draw, other threads may draw.
    own = torch.Generator()
    with _ONE_AT_A_TIME:
        state = default.get_state()
        own.set_state(state)
        noise = _noise(x, p, own)
        default.set_state(own.get_state())
    return (x.mul_(noise) if inplace else x * noise), {"rng_state": state}


_ONE_AT_A_TIME = threading.Lock()


def _noise(x: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """What stock multiplies by on CPU."""
    return torch.empty_like(x).bernoulli_(1 - p, generator=generator).div_(1 - p)


def _bwd_rng(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float, inplace: bool = False
) -> Grads:
    like = shapes["x"]
    with outside_of_vmap():
        noise = _noise_again(like, g.device, saved["rng_state"], p, inplace)
    return {"x": noise.mul_(g) if is_plain_gradient(g) else g * noise}


def _noise_again(
    like: Like, device: torch.device, state: Tensor, p: float, inplace: bool
) -> Tensor:
    x = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device)
    if device.type == "cpu":
        own = torch.Generator()
        own.set_state(state)
        return _noise(x, p, own)
    generator = _generator(device)
    now = generator.get_state()
    generator.set_state(state)
    try:
        return _primal(x.fill_(1), p=p, inplace=inplace)
    finally:
        generator.set_state(now)


def _node(
    from_rng: bool, row: str, wrt: Mask, x: Tensor, *, p: float, inplace: bool = False
) -> Tensor | None:
    return kernels.nodes.dropout(row, x, p, True, inplace, from_rng)


# Regenerating the mask draws every random number twice. Where both rows are timed, the row of bits
# is the faster (`python -m experiments run dropout_rows`), so it is the default.
_dropout = define(
    spec.DROPOUT,
    _primal,
    _bwd,
    _fwd,
    compiled=False,
    shapes=("y",),
    node=partial(_node, False),
    draws=True,
)
_dropout_from_rng = define(
    spec.DROPOUT_FROM_RNG,
    _primal,
    _bwd_rng,
    _fwd_rng,
    compiled=False,
    node=partial(_node, True),
    draws=True,
)


#: Of SELU: https://arxiv.org/abs/1706.02515. What is dropped takes this value (negative).
ALPHA = 1.7580993408473766


def _alpha_primal(x: Tensor, *, p: float, inplace: bool = False) -> Tensor:
    return F.alpha_dropout(x, p, True, inplace)


def _alpha_fwd(
    wrt: Mask, x: Tensor, *, p: float, inplace: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    bits, like = _draw(x, 1 - p, inplace)
    factor, kept, dropped = _alpha_constants(p, x.dtype)
    y = kernels.scale(x, bits, like, factor, 0.0, inplace)
    shift = kernels.scale(torch.ones_like(y), bits, like, kept, dropped, True)
    return y.add_(shift), {"kept": bits}


@lru_cache(maxsize=64)
def _alpha_constants(p: float, dtype: torch.dtype) -> tuple[float, ...]:
    """By what is multiplied what is kept; what is added to it, and to what is dropped: as torch
    rounds them.
    """
    scale = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p))
    with _disable_current_modes():  # in which tensors may have no values
        noise = torch.tensor([1, 0], dtype=dtype, device="cpu")
        shifts = noise.add(-1).mul_(ALPHA * scale).add_(ALPHA * scale * p)
        return (noise.mul_(scale)[0].item(), *shifts.tolist())


def _alpha_bwd(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float, inplace: bool = False
) -> Grads:
    like = shapes["y"]
    factor, *_ = _alpha_constants(p, g.dtype)
    return {"x": _scale(g, saved["kept"], like, factor)}


def _feature_primal(x: Tensor, *, p: float, inplace: bool = False) -> Tensor:
    return torch.feature_dropout_(x, p, True) if inplace else torch.feature_dropout(x, p, True)


def _channels(x: Tensor) -> tuple[int, ...]:
    """The shape of one for each channel."""
    return (*x.shape[:2], *[1] * (x.ndim - 2))


def _feature_fwd(
    wrt: Mask, x: Tensor, *, p: float, inplace: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    if x.ndim < 2 and x.numel():
        return _feature_primal(x, p=p, inplace=inplace), {}  # raises stock's error
    # The order of the operations is torch's, for the last bit.
    noise = x.new_empty(_channels(x)).bernoulli_(1 - p).div_(1 - p)
    bits = kernels.compare(noise, Like.of(noise), "above", 0.0, 0.0)
    return (x.mul_(noise) if inplace else x * noise), {"kept": bits}


def _feature_bwd(
    g: Tensor, wrt: Mask, saved: Saved, shapes: Shapes, *, p: float, inplace: bool = False
) -> Grads:
    ones = torch.ones(_channels(g), dtype=g.dtype, device=g.device)
    noise = kernels.scale(ones, saved["kept"], Like.of(ones), _factor(p, g.dtype), 0.0)
    return {"x": g * noise}


def _feature_node(
    row: str, wrt: Mask, x: Tensor, *, p: float, inplace: bool = False
) -> Tensor | None:
    return None if inplace or x.ndim < 2 else kernels.nodes.feature_dropout(row, x, p)


_alpha_dropout = define(
    spec.ALPHA_DROPOUT, _alpha_primal, _alpha_bwd, _alpha_fwd, compiled=False, draws=True
)
_feature_dropout = define(
    spec.FEATURE_DROPOUT,
    _feature_primal,
    _feature_bwd,
    _feature_fwd,
    compiled=False,
    node=_feature_node,
    draws=True,
)


def _has_elements(input: Any) -> bool:
    """Of others, stock says what they are, or returns them."""
    return is_plain(input) and (is_dynamo_compiling() or input.numel() != 0)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """As :func:`torch.nn.functional.dropout`, with the same random numbers. Keeps one bit per
    element.

    Args:
        input: Any shape and floating dtype; overwritten if ``inplace``.
        p: Probability of an element to be zeroed; a constant factor where it is 0 or 1.
    """
    if training is True and 0 < p < 1 and _has_elements(input):
        return _dropout(input, p=p, inplace=inplace)
    return F.dropout(input, p, training, inplace)


def alpha_dropout(
    input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """As :func:`torch.nn.functional.alpha_dropout`, with the same random numbers. Keeps one bit per
    element.
    """
    if training is True and 0 < p < 1 and _has_elements(input):
        return _alpha_dropout(input, p=p, inplace=inplace)
    return F.alpha_dropout(input, p, training, inplace)


def _dropout_nd(dims: int, stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def dropout_nd(
        input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        # (Stock warns of, or reshapes, an input of other dimensions.)
        if training is True and 0 < p < 1 and _has_elements(input) and input.ndim == dims + 2:
            return _feature_dropout(input, p=p, inplace=inplace)
        return stock(input, p, training, inplace)

    name = f"dropout{dims}d"
    dropout_nd.__name__ = dropout_nd.__qualname__ = name
    dropout_nd.__doc__ = f"""As :func:`torch.nn.functional.{name}`, with the same random numbers.
    Keeps one bit per channel.
    """
    return dropout_nd


dropout1d, dropout2d, dropout3d = (
    _dropout_nd(dims, stock)
    for dims, stock in ((1, F.dropout1d), (2, F.dropout2d), (3, F.dropout3d))
)


_dropout_of = by_attributes(spec.DROPOUT, nn.Dropout, "dropout", "p", "training", "inplace", False)


@drop_in(spec.DROPOUT)
class Dropout(nn.Dropout):
    """As :class:`torch.nn.Dropout`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        if (y := _dropout_of(self, input)) is not None:
            return y
        return dropout(input, self.p, self.training, self.inplace)


@drop_in(spec.DROPOUT_FROM_RNG, by_policy=True)
class DropoutFromRng(nn.Dropout):
    """As :class:`torch.nn.Dropout`. Keeps the state of the random generator alone."""

    def forward(self, input: Tensor) -> Tensor:
        # (What is recorded must draw from torch's own generator.)
        if self.training and 0 < self.p < 1 and _has_elements(input) and not is_recorded():
            return _dropout_from_rng(input, p=self.p, inplace=self.inplace)
        return F.dropout(input, self.p, self.training, self.inplace)


@drop_in(spec.ALPHA_DROPOUT)
class AlphaDropout(nn.AlphaDropout):
    """As :class:`torch.nn.AlphaDropout`. Keeps one bit per element."""

    def forward(self, input: Tensor) -> Tensor:
        return alpha_dropout(input, self.p, self.training)


@drop_in(spec.FEATURE_DROPOUT)
class Dropout1d(nn.Dropout1d):
    """As :class:`torch.nn.Dropout1d`. Keeps one bit per channel."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout1d(input, self.p, self.training, self.inplace)


@drop_in(spec.FEATURE_DROPOUT)
class Dropout2d(nn.Dropout2d):
    """As :class:`torch.nn.Dropout2d`. Keeps one bit per channel."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout2d(input, self.p, self.training, self.inplace)


@drop_in(spec.FEATURE_DROPOUT)
class Dropout3d(nn.Dropout3d):
    """As :class:`torch.nn.Dropout3d`. Keeps one bit per channel."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout3d(input, self.p, self.training, self.inplace)
