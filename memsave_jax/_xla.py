"""What XLA is told, so that compiled programs keep what the layers keep, and no more.

XLA decides by itself what of a forward pass a backward pass reads and what it computes again. On a
GPU it computes again what takes little; on a CPU, nearly nothing. (Programs for a GPU can be
compiled without one: ``python -m experiments run flax_programs``.)
"""

from __future__ import annotations

import jax
from jax import Array, lax


def on_gpu() -> bool:
    """Whether programs are compiled for a GPU, as far as can be told where they are traced."""
    device = jax.default_device.value  # a device, or the name of a platform
    platform = getattr(device, "platform", device) or jax.default_backend()
    return platform in ("gpu", "cuda", "rocm")


def as_kept(array: Array, effort: int) -> Array:
    """Behind a barrier, where XLA would otherwise keep, besides it or instead, what is computed
    from it, as that takes too much effort to compute again.

    Elsewhere a barrier would do harm: the array itself would be written out, though XLA would
    compute it, too, again from what was before. What is of two bytes, XLA computes in four, and
    converts.

    Args:
        array: As it was kept.
        effort: 0: arithmetic alone; 1: one exponential, or its like; 2, 3: more.
    """
    most = 2 if on_gpu() else 0
    if effort + (array.dtype.itemsize < 4) <= most:
        return array
    return lax.optimization_barrier(array)
