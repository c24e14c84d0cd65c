"""Bit packing: one bit per element, in the storage order of the tensor that the bits describe.

One interface, whatever computes it: :func:`pack` and :func:`unpack`. The reference in plain torch
(:mod:`memsave.kernels.reference`) runs everywhere.
"""

from .reference import pack, unpack

__all__ = ["pack", "unpack"]
