"""The layers as modules and functions of Flax NNX, named and signed like those of :mod:`flax.nnx`.

A drop-in has the state of its stock module and another ``__call__``, the rule's. What the rules do
not take, such as a convolution of the user's own, is left to stock: right, without the saving.
"""
# ruff: noqa: E402 - without Flax, the error is to name the extra

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from . import _require

_require("flax")

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype
from flax.nnx.nn.linear import canonicalize_padding
from jax import Array, lax

from memsave import spec
from memsave._text import Coverage, Entry

from . import functional
from ._convert_nnx import convert, coverage, drop_in, register, revert
from .function import is_number, is_typed
from .functional import (
    avg_pool,
    celu,
    celu_from_output,
    elu,
    elu_from_output,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    leaky_relu,
    log_sigmoid,
    log_sigmoid_from_output,
    log_softmax,
    max_pool,
    mish,
    relu,
    relu6,
    relu_from_output,
    selu,
    selu_from_output,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    softplus_from_output,
    swish,
    tanh,
)
from .layers.norm import is_last
from .layers.shape import as_tuple

__all__ = [
    "BatchNorm",
    "Conv",
    "ConvTranspose",
    "Coverage",
    "Dropout",
    "DropoutFromRng",
    "Embed",
    "EmbedCompact",
    "Entry",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "Linear",
    "PReLU",
    "PReLUFromInput",
    "RMSNorm",
    "avg_pool",
    "celu",
    "celu_from_output",
    "convert",
    "coverage",
    "elu",
    "elu_from_output",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "leaky_relu",
    "log_sigmoid",
    "log_sigmoid_from_output",
    "log_softmax",
    "max_pool",
    "mish",
    "relu",
    "relu6",
    "relu_from_output",
    "revert",
    "selu",
    "selu_from_output",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "softplus_from_output",
    "swish",
    "tanh",
]

register(relu, jax.nn.relu, spec.RELU)
register(relu_from_output, jax.nn.relu, spec.RELU_FROM_OUTPUT)
register(leaky_relu, jax.nn.leaky_relu, spec.LEAKY_RELU)
register(relu6, jax.nn.relu6, spec.RELU6)
register(hard_tanh, jax.nn.hard_tanh, spec.HARDTANH)
register(hard_sigmoid, jax.nn.hard_sigmoid, spec.HARDSIGMOID)
register(sigmoid, jax.nn.sigmoid, spec.SIGMOID)
register(tanh, jnp.tanh, spec.TANH)
register(softmax, jax.nn.softmax, spec.SOFTMAX)
register(log_softmax, jax.nn.log_softmax, spec.LOG_SOFTMAX)
register(elu, jax.nn.elu, spec.ELU)
register(elu_from_output, jax.nn.elu, spec.ELU_FROM_OUTPUT)
register(celu, jax.nn.celu, spec.CELU)
register(celu_from_output, jax.nn.celu, spec.CELU_FROM_OUTPUT)
register(selu, jax.nn.selu, spec.SELU)
register(selu_from_output, jax.nn.selu, spec.SELU_FROM_OUTPUT)
register(softplus, jax.nn.softplus, spec.SOFTPLUS)
register(softplus_from_output, jax.nn.softplus, spec.SOFTPLUS_FROM_OUTPUT)
register(log_sigmoid, jax.nn.log_sigmoid, spec.LOGSIGMOID)
register(log_sigmoid_from_output, jax.nn.log_sigmoid, spec.LOGSIGMOID_FROM_OUTPUT)
register(gelu, jax.nn.gelu, spec.GELU)
register(silu, jax.nn.silu, spec.SILU)
register(mish, jax.nn.mish, spec.MISH)
register(hard_silu, jax.nn.hard_silu, spec.HARDSWISH)
register(soft_sign, jax.nn.soft_sign, spec.SOFTSIGN)
register(glu, jax.nn.glu, spec.GLU)
register(max_pool, nnx.max_pool, spec.MAX_POOL2D, spec.MAX_POOL1D, spec.MAX_POOL3D)
register(avg_pool, nnx.avg_pool, spec.AVG_POOL2D, spec.AVG_POOL1D, spec.AVG_POOL3D)


# Outside of jit, stock's casts copy an array for its gradient even where it has the dtype already,
# and the copy is kept. So an array that has the dtype is taken as it is.


