"""``memsave_jax.nnx``: drop-ins for the layers of Flax NNX, and the conversion of models to them.

The oracle is stock Flax on the same state. Outputs are equal to the bit, gradients to rounding;
what is kept for backward is what the wanted gradients read.
"""

from __future__ import annotations

import copy
import functools
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import TestCase

import cloudpickle
import flax.linen
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import lax
from strategies import functions_of_rows

import memsave_jax
from memsave import spec
from memsave._text import Entry
from memsave_jax import _convert_nnx, function, nnx as mnnx

Make = Callable[[Any], nnx.Module]


# Drawn by NumPy, and compiled without optimizing: most of the time would go into compiling.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def noise(key: Any, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An initializer."""
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape) / 2, dtype)


def image(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return noise(None, shape or (2, 6, 6, 4), dtype)


def leaves(tree: Any) -> list[np.ndarray]:
    keys = jax.dtypes.prng_key
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, keys) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def same(actual: Any, expected: Any) -> None:
    """Equal to the bit, dtypes and structure included."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, strict=True)


def close(actual: Any, expected: Any, rtol: float = 2e-5, atol: float = 1e-9) -> None:
    """Equal to rounding, relative to the largest element."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = (each.astype(float) for each in (a, b))
        largest = np.abs(b).max(initial=0)
        np.testing.assert_allclose(a, b, rtol=0, atol=max(atol, rtol * largest))


def compiled(f: Callable[..., Any], *args: Any) -> Any:
    return jit(f)(*args)


