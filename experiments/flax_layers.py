"""JAX: layers alone: bytes kept, and time of a jitted step.

A step is one program, which XLA may fuse over both passes; "apart" it is two, forward and backward,
as where other layers lie in between. Beside stock stands ``jax.checkpoint`` of the stock layer,
which keeps its input and computes the layer again. Alternatives of one op (two rows of dropout, of
relu) are there to be compared. Kept bytes are parts of the input's. Times are medians of ratios to
stock, taken in turn, in a process that keeps the memory it frees; "custom_vjp" is the other form
that the rules can take (no forward mode). What stock's ratio to itself is off 1 is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import memsave_jax
from memsave_jax import function as engine, functional as F

from .harness import Experiment
from .measure import compare_in_jax, difference, keep_freed_memory
from .render import AGAIN, noise, quartiles, table
from .results import Record

#: Largest difference of outputs and gradients to stock's, to stock's largest.
TOLERANCE = 1e-5


Layer = Callable[[Array, Array, Array], Array]


def _of_vectors(norm: Callable[..., Array]) -> Layer:
    return lambda x, vector, key: norm(x, vector, vector)


def _elementwise(function: Callable[[Array], Array]) -> Layer:
    return lambda x, vector, key: function(x)


def _batch_norm_train(x: Array, vector: Array, key: Array) -> Array:
    return F.batch_norm(x, None, None, vector, vector, use_running_average=False)[0]


def _batch_norm_eval(x: Array, vector: Array, key: Array) -> Array:
    return F.batch_norm(x, vector, vector, vector, vector, use_running_average=True)[0]


def _cross_entropy(x: Array, vector: Array, key: Array) -> Array:
    return F.cross_entropy(x, jax.random.randint(key, x.shape[:-1], 0, x.shape[-1]))


ELEMENTWISE = (
    *(F.relu, F.relu_from_output, F.leaky_relu, F.relu6, F.hard_tanh, F.hard_sigmoid),
    *(F.hard_shrink, F.soft_shrink, F.hard_silu, F.elu, F.celu, F.selu, F.softplus, F.log_sigmoid),
    *(F.mish, F.gelu, F.silu, F.sigmoid, F.tanh, F.tanh_shrink, F.soft_sign, F.glu),
    *(F.softmax, F.log_softmax),
)

#: Functions of ``x``, of parameters that are one vector, and of a key.
LAYERS: dict[str, Layer] = {
    **{function.__name__: _elementwise(function) for function in ELEMENTWISE},
    "threshold": lambda x, vector, key: F.threshold(x, 0.1, 0.0),
    "prelu": lambda x, vector, key: F.prelu(x, vector),
    "swiglu": lambda x, vector, key: F.swiglu(x, x * vector),
    "geglu": lambda x, vector, key: F.geglu(x, x * vector),
    "dropout": lambda x, vector, key: F.dropout(x, 0.1, key),
    "dropout_from_rng": lambda x, vector, key: F.dropout_from_rng(x, 0.1, key),
    "alpha_dropout": lambda x, vector, key: F.alpha_dropout(x, 0.1, key),
    "feature_dropout": lambda x, vector, key: F.feature_dropout(x, 0.1, key),
    "max_pool2d, 2x2": lambda x, vector, key: F.max_pool(x, (2, 2), (2, 2)),
    "max_pool2d, 3x3 by 2": lambda x, vector, key: F.max_pool(x, (3, 3), (2, 2), "SAME"),
    "avg_pool2d, 2x2": lambda x, vector, key: F.avg_pool(x, (2, 2), (2, 2)),
    "batch_norm_train": _batch_norm_train,
    "batch_norm_eval": _batch_norm_eval,
    "layer_norm": _of_vectors(F.layer_norm),
    "layer_norm_from_output": _of_vectors(F.layer_norm_from_output),
    "rms_norm": lambda x, vector, key: F.rms_norm(x, vector),
    "rms_norm_from_output": lambda x, vector, key: F.rms_norm_from_output(x, vector),
    "group_norm": _of_vectors(F.group_norm),
    "instance_norm": _of_vectors(F.instance_norm),
    "cross_entropy": _cross_entropy,
}


@dataclass(frozen=True)
class Config:
    """Which layers, on how many square images of how many pixels and channels."""

    layers: tuple[str, ...] = tuple(LAYERS)
    batch: int = 16
    size: int = 64
    channels: int = 64
    repeats: int = 101


@dataclass(frozen=True)
class Case:
    """A layer."""

    layer: str
    batch: int
    size: int
    channels: int
    repeats: int


def cases(config: Config) -> Iterator[Case]:
    """By layer."""
    for layer in config.layers:
        yield Case(layer, config.batch, config.size, config.channels, config.repeats)


def _step(
    layer: Callable[[Array, Array], Array],
    x: Array,
    vector: Array,
    g: Array,
    form: Any,
    apart: bool = False,
) -> Callable[[], Any]:
    """Forward and backward, compiled, as one program or as two, between which others may run.

    (The output goes out, as to a next layer; the parameters come in.)
    """

    def step(x: Array, vector: Array, g: Array) -> Any:
        y, pull = forward(x, vector)
        return y, backward(pull, g)

    def forward(x: Array, vector: Array) -> Any:
        return jax.vjp(lambda x: layer(x, vector), x)

    def backward(pull: Callable[[Array], tuple[Array]], g: Array) -> Array:
        return pull(g)[0]

    with engine.using(form):
        if apart:
            forward = jax.jit(forward).lower(x, vector).compile()
            backward = jax.jit(backward).lower(forward(x, vector)[1], g).compile()
        else:
            step = jax.jit(step).lower(x, vector, g).compile()
    return lambda: step(x, vector, g)


def measure(case: Case) -> dict[str, Any]:
    """Bytes kept, times of a step, and by how much its output and gradient differ from stock's."""
    keep_freed_memory()
    shape = (case.batch, case.size, case.size, case.channels)
    x = jax.random.normal(jax.random.key(1), shape)
    vector, key = jnp.ones(case.channels), jax.random.key(0)

    def layer(x: Array, vector: Array) -> Array:
        return LAYERS[case.layer](x, vector, key)

    # (One for all steps: one that is read more often than others would be found in caches.)
    g = jax.random.normal(jax.random.key(2), jax.eval_shape(layer, x, vector).shape)
    # (Of an activation: an input of the whole function would be free.)
    report = memsave_jax.report(lambda x: layer(2 * x, vector), x, compiled=False)
    steps = {
        "stock": _step(layer, x, vector, g, "stock"),
        "memsave_jax": _step(layer, x, vector, g, "custom_jvp"),
        "custom_vjp": _step(layer, x, vector, g, "custom_vjp"),
        "checkpoint": _step(jax.checkpoint(layer), x, vector, g, "stock"),
    }
    apart = {
        "stock": _step(layer, x, vector, g, "stock", apart=True),
        "memsave_jax": _step(layer, x, vector, g, "custom_jvp", apart=True),
    }
    return {
        "input_bytes": x.nbytes,
        "kept_bytes": {"stock": report.stock, "memsave_jax": report.now},
        "times": compare_in_jax({**steps, AGAIN: steps["stock"]}, case.repeats),
        "apart": compare_in_jax({**apart, AGAIN: apart["stock"]}, case.repeats),
        "difference": difference(steps["stock"](), steps["memsave_jax"]()),
    }