def _promoted(dtype: Any, *arrays: Any) -> list[Any]:
    """As Flax's ``promote_dtype``."""
    dtype = canonicalize_dtype(*arrays, dtype=dtype)
    return [_cast(array, dtype) for array in arrays]


def _cast(array: Any, dtype: Any) -> Any:
    kept = array is None or getattr(array, "dtype", None) == dtype  # (a list has none)
    return array if kept else jnp.asarray(array, dtype)


@drop_in(spec.LINEAR)
class Linear(nnx.Linear):
    """As :class:`flax.nnx.Linear`. Keeps what the wanted gradients read."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        if (
            self.promote_dtype is not promote_dtype
            or self.dot_general is not lax.dot_general
            or out_sharding is not None
            or self.use_bias != (self.bias is not None)
        ):
            return super().__call__(inputs, out_sharding)
        bias = self.bias[...] if self.bias is not None else None
        return functional.linear(
            *_promoted(self.dtype, inputs, self.kernel[...], bias),
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )


#: What the functions take as padding, other than numbers.
_PADDING = ("SAME", "VALID", "CIRCULAR")


def _is_plain(
    layer: nnx.Conv | nnx.ConvTranspose, inputs: Any, padding: Any, named: tuple[str, ...]
) -> bool:
    """Whether the functions take it: stock would not raise, nor call a function of the user's."""
    return (
        is_typed(inputs)
        and (not isinstance(padding, str) or padding in named)
        and layer.promote_dtype is promote_dtype
        and 0 < len(layer.kernel_size) <= 3
        and (layer.mask is None or layer.mask.shape == layer.kernel_shape)
    )


def _operands(layer: nnx.Conv | nnx.ConvTranspose, inputs: Any) -> list[Any]:
    """Inputs, masked kernel and bias, in the dtype of the computation."""
    kernel = layer.kernel[...]
    if layer.mask is not None:
        kernel *= layer.mask
    bias = layer.bias[...] if layer.bias is not None else None
    return _promoted(layer.dtype, inputs, kernel, bias)


def _options(layer: nnx.Conv | nnx.ConvTranspose) -> dict[str, Any]:
    return {
        "strides": 1 if layer.strides is None else layer.strides,
        "kernel_dilation": 1 if layer.kernel_dilation is None else layer.kernel_dilation,
        "precision": layer.precision,
        "preferred_element_type": layer.preferred_element_type,
    }