def gradients(model: nnx.Module, *args: Any, run: Any = compiled, **kwargs: Any) -> Any:
    """Of the parameters and arguments, and the rest of the state afterwards."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def call(params: Any, *args: Any) -> Any:
        merged = nnx.merge(graphdef, params, rest, copy=True)
        y = merged(*args, **kwargs)  # type: ignore[operator]
        return y, nnx.to_pure_dict(nnx.split(merged, nnx.Param, ...)[2])

    def both(params: Any, *args: Any) -> Any:
        y, pull, rest = jax.vjp(call, params, *args, has_aux=True)
        g = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype)
        return jax.tree.leaves(pull(g)), rest

    return run(both, params, *args)


def agree(actual: Any, expected: Any, *args: Any, run: Any = compiled, **kwargs: Any) -> None:
    """Equal outputs and new states, as they are computed eagerly; equal gradients."""
    ours, stock = (gradients(model, *args, run=run, **kwargs) for model in (actual, expected))
    y, y2 = (model(*args, **kwargs) for model in (actual, expected))
    same(y, y2)
    same(*(nnx.to_pure_dict(nnx.state(model)) for model in (actual, expected)))
    params = jax.tree.leaves(nnx.state(expected, nnx.Param))
    half = any(jnp.finfo(a.dtype).bits < 32 for a in (y, *args, *params))
    close(ours, stock, 3e-2 if half else 2e-5)


def kept(f: Callable[..., Any], *args: Any, free: Any = ()) -> int:
    """Bytes that backward needs, other than the arrays in ``free``."""
    _, pull = jax.vjp(f, *args)
    arrays = [leaf for leaf in jax.tree.leaves(pull) if isinstance(leaf, jax.Array)]
    known = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(free)}
    held = {a.unsafe_buffer_pointer(): a.nbytes for a in arrays if a.dtype != jax.dtypes.float0}
    return sum(size for pointer, size in held.items() if pointer not in known)


# The layers.


def user_conv(*args: Any, **kwargs: Any) -> jax.Array:
    return 2 * lax.conv_general_dilated(*args, **kwargs)


def user_dot(*args: Any, **kwargs: Any) -> jax.Array:
    return 2 * lax.dot_general(*args, **kwargs)


def user_promote(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    return tuple(
        None if a is None else jnp.round(8 * a) / 8
        for a in promote_dtype(args, dtype=dtype, inexact=inexact)
    )


def mask(*shape: int) -> jax.Array:
    return (jnp.arange(np.prod(shape)) % 3 > 0).astype(jnp.float32).reshape(shape)


HALF = jnp.bfloat16
CONV: dict[str, tuple[dict[str, Any], Any]] = {
    "no axes": ({"kernel_size": ()}, image(3, 4)),
    "same": ({}, image()),
    "circular": ({"padding": "CIRCULAR", "strides": 2}, image()),
    "circular mask": ({"padding": "CIRCULAR", "mask": mask(3, 3, 4, 6)}, image()),
    "circular even": (
        {
            "kernel_size": (2, 4),
            "padding": "CIRCULAR",
            "use_bias": False,
            "precision": lax.Precision.HIGHEST,
        },
        image(),
    ),
    "circular own": ({"padding": "CIRCULAR", "conv_general_dilated": user_conv}, image()),
    "reflect": (
        {"padding": "REFLECT", "kernel_dilation": 2, "feature_group_count": 2},
        image(6, 6, 4),
    ),
    "reflect None": (
        {"padding": "REFLECT", "strides": None, "input_dilation": None, "kernel_dilation": None},
        image(2, 2, 6, 6, 4),
    ),
    "reflect half": ({"padding": "REFLECT", "dtype": HALF, "param_dtype": HALF}, image()),
    "reflect np": ({"padding": "REFLECT", "preferred_element_type": np.float32}, image(dtype=HALF)),
    "circular own promote": ({"padding": "CIRCULAR", "promote_dtype": user_promote}, image()),
    "causal": ({"kernel_size": 3, "padding": "CAUSAL", "kernel_dilation": 2}, image(2, 9, 4)),
    "causal one": ({"kernel_size": 2, "padding": "CAUSAL"}, image(9, 4)),
    "dilated": ({"padding": 1, "input_dilation": 2}, image()),
    "pairs": ({"padding": ((0, 1), (2, 1)), "mask": mask(3, 3, 4, 6)}, image()),
    "volume": ({"kernel_size": (3, 2, 2), "padding": "CIRCULAR"}, image(1, 4, 4, 3, 4)),
}
TRANSPOSE: dict[str, tuple[dict[str, Any], Any]] = {
    "no axes": ({"kernel_size": ()}, image(3, 4)),
    "plain": ({"strides": 2}, image()),
    "flip": ({"transpose_kernel": True, "strides": (2, 2)}, image()),
    "flip valid": ({"transpose_kernel": True, "padding": "VALID", "strides": 3}, image(6, 6, 4)),
    "flip circular": ({"transpose_kernel": True, "padding": "CIRCULAR", "strides": 2}, image()),
    "flip pads": (
        {"transpose_kernel": True, "padding": (1, (0, 2)), "kernel_dilation": 2, "strides": None},
        image(2, 2, 6, 6, 4),
    ),
    "flip mask": ({"transpose_kernel": True, "mask": mask(3, 3, 6, 4), "padding": 1}, image()),
    "flip half": ({"transpose_kernel": True, "dtype": HALF, "use_bias": False}, image()),
    "flip np": (
        {"transpose_kernel": True, "preferred_element_type": np.float32, "strides": 1},
        image(dtype=HALF),
    ),
    "flip own promote": ({"transpose_kernel": True, "promote_dtype": user_promote}, image()),
    "circular": ({"padding": "CIRCULAR"}, image()),
    "line": ({"kernel_size": 3, "transpose_kernel": True}, image(2, 9, 4)),
}
LINEAR: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, image(3, 4)),
    "half": ({"dtype": HALF, "use_bias": False}, image(3, 4)),
    "own": ({"dot_general": user_dot, "promote_dtype": user_promote}, image(3, 4)),
    "wide": ({"preferred_element_type": np.float32}, image(4, dtype=HALF)),
}
NORM: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, image()),
    "bare": ({"use_scale": False, "use_bias": False, "use_fast_variance": False}, image()),
    "first axis": ({"axis": 1, "momentum": 0.5, "epsilon": 0.1}, image(3, 4, 5)),
    "half": ({}, image(dtype=HALF)),
    "half params": ({"param_dtype": HALF}, image(dtype=jnp.float16)),
    "to half": ({"dtype": HALF}, image()),
    "in half": ({"dtype": HALF, "param_dtype": HALF}, image(dtype=HALF)),
    "other half": ({"dtype": HALF}, image(dtype=jnp.float16)),
    "to single": ({"dtype": np.float32}, image(dtype=HALF)),
    "ints": ({}, jnp.arange(24).reshape(6, 4)),
    "numpy": ({}, np.asarray(image())),
    "own promote": ({"promote_dtype": user_promote}, image()),
    "numpy eps": ({"epsilon": np.float64(1e-3)}, image()),
    "numpy axis": ({"axis": np.int64(-1)}, image()),
}


def layers(lib: Any, name: str, **options: Any) -> Any:
    inits = {"bias_init": noise, "rngs": nnx.Rngs(0)}
    if name.startswith("PReLU"):
        return getattr(lib, name)(**options)
    if name.startswith("Embed"):
        size = options.pop("num_embeddings", 5)
        return getattr(lib, name)(size, 3, **options, embedding_init=noise, rngs=nnx.Rngs(0))
    if name.startswith("RMSNorm"):
        return getattr(lib, name)(4, **options, rngs=nnx.Rngs(0), scale_init=noise)
    if "Norm" in name and name != "BatchNorm":
        groups = {"num_groups": 2} if name.startswith("Group") else {}
        return getattr(lib, name)(4, **{**groups, **options}, **inits, scale_init=noise)
    if name == "BatchNorm":
        return with_statistics(lib.BatchNorm(4, **options, **inits, scale_init=noise))
    size = () if name == "Linear" else ((3, 3),)
    if "kernel_size" in options:
        size = (options.pop("kernel_size"),)
    return getattr(lib, name)(4, 6, *size, **options, **inits, kernel_init=noise)


def with_statistics(model: Any) -> Any:
    """With other values than the zeros and ones that they begin with."""
    for _, norm in nnx.iter_modules(model):
        if isinstance(norm, nnx.BatchNorm):
            norm.mean[...] = noise(None, norm.mean.shape)
            norm.var[...] = 0.1 + noise(None, norm.var.shape) ** 2
    return model


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (name, case)
        for name, cases in {"Conv": CONV, "ConvTranspose": TRANSPOSE, "Linear": LINEAR}.items()
        for case in cases
    ],
)
def test_linear_layers(name: str, case: str) -> None:
    options, x = {"Conv": CONV, "ConvTranspose": TRANSPOSE, "Linear": LINEAR}[name][case]
    agree(layers(mnnx, name, **options), layers(nnx, name, **options), x)


BARE = {"use_scale": False, "use_bias": False, "use_fast_variance": False}
OF_EXAMPLES: dict[str, dict[str, tuple[dict[str, Any], Any, dict[str, Any]]]] = {
    "LayerNorm": {
        "plain": ({}, image(), {}),
        "bare": (BARE, image(), {}),
        "half": ({}, image(dtype=HALF), {}),
        "in half": ({"dtype": HALF, "epsilon": 1e-3}, image(), {}),
        "other axes": ({"reduction_axes": (1, 2)}, image(), {}),
        "mask": ({}, image(), {"mask": mask(2, 6, 6, 4) > 0}),
        "own promote": ({"promote_dtype": user_promote}, image(), {}),
        "numpy eps": ({"epsilon": np.float64(1e-3)}, image(), {}),
    },
    "GroupNorm": {
        "plain": ({}, image(), {}),
        "bare": (BARE, image(3, 6, 4), {}),
        "size": ({"num_groups": None, "group_size": 1}, image(dtype=HALF), {}),
        "other axes": ({"reduction_axes": (2, 3)}, image(2, 6, 6, 4), {}),
        "mask": ({}, image(), {"mask": mask(2, 6, 6, 4) > 0}),
    },
    "InstanceNorm": {
        "plain": ({}, image(), {}),
        "bare": (BARE, image(), {}),
        "half": ({"param_dtype": HALF}, image(dtype=HALF), {}),
        "line": ({}, image(3, 4), {}),
        "mask": ({}, image(), {"mask": mask(2, 6, 6, 4) > 0}),
    },
    "RMSNorm": {
        "plain": ({}, image(), {}),
        "bare": ({"use_scale": False}, image(), {}),
        "half": ({}, image(dtype=HALF), {}),
        "in half": ({"dtype": HALF}, image(), {}),
        "mask": ({}, image(), {"mask": mask(2, 6, 6, 4) > 0}),
    },
    "PReLU": {
        "plain": ({}, image(), {}),
        "half": ({"negative_slope_init": -0.5}, image(dtype=HALF), {}),
        "in half": ({"dtype": HALF}, image(), {}),
        "own": ({"dtype": HALF, "promote_dtype": user_promote}, image(), {}),
    },
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, cases in OF_EXAMPLES.items() for case in cases]
)
def test_layers_of_single_examples(name: str, case: str) -> None:
    options, x, call = OF_EXAMPLES[name][case]
    for drop_in in _convert_nnx.DROP_INS[getattr(nnx, name)]:
        ours = layers(mnnx, drop_in.__name__, **options)
        agree(ours, layers(nnx, name, **options), x, **call)


INDICES = jnp.array([[4, 0, -2], [0, 3, 0]])
EMBED: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, INDICES),
    "bytes": ({}, np.asarray(INDICES, np.int8)),
    "many": ({"num_embeddings": 300}, 70 * jnp.abs(INDICES).astype(jnp.uint16)),
    "one": ({"num_embeddings": 1}, INDICES),
    "half": ({"dtype": HALF}, INDICES[0]),
    "in half": ({"param_dtype": HALF}, INDICES),
    "own promote": ({"promote_dtype": user_promote}, INDICES),
}


def test_embed_beyond() -> None:
    """Indices that are too large give nan, and no gradient."""
    agree(layers(mnnx, "Embed"), layers(nnx, "Embed"), inputs=jnp.array([1, 5]))


@pytest.mark.parametrize("case", EMBED)
def test_embed(case: str) -> None:
    """Its inputs have no gradient."""
    options, indices = EMBED[case]
    for drop_in in _convert_nnx.DROP_INS[nnx.Embed]:
        ours = layers(mnnx, drop_in.__name__, **options)
        agree(ours, layers(nnx, "Embed", **options), inputs=indices)
        query = image(2, 3)
        same(ours.attend(query), layers(nnx, "Embed", **options).attend(query))
        with pytest.raises(ValueError, match="must be an integer"):
            ours(image())


@pytest.mark.parametrize(("name", "expected"), [("Embed", 0), ("EmbedCompact", INDICES.size)])
def test_embed_keeps(name: str, expected: int) -> None:
    """The indices, which are free where they are an input, or a byte for each."""
    model = layers(mnnx, name)
    graphdef, state = nnx.split(model)
    assert kept(lambda s: nnx.merge(graphdef, s)(INDICES), state, free=(state, INDICES)) == expected


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("case", NORM)
def test_batch_norm(case: str, average: bool) -> None:
    """By the argument; the layer's own choice is the other one."""
    options, x = NORM[case]
    ours, stock = (
        layers(lib, "BatchNorm", use_running_average=not average, **options) for lib in (mnnx, nnx)
    )
    if x.dtype.kind == "i":  # (integers have no gradient)
        same(*(m(x, use_running_average=average) for m in (ours, stock)))
        same(*(nnx.to_pure_dict(nnx.state(m)) for m in (ours, stock)))
    else:
        agree(ours, stock, x, use_running_average=average)


