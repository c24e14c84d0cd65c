"""Whole layers as autograd functions of C++ (nodes.cpp), where they are compiled for this torch.

Each function returns the output of a layer, which has its gradient, or ``None`` where it does not
apply: the layer's rule, in Python, computes the same and keeps the same. Compiled against one
version of torch, whose name it bears, so that no other loads it: see README.md.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import native
from .reference import PIECES

NAME = "_nodes_" + re.sub(r"\W", "_", torch.__version__)
_nodes = importlib.import_module(f".{NAME}", __package__)
native.check(_nodes)
_native = native._native
LOOPS_OF_NODES = ("select", "part", "scale", "nonzero", "rest")
_nodes.connect(_native.loops, *(getattr(_native, name) for name in LOOPS_OF_NODES))

#: ``wanted(places, args)``: of the arguments at these places (in order), whose gradients are
#: wanted, as bits of a number; ``None`` if an argument is neither ``None`` nor a plain tensor of
#: the CPU, or if anything is on that gives operations another meaning (a mode, autocast, ...).
wanted = _nodes.wanted
#: ``for_stock(parameters, wanted, input, casts, has_bias)``: :func:`memsave.function.for_stock` of
#: a dict of parameters, while nobody observes.
for_stock = _nodes.for_stock

BACKWARD = {"select": 0, "part": 1, "scale": 2}


def bits(
    row: str,
    x: Tensor,
    inplace: bool,
    name: str,
    low: float,
    high: float,
    backward: str = "select",
    a: float = 1.0,
    b: float = 0.0,
    also: Tensor | None = None,
) -> Tensor | None:
    """ReLU, or as :func:`memsave.kernels.piecewise`. Of its gradient ``g``, the bits select ``g``
    or +0; ``part``: ``g * a`` or +0; ``scale``: ``g * a`` or ``g * b``. What it keeps ``also`` must
    not be overwritten.
    """
    family = BACKWARD[backward]
    if name != "softshrink" or native.fills_vectors(x):
        loop = (LOOPS[name], inplace, low, high)
        return _nodes.bits(row, x, *loop, family, a, b, None, None, also)
    op, test = PIECES[name]
    within, *bounds = test(low, high)
    loop = (native.COMPARE[within], inplace, *bounds)
    return _nodes.bits(row, x, *loop, family, a, b, op, (x, low, high, inplace), also)


LOOPS = {"relu": _native.relu, **native.PIECEWISE}


#: ``bernoulli(x, p)``: bits of whether ``torch.empty_like(x).bernoulli_(p)`` would be 1. (No layer,
#: but of the generator Python shows a copy alone.)
bernoulli = _nodes.bernoulli
#: ``dropout(row, x, p, factor, inplace, from_rng)``, which is ``F.dropout(x, p, True, inplace)``:
#: what is kept is multiplied by the factor. It keeps bits, or the state of the random generator.
dropout = _nodes.dropout
#: ``feature_dropout(row, x, p)``: ``torch.feature_dropout(x, p, True)``, with the same numbers.
feature_dropout = _nodes.feature_dropout
#: ``max_pool(row, x, windows)``, of :class:`memsave.kernels.reference.Windows`.
max_pool = _nodes.max_pool
#: ``adaptive_max_pool(row, x, outputs, kernel, bits)``: to these sizes; ``kernel`` are those of the
#: largest window. It keeps where the maxima are, as indices into windows, of such bits.
adaptive_max_pool = _nodes.adaptive_max_pool
#: ``instance_norm(row, x, weight, bias, eps)``, without running statistics.
instance_norm = _nodes.instance_norm
#: ``norm(row, x, weight, bias, groups, from_y, centered, wants_x, eps)``: of the last axis, or of
#: ``groups``; of root mean squares, if not centered. ``from_y``: which of ``x`` and ``y`` it keeps.
norm = _nodes.norm
#: ``is_invertible(x, normalized_shape, weight, bias, factor)``: whether a look at plain tensors
#: says that ``y`` of a norm of the last axis tells what it normalized: no weight is zero, or
#: smaller than its bias by more than the factor.
is_invertible = _nodes.is_invertible
#: ``batch_norm_eval(row, primal, (var, weight), args, options, eps)``, which is
#: ``primal(*args, **options)``: of ``args[0]``, by constants. Its gradient reads the two vectors.
batch_norm_eval = _nodes.batch_norm_eval
#: ``adjoint(row, recipe_of, primal, kept, args, options)``: ``primal(*args, **options)``, whose
#: gradient with respect to ``args[0]`` is by the :func:`recipe` of ``recipe_of(*args, **options)``.
#: (Of what is kept, a pair is a tensor of integers and the dtype to keep them in.)
adjoint = _nodes.adjoint


#: ``rest(row, primal, x, options, factor)``: ``y = primal(x, **options)``, a curve whose slope is
#: ``1 - exp(factor * y)``.
rest = _nodes.rest


@cache
def recipe(*steps: tuple[Any, ...], flat: bool = False, of_output: bool = False) -> int | None:
    """For :data:`adjoint`: one operation of torch after another, with their arguments.

    Args:
        *steps: Of each its name (``"mul.Tensor"`` where it has several signatures), then its
            arguments: constants (of the types that it takes, tuples for lists); ``"g"``, the
            gradient of the output; ``"x"``, a stand-in that has the shape of the input; ``"k"``,
            what is kept; ``"i"``, the same as int32; ``"r"``, the result of the step before (if it
            is the first one, this step is taken in place where it can).
        flat: Whether they work on an axis more, of length 1, before the last.
        of_output: Whether the output is what is kept.

    Returns:
        ``None`` if a constant is of another type.
    """
    try:
        named = tuple((f"aten::{op}", tuple(args)) for op, *args in steps)
        return _nodes.recipe(named, flat, of_output)
    except TypeError:
        return None


#: ``cross_entropy(row, x, target, ignore_index, reduction)``, of rows of logits, by indices of
#: classes that have no weights; the reduction as torch numbers it.
cross_entropy = _nodes.cross_entropy


__all__ = [
    "adaptive_max_pool",
    "adjoint",
    "batch_norm_eval",
    "bernoulli",
    "bits",
    "cross_entropy",
    "dropout",
    "feature_dropout",
    "for_stock",
    "instance_norm",
    "is_invertible",
    "max_pool",
    "norm",
    "recipe",
    "rest",
    "wanted",
]