@drop_in(spec.CONV2D, spec.CONV1D, spec.CONV3D)
class Conv(nnx.Conv):
    """As :class:`flax.nnx.Conv`. Keeps no padded copy of its inputs."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        padding = canonicalize_padding(self.padding, len(self.kernel_size))
        if (
            not _is_plain(self, inputs, padding, (*_PADDING, "REFLECT", "CAUSAL"))
            or self.conv_general_dilated is not lax.conv_general_dilated
            or out_sharding is not None
        ):
            return super().__call__(inputs, out_sharding)
        return functional.conv(
            *_operands(self, inputs),
            padding=padding,
            input_dilation=1 if self.input_dilation is None else self.input_dilation,
            feature_group_count=self.feature_group_count,
            **_options(self),
        )


@drop_in(spec.CONV_TRANSPOSE2D, spec.CONV_TRANSPOSE1D, spec.CONV_TRANSPOSE3D)
class ConvTranspose(nnx.ConvTranspose):
    """As :class:`flax.nnx.ConvTranspose`. Keeps no flipped copy of its kernel."""

    def __call__(self, inputs: Any) -> Array:
        padding = canonicalize_padding(self.padding, len(self.kernel_size))
        if not _is_plain(self, inputs, padding, _PADDING):
            return super().__call__(inputs)
        return functional.conv_transpose(
            *_operands(self, inputs),
            padding=padding,
            transpose_kernel=self.transpose_kernel,
            **_options(self),
        )


@drop_in(spec.BATCH_NORM_TRAIN, spec.BATCH_NORM_EVAL)
class BatchNorm(nnx.BatchNorm):
    """As :class:`flax.nnx.BatchNorm`. Keeps its input as it is, unless no gradient reads it."""

    def __call__(
        self, x: Any, use_running_average: bool | None = None, *, mask: Array | None = None
    ) -> Array:
        average = self.use_running_average if use_running_average is None else use_running_average
        if (
            average is None
            or (not average and not (mask is None and self.axis_name is None))
            or self.promote_dtype is not promote_dtype
            or not is_number(self.epsilon)
            or not _are_features(x, self.axis, self.num_features)
        ):
            return super().__call__(x, use_running_average, mask=mask)
        mean, var = self.mean[...], self.var[...]
        scale = self.scale[...] if self.scale is not None else None
        bias = self.bias[...] if self.bias is not None else None
        dtype = canonicalize_dtype(x, mean, var, scale, bias, dtype=self.dtype)
        if average:
            mean, var = _promoted(dtype, mean, var)
        y, mean, var = functional.batch_norm(
            x if _widens(x.dtype, dtype) else _cast(x, dtype),
            mean,
            var,
            *_promoted(dtype, scale, bias),
            use_running_average=average,
            axis=self.axis,
            momentum=self.momentum,
            epsilon=self.epsilon,
            dtype=dtype,
            use_fast_variance=self.use_fast_variance,
        )
        if not average:
            fixed = self.mean._can_update or self.var._can_update
            self.mean[...] = lax.stop_gradient(mean) if fixed else mean
            self.var[...] = lax.stop_gradient(var) if fixed else var
        return y


def _are_features(x: Array, axes: int | Sequence[int], count: int) -> bool:
    """Whether the axes have so many places. (Where not, it is stock that says so.)"""
    places = as_tuple(axes)
    if not all(-x.ndim <= axis < x.ndim for axis in places):
        return False
    return math.prod(x.shape[axis] for axis in places) == count


def _takes(layer: Any, x: Any, mask: Array | None) -> bool:
    """Whether the functions take what a layer that normalizes is asked for."""
    if not hasattr(x, "dtype"):  # of a list, which stock takes
        return False
    if isinstance(layer, nnx.GroupNorm):
        channels = layer.num_groups * layer.group_size
        usual = layer.reduction_axes is None and x.ndim > 1 and _are_features(x, -1, channels)
    elif isinstance(layer, nnx.InstanceNorm):
        usual = x.ndim > 1 and is_last(x, layer.feature_axes)
    else:
        usual = is_last(x, layer.reduction_axes) and is_last(x, layer.feature_axes)
    return (
        usual
        and mask is None
        and layer.axis_name is None
        and layer.promote_dtype is promote_dtype
        and is_number(layer.epsilon)
    )


def _normalize(
    layer: Any, stock: Any, function: Callable[..., Array], x: Any, mask: Array | None
) -> Array:
    """The function with the layer's parameters and options, or stock."""
    if not _takes(layer, x, mask):
        return stock.__call__(layer, x, mask=mask)
    names = ["scale"] if stock is nnx.RMSNorm else ["scale", "bias"]
    parameters = [getattr(layer, name) for name in names]
    parameters = [None if array is None else array[...] for array in parameters]
    dtype = canonicalize_dtype(x, *parameters, dtype=layer.dtype)
    options = {} if stock is nnx.RMSNorm else {"use_fast_variance": layer.use_fast_variance}
    if stock is nnx.GroupNorm:
        options["num_groups"] = layer.num_groups
    return function(
        x if _widens(x.dtype, dtype) else _cast(x, dtype),
        *_promoted(dtype, *parameters),
        epsilon=layer.epsilon,
        dtype=dtype,
        **options,
    )


@drop_in(spec.LAYER_NORM)
class LayerNorm(nnx.LayerNorm):
    """As :class:`flax.nnx.LayerNorm`. Keeps its input as it is."""

    def __call__(self, x: Any, *, mask: Array | None = None) -> Array:
        return _normalize(self, nnx.LayerNorm, functional.layer_norm, x, mask)


@drop_in(spec.GROUP_NORM)
class GroupNorm(nnx.GroupNorm):
    """As :class:`flax.nnx.GroupNorm`. Keeps its input as it is."""

    def __call__(self, x: Any, *, mask: Array | None = None) -> Array:
        return _normalize(self, nnx.GroupNorm, functional.group_norm, x, mask)


@drop_in(spec.INSTANCE_NORM)
class InstanceNorm(nnx.InstanceNorm):
    """As :class:`flax.nnx.InstanceNorm`. Keeps its input as it is."""

    def __call__(self, x: Any, *, mask: Array | None = None) -> Array:
        return _normalize(self, nnx.InstanceNorm, functional.instance_norm, x, mask)