def test_batch_norm_in_double() -> None:
    """Statistics in float32, an input in float64: the small one is promoted before epsilon."""
    with jax.enable_x64(True):
        ours, stock = (layers(lib, "BatchNorm") for lib in (mnnx, nnx))
        agree(ours, stock, image(dtype=jnp.float64), use_running_average=True)
        for model in (ours, stock):
            model.mean.set_value(model.mean[...].astype(jnp.float64))
            model.var.set_value(model.var[...].astype(jnp.float64))
        agree(ours, stock, image(dtype=jnp.float64), use_running_average=False)
        agree(ours, stock, image(), use_running_average=False)


@pytest.mark.parametrize("average", [False, True])
def test_batch_norm_of_some_elements(average: bool) -> None:
    """A mask; the statistics of all devices of an axis."""
    x = image(3, 2, 4)
    ours, stock = (layers(lib, "BatchNorm", use_running_average=average) for lib in (mnnx, nnx))
    agree(ours, stock, x, mask=jnp.arange(3).reshape(3, 1, 1) < 2)

    def outputs(lib: Any) -> Any:
        norm = layers(lib, "BatchNorm", axis_name="devices", use_running_average=average)
        graphdef, state = nnx.split(norm)

        def call(x: Any) -> Any:
            model = nnx.merge(graphdef, state, copy=True)
            return model(x), nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

        return jax.vmap(call, axis_name="devices")(x)

    close(outputs(mnnx), outputs(nnx))


DROPOUT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "own": ({"rngs": nnx.Rngs(3)}, {}),
    "stream": ({"rngs": nnx.Rngs(3)["dropout"]}, {}),
    "key": ({}, {"rngs": jax.random.key(5)}),
    "raw key": ({}, {"rngs": jax.random.PRNGKey(5)}),
    "off": ({"deterministic": True}, {}),
    "off by argument": ({"rngs": nnx.Rngs(3)}, {"deterministic": True}),
    "on by argument": ({"rngs": nnx.Rngs(3), "deterministic": True}, {"deterministic": False}),
    "broadcast": ({"rngs": nnx.Rngs(3), "broadcast_dims": [1, -1]}, {}),
    "never": ({"rate": 0.0}, {}),
    "always": ({"rate": 1.0}, {}),
    "numpy rate": ({"rate": np.float32(0.25), "rngs": nnx.Rngs(3)}, {}),
}


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "InstanceNorm"])
@pytest.mark.parametrize("axes", [(-1,), 3, (3, -1)], ids=str)
def test_norms_of_axes_in_another_spelling(name: str, axes: Any) -> None:
    """They keep no more."""
    options = {"feature_axes": axes}
    options |= {} if name.startswith("Instance") else {"reduction_axes": axes}
    layer, usual, x = layers(mnnx, name, **options), layers(mnnx, name), image()
    same(layer(x), layers(nnx, name)(x))
    assert kept(layer, x) == kept(usual, x) < kept(layers(nnx, name), x)


@pytest.mark.parametrize("case", DROPOUT)
def test_dropout(case: str) -> None:
    """The same numbers, and as many are drawn."""
    options, call = DROPOUT[case]
    for cls in (mnnx.Dropout, mnnx.DropoutFromRng):
        ours, stock = (c(**{"rate": 0.25, **copy.deepcopy(options)}) for c in (cls, nnx.Dropout))
        # (Not compiled: the generator of random numbers would be, again and again.)
        agree(ours, stock, image(3, 10), run=lambda f, *args: f(*args), **call)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all_takes_no_key(rate: float) -> None:
    counts = []
    for lib in (nnx, mnnx):
        layer = lib.Dropout(rate, rngs=nnx.Rngs(0))
        layer(image(3, 10), deterministic=False)
        counts.append(nnx.to_pure_dict(nnx.state(layer, nnx.RngCount)))
    same(*counts)


