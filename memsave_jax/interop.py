"""Weights to and from PyTorch: the same numbers, their axes in the order of the other framework.

The table names the axes of every weight; a backend's rules say in which order it has them. So a
weight moves by the names of its axes (:func:`permutation <memsave.spec.permutation>`), and no layer
is mentioned here but for the names of its parameters. Imports no PyTorch: a ``state_dict`` is read
as arrays.
"""
# ruff: noqa: E402 - without Flax, the error is to name the extra

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import _require

_require("flax")

import jax.numpy as jnp
import numpy as np
from flax import nnx

from memsave import spec
from memsave.spec import Layer, permutation

from . import functional as _  # noqa: F401 - defines the rules
from .function import RULES

#: Flax's names of a row's arguments. (PyTorch's are the table's.)
LINEAR = {"weight": "kernel", "bias": "bias"}
NORM = {"weight": "scale", "bias": "bias"}
BATCH_NORM = {**NORM, "running_mean": "mean", "running_var": "var"}
CONV = (spec.CONV1D, spec.CONV2D, spec.CONV3D)
CONV_TRANSPOSE = (spec.CONV_TRANSPOSE1D, spec.CONV_TRANSPOSE2D, spec.CONV_TRANSPOSE3D)


def load_state_dict(
    model: nnx.Module,
    state_dict: Mapping[str, Any],
    *,
    rename: Callable[[str], str] = lambda path: path,
) -> None:
    """Write a PyTorch model's weights into its twin, in place. Both may be converted or not.

    Args:
        model: Has Linear, Conv, ConvTranspose, Embed, BatchNorm, LayerNorm, GroupNorm, InstanceNorm
            and RMSNorm layers with the shapes of PyTorch's. What others have stays as it is.
        state_dict: ``torch_model.state_dict()``, tensors on the CPU or arrays.
        rename: Path of a layer in ``model``, as ``"stages.0.conv"``, to that in the state dict.

    Raises:
        KeyError: The state dict lacks a weight, or has one that no layer takes (if it is shared, by
            any of its names).
        ValueError: A weight has another shape. In either case nothing is written.
    """
    todo, taken = [], set()
    for name, variable, row, argument, layer in _weights(model, rename):
        if name not in state_dict:
            raise KeyError(f"the state dict has no {name!r}, which the model needs")
        array = _to_jax(_array(state_dict[name]), row, argument, layer)
        if array.shape != variable.shape:
            raise ValueError(f"{name} has shape {array.shape} here, the model {variable.shape}")
        todo.append((variable, jnp.array(array, variable.dtype)))  # a copy
        taken.add(_memory(name, state_dict[name]))
    # (PyTorch lists what is shared by each of its names.)
    left = [name for name, value in state_dict.items() if _memory(name, value) not in taken]
    if left := [name for name in left if not name.endswith("num_batches_tracked")]:
        raise KeyError(f"no layer of the model takes {', '.join(sorted(left))}")
    for variable, array in todo:
        variable.set_value(array)


def state_dict(
    model: nnx.Module, *, rename: Callable[[str], str] = lambda path: path
) -> dict[str, np.ndarray]:
    """The inverse of :func:`load_state_dict`: arrays by PyTorch's names, in PyTorch's layout.

    ``torch_model.load_state_dict({name: torch.from_numpy(array) ...}, strict=False)`` reads them
    (not strict, as Flax counts no batches). Those of bfloat16, which NumPy does not have, are of
    float32, which holds them.

    Raises:
        KeyError: The model has parameters that belong to none of the layers named there.
    """
    arrays, taken = {}, set()
    for name, variable, row, argument, layer in _weights(model, rename):
        array = np.asarray(variable[...])
        array = array.astype(np.float32) if array.dtype == jnp.bfloat16 else array
        arrays[name] = _to_torch(array, row, argument, layer)
        taken.add(id(variable))
    for path, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param) and id(node) not in taken:
            name = ".".join(map(str, path))
            raise KeyError(f"{name!r} is of no layer of which PyTorch's layout is known")
    return arrays


def _array(value: Any) -> np.ndarray:
    """(NumPy reads no bfloat16 of PyTorch's.)"""
    is_narrow = str(getattr(value, "dtype", None)) == "torch.bfloat16"
    return np.asarray(value.float() if is_narrow else value)


def _memory(name: str, value: Any) -> Any:
    """What PyTorch's names of one weight have in common: where it lies."""
    return (value.data_ptr(), value.shape) if hasattr(value, "data_ptr") else name


def _weights(
    model: nnx.Module, rename: Callable[[str], str]
) -> Iterator[tuple[str, nnx.Variable, Layer, str, nnx.Module]]:
    """Every weight: its name in PyTorch, where it is, and what it is to which row."""
    for path, layer in nnx.iter_modules(model):
        row, names = _row(layer)
        for argument, attribute in names.items():
            variable = getattr(layer, attribute)
            if variable is not None:
                prefix = rename(".".join(map(str, path)))
                yield f"{prefix}.{argument}".lstrip("."), variable, row, argument, layer


def _row(layer: nnx.Module) -> tuple[Layer, dict[str, str]]:
    if isinstance(layer, nnx.Linear):
        return spec.LINEAR, LINEAR
    if isinstance(layer, nnx.Conv):
        return CONV[len(layer.kernel_size) - 1], LINEAR
    if isinstance(layer, nnx.ConvTranspose):
        return CONV_TRANSPOSE[len(layer.kernel_size) - 1], LINEAR
    if isinstance(layer, nnx.BatchNorm):
        return spec.BATCH_NORM_EVAL, BATCH_NORM
    if isinstance(layer, nnx.LayerNorm | nnx.GroupNorm | nnx.InstanceNorm):
        return spec.LAYER_NORM, NORM
    if isinstance(layer, nnx.RMSNorm):
        return spec.RMS_NORM, {"weight": "scale"}
    if isinstance(layer, nnx.Embed):
        return spec.EMBEDDING, {"weight": "embedding"}
    return spec.LINEAR, {}


def _order(row: Layer, argument: str, ndim: int) -> tuple[int, ...]:
    return permutation(row.args[argument], RULES[row.name].layout[argument], ndim)


def _to_jax(array: np.ndarray, row: Layer, argument: str, layer: nnx.Module) -> np.ndarray:
    array = array.transpose(_order(row, argument, array.ndim))
    return _flipped(array) if _is_flipped(layer, argument) else array


def _to_torch(array: np.ndarray, row: Layer, argument: str, layer: nnx.Module) -> np.ndarray:
    array = _flipped(array) if _is_flipped(layer, argument) else array
    order = np.argsort(_order(row, argument, array.ndim))
    return np.array(array.transpose(order), order="C")  # a copy


def _is_flipped(layer: nnx.Module, argument: str) -> bool:
    """Whether the kernel is that of the transposed convolution, not of the one it transposes."""
    is_transposed = isinstance(layer, nnx.ConvTranspose) and not layer.transpose_kernel
    return is_transposed and argument == "weight"


def _flipped(kernel: np.ndarray) -> np.ndarray:
    return np.flip(kernel, tuple(range(kernel.ndim - 2))).swapaxes(-1, -2)
