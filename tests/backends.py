"""The backends that every property is checked on. Their classes have the same methods."""

from __future__ import annotations

from jax_backend import Jax
from torch_backend import Torch

TORCH, JAX, JAX_VJP = Torch(), Jax(), Jax("custom_vjp")
BACKENDS = [TORCH, TORCH.in_python(), JAX, JAX_VJP]