def test_dropout_by_rngs_given() -> None:
    """An argument that has a state of its own: both are left in the same one."""
    for make in (lambda: nnx.Rngs(4), lambda: nnx.Rngs(drop=4), lambda: nnx.Rngs(4)["drop"]):
        ours, stock = make(), make()
        layer = {"rate": 0.5, "rng_collection": "drop"}
        for _ in range(2):
            y = mnnx.Dropout(**layer)(image(3, 10), rngs=ours)
            same(y, nnx.Dropout(**layer)(image(3, 10), rngs=stock))
        same(nnx.to_pure_dict(nnx.state(ours)), nnx.to_pure_dict(nnx.state(stock)))


def wrong_calls(lib: Any) -> list[Callable[[], Any]]:
    x = image()
    conv = {"kernel_size": (3, 3), "rngs": nnx.Rngs(0)}
    return [
        lambda: lib.Dropout(0.5)(x),
        lambda: lib.Dropout(0.5, deterministic=None)(x),
        lambda: lib.Dropout(0.5)(x, rngs=3),
        lambda: lib.Dropout(0.5, rngs=nnx.Rngs(0))(jnp.arange(4)),
        lambda: lib.BatchNorm(4, use_running_average=None, rngs=nnx.Rngs(0))(x),
        lambda: lib.BatchNorm(3, rngs=nnx.Rngs(0))(x),
        lambda: lib.BatchNorm(1, rngs=nnx.Rngs(0))(x[0, 0, 0]),
        lambda: lib.BatchNorm(4, axis=5, rngs=nnx.Rngs(0))(x),
        lambda: lib.BatchNorm(4, axis=5, use_running_average=True, rngs=nnx.Rngs(0))(x),
        lambda: lib.GroupNorm(2, 2, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))(x),
        lambda: lib.GroupNorm(6, 3, rngs=nnx.Rngs(0))(x),
        lambda: lib.max_pool(x[0, 0], (2, 2)),
        lambda: lib.max_pool(x[0, 0, 0], (2, 2), padding="SAME"),
        lambda: lib.avg_pool(x[0, 0, 0, 0], (2, 2), padding="SAME"),
        lambda: lib.Conv(4, 4, padding="CIRCULAR", mask=jnp.ones(3), **conv)(x),
        lambda: lib.Conv(4, 4, mask=jnp.ones((1, 3, 4, 4)), **conv)(x),
        lambda: lib.ConvTranspose(4, 4, mask=jnp.ones((1, 3, 4, 4)), **conv)(x),
        lambda: lib.Conv(4, 4, padding="CAUSAL", **conv)(x),
        lambda: lib.Conv(4, 4, padding=(1, 2, 3), **conv)(x),
        lambda: lib.Conv(3, 4, padding="REFLECT", **conv)(x),
        lambda: lib.ConvTranspose(4, 4, mask=jnp.ones(3), transpose_kernel=True, **conv)(x),
        lambda: lib.ConvTranspose(4, 4, padding="REFLECT", transpose_kernel=True, **conv)(x),
        lambda: lib.ConvTranspose(4, 4, padding=(1, 2, 3), transpose_kernel=True, **conv)(x),
        lambda: lib.Conv(4, 4, **conv)(x.tolist()),
        lambda: lib.ConvTranspose(4, 4, **conv)(x.tolist()),
        lambda: lib.Dropout(0.5, rngs=nnx.Rngs(0))(x.tolist()),
    ]


@pytest.mark.parametrize("k", range(len(wrong_calls(nnx))))
def test_errors_are_those_of_stock(k: int) -> None:
    with pytest.raises(Exception) as expected:
        wrong_calls(nnx)[k]()
    with pytest.raises(type(expected.value)):
        wrong_calls(mnnx)[k]()


def test_functions() -> None:
    x = image()
    for stock, drop_ins in _convert_nnx.DROP_INS.items():
        for ours in drop_ins if not isinstance(stock, type) else ():
            args = ((2, 2), (2, 2), "SAME") if "pool" in ours.__name__ else ()
            same(ours(x, *args), stock(x, *args))
            assert getattr(mnnx, ours.__name__) is ours
    assert set(mnnx.__all__) <= set(dir(mnnx))
    assert memsave_jax.nnx is mnnx


class OfAVariable(nnx.Module):
    """A layer of what is learnt: queries, a class token, positions."""

    def __init__(self, layer: Any) -> None:
        self.tokens = nnx.Param(image())
        self.layer = layer

    def __call__(self) -> jax.Array:
        return self.layer(self.tokens)


def variable_cases() -> dict[str, Callable[[Any], Any]]:
    """Layers of a library: modules in several settings, and functions."""
    names = ("Linear", "Conv", "ConvTranspose", "BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm")
    cases: dict[str, Callable[[Any], Any]] = {
        name: lambda lib, name=name: layers(lib, name) for name in (*names, "InstanceNorm", "PReLU")
    }
    cases["Dropout"] = lambda lib: lib.Dropout(0.5, rngs=nnx.Rngs(0))
    for padding in ("CIRCULAR", "REFLECT"):
        cases[f"Conv {padding}"] = lambda lib, padding=padding: layers(lib, "Conv", padding=padding)
    cases["ConvTranspose flip"] = lambda lib: layers(lib, "ConvTranspose", transpose_kernel=True)
    for name in ("relu", "leaky_relu", "gelu", "silu", "softmax", "tanh", "log_sigmoid"):
        cases[name] = lambda lib, name=name: getattr(lib, name)
    for name in ("avg_pool", "max_pool"):
        cases[name] = lambda lib, name=name: lambda x: getattr(lib, name)(x, (2, 2))
    return cases


@pytest.mark.parametrize("make", variable_cases().values(), ids=variable_cases())
def test_variables_in_the_place_of_arrays(make: Callable[[Any], Any]) -> None:
    """Whatever stock does with them: forward, compiled, and its gradients."""
    results: list[list[Any]] = []
    for lib in (nnx, mnnx):
        runs = []
        for run in (
            lambda model: model(),
            nnx.jit(lambda model: model()),
            nnx.grad(lambda model: jnp.sin(3 * model()).sum()),
            nnx.grad(
                lambda model: jnp.sin(3 * model()).sum(),
                argnums=nnx.DiffState(0, nnx.PathContains("tokens")),
            ),
        ):
            try:
                runs.append(run(OfAVariable(make(lib))))
            except (TypeError, ValueError) as error:  # stock's, of some functions
                runs.append(type(error))
        results.append(runs)
    for expected, actual in zip(*results, strict=True):
        if not isinstance(expected, type):
            close(actual, expected)


