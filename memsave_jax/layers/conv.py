"""Convolutions and transposed convolutions, 1 to 3 dimensional, channels last.

JAX's own keep just what the row says, for every mask. Not so where the input is padded by an op of
its own (``padding_mode``) or reshaped to one batch axis, or the kernel is flipped: there JAX keeps
the copy that was made, while the rules here keep the arguments themselves. Their gradients are the
linear transposes of the same op.

Index legend: n batch, i input channels, o output channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memsave import spec
from memsave.spec import Layer

from ..function import Grads, Mask, Saved, Shapes, define
from .shape import Ints, Padding, per_axis

PAD_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pairs(padding: Padding, kernel: Sequence[int], dilation: Sequence[int]) -> Any:
    """Padding as ``(low, high)`` per axis, "same" as PyTorch means it, or one of JAX's names."""
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):
        return padding.upper()
    padding = (padding,) * len(kernel) if isinstance(padding, int) else padding
    return [(p, p) if isinstance(p, int) else tuple(p) for p in padding]


def _numbers(ndim: int) -> lax.ConvDimensionNumbers:
    spatial = tuple(range(1, ndim - 1))
    images = (0, ndim - 1, *spatial)
    return lax.ConvDimensionNumbers(images, (ndim - 1, ndim - 2, *range(ndim - 2)), images)


def _batched(convolve: Callable[[Array], Array], x: Array, dims: int) -> Array:
    """With all axes before the spatial ones as one."""
    before = x.shape[: x.ndim - dims - 1]
    if len(before) == 1:
        return convolve(x)
    y = convolve(x.reshape(-1, *x.shape[len(before) :]))
    return y.reshape(*before, *y.shape[1:])


