"""The table: what each layer must keep for backward, given which gradients are wanted.

This module alone decides it. Both backends read it to know what to save, the report reads it to
explain and predict, and the tests draw their cases from it. It needs the standard library only.

Vocabulary
----------
argument   a tensor input of the layer, declared with named axes. The keys of ``reads`` are those
           that can want a gradient; the others (running statistics, indices) are only read.
``y``      the (first) output.
extra      a tensor that forward makes on purpose for backward.
residual   what backward may read: an argument, ``y``, or an extra.
``wrt``    the mask: the names of the arguments whose gradient is wanted.

Axes
----
``"*n c h w"`` names the axes of an array; ``*n`` stands for any number of them. ``i/groups`` is an
axis whose size is that of ``i`` divided by the option ``groups``. Axes of the output that no
argument has (``oh`` of a convolution, ``*m`` where one is summed or halved) are of any size.

Adding a layer is one row here, one rule in each backend (see CONTRIBUTING.md), and no test code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ._row import (
    Extra as Extra,
    Layer as Layer,
    MissingResidual as MissingResidual,
    Packing as Packing,
    Residuals as Residuals,
    Shape as Shape,
    permutation as permutation,
)


def offset_bits(kernel: Iterable[int]) -> int:
    """Bits of the integer that holds an offset in a window of these sizes (an index into them)."""
    places = math.prod(kernel)
    largest = {1 << 8: 8, 1 << 15: 16, 1 << 31: 32}
    return next((bits for most, bits in largest.items() if places <= most), 64)


def adaptive_kernel(inputs: Iterable[int], outputs: Iterable[int]) -> list[int]:
    """Sizes of the largest window of adaptive pooling: the ``k``-th along an axis begins at
    ``k * input / output``, rounded down, and ends at ``(k + 1) * input / output``, rounded up.
    What is rounded off of a begin is a multiple of the greatest common divisor.
    """
    return [
        max(1, -(-(size + count - _gcd(size, count)) // count)) if count > 0 else 1
        for size, count in zip(inputs, outputs, strict=True)
    ]


def _gcd(one: int, other: int) -> int:
    """(``math.gcd`` takes no symbol, which ``torch.compile`` has for sizes.)"""
    while other:
        one, other = other, one % other
    return one


def _spatial(dims: int) -> tuple[str, str, str]:
    """Names of the spatial axes of x, of a kernel and of y."""
    names = {1: "l", 2: "h w", 3: "d h w"}[dims].split()
    return " ".join(names), " ".join("k" + n for n in names), " ".join("o" + n for n in names)


def _conv(dims: int) -> Layer:
    x, kernel, y = _spatial(dims)
    return Layer(
        f"conv{dims}d",
        args={"x": f"*n i {x}", "weight": f"o i/groups {kernel}", "bias": "o"},
        y=f"*n o {y}",
        reads={"x": ("weight",), "weight": ("x",), "bias": ()},
        optional=("bias",),
        options={
            "stride": (1, 2),
            "padding": (0, 1, "same", "valid"),
            "dilation": (1, 2),
            "groups": (1, 2),
            "padding_mode": ("zeros", "reflect", "replicate", "circular"),
        },
    )


def _conv_transpose(dims: int) -> Layer:
    x, kernel, y = _spatial(dims)
    return Layer(
        f"conv_transpose{dims}d",
        args={"x": f"*n i {x}", "weight": f"i o/groups {kernel}", "bias": "o"},
        y=f"*n o {y}",
        reads={"x": ("weight",), "weight": ("x",), "bias": ()},
        optional=("bias",),
        options={
            "stride": (1, 2),
            "padding": (0, 1),
            "output_padding": (0, 1),
            "groups": (1, 2),
            "dilation": (1, 2),
        },
    )


def _max_pool(dims: int) -> Layer:
    x, _, y = _spatial(dims)

    def bits(options: Mapping[str, Any], sizes: Mapping[str, Shape]) -> int:
        size = options["kernel_size"]
        return offset_bits([size] * dims if isinstance(size, int) else size)

    return Layer(
        f"max_pool{dims}d",
        args={"x": f"*n c {x}"},
        y=f"*n c {y}",
        reads={"x": ("offsets",)},
        extras={"offsets": Extra(f"*n c {y}", bits=bits)},
        options={
            "kernel_size": (2, 3),
            "stride": (None, 1, 2),
            "padding": (0, 1),
            "dilation": (1, 2),
            "ceil_mode": (False, True),
            "return_indices": (False, True),
        },
    )


def _adaptive_max_pool(dims: int) -> Layer:
    x, _, y = _spatial(dims)

    def bits(options: Mapping[str, Any], sizes: Mapping[str, Shape]) -> int:
        inputs, outputs = ([sizes[axis][0] for axis in axes.split()] for axes in (x, y))
        return offset_bits(adaptive_kernel(inputs, outputs))

    return Layer(
        f"adaptive_max_pool{dims}d",
        args={"x": f"*n c {x}"},
        y=f"*n c {y}",
        reads={"x": ("offsets",)},
        extras={"offsets": Extra(f"*n c {y}", bits=bits)},
        options={"output_size": (2, 1, 3), "return_indices": (False, True)},
    )


LINEAR = Layer(
    "linear",
    args={"x": "*n i", "weight": "o i", "bias": "o"},
    y="*n o",
    reads={"x": ("weight",), "weight": ("x",), "bias": ()},
    optional=("bias",),
)
CONV1D, CONV2D, CONV3D = _conv(1), _conv(2), _conv(3)
CONV_TRANSPOSE1D, CONV_TRANSPOSE2D, CONV_TRANSPOSE3D = (_conv_transpose(d) for d in (1, 2, 3))

BATCH_NORM_EVAL = Layer(
    "batch_norm_eval",
    args={"x": "n c *s", "running_mean": "c", "running_var": "c", "weight": "c", "bias": "c"},
    y="n c *s",
    reads={
        "x": ("weight", "running_var"),
        "weight": ("x", "running_mean", "running_var"),
        "bias": (),
    },
    optional=("weight", "bias"),
    options={"eps": (1e-5, 1e-2)},
)
BATCH_NORM_TRAIN = Layer(
    "batch_norm_train",
    args={"x": "n c *s", "running_mean": "c", "running_var": "c", "weight": "c", "bias": "c"},
    y="n c *s",
    reads={"x": ("x", "mean", "rstd", "weight"), "weight": ("x", "mean", "rstd"), "bias": ()},
    extras={"mean": Extra("c"), "rstd": Extra("c")},
    optional=("running_mean", "running_var", "weight", "bias"),
    options={"momentum": (0.1, 0.0, 1.0), "eps": (1e-5, 1e-2)},
)


def _norm(name: str, x: str, features: str, groups: str, **fields: Any) -> tuple[Layer, Layer]:
    """Each of the groups is normalized by its own statistics. Two rows: from ``x``, and from ``y``,
    of which ``x`` is what weight and bias do not hide (where the weight has no zero).
    """
    fields = {"optional": ("weight", "bias"), **fields}
    args = {"x": x, **fields.pop("args", {}), "weight": features, "bias": features}
    of_input = Layer(
        name,
        args=args,
        y=x,
        reads={"x": ("x", "mean", "rstd", "weight"), "weight": ("x", "mean", "rstd"), "bias": ()},
        extras={"mean": Extra(groups), "rstd": Extra(groups)},
        **fields,
    )
    of_output = Layer(
        f"{name}_from_output",
        op=name,
        args=args,
        y=x,
        reads={
            "x": ("y", "rstd", "weight", "bias"),
            "weight": ("y", "weight", "bias"),
            "bias": (),
        },
        extras={"rstd": Extra(groups)},
        wide=True,
        **fields,
    )
    return of_input, of_output


LAYER_NORM, LAYER_NORM_FROM_OUTPUT = _norm(
    "layer_norm", "*n i", "i", "*n", options={"eps": (1e-5, 1e-2)}
)
GROUP_NORM, GROUP_NORM_FROM_OUTPUT = _norm(
    "group_norm", "n c *s", "c", "n g", options={"num_groups": (1, 2, 3), "eps": (1e-5, 1e-2)}
)
# With the statistics of its input: with the running ones it is batch_norm_eval.
INSTANCE_NORM, INSTANCE_NORM_FROM_OUTPUT = _norm(
    "instance_norm",
    "n c *s",
    "c",
    "n c",
    args={"running_mean": "c", "running_var": "c"},
    optional=("running_mean", "running_var", "weight", "bias"),
    options={"momentum": (0.1, 0.0, 1.0), "eps": (1e-5, 1e-2)},
)

RMS_NORM = Layer(
    "rms_norm",
    args={"x": "*n i", "weight": "i"},
    y="*n i",
    reads={"x": ("x", "rstd", "weight"), "weight": ("x", "rstd")},
    extras={"rstd": Extra("*n")},
    optional=("weight",),
    options={"eps": (1e-6, 1e-2)},
)
RMS_NORM_FROM_OUTPUT = Layer(
    "rms_norm_from_output",
    op="rms_norm",
    args={"x": "*n i", "weight": "i"},
    y="*n i",
    reads={"x": ("y", "rstd", "weight"), "weight": ("y", "weight")},
    extras={"rstd": Extra("*n")},
    optional=("weight",),
    options={"eps": (1e-6, 1e-2)},
    wide=True,
)


def _from(residual: str, name: str, *, op: str = "", y: str = "*n", **options: Any) -> Layer:
    """A function of one argument whose derivative reads its input or its output."""
    return Layer(
        name,
        op=op,
        args={"x": "*n"},
        y=y,
        reads={"x": (residual,)},
        options=options,
        inplace="inplace" in options,
    )


def _selecting(name: str, extra: str, axes: str = "*n", x: str = "*n", **options: Any) -> Layer:
    """A layer of one argument whose derivative takes two values, and one bit says which."""
    return Layer(
        name,
        args={"x": x},
        y=x,
        reads={"x": (extra,)},
        extras={extra: Extra(axes, bits=1)},
        options=options,
        inplace="inplace" in options,
    )


_INPLACE = (False, True)

RELU = _selecting("relu", "positive", inplace=_INPLACE)
RELU_FROM_OUTPUT = _from("y", "relu_from_output", op="relu", inplace=_INPLACE)
LEAKY_RELU = _selecting(
    "leaky_relu", "positive", negative_slope=(0.01, 0.3, -0.2), inplace=_INPLACE
)
RELU6 = _selecting("relu6", "passes", inplace=_INPLACE)
HARDTANH = _selecting(
    "hardtanh", "passes", min_val=(-1.0, 0.0), max_val=(1.0, 0.7), inplace=_INPLACE
)
THRESHOLD = _selecting(
    "threshold", "passes", threshold=(0.1, -1.0), value=(0.0, 0.7), inplace=_INPLACE
)
HARDSIGMOID = _selecting("hardsigmoid", "passes", inplace=_INPLACE)
HARDSHRINK = _selecting("hardshrink", "passes", lambd=(0.5, 0.0, 0.3))
SOFTSHRINK = _selecting("softshrink", "passes", lambd=(0.5, 0.0, 0.3))
PRELU = Layer(
    "prelu",
    args={"x": "n c *s", "weight": "p"},
    y="n c *s",
    reads={"x": ("positive", "weight"), "weight": ("x",)},
    extras={"positive": Extra("n c *s", bits=1)},
)
# Where the gradient of the weight is wanted, and x is kept for it.
PRELU_FROM_INPUT = Layer(
    "prelu_from_input",
    op="prelu",
    args={"x": "n c *s", "weight": "p"},
    y="n c *s",
    reads={"x": ("x", "weight"), "weight": ("x",)},
)

SIGMOID = _from("y", "sigmoid")
TANH = _from("y", "tanh")
SOFTMAX = _from("y", "softmax", dim=(-1, 0, 1))
LOG_SOFTMAX = _from("y", "log_softmax", dim=(-1, 0, 1))
# (In place, torch has the row from y or copies x.)
ELU = _from("x", "elu", alpha=(1.0, 0.5))
ELU_FROM_OUTPUT = _from("y", "elu_from_output", op="elu", alpha=(1.0, 0.5), inplace=_INPLACE)
CELU = _from("x", "celu", alpha=(1.0, 0.5))
CELU_FROM_OUTPUT = _from("y", "celu_from_output", op="celu", alpha=(1.0, 0.5), inplace=_INPLACE)
SELU = _from("x", "selu")
SELU_FROM_OUTPUT = _from("y", "selu_from_output", op="selu", inplace=_INPLACE)
SOFTPLUS = _from("x", "softplus", beta=(1.0, 2.0), threshold=(20.0, 40.0))
# From y the two branches are told apart where they agree to rounding: exp(-threshold) < eps.
SOFTPLUS_FROM_OUTPUT = _from(
    "y", "softplus_from_output", op="softplus", beta=(1.0, 2.0), threshold=(40.0,)
)
LOGSIGMOID = _from("x", "logsigmoid")
LOGSIGMOID_FROM_OUTPUT = _from("y", "logsigmoid_from_output", op="logsigmoid")
GELU = _from("x", "gelu", approximate=("none", "tanh"))
SILU = _from("x", "silu")
MISH = _from("x", "mish")
HARDSWISH = _from("x", "hardswish")
TANHSHRINK = _from("x", "tanhshrink")
SOFTSIGN = _from("x", "softsign")
GLU = _from("x", "glu", y="*m", dim=(-1, 0, 1))


def _gated(name: str, **options: Any) -> Layer:
    """``y = f(gate) * up``. (Stock keeps f(gate) as well.)"""
    reads = {"gate": ("gate", "up"), "up": ("gate",)}
    return Layer(name, args={"gate": "*n", "up": "*n"}, y="*n", reads=reads, options=options)


SWIGLU = _gated("swiglu")
GEGLU = _gated("geglu", approximate=("none", "tanh"))

DROPOUT = _selecting("dropout", "kept", p=(0.5, 0.1, 0.9), inplace=_INPLACE)
DROPOUT_FROM_RNG = Layer(
    "dropout_from_rng",
    op="dropout",
    args={"x": "*n"},
    y="*n",
    reads={"x": ("rng_state",)},
    extras={"rng_state": Extra("*s")},
    options={"p": (0.5, 0.1, 0.9), "inplace": _INPLACE},
    inplace=True,
)
# Of whole channels.
FEATURE_DROPOUT = _selecting(
    "feature_dropout", "kept", "n c", "n c *s", p=(0.5, 0.1, 0.9), inplace=_INPLACE
)
ALPHA_DROPOUT = _selecting("alpha_dropout", "kept", p=(0.5, 0.1, 0.9), inplace=_INPLACE)

MAX_POOL1D, MAX_POOL2D, MAX_POOL3D = _max_pool(1), _max_pool(2), _max_pool(3)
ADAPTIVE_MAX_POOL1D, ADAPTIVE_MAX_POOL2D, ADAPTIVE_MAX_POOL3D = (
    _adaptive_max_pool(d) for d in (1, 2, 3)
)


def _of_shapes(name: str, x: str, y: str, **options: Any) -> Layer:
    """A layer whose derivative does not depend on values."""
    return Layer(name, args={"x": x}, y=y, reads={"x": ()}, options=options)


def _avg_pool(dims: int) -> tuple[Layer, Layer]:
    x, _, y = _spatial(dims)
    average = _of_shapes(
        f"avg_pool{dims}d",
        f"*n c {x}",
        f"*n c {y}",
        kernel_size=(2, 3),
        stride=(None, 1, 2),
        padding=(0, 1),
        ceil_mode=(False, True),
        count_include_pad=(True, False),
    )
    adaptive = _of_shapes(
        f"adaptive_avg_pool{dims}d", f"*n c {x}", f"*n c {y}", output_size=(1, 2, 3)
    )
    return average, adaptive


AVG_POOL1D, ADAPTIVE_AVG_POOL1D = _avg_pool(1)
AVG_POOL2D, ADAPTIVE_AVG_POOL2D = _avg_pool(2)
AVG_POOL3D, ADAPTIVE_AVG_POOL3D = _avg_pool(3)

PAD = _of_shapes(
    "pad",
    "*n",
    "*m",
    pad=((1, 0, 0, 2), (1, 1), (2, 0), (1, 1, 0, 1, 2, 0)),
    mode=("reflect", "replicate", "circular"),
)

_EMBEDDING: dict[str, Any] = {
    "args": {"weight": "v i", "indices": "*n"},
    "y": "*n i",
    "integers": {"indices": "v"},
}
EMBEDDING = Layer("embedding", reads={"weight": ("indices",)}, **_EMBEDDING)
# Where nobody else keeps the indices: in the smallest integers that hold them.
EMBEDDING_COMPACT = Layer(
    "embedding_compact",
    op="embedding",
    reads={"weight": ("ids",)},
    extras={"ids": Extra("*n", bits=lambda options, sizes: offset_bits(sizes["v"]))},
    **_EMBEDDING,
)


def _cross_entropy(name: str, target: str, **fields: Any) -> Layer:
    """Of logits, whose softmax is computed again: no log-probabilities are kept."""
    return Layer(
        name,
        args={"x": "n c *s", "target": target, "weight": "c"},
        y="*m",
        reads={"x": ("x", "target", "weight")},
        optional=("weight",),
        **fields,
    )


CROSS_ENTROPY = _cross_entropy(
    "cross_entropy",
    "n *s",
    integers={"target": "c"},
    options={
        "ignore_index": (-100, 1),
        "reduction": ("mean", "sum", "none"),
        "label_smoothing": (0.0, 0.1),
    },
)
CROSS_ENTROPY_OF_PROBABILITIES = _cross_entropy(
    "cross_entropy_of_probabilities",
    "n c *s",
    options={"reduction": ("mean", "sum", "none"), "label_smoothing": (0.0, 0.1)},
)

TABLE: Mapping[str, Layer] = MappingProxyType(
    {row.name: row for row in list(globals().values()) if isinstance(row, Layer)}
)