def test_functions_with_options() -> None:
    x, slope = image(), jnp.full(4, -0.5)
    for name, options in (
        ("leaky_relu", {"negative_slope": -0.5}),
        ("leaky_relu", {"negative_slope": slope}),
        ("elu", {"alpha": 0.5}),
        ("elu", {"alpha": slope}),
        ("celu", {"alpha": 2}),
        ("celu", {"alpha": slope}),
        ("gelu", {"approximate": False}),
        ("glu", {"axis": 1}),
        ("softmax", {"axis": (0, -1)}),
        ("softmax", {"where": x > 0}),
        ("log_softmax", {"axis": 1}),
        ("log_softmax", {"where": x > 0}),
    ):
        stock = getattr(jax.nn, name)
        for ours in _convert_nnx.DROP_INS[stock]:
            same(ours(x, **options), stock(x, **options))
    for options in (
        {"count_include_pad": False},
        {"strides": (3, 1)},
        {"padding": ((0, 1), (1, 1))},
    ):
        for dtype in (jnp.float32, HALF):
            args = x.astype(dtype), (2, 3)
            same(mnnx.avg_pool(*args, **options), nnx.avg_pool(*args, **options))


#: Rows that have no counterpart in Flax, or that ask something of the parameters' values.
FUNCTIONS_ALONE = {
    *(f"{name}_norm_from_output" for name in ("layer", "group", "instance", "rms")),
    *("threshold", "hardshrink", "softshrink", "tanhshrink", "swiglu", "geglu", "pad"),
    *("feature_dropout", "alpha_dropout", "cross_entropy", "cross_entropy_of_probabilities"),
    *(f"adaptive_{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3)),
}


def test_every_row_has_a_drop_in() -> None:
    """The one list of layers is the table; this one follows it."""
    rows = {row.name for rows in _convert_nnx.ROWS.values() for row in rows}
    assert rows.isdisjoint(FUNCTIONS_ALONE)
    missing = set(function.RULES) - rows - FUNCTIONS_ALONE
    assert not missing, "register() them in memsave_jax/nnx.py, or name them in FUNCTIONS_ALONE"
    assert set(function.RULES) >= FUNCTIONS_ALONE
    for stock, drop_ins in _convert_nnx.DROP_INS.items():
        assert [_convert_nnx.STOCK[drop_in] for drop_in in drop_ins] == [stock] * len(drop_ins)
        if isinstance(stock, type):
            assert stock.__name__ == drop_ins[0].__name__


def test_every_function_is_public() -> None:
    """The list that is written out, ``memsave_jax.functional``, follows the layers."""
    missing = functions_of_rows(memsave_jax.layers) - {*memsave_jax.functional.__all__}
    assert not missing, "import them in memsave_jax/functional.py, and name them in its __all__"


# What is kept.


SIZE = 4 * 2 * 6 * 6 * 4  # bytes of image()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        # x is free, as are the parameters; the padded or promoted copy is not made.
        (lambda lib: layers(lib, "Conv", padding="CIRCULAR"), 0),
        (lambda lib: layers(lib, "Conv", padding="REFLECT"), 0),
        (lambda lib: layers(lib, "Conv", padding="CAUSAL", kernel_size=3), 0),
        (lambda lib: layers(lib, "ConvTranspose", transpose_kernel=True), 0),
        (lambda lib: layers(lib, "Linear"), 0),
        (lambda lib: layers(lib, "BatchNorm"), 32),
        (lambda lib: layers(lib, "BatchNorm", use_running_average=True), 0),
        (lambda lib: layers(lib, "LayerNorm"), 2 * SIZE // 4),
        (lambda lib: layers(lib, "GroupNorm"), 2 * 4 * 2 * 2),
        (lambda lib: layers(lib, "InstanceNorm"), 2 * 4 * 2 * 4),
        (lambda lib: layers(lib, "RMSNorm"), SIZE // 4),
        (lambda lib: layers(lib, "PReLUFromInput"), 0),
        (lambda lib: lib.Dropout(0.5, rngs=nnx.Rngs(0)), SIZE // 16),
    ],
)
def test_keeps_no_copies(make: Make, expected: int) -> None:
    """Per layer, as the rows' sizes are tested elsewhere: here that the modules add nothing."""
    model: Any = make(mnnx)
    x = image(2, 36, 4) if getattr(model, "kernel_size", ()) == (3,) else image()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def call(params: Any, x: Any) -> Any:
        return nnx.merge(graphdef, params, rest, copy=True)(x)

    assert kept(call, params, x, free=(params, rest, x)) == expected


# Models.


class Block(nnx.Module):
    """With an activation as an attribute, in a tuple, in a list and in a dict."""

    def __init__(self, lib: Any, activation: Any, shared: Any) -> None:
        options = {"kernel_init": noise, "rngs": nnx.Rngs(0)}
        self.conv = lib.Conv(4, 4, (3, 3), padding="CIRCULAR", **options)
        self.norms = nnx.Dict(a=lib.BatchNorm(4, rngs=nnx.Rngs(0)), shared=shared)
        self.activation = activation
        self.functions = (activation, [activation, {"logsumexp": nnx.logsumexp}])

    def __call__(self, x: Any) -> Any:
        y = self.activation(self.norms["a"](self.conv(x)))
        y = self.functions[1][0](self.norms["shared"](y))
        return self.functions[0](x + y)


class Net(nnx.Module):
    """A little ResNet. ``lib`` and the functions say whose layers it is built of."""

    def __init__(self, lib: Any = nnx, relu: Any = nnx.relu, max_pool: Any = nnx.max_pool) -> None:
        options = {"kernel_init": noise, "rngs": nnx.Rngs(0)}
        shared = lib.BatchNorm(4, rngs=nnx.Rngs(0))
        self.stem = nnx.Sequential(
            lib.Conv(3, 4, (3, 3), **options),
            relu,
            functools.partial(max_pool, window_shape=(2, 2), strides=(2, 2)),
        )
        self.blocks = nnx.List([Block(lib, relu, shared) for _ in range(2)])
        self.head = nnx.data([lib.Dropout(0.25, rngs=nnx.Rngs(1)), lib.Linear(4, 2, **options)])
        self.up = lib.ConvTranspose(4, 4, (3, 3), transpose_kernel=True, **options)

    def __call__(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        for layer in self.head:
            x = layer(x if layer is self.head[0] else self.up(x).mean((1, 2)))
        return x


def photo() -> jax.Array:
    return image(2, 8, 8, 3)


def shape_of(model: Any) -> dict[str, Any]:
    """Classes and functions, by name, as they are; those of a partial application within."""
    return {
        ".".join(map(str, path)): _convert_nnx._kind(node)
        for path, node in _convert_nnx._nodes(model)
        if callable(node) and not isinstance(node, nnx.Variable | nnx.RngStream)
    }


def test_convert_and_revert() -> None:
    """In place: the same modules, variables and paths; revert gives back what was there."""
    model, expected = Net(), shape_of(Net())
    modules = [id(m) for _, m in nnx.iter_modules(model)]
    variables = jax.tree.leaves(nnx.state(model))
    before = [dict(vars(m)) for _, m in nnx.iter_modules(model)]
    state = nnx.state(model)

    assert mnnx.convert(model) is model
    assert shape_of(model) == shape_of(Net(mnnx, mnnx.relu, mnnx.max_pool))
    assert [id(m) for _, m in nnx.iter_modules(model)] == modules
    assert all(a is b for a, b in zip(variables, jax.tree.leaves(nnx.state(model)), strict=True))
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(state)
    assert model.blocks[0].norms["shared"] is model.blocks[1].norms["shared"]
    assert shape_of(mnnx.convert(model)) == shape_of(Net(mnnx, mnnx.relu, mnnx.max_pool))

    assert mnnx.revert(model) is model
    assert shape_of(model) == expected
    for module, attributes in zip(nnx.iter_modules(model), before, strict=True):
        assert vars(module[1]).keys() == attributes.keys()
    assert shape_of(mnnx.revert(model)) == expected


def test_every_class_as_the_root() -> None:
    for stock, drop_ins in _convert_nnx.DROP_INS.items():
        if not isinstance(stock, type):
            continue
        for drop_in in drop_ins:
            name = stock.__name__
            layer = stock(0.5) if name == "Dropout" else layers(nnx, name)
            row = _convert_nnx.ROWS[drop_in][0]
            attributes = dict(vars(layer))
            mnnx.convert(layer, policy=lambda node, name, rows, r=row: r)
            assert type(layer) is drop_in
            assert vars(layer) == attributes
            assert type(mnnx.revert(layer)) is stock


#: Of what is zero but for rounding, e.g. the gradient of a bias before a normalization.
ROUNDING = 1e-4


def stepper(model: Any, optimizer: Any, wrt: Any, x: Any) -> Callable[[], Any]:
    """A step of the optimizer, in place; returns the loss."""
    graphdef = nnx.graphdef((model, optimizer))

    @jit
    def run(state: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(
            lambda model: (model(x) ** 2).mean(), argnums=nnx.DiffState(0, wrt)
        )(model)
        optimizer.update(model, grads)
        return loss, nnx.state((model, optimizer))

    def step() -> Any:
        loss, state = run(nnx.state((model, optimizer)))
        nnx.update((model, optimizer), state)
        return loss

    return step


def train(model: Any, x: Any, wrt: Any = nnx.Param, between: Any = None) -> list[Any]:
    """Losses, parameters and statistics after two steps of an optimizer."""
    optimizer = nnx.Optimizer(model, optax.sgd(0.01, momentum=0.9), wrt=wrt)
    step = stepper(model, optimizer, wrt, x)
    losses = [step()]
    if between:
        between(model)
        step = stepper(model, optimizer, wrt, x)
    losses.append(step())
    return [losses, nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(optimizer))]


def only(*names: str) -> Any:
    """A filter of parameters whose path has one of the names."""
    return nnx.All(nnx.Param, lambda path, _: bool({*names} & {str(part) for part in path}))


MASKS = {"all": nnx.Param, "bias": only("bias"), "head": only("head")}


@pytest.mark.parametrize("name", ["all", "head"])
def test_training(name: str) -> None:
    """Losses, parameters, running statistics, random numbers and the optimizer's state; masks."""
    wrt = MASKS[name]
    close(train(mnnx.convert(Net()), photo(), wrt), train(Net(), photo(), wrt), 1e-4, ROUNDING)


def test_the_optimizer_survives() -> None:
    """Made before converting, with state from a step of the stock model."""
    ours, stock = (Layer(nnx.Rngs(0)) for _ in range(2))
    trained = train(ours, image(3, 4), between=mnnx.convert)
    assert type(ours.norm) is mnnx.BatchNorm
    close(trained, train(stock, image(3, 4)), 1e-4, ROUNDING)


def kept_by(model: Any, wrt: Any) -> int:
    """Bytes that backward of a model needs, other than its state and the images; in a program."""
    graphdef, params, rest = nnx.split(model, wrt, ...)

    def held(params: Any, rest: Any, x: Any) -> Any:
        def call(params: Any) -> Any:
            return nnx.merge(graphdef, params, rest, copy=True)(x)

        return jax.tree.leaves(jax.vjp(call, params)[1])

    program = jax.make_jaxpr(held)(params, rest, photo()).jaxpr
    kept = {v for v in program.outvars if isinstance(v, jax.extend.core.Var)} - {*program.invars}
    return sum(function.bytes_of(v.aval) for v in kept - {*program.constvars})


def test_masks_prune() -> None:
    """Fewer wanted gradients keep less, and each less than stock does."""
    ours, stock = (
        [kept_by(m, wrt) for wrt in MASKS.values()] for m in (mnnx.convert(Net()), Net())
    )
    assert ours[0] > ours[1] > ours[2]
    assert all(a < 0.7 * b for a, b in zip(ours[:2], stock[:2], strict=True))
    assert ours[2] <= stock[2]


def test_evaluation_prunes_more() -> None:
    """``model.eval()`` reaches the drop-ins: the norms run the row that keeps no activation."""
    model = mnnx.convert(Net())
    training = kept_by(model, only("bias"))
    model.eval()
    assert model.head[0].deterministic
    assert kept_by(model, only("bias")) < training / 2
    expected = Net()
    expected.eval()
    same(model(photo()), expected(photo()))
    model.train(), expected.train()
    same(model(photo()), expected(photo()))
    ours, stock = (
        nnx.view(m, deterministic=True, use_running_average=True) for m in (model, expected)
    )
    assert type(ours.blocks[0].norms["a"]) is mnnx.BatchNorm
    same(ours(photo()), stock(photo()))


# The transformations of NNX.


class Layer(nnx.Module):
    """One that can be stacked: the shape of its output is that of its input."""

    def __init__(self, rngs: Any) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs, kernel_init=noise)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.25, rngs=rngs)
        self.activation = nnx.relu

    def __call__(self, x: Any) -> Any:
        return self.drop(self.activation(self.norm(self.linear(x))))


def over_layers(transform: str, model: Any, x: Any) -> Any:
    if transform == "scan":
        return nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model)
    if transform == "vmap":
        return nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(model, x)
    if transform == "remat":
        return nnx.remat(lambda m, x: m(x))(model, x)
    return nnx.jit(lambda m, x: m(x))(model, x)


