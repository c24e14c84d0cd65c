"""Embeddings. PyTorch's own keep the indices, which are free where they are the model's input.

Where nobody else keeps them, a smaller copy is enough.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import kernels, spec
from ..function import Grads, Mask, Saved, Shapes, define
from .module import as_stock, drop_in
from .pooling import OFFSET


def _primal(
    weight: Tensor,
    indices: Tensor,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    return F.embedding(indices, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)


@cache
def _smallest(count: int) -> torch.dtype:
    """Integers that hold so many indices."""
    return OFFSET[spec.offset_bits([count])]


def _fwd(
    wrt: Mask, weight: Tensor, indices: Tensor, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    y = _primal(weight, indices, **options)
    return y, {"ids": indices.to(_smallest(weight.shape[0]))}


def _bwd(
    g: Tensor,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
) -> Grads:
    like = shapes["weight"]
    count = like.shape[0]
    padding = -1 if padding_idx is None else padding_idx % count
    ids = saved["ids"]
    ids = ids if ids.dtype is torch.int64 else ids.int()  # the kernel takes no smaller integers
    embedding_backward = torch.ops.aten.embedding_dense_backward
    return {"weight": embedding_backward(g, ids, count, padding, scale_grad_by_freq)}


def _node(
    row: str,
    wrt: Mask,
    weight: Tensor,
    indices: Tensor,
    *,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
) -> Tensor | None:
    count = weight.shape[0]
    if padding_idx is not None and not -count <= padding_idx < count:
        return None  # stock complains
    padding = -1 if padding_idx is None else padding_idx % count
    options = (_smallest(count), padding, bool(scale_grad_by_freq))
    return kernels.nodes.embedding(row, weight, indices, *options)


_embedding = define(spec.EMBEDDING, _primal)
# Compiled, the indices are an input of the graph, which torch.compile does not copy.
_embedding_compact = define(spec.EMBEDDING_COMPACT, _primal, _bwd, _fwd, compiled=False, node=_node)


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """As :func:`torch.nn.functional.embedding`, which keeps the indices alone.

    Args:
        input: Indices, ``(*)``.
        weight: ``(num_embeddings, embedding_dim)``.
    """
    if sparse is not False or max_norm is not None:
        return F.embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
    return _embedding(weight, input, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq)


as_stock(nn.Embedding, spec.EMBEDDING)


@drop_in(spec.EMBEDDING_COMPACT)
class EmbeddingCompact(nn.Embedding):
    """As :class:`torch.nn.Embedding`. Keeps its indices in the smallest integers that hold them:
    for where they are computed, and nobody else keeps them.

    (With ``sparse`` or ``max_norm`` it is stock.)
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.sparse is not False or self.max_norm is not None:
            return nn.Embedding.forward(self, input)
        return _embedding_compact(
            self.weight,
            input,
            padding_idx=self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )
