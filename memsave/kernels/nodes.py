"""Whole layers as autograd functions of C++ (csrc/nodes), where they are compiled for this torch.

Each function returns the output of a layer, which has its gradient, or ``None`` where it does not
apply: the layer's rule, in Python, computes the same and keeps the same. They go by operations of
torch's, and by loops: on CPU those of native.c, on CUDA those that cuda.py has Triton compile.
Compiled against one version of torch, whose name it bears, so that no other loads it (README.md).
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from . import native
from .reference import AS_X, SELECTIONS

try:
    from . import cuda
except ImportError:  # no triton
    cuda = None  # type: ignore[assignment]

NAME = "_nodes_" + re.sub(r"\W", "_", torch.__version__)
_nodes = importlib.import_module(f".{NAME}", __package__)
native.check(_nodes)
_native = native._native
#: In this order.
LOOPS_OF_NODES = (
    *SELECTIONS,
    "scale_channels",
    "nonzero",
    "not_inside",
    "rest",
    "tanh2",
    "logistic",
)
_families = tuple(getattr(_native, name) for name in LOOPS_OF_NODES)
_compiled = None if cuda is None else cuda.compiled
for _node in _nodes.connect(_native.loops, _families, DeviceContext, _compiled):
    torch.autograd.graph.Node.register(_node)

#: ``wanted(places, args, casts)``: of the arguments at these places (in order), whose gradients are
#: wanted, as bits of a number; ``None`` if an argument is neither ``None`` nor a plain tensor of
#: the CPU or of a CUDA device, or if anything is on that gives operations another meaning (a mode;
#: autocast, if it ``casts`` on that device: 1 for the CPU, 2 for CUDA; ...).
wanted = _nodes.wanted
#: ``for_stock(parameters, wanted, input, casts, has_bias)``: :func:`memsave.function.for_stock` of
#: the ``__dict__`` of a module, while nobody observes.
for_stock = _nodes.for_stock
#: ``by_attributes(row, module.__dict__, x, call)``: a layer by the attributes of a module; or
#: ``False``, if no gradient is wanted. ``call`` is a function of this file's, the devices on which
#: autocast casts (as above), and what it takes after ``x``: strings are names of attributes, in a
#: tuple of the negative of a number.
by_attributes = _nodes.by_attributes


def bits(row: str, x: Tensor, inplace: bool, name: str, *piece: Any, **also: Any) -> Tensor | None:
    """ReLU, or as :func:`memsave.kernels.piecewise`, in the terms of :func:`of_piece`."""
    arguments = of_piece(inplace, name, *piece, **also)
    return None if arguments is None else of_bits(row, x, *arguments)


#: ``of_bits(row, x, *of_piece(...))``.
of_bits = _nodes.bits


def of_piece(
    inplace: Any,
    name: str,
    low: Any,
    high: Any,
    backward: str = "select",
    a: Any = 1.0,
    b: Any = 0.0,
    also: Tensor | None = None,
) -> tuple[Any, ...] | None:
    """What the function of C++ takes after ``x``. Of the gradient ``g``, the bits select ``g`` or
    +0; ``part``: ``g * a`` or +0; ``scale``: ``g * a`` or ``g * b``. What it keeps ``also`` must
    not be overwritten.
    """
    loop, family = LOOPS.get(name), SELECTIONS.index(backward)
    if loop is None:
        return None
    return loop, inplace, low, high, family, a, b, OUTPUTS[name], also, KINDS[name]


#: ``prelu(row, x, weight)``, on CUDA; the gradient of ``x`` alone.
prelu = _nodes.prelu

LOOPS = {"relu": _native.relu, **native.PIECEWISE}
#: How a new output is stored.
OUTPUTS = {
    **{name: _nodes.AS_X if name in AS_X else _nodes.AS_RESULT for name in LOOPS},
    "softshrink": _nodes.OF_SOFTSHRINK,
}
#: On CUDA, or -1 where there is none.
KINDS = {name: cuda.KINDS.index(name) if cuda and name in cuda.KINDS else -1 for name in LOOPS}


#: ``bernoulli(x, p)``: bits of whether ``torch.empty_like(x).bernoulli_(p)`` would be 1. (No layer,
#: but of the generator Python shows a copy alone.)
bernoulli = _nodes.bernoulli
#: ``dropout(row, x, p, training, inplace, from_rng)``, in training: it keeps bits, or the state of
#: the random generator.
dropout = _nodes.dropout
#: ``feature_dropout(row, x, p)``: ``torch.feature_dropout(x, p, True)``, with the same numbers.
feature_dropout = _nodes.feature_dropout
#: ``max_pool(row, x, dims, kernel_size, stride, padding, dilation, ceil_mode, return_indices)``,
#: without the indices.
max_pool = _nodes.max_pool
#: ``max_pool_by_windows(row, x, windows)``, of :class:`memsave.kernels.reference.Windows`.
max_pool_by_windows = _nodes.max_pool_by_windows
#: ``adaptive_max_pool(row, x, outputs, kernel, bits)``: to these sizes; ``kernel`` are those of the
#: largest window. It keeps where the maxima are, as indices into windows, of such bits.
adaptive_max_pool = _nodes.adaptive_max_pool
#: ``instance_norm(row, x, weight, bias, eps, by_loop)``, without running statistics; by the loop of
#: :func:`memsave.kernels.batch_norm`, or by torch.
instance_norm = _nodes.instance_norm
#: ``norm(row, x, weight, bias, groups, from_y, centered, wants_x, eps)``: of the last axis, or of
#: ``groups``; of root mean squares, if not centered. ``from_y``: which of ``x`` and ``y`` it keeps.
norm = _nodes.norm
#: ``layer_norm_of(row, module.__dict__, x)``, ``rms_norm_of``, ``group_norm_of``: by the attributes
#: of a module; the stock op, where that keeps the same.
layer_norm_of = _nodes.layer_norm_of
rms_norm_of = _nodes.rms_norm_of
group_norm_of = _nodes.group_norm_of
#: ``layer_norm_from_output_of(row, module.__dict__, x, ratio)``, ``rms_norm_from_output_of``: the
#: same, which keep the output where it tells the input (with this ``ratio``: ``is_invertible``).
layer_norm_from_output_of = _nodes.layer_norm_from_output_of
rms_norm_from_output_of = _nodes.rms_norm_from_output_of
#: ``is_over_last(x, normalized_shape, *parameters)``: whether a look at plain tensors says that it
#: is a norm of the last axis.
is_over_last = _nodes.is_over_last
#: ``is_invertible(x, weight, bias, ratio)``: whether no weight is (nearly) zero or infinite, and
#: biases are at most so many times as large; ``None`` for other tensors.
is_invertible = _nodes.is_invertible
#: ``batch_norm_eval(row, x, mean, var, weight, bias, eps)``: by constants.
batch_norm_eval = _nodes.batch_norm_eval
#: ``convolution(row, x, weight, bias, stride, padding, dilation, transposed, output_padding,
#: groups)``, by constants.
convolution = _nodes.convolution
#: ``convolution_of(row, module.__dict__, x)``: by the attributes of a module; also the stock one.
convolution_of = _nodes.convolution_of
#: ``padded_convolution(row, x, weight, bias, stride, dilation, groups, padding_mode, pad)``: by a
#: mode of ``torch.nn.Conv2d``, on CPU; ``pad`` as ``torch.nn.functional.pad`` takes it.
padded_convolution = _nodes.padded_convolution
#: ``batch_norm_of(row, module.__dict__, x, least, most)``, of so many axes: the same, and
#: what it does to the buffers in training.
batch_norm_of = _nodes.batch_norm_of
#: ``pad(row, x, replicates, pad)``, by replication or reflection.
pad = _nodes.pad
#: ``avg_pool(row, x, dims, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor)``.
avg_pool = _nodes.avg_pool
#: ``adaptive_avg_pool(row, x, dims, output_size)``.
adaptive_avg_pool = _nodes.adaptive_avg_pool
#: ``embedding(row, weight, indices, dtype, padding, by_freq)``: it keeps indices of this dtype.
embedding = _nodes.embedding

#: Rows of activations, by what is behind them.
CURVES = {
    "logsigmoid": _nodes.LOGSIGMOID,
    "tanhshrink": _nodes.TANHSHRINK,
    "elu_from_output": _nodes.ELU_FROM_OUTPUT,
    "celu_from_output": _nodes.ELU_FROM_OUTPUT,
    "selu_from_output": _nodes.ELU_FROM_OUTPUT,
    "softplus_from_output": _nodes.SOFTPLUS_FROM_OUTPUT,
    "logsigmoid_from_output": _nodes.LOGSIGMOID_FROM_OUTPUT,
}


def curve(row: str, x: Tensor, a: float = 0.0, b: float = 0.0, c: float = 0.0) -> Tensor | None:
    """An activation. ELU and its kin by the scales of what is negative, of all, and of what is
    negative before the exponential; softplus by beta and threshold.
    """
    return _nodes.curve(row, x, CURVES[row], a, b, c)


#: ``cross_entropy(row, x, target, weight, ignore_index, reduction, label_smoothing)``, of rows of
#: logits, by indices of classes; the reduction as torch numbers it. (On CUDA without weights and
#: smoothing, elsewhere by one of them.)
cross_entropy = _nodes.cross_entropy


__all__ = [
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "avg_pool",
    "batch_norm_eval",
    "batch_norm_of",
    "bernoulli",
    "bits",
    "by_attributes",
    "convolution",
    "convolution_of",
    "cross_entropy",
    "curve",
    "dropout",
    "embedding",
    "feature_dropout",
    "for_stock",
    "group_norm_of",
    "instance_norm",
    "is_invertible",
    "is_over_last",
    "layer_norm_from_output_of",
    "layer_norm_of",
    "max_pool",
    "max_pool_by_windows",
    "norm",
    "of_bits",
    "of_piece",
    "pad",
    "padded_convolution",
    "prelu",
    "rms_norm_from_output_of",
    "rms_norm_of",
    "wanted",
]