def show(records: Sequence[Record[Case]]) -> str:
    """A row per layer."""
    return table(
        (
            *("layer", "stock keeps", "memsave_jax", "stock ms"),
            *("time: memsave_jax", "quartiles", "custom_vjp", "checkpoint"),
            *("stock to itself", "quartiles", "apart: stock ms", "memsave_jax", "quartiles"),
            *("stock to itself", "quartiles", "differs by"),
        ),
        [tuple(_line(record)) for record in records],
    )


def _line(record: Record[Case]) -> Iterator[str]:
    figures = record.figures
    times = figures["times"]
    kept = {name: size / figures["input_bytes"] for name, size in figures["kept_bytes"].items()}
    yield record.case.layer
    yield f"{kept['stock']:.3f}"
    yield f"{kept['memsave_jax']:.4f}"
    yield f"{times['stock']['seconds'] * 1e3:.2f}"
    yield f"{times['memsave_jax']['ratio']:.3f}"
    yield quartiles(times["memsave_jax"])
    yield f"{times['custom_vjp']['ratio']:.3f}"
    yield f"{times['checkpoint']['ratio']:.3f}"
    yield from noise(times)
    yield f"{figures['apart']['stock']['seconds'] * 1e3:.2f}"
    yield f"{figures['apart']['memsave_jax']['ratio']:.3f}"
    yield quartiles(figures["apart"]["memsave_jax"])
    yield from noise(figures["apart"])
    yield f"{figures['difference']:.1e}"


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Layers that keep more than stock, or compute something else."""
    for record in records:
        layer, figures = record.case.layer, record.figures
        if figures["kept_bytes"]["memsave_jax"] > figures["kept_bytes"]["stock"]:
            yield f"{layer}: keeps more than stock"
        if figures["difference"] > TOLERANCE:
            yield f"{layer}: differs from stock by {figures['difference']:.1e} of the largest"


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(("dropout", "max_pool2d, 2x2"), batch=2, size=8, channels=8, repeats=3),
        "quick": Config(repeats=5),
        "default": Config(),
    },
    choices={"layers": LAYERS},
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    backend="jax",
)
