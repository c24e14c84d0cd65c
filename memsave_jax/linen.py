"""Drop-ins for :mod:`flax.linen`: its layers under its names, as thin shells over the functions.

How whole models are converted is in ``_convert_linen.py``.
"""
# ruff: noqa: E402 - without Flax, the error is to name the extra

from __future__ import annotations

import inspect
from typing import Any

from . import _require

_require("flax")

import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import canonicalize_padding
from jax import Array

from memsave import spec
from memsave._text import Coverage, Entry

from . import functional
from ._convert_linen import convert, coverage, drop_in, revert
from .function import is_number, is_typed
from .functional import (
    avg_pool,
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    max_pool,
    relu,
    relu6,
    relu_from_output,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
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
    "Dense",
    "Dropout",
    "Embed",
    "Entry",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "PReLU",
    "RMSNorm",
    "avg_pool",
    "celu",
    "convert",
    "coverage",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "max_pool",
    "relu",
    "relu6",
    "relu_from_output",
    "revert",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "swish",
    "tanh",
]

# Each ``__call__`` also runs on an instance of the stock class, which has the same fields: that is
# how convert replaces it. What our functions do not take, or stock refuses, is left to stock's.

_dense = inspect.unwrap(nn.Dense.__call__)
_conv = inspect.unwrap(nn.Conv.__call__)
_conv_transpose = inspect.unwrap(nn.ConvTranspose.__call__)
_batch_norm = inspect.unwrap(nn.BatchNorm.__call__)
_layer_norm = inspect.unwrap(nn.LayerNorm.__call__)
_group_norm = inspect.unwrap(nn.GroupNorm.__call__)
_instance_norm = inspect.unwrap(nn.InstanceNorm.__call__)
_rms_norm = inspect.unwrap(nn.RMSNorm.__call__)
_prelu = inspect.unwrap(nn.PReLU.__call__)
_dropout = inspect.unwrap(nn.Dropout.__call__)
_embed = inspect.unwrap(nn.Embed.__call__)


def _operands(module: Any, inputs: Any, shape: tuple[int, ...]) -> Any:
    """Inputs, kernel (masked) and bias, in the dtype of the computation."""
    kernel = module.param("kernel", module.kernel_init, shape, module.param_dtype)
    if getattr(module, "mask", None) is not None:
        kernel *= module.mask
    bias = None
    if module.use_bias:
        bias = module.param("bias", module.bias_init, (module.features,), module.param_dtype)
    given = inputs, kernel, bias
    promoted = module.promote_dtype(*given, dtype=module.dtype)
    if module.promote_dtype is not promote_dtype:
        return promoted
    # Called eagerly, Flax's copies also what has the dtype already, and the copy would be kept.
    return [
        old if isinstance(old, Array) and old.dtype == new.dtype else new
        for old, new in zip(given, promoted, strict=True)
    ]


def _is_plain(module: Any, shape: tuple[int, ...], named: tuple[str, ...]) -> bool:
    """Whether our functions take the options of a convolution."""
    return (
        (module.padding in named if isinstance(module.padding, str) else True)
        and 3 <= len(shape) <= 5
        and (module.mask is None or module.mask.shape == shape)
    )


@drop_in(spec.LINEAR)
class Dense(nn.Dense):
    """As :class:`flax.linen.Dense`. Keeps what the wanted gradients read."""

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        if self.dot_general is not None or self.dot_general_cls is not None:
            return _dense(self, inputs)
        shape = (jnp.shape(inputs)[-1], self.features)
        return functional.linear(*_operands(self, inputs, shape), precision=self.precision)