@pytest.mark.parametrize("transform", ["jit", "vmap", "scan", "remat"])
def test_transformations(transform: str) -> None:
    results = []
    for convert in (lambda model: model, mnnx.convert):
        make = lambda rngs: Layer(rngs)  # noqa: E731
        if transform in ("vmap", "scan"):
            split = nnx.split_rngs(splits=2)
            model = split(nnx.vmap(make, in_axes=(0,), out_axes=0))(nnx.Rngs(0))
        else:
            model = make(nnx.Rngs(0))
        model = convert(model)

        def loss(model: Any, x: Any) -> Any:
            return (over_layers(transform, model, x) ** 2).sum()

        value, grads = nnx.value_and_grad(loss, argnums=(nnx.DiffState(0, nnx.Param), 1))(
            model, image(3, 4)
        )
        state = nnx.to_pure_dict(nnx.state(model))
        results.append((value, [nnx.to_pure_dict(grads[0]), grads[1]], state))
    close(*results, rtol=1e-4, atol=ROUNDING)


def test_linear_modules_hold_it() -> None:
    """``nnx.bridge.to_linen``: modules of NNX within one of Linen."""
    x = image(3, 4)
    outputs = []
    for convert in (lambda model: model, mnnx.convert):
        module = nnx.bridge.to_linen(lambda *, rngs, c=convert: c(Layer(rngs)))
        variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
        outputs.append(
            module.apply(variables, x, rngs={"dropout": jax.random.key(2)}, mutable=["batch_stats"])
        )
    close(outputs[0][0], outputs[1][0])