def _plus(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + bias.reshape((1,) * (y.ndim - 1) + (-1,))


def _conv_primal(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    input_dilation: Ints = 1,
    **options: Any,
) -> Array:
    dims = weight.ndim - 2
    stride, dilation = per_axis(stride, dims), per_axis(dilation, dims)
    pads = _pairs(padding, weight.shape[:dims], dilation)

    def convolve(x: Array) -> Array:
        if padding_mode != "zeros" and not isinstance(pads, str):
            x = jnp.pad(x, [(0, 0), *pads, (0, 0)], mode=PAD_MODES[padding_mode])
        return lax.conv_general_dilated(
            x,
            weight,
            stride,
            pads if padding_mode == "zeros" else "VALID",
            lhs_dilation=per_axis(input_dilation, dims),
            rhs_dilation=dilation,
            dimension_numbers=_numbers(x.ndim),
            feature_group_count=groups,
            **options,
        )

    return _plus(_batched(convolve, x, dims), bias)


def _conv_transpose_primal(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    stride: Ints = 1,
    padding: Padding = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    flip: bool = True,
    **options: Any,
) -> Array:
    """With ``flip`` the transpose of :func:`_conv_primal` with the same weight and options."""
    dims = weight.ndim - 2
    stride, dilation = per_axis(stride, dims), per_axis(dilation, dims)
    extra = per_axis(output_padding, dims)
    if flip:
        weight = _flipped(weight, groups)
    extent = [d * (k - 1) for d, k in zip(dilation, weight.shape, strict=False)]
    pads = _pairs(padding, weight.shape[:dims], dilation)
    sizes = zip(extent, pads, extra, strict=True)
    pads = [(e - low, e - high + more) for e, (low, high), more in sizes]

    def convolve(x: Array) -> Array:
        return lax.conv_general_dilated(
            x,
            weight,
            (1,) * dims,
            pads,
            lhs_dilation=stride,
            rhs_dilation=dilation,
            dimension_numbers=_numbers(x.ndim),
            feature_group_count=groups,
            **options,
        )

    return _plus(_batched(convolve, x, dims), bias)


def _flipped(weight: Array, groups: int) -> Array:
    """``(*k, o/groups, i) -> (*k, i/groups, o)``, reversed along the spatial axes."""
    *kernel, o, i = weight.shape
    weight = jnp.flip(weight, range(len(kernel))).reshape(*kernel, o, groups, i // groups)
    weight = jnp.moveaxis(weight, -3, -1)  # *k groups i/groups o/groups
    weight = jnp.moveaxis(weight, -3, -2)  # *k i/groups groups o/groups
    return weight.reshape(*kernel, i // groups, groups * o)


def _bwd(
    primal: Callable[..., Array],
    g: Array,
    wrt: Mask,
    saved: Saved,
    shapes: Shapes,
    **options: Any,
) -> Grads:
    def transposed(function: Callable[[Array], Array], name: str) -> Array:
        # (The bias, and so y, may be of a wider dtype.)
        dtype = jax.eval_shape(function, shapes[name]).dtype
        return jax.linear_transpose(function, shapes[name])(g.astype(dtype))[0]

    grads = {}
    if "x" in wrt:
        weight = saved["weight"]
        grads["x"] = transposed(lambda x: primal(x, weight, None, **options), "x")
    if "weight" in wrt:
        x = saved["x"]
        grads["weight"] = transposed(lambda weight: primal(x, weight, None, **options), "weight")
    if "bias" in wrt:
        grads["bias"] = g.sum(range(g.ndim - 1))
    return grads


def _conv_is_stock(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    padding_mode: str = "zeros",
    **options: Any,
) -> bool:
    if bias is not None and bias.shape != weight.shape[-1:]:
        return True  # which broadcasts
    return x.ndim == weight.ndim and padding_mode == "zeros"


def _conv_transpose_is_stock(
    x: Array,
    weight: Array,
    bias: Array | None,
    *,
    groups: int = 1,
    flip: bool = True,
    **options: Any,
) -> bool:
    if bias is not None and bias.shape != (weight.shape[-2] * groups,):
        return True
    return x.ndim == weight.ndim and not flip


def _layout(row: Layer) -> dict[str, str]:
    """Channels last: the row's axes, with the channels behind the spatial ones."""
    batch, channels, *spatial = row.args["x"].split()
    one, other, *kernel = row.args["weight"].split()
    _, outputs, *places = row.y.split()
    return {
        "x": " ".join([batch, *spatial, channels]),
        "weight": " ".join([*kernel, other, one]),
        "y": " ".join([batch, *places, outputs]),
    }


_conv, _conv_transpose = (
    {
        dims: define(row, primal, partial(_bwd, primal), stock_op=is_stock, layout=_layout(row))
        for dims, row in enumerate(rows, start=1)
    }
    for primal, is_stock, rows in (
        (_conv_primal, _conv_is_stock, (spec.CONV1D, spec.CONV2D, spec.CONV3D)),
        (
            _conv_transpose_primal,
            _conv_transpose_is_stock,
            (spec.CONV_TRANSPOSE1D, spec.CONV_TRANSPOSE2D, spec.CONV_TRANSPOSE3D),
        ),
    )
)


def conv(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    strides: Ints = 1,
    padding: Padding = "SAME",
    input_dilation: Ints = 1,
    kernel_dilation: Ints = 1,
    feature_group_count: int = 1,
    **options: Any,
) -> Array:
    """The layer of :class:`flax.nnx.Conv`, as a function.

    Keeps the kernel for the gradient of the inputs, the inputs (never a padded copy) for that of
    the kernel, nothing for that of the bias.

    Args:
        inputs: ``(*n, spatial axes, in_features)``, of the dtype of the kernel.
        kernel: ``(kernel sizes, in_features / feature_group_count, out_features)``.
        bias: ``(out_features,)``.
        strides, input_dilation, kernel_dilation: One for all, or one per spatial axis.
        padding: ``"SAME"``, ``"VALID"``, ``"CIRCULAR"``, ``"REFLECT"``, ``"CAUSAL"`` (along one
            axis), an int, or an int or pair per spatial axis.
        feature_group_count: Into how many groups the features are split.
        **options: ``precision``, ``preferred_element_type``, ``out_sharding`` as in
            :func:`jax.lax.conv_general_dilated`.
    """
    dims = kernel.ndim - 2
    strides, kernel_dilation = per_axis(strides, dims), per_axis(kernel_dilation, dims)
    input_dilation = per_axis(input_dilation, dims)
    extent = [d * (k - 1) + 1 for k, d in zip(kernel.shape, kernel_dilation, strict=False)]
    mode = {"CIRCULAR": "circular", "REFLECT": "reflect"}.get(str(padding), "zeros")
    if mode != "zeros":
        padding = [((e - 1) // 2, e // 2) for e in extent]
    elif isinstance(padding, str) and padding != "CAUSAL":
        padding = padding.upper()  # "same" in lower case is PyTorch's, another one
    elif padding == "CAUSAL":
        if dims != 1:
            raise ValueError("Causal padding is only implemented for 1D convolutions.")
        if any(d != 1 for d in input_dilation):
            raise ValueError("Causal padding is not implemented for dilated inputs.")
        padding = [(extent[0] - 1, 0)]
    return _conv.get(dims, _conv_primal)(
        inputs,
        kernel,
        bias,
        stride=strides,
        padding=padding,
        dilation=kernel_dilation,
        groups=feature_group_count,
        padding_mode=mode,
        input_dilation=input_dilation,
        **options,
    )


def conv_transpose(
    inputs: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    strides: Ints = 1,
    padding: Padding = "SAME",
    kernel_dilation: Ints = 1,
    transpose_kernel: bool = False,
    **options: Any,
) -> Array:
    """The layer of :class:`flax.nnx.ConvTranspose`, as a function.

    Keeps the kernel (never a flipped copy) for the gradient of the inputs, the inputs for that of
    the kernel, nothing for that of the bias.

    Args:
        inputs: ``(*n, spatial axes, in_features)``, of the dtype of the kernel.
        kernel: ``(kernel sizes, in_features, out_features)``; with ``transpose_kernel``
            ``(kernel sizes, out_features, in_features)``, and flipped along the spatial axes.
        bias: ``(out_features,)``.
        strides, kernel_dilation: One for all, or one per spatial axis.
        padding: ``"SAME"``, ``"VALID"``, ``"CIRCULAR"``, an int, or an int or pair per spatial
            axis, as in :func:`jax.lax.conv_transpose`.
        **options: ``precision``, ``preferred_element_type`` as there.
    """
    dims = kernel.ndim - 2
    strides, dilation = per_axis(strides, dims), per_axis(kernel_dilation, dims)
    if {len(strides), len(dilation)} != {dims}:
        raise TypeError(
            f"strides {strides}, kernel_dilation {dilation}: the kernel has {dims} axes"
        )
    circular = padding == "CIRCULAR"
    extent = [d * (k - 1) + 1 for k, d in zip(kernel.shape, dilation, strict=False)]
    if isinstance(padding, str):
        if padding not in ("SAME", "VALID", "CIRCULAR"):
            raise ValueError(f"Unknown padding {padding!r}: SAME, VALID, CIRCULAR, or numbers")
        same = padding == "SAME"
        pads = [_transposed_padding(e, s, same) for e, s in zip(extent, strides, strict=True)]
    else:
        pads = _pairs(padding, strides, dilation)
    both = zip(extent, pads, strict=True)
    complements = [(e - 1 - low, e - 1 - high) for e, (low, high) in both]
    y = _conv_transpose.get(dims, _conv_transpose_primal)(
        inputs,
        kernel,
        None if circular else bias,
        stride=strides,
        padding=complements,
        dilation=dilation,
        flip=transpose_kernel,
        **options,
    )
    return _plus(_wrapped(y, inputs, strides, transpose_kernel), bias) if circular else y


def _transposed_padding(extent: int, stride: int, same: bool) -> tuple[int, int]:
    """The padding of :func:`jax.lax.conv_transpose` along an axis, by name."""
    total = extent + stride - 2 + (0 if same else max(extent - stride, 0))
    low = -(-total // 2) if same and stride <= extent - 1 else extent - 1
    return low, total - low


def _wrapped(y: Array, inputs: Array, strides: Sequence[int], transpose_kernel: bool) -> Array:
    """Fold ``y`` along every spatial axis to a period, ``size * stride``, and sum what coincides.

    Where the period begins is Flax's convention.
    """
    axes = range(y.ndim - len(strides) - 1, y.ndim - 1)
    periods = [inputs.shape[axis] * stride for axis, stride in zip(axes, strides, strict=True)]
    pads = [(0, 0)] * y.ndim
    for axis, period in zip(axes, periods, strict=True):
        missing = (period - y.shape[axis]) % (2 * period)
        low = missing // 2 if transpose_kernel else (missing + 1) // 2
        pads[axis] = (low, missing - low)
    y = jnp.pad(y, pads)
    for axis, period in zip(axes, periods, strict=True):
        y = y.reshape(*y.shape[:axis], -1, period, *y.shape[axis + 1 :]).sum(axis)
    return y