@drop_in(spec.RMS_NORM)
class RMSNorm(nnx.RMSNorm):
    """As :class:`flax.nnx.RMSNorm`. Keeps its input as it is."""

    def __call__(self, x: Any, mask: Array | None = None) -> Array:
        return _normalize(self, nnx.RMSNorm, functional.rms_norm, x, mask)


@drop_in(spec.PRELU)
class PReLU(nnx.PReLU):
    """As :class:`flax.nnx.PReLU`. Keeps one bit per element, and its input for its slope."""

    def __call__(self, inputs: Any) -> Array:
        return _prelu(self, functional.prelu, inputs)


@drop_in(spec.PRELU_FROM_INPUT)
class PReLUFromInput(nnx.PReLU):
    """As :class:`flax.nnx.PReLU`. Keeps its input."""

    def __call__(self, inputs: Any) -> Array:
        return _prelu(self, functional.prelu_from_input, inputs)


def _prelu(layer: nnx.PReLU, function: Callable[..., Array], inputs: Any) -> Array:
    slope = layer.negative_slope[...]
    if layer.promote_dtype is not promote_dtype or slope.size != 1:
        return nnx.PReLU.__call__(layer, inputs)
    if layer.dtype is not None:
        inputs, slope = _promoted(layer.dtype, inputs, slope)
    return function(inputs, slope)


@drop_in(spec.EMBEDDING)
class Embed(nnx.Embed):
    """As :class:`flax.nnx.Embed`. Keeps the indices as they are."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        return _embed(self, functional.embedding, inputs, out_sharding)


@drop_in(spec.EMBEDDING_COMPACT)
class EmbedCompact(nnx.Embed):
    """As :class:`flax.nnx.Embed`. Keeps the indices in the smallest integers that hold them.

    (Of indices that are too large, for which stock gives nan, the gradient is not stock's.)
    """

    def __call__(self, inputs: Any, out_sharding: Any = None) -> Array:
        return _embed(self, functional.embedding_compact, inputs, out_sharding)


def _embed(
    layer: nnx.Embed, function: Callable[..., Array], inputs: Any, out_sharding: Any
) -> Array:
    """The function with the layer's parameter; stock where nothing is looked up, or it raises."""
    if (
        layer.promote_dtype is not promote_dtype
        or layer.num_embeddings == 1
        or not jnp.issubdtype(inputs.dtype, jnp.integer)
        or out_sharding is not None
    ):
        return nnx.Embed.__call__(layer, inputs, out_sharding)
    return function(_cast(layer.embedding[...], layer.dtype), inputs)


def _widens(narrow: Any, wide: Any) -> bool:
    """Whether an array need not be cast: the function widens it, exactly, and keeps it narrow."""
    half = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    single, double = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)
    return (narrow in half and wide in (single, double)) or (narrow, wide) == (single, double)


def _dropout(
    layer: nnx.Dropout,
    function: Callable[..., Array],
    inputs: Array,
    deterministic: bool | None,
    rngs: Any,
) -> Array:
    """The function with the layer's options and key; stock where nothing is drawn or it raises."""
    off = layer.deterministic if deterministic is None else deterministic
    source = layer.rngs if rngs is None else rngs
    if (
        off is None
        or off
        or not is_number(layer.rate)
        or layer.rate in (0.0, 1.0)
        or not is_typed(inputs)
        or not isinstance(source, nnx.Rngs | nnx.RngStream | jax.Array)
    ):
        return nnx.Dropout.__call__(layer, inputs, deterministic=deterministic, rngs=rngs)
    if isinstance(source, nnx.Rngs):
        source = source[layer.rng_collection]
    key = source() if isinstance(source, nnx.RngStream) else source
    return function(inputs, layer.rate, key, broadcast_dims=tuple(layer.broadcast_dims))


@drop_in(spec.DROPOUT)
class Dropout(nnx.Dropout):
    """As :class:`flax.nnx.Dropout`. Keeps one bit per element."""

    def __call__(
        self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None
    ) -> Array:
        return _dropout(self, functional.dropout, inputs, deterministic, rngs)


@drop_in(spec.DROPOUT_FROM_RNG)
class DropoutFromRng(nnx.Dropout):
    """As :class:`flax.nnx.Dropout`. Keeps the key, and draws all numbers twice."""

    def __call__(
        self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None
    ) -> Array:
        return _dropout(self, functional.dropout_from_rng, inputs, deterministic, rngs)