def test_copies() -> None:
    """Converted modules can be cloned, copied, pickled and merged."""
    model = mnnx.convert(Net())
    expected = Net()(photo())
    copies = [nnx.clone(model), copy.deepcopy(model), nnx.merge(*nnx.split(model), copy=True)]
    head = mnnx.convert(layers(nnx, "Conv", padding="CIRCULAR"))
    pickled = [pickle.loads(pickle.dumps(head)), cloudpickle.loads(cloudpickle.dumps(head))]
    for each in copies:
        assert shape_of(each) == shape_of(model)
        same(each(photo()), expected)
    for each in pickled:
        assert type(each) is mnnx.Conv
        same(each(image()), head(image()))


def test_repr_shows_the_package() -> None:
    text = repr(mnnx.convert(Net()))
    for name in ("Conv", "ConvTranspose", "BatchNorm", "Dropout", "Linear"):
        assert f"memsave.{name}(" in text
    assert text.replace("memsave.", "").splitlines()[0] == repr(Net()).splitlines()[0]
    assert "memsave.Conv(" not in repr(mnnx.revert(mnnx.convert(Net())))


# What is converted, and what is listed.


def entries(model: Any) -> list[Entry]:
    return list(mnnx.coverage(model))


def statuses(model: Any) -> dict[str, str]:
    return {entry.name: entry.status for entry in mnnx.coverage(model)}


def test_filter() -> None:
    asked: dict[str, Any] = {}

    def accept(node: Any, name: str) -> bool:
        asked[name] = node
        return name.startswith("blocks.0") and not isinstance(node, nnx.BatchNorm)

    model = mnnx.convert(Net(), filter_fn=accept)
    assert asked["stem.layers.1"] is nnx.relu
    assert asked["stem.layers.2"].func is nnx.max_pool
    assert asked["head.1"] is model.head[1]
    converted = [name for name, status in statuses(model).items() if status == "converted"]
    assert converted == [
        "blocks.0.conv",
        "blocks.0.activation",
        "blocks.0.functions.0",
        "blocks.0.functions.1.0",
    ]


def test_policy() -> None:
    def last(node: Any, name: str, rows: Any) -> Any:
        return rows[-1]

    model = mnnx.convert(Net(), policy=last)
    assert model.blocks[0].activation is mnnx.relu_from_output
    assert type(model.head[0]) is mnnx.DropoutFromRng
    same(model(photo()), Net()(photo()))
    assert shape_of(mnnx.revert(model)) == shape_of(Net())
    with pytest.raises(ValueError, match=r"policy chose .* for 'stem.layers.1'"):
        mnnx.convert(model, policy=lambda *_: spec.LINEAR)
    assert shape_of(model) == shape_of(Net())


class OwnCall(nnx.Conv):
    def __call__(self, inputs: Any, out_sharding: Any = None) -> Any:
        return 2 * super().__call__(inputs, out_sharding)


class NoCall(nnx.Conv):
    pass


def helper(x: Any) -> Any:
    return nnx.relu(x)


class Functional(nnx.Module):
    """Names the functions as users do; the constructor's are held, hence reached."""

    def __init__(self) -> None:
        self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))
        self.activation = nnx.relu
        self.call = lambda x: jax.nn.relu(x)

    def __call__(self, x: Any) -> Any:
        return self.pool(helper(x))

    def pool(self, x: Any) -> Any:
        return flax.linen.max_pool(x, (2, 2))


class Ours(nnx.Module):
    def __call__(self, x: Any) -> Any:
        return mnnx.relu(nnx.logsumexp(x)) * jnp.sin(x)


def test_what_is_skipped_and_why() -> None:
    rngs = {"rngs": nnx.Rngs(0)}
    model = nnx.List(
        [
            OwnCall(4, 4, (1,), **rngs),
            NoCall(4, 4, (1,), **rngs),
            nnx.MultiHeadAttention(1, 4, **rngs),
            nnx.LoRALinear(4, 4, lora_rank=1, **rngs),
            Functional(),
            Ours(),
            nnx.logsumexp,
            nnx.relu,
        ]
    )
    listed = {(e.name, e.layer): (e.status, e.reason) for e in entries(mnnx.convert(model))}
    assert listed["0", "OwnCall"] == ("skipped", "subclass of Conv with a __call__ of its own")
    assert listed["1", "NoCall"] == (
        "skipped",
        "subclass of Conv which may mean more than its base",
    )
    assert listed["2.query", "LinearGeneral"] == ("skipped", "not in the table")
    assert listed["3", "LoRALinear"][1] == "subclass of Linear with a __call__ of its own"
    assert listed["4.norm", "LayerNorm"] == ("converted", "rows: layer_norm")
    assert listed["4", "Functional"] == (
        "skipped",
        "its code names relu, max_pool: use memsave_jax.nnx.relu, memsave_jax.nnx.max_pool there",
    )
    assert listed["4.activation", "relu"] == ("converted", "rows: relu")
    assert listed["4.call", "<lambda>"] == (
        "skipped",
        "its code names relu: use memsave_jax.nnx.relu there",
    )
    assert listed["5", "Ours"] == ("skipped", "not in the table")
    assert listed["6", "logsumexp"] == ("skipped", "not in the table")
    assert listed["7", "relu"][0] == "converted"