@drop_in(spec.CONV1D, spec.CONV2D, spec.CONV3D)
class Conv(nn.Conv):
    """As :class:`flax.linen.Conv`. Keeps the inputs, not the copy that a padding mode makes.

    (With a ``conv_general_dilated`` of the user's it is stock.)
    """

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        size, groups = as_tuple(self.kernel_size), self.feature_group_count
        shape = (*size, inputs.shape[-1] // groups, self.features)
        dilation = 1 if self.input_dilation is None else self.input_dilation
        named = ("SAME", "VALID", "CIRCULAR", "REFLECT", "CAUSAL")
        if (
            not _is_plain(self, shape, named)
            or inputs.shape[-1] % groups
            or (isinstance(self.padding, str) and {*as_tuple(dilation)} != {1})
            or not (self.conv_general_dilated is self.conv_general_dilated_cls is None)
        ):
            return _conv(self, inputs)
        return functional.conv(
            *_operands(self, inputs, shape),
            strides=1 if self.strides is None else self.strides,
            padding=canonicalize_padding(self.padding, len(size)),
            input_dilation=dilation,
            kernel_dilation=1 if self.kernel_dilation is None else self.kernel_dilation,
            feature_group_count=groups,
            precision=self.precision,
        )


@drop_in(spec.CONV_TRANSPOSE1D, spec.CONV_TRANSPOSE2D, spec.CONV_TRANSPOSE3D)
class ConvTranspose(nn.ConvTranspose):
    """As :class:`flax.linen.ConvTranspose`. Keeps the kernel, not its flipped copy."""

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        size, features = as_tuple(self.kernel_size), (inputs.shape[-1], self.features)
        shape = (*size, *(reversed(features) if self.transpose_kernel else features))
        if not _is_plain(self, shape, ("SAME", "VALID", "CIRCULAR")):
            return _conv_transpose(self, inputs)
        return functional.conv_transpose(
            *_operands(self, inputs, shape),
            strides=1 if self.strides is None else self.strides,
            padding=canonicalize_padding(self.padding, len(size)),
            kernel_dilation=1 if self.kernel_dilation is None else self.kernel_dilation,
            transpose_kernel=self.transpose_kernel,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )


@drop_in(spec.BATCH_NORM_TRAIN, spec.BATCH_NORM_EVAL)
class BatchNorm(nn.BatchNorm):
    """As :class:`flax.linen.BatchNorm`. Keeps the input as it is, or nothing (see
    :func:`memsave_jax.functional.batch_norm`).

    (With a ``mask`` or an ``axis_name`` it computes as stock does; for integers and without
    ``force_float32_reductions``, it is stock.)
    """

    @nn.compact
    def __call__(
        self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
    ) -> Array:
        if not (
            jnp.issubdtype(x.dtype, jnp.inexact)
            and self.force_float32_reductions
            and is_number(self.epsilon)
        ):
            return _batch_norm(self, x, use_running_average, mask=mask)
        frozen = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        axes = {a + x.ndim if a < 0 else a for a in as_tuple(self.axis)}
        shape = [x.shape[a] for a in sorted(axes)]
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        y, *updated = functional.batch_norm(
            x,
            mean.value,
            var.value,
            scale,
            bias,
            use_running_average=frozen,
            axis=tuple(axes),
            momentum=self.momentum,
            epsilon=self.epsilon,
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
            axis_name=None if self.is_initializing() else self.axis_name,
            axis_index_groups=self.axis_index_groups,
            mask=None if mask is None else jnp.asarray(mask, bool),
        )
        if not (frozen or self.is_initializing()):
            mean.value, var.value = updated  # type: ignore - there are running ones to update
        return y


def _takes(module: Any, x: Any, mask: Array | None) -> bool:
    """Whether our functions take what a module that normalizes is asked for."""
    if not is_typed(x):
        return False
    if isinstance(module, nn.GroupNorm):
        groups, size = module.num_groups, module.group_size
        count = groups or size or 0
        usual = (
            module.reduction_axes is None
            and x.ndim > 1
            and (groups is None) != (size is None)
            and count > 0
            and not x.shape[-1] % count
        )
    elif isinstance(module, nn.InstanceNorm):
        usual = x.ndim > 1 and is_last(x, module.feature_axes)
    else:
        usual = is_last(x, module.reduction_axes) and is_last(x, module.feature_axes)
    return (
        usual
        and mask is None
        and module.axis_name is None
        and module.force_float32_reductions
        and jnp.issubdtype(x.dtype, jnp.inexact)
        and is_number(module.epsilon)
    )


def _parameters(module: Any, x: Array, *names: str) -> list[Array | None]:
    shape = [x.shape[-1]]

    def parameter(name: str) -> Array | None:
        if not getattr(module, f"use_{name}"):
            return None
        return module.param(name, getattr(module, f"{name}_init"), shape, module.param_dtype)

    return [parameter(name) for name in names]


@drop_in(spec.LAYER_NORM)
class LayerNorm(nn.LayerNorm):
    """As :class:`flax.linen.LayerNorm`. Keeps its input as it is."""

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        if not _takes(self, x, mask):
            return _layer_norm(self, x, mask=mask)
        return functional.layer_norm(
            x,
            *_parameters(self, x, "scale", "bias"),
            epsilon=self.epsilon,
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
        )


@drop_in(spec.GROUP_NORM)
class GroupNorm(nn.GroupNorm):
    """As :class:`flax.linen.GroupNorm`. Keeps its input as it is."""

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        if not _takes(self, x, mask):
            return _group_norm(self, x, mask=mask)
        size = self.group_size
        return functional.group_norm(
            x,
            *_parameters(self, x, "scale", "bias"),
            num_groups=self.num_groups if size is None else x.shape[-1] // size,  # type: ignore
            epsilon=self.epsilon,
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
        )


@drop_in(spec.INSTANCE_NORM)
class InstanceNorm(nn.InstanceNorm):
    """As :class:`flax.linen.InstanceNorm`. Keeps its input as it is."""

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        if not _takes(self, x, mask):
            return _instance_norm(self, x, mask=mask)
        return functional.instance_norm(
            x,
            *_parameters(self, x, "scale", "bias"),
            epsilon=self.epsilon,
            dtype=self.dtype,
            use_fast_variance=self.use_fast_variance,
        )


@drop_in(spec.RMS_NORM)
class RMSNorm(nn.RMSNorm):
    """As :class:`flax.linen.RMSNorm`. Keeps its input as it is."""

    @nn.compact
    def __call__(self, x: Array, *, mask: Array | None = None) -> Array:
        if not _takes(self, x, mask):
            return _rms_norm(self, x, mask=mask)
        (scale,) = _parameters(self, x, "scale")
        return functional.rms_norm(x, scale, epsilon=self.epsilon, dtype=self.dtype)


@drop_in(spec.PRELU)
class PReLU(nn.PReLU):
    """As :class:`flax.linen.PReLU`. Keeps one bit per element, and its input for its slope."""

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        if jnp.size(self.negative_slope_init) != 1 or not is_typed(inputs):
            return _prelu(self, inputs)
        slope = self.param(
            "negative_slope", lambda key: jnp.asarray(self.negative_slope_init, self.param_dtype)
        )
        return functional.prelu(inputs, slope)


@drop_in(spec.DROPOUT, spec.DROPOUT_FROM_RNG)
class Dropout(nn.Dropout):
    """As :class:`flax.linen.Dropout`, drawing the same numbers. Keeps one bit per element."""

    @nn.compact
    def __call__(
        self, inputs: Array, deterministic: bool | None = None, rng: Any | None = None
    ) -> Array:
        drops = not nn.merge_param("deterministic", self.deterministic, deterministic)
        if not (drops and is_number(self.rate) and 0 < self.rate < 1 and is_typed(inputs)):
            return _dropout(self, inputs, deterministic, rng)
        key = self.make_rng(self.rng_collection) if rng is None else rng
        return functional.dropout(inputs, self.rate, key, broadcast_dims=self.broadcast_dims)


@drop_in(spec.EMBEDDING)
class Embed(nn.Embed):
    """As :class:`flax.linen.Embed`. Keeps the indices as they are."""

    def __call__(self, inputs: Array) -> Array:
        if (
            self.promote_dtype is not promote_dtype
            or self.num_embeddings == 1
            or not jnp.issubdtype(inputs.dtype, jnp.integer)
        ):
            return _embed(self, inputs)
        (weight,) = promote_dtype(self.embedding, dtype=self.dtype, inexact=False)
        return functional.embedding(
            self.embedding if weight.dtype == self.embedding.dtype else weight, inputs
        )
