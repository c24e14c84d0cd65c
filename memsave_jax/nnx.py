"""The layers as modules and functions of Flax NNX, named and signed like those of :mod:`flax.nnx`.

A drop-in has the state of its stock module and another ``__call__``, the rule's. What the rules do
not take, such as a convolution of the user's own, is left to stock: right, without the saving.
"""
# ruff: noqa: E402 - without Flax, the error is to name the extra

from __future__ import annotations

from collections.abc import Callable
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

from . import functional
from ._convert_nnx import convert, coverage, drop_in, register, revert
from ._coverage import Coverage, Entry
from .functional import max_pool, relu, relu_from_output

__all__ = [
    "BatchNorm",
    "Conv",
    "ConvTranspose",
    "Coverage",
    "Dropout",
    "DropoutFromRng",
    "Entry",
    "Linear",
    "convert",
    "coverage",
    "max_pool",
    "relu",
    "relu_from_output",
    "revert",
]

register(relu, jax.nn.relu, spec.RELU)
register(relu_from_output, jax.nn.relu, spec.RELU_FROM_OUTPUT)
register(max_pool, nnx.max_pool, spec.MAX_POOL2D, spec.MAX_POOL1D, spec.MAX_POOL3D)


# Outside of jit, stock's casts copy an array for its gradient even where it has the dtype already,
# and the copy is kept. So an array that has the dtype is taken as it is.


def _promoted(dtype: Any, *arrays: Any) -> list[Any]:
    """As Flax's ``promote_dtype``."""
    dtype = canonicalize_dtype(*arrays, dtype=dtype)
    return [_cast(array, dtype) for array in arrays]


def _cast(array: Any, dtype: Any) -> Any:
    return array if array is None or array.dtype == dtype else jnp.asarray(array, dtype)


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
PADDING = ("SAME", "VALID", "CIRCULAR")


def _is_plain(layer: nnx.Conv | nnx.ConvTranspose, padding: Any, named: tuple[str, ...]) -> bool:
    """Whether the functions take it: stock would not raise, nor call a function of the user's."""
    return (
        (not isinstance(padding, str) or padding in named)
        and layer.promote_dtype is promote_dtype
        and len(layer.kernel_size) <= 3
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
            not _is_plain(self, padding, (*PADDING, "REFLECT", "CAUSAL"))
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
        if not _is_plain(self, padding, PADDING):
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
            or not _is_number(self.epsilon)
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


def _widens(narrow: Any, wide: Any) -> bool:
    """Whether an array need not be cast: the function widens it, exactly, and keeps it narrow."""
    half = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
    single, double = jnp.dtype(jnp.float32), jnp.dtype(jnp.float64)
    return (narrow in half and wide in (single, double)) or (narrow, wide) == (single, double)


def _is_number(option: Any) -> bool:
    """No array, nor a scalar of NumPy's, which has a dtype to promote to."""
    return type(option) in (int, float)


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
        or not _is_number(layer.rate)
        or layer.rate in (0.0, 1.0)
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