def test_what_is_shared_comes_once() -> None:
    """Under its first name; a module may hold the one that holds it."""
    model = nnx.List([nnx.relu, nnx.Dropout(0.5), nnx.Dict()])
    model[2].dropout = model[1]
    model[2].up = model
    assert statuses(model) == {"0": "convertible", "1": "convertible"}
    assert type(mnnx.convert(model)[2].dropout) is mnnx.Dropout


def test_the_constructor_may_name_functions() -> None:
    """What it names is held by the model, so conversion reaches it."""
    assert set(statuses(Layer(nnx.Rngs(0))).values()) == {"convertible"}


def test_coverage_before_and_after() -> None:
    model = Net()
    assert set(statuses(model).values()) == {"convertible", "skipped"}
    mnnx.convert(model)
    assert set(statuses(model).values()) == {"converted", "skipped"}
    text = str(mnnx.coverage(model))
    assert "   3 x Conv - rows: conv2d, conv1d, conv3d: stem.layers.0, blocks.0" in text
    assert (
        "skipped: 2\n     2 x logsumexp - not in the table: blocks.0.functions.1.1.logsumexp"
        in text
    )


def test_nothing_to_convert() -> None:
    with pytest.warns(UserWarning, match="found nothing to convert"):
        mnnx.convert(nnx.LinearGeneral(2, 4, rngs=nnx.Rngs(0)))
    with pytest.warns(UserWarning, match="found nothing to convert"):
        mnnx.convert(Net(), filter_fn=lambda node, name: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mnnx.convert(mnnx.convert(Net()))


@pytest.mark.parametrize("wrong", [nnx.relu, [nnx.relu], nnx.Conv, 3, flax.linen.Dense(3)])
def test_no_module(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"convert needs a flax\.nnx\.Module"):
        mnnx.convert(wrong)


def test_logs() -> None:
    with TestCase().assertLogs("memsave", "INFO") as logs:
        mnnx.convert(Net())
    assert "converted: 17" in "".join(logs.output)


def test_containers_of_others_are_left_alone() -> None:
    functions = {"relu": nnx.relu, "list": [nnx.gelu]}

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.functions = self.again = functions

    model, other = mnnx.convert(Model()), Model()
    assert functions == {"relu": nnx.relu, "list": [nnx.gelu]}
    assert model.functions == {"relu": mnnx.relu, "list": [mnnx.gelu]}
    assert model.again is model.functions
    mnnx.revert(other)
    assert model.functions["relu"] is mnnx.relu
    assert mnnx.revert(model).functions == functions


def test_running_statistics_have_no_gradient() -> None:
    def loss(model: nnx.BatchNorm, x: jax.Array) -> jax.Array:
        return (model(x) * 0).sum() + (model.mean[...] * model.var[...]).sum()

    x = jnp.arange(12.0).reshape(4, 3)
    stock, ours = (
        nnx.grad(loss, argnums=1)(lib.BatchNorm(3, rngs=nnx.Rngs(0)), x) for lib in (nnx, mnnx)
    )
    close(ours, stock)


def test_statistics_that_are_given_are_nobody_elses() -> None:
    """Whatever axis there is over which those of a batch would be taken."""
    norm = mnnx.BatchNorm(3, axis_name="i", use_running_average=True, rngs=nnx.Rngs(0))
    report = memsave_jax.report(lambda x: norm(x).sum(), jnp.ones((64, 3)), compiled=False)
    assert report.now == 0


@pytest.mark.parametrize("name", ["PReLU", "PReLUFromInput"])
def test_a_slope_per_element(name: str) -> None:
    """Which the functions do not take."""
    x = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
    results = []
    for cls in (nnx.PReLU, getattr(mnnx, name)):
        layer = cls()
        layer.negative_slope = nnx.Param(x / 2)
        results.append(jax.grad(lambda x, layer=layer: (layer(x) ** 2).sum())(x))
    close(results[1], results[0])


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (lambda lib: lib.Linear(2, 3, rngs=nnx.Rngs(0)), [[1.0, 2.0]]),
        (lambda lib: lib.LayerNorm(2, rngs=nnx.Rngs(0)), [[1.0, 2.0]]),
        (lambda lib: lib.RMSNorm(2, rngs=nnx.Rngs(0)), [[1.0, 2.0]]),
        (lambda lib: lib.PReLU(dtype=jnp.float16), -2.0),
    ],
    ids=["Linear", "LayerNorm", "RMSNorm", "PReLU"],
)
def test_lists_and_numbers(layer, x) -> None:
    """Stock takes them."""
    actual, expected = layer(mnnx)(x), layer(nnx)(x)
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_a_negative_epsilon() -> None:
    """Stock takes it, of variances that are larger."""
    x, gradients = jnp.arange(12.0).reshape(3, 4), []
    for lib in (nnx, mnnx):
        layer = lib.LayerNorm(4, epsilon=-1e-3, rngs=nnx.Rngs(0))
        gradients.append(jax.grad(lambda x, layer=layer: (layer(x) ** 3).sum())(x))
    close(*gradients)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_an_array_of_numpy_that_is_too_long(name: str) -> None:
    for lib in (nnx, mnnx):
        layer = getattr(lib, name)(4, rngs=nnx.Rngs(0))
        layer.scale = nnx.Param(np.ones(4, np.float32))
        with pytest.raises(TypeError, match="cannot reshape"):
            layer(jnp.ones((2, 3)))


class Pair(tuple):
    """Cannot be made of what it iterates over."""

    __slots__ = ()

    def __new__(cls, first: object, second: object) -> Pair:
        return super().__new__(cls, (first, second))


class Lazy:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


class Frozen(dict):
    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError("frozen")


@pytest.mark.parametrize(
    "make", [lambda: Pair(nnx.relu, 1), Lazy, lambda: Frozen(a=nnx.relu)], ids=["0", "1", "2"]
)
def test_attributes_of_classes_of_the_users_own(make) -> None:
    """What they hold stays as it is, and the rest is converted."""
    extra = make()

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.extra = nnx.static(extra)
            self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))

    model = mnnx.convert(Model())
    assert model.extra is extra
    assert type(model.norm) is mnnx.LayerNorm
    assert type(mnnx.revert(model).norm) is nnx.LayerNorm
