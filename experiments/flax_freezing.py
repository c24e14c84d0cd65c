"""Flax: which ways of freezing let JAX, and so these layers, keep less.

A network of convolution, BatchNorm (in eval mode) and ReLU, of which the biases are trained. What
counts is whether JAX knows, while it traces the loss, that the gradient of a weight is not wanted:

- it does where the biases are an argument of their own (``argnums``, a partition of the model),
  with ``nnx.DiffState``, and behind ``stop_gradient``;
- it does not where only the optimizer freezes (``optax.multi_transform``). Then all is kept,
  except where gradient and update are compiled as one: XLA drops what the update does not read.

Kept bytes are those of an eager ``jax.vjp``. Temporaries are those that XLA allots, once to the
gradient alone, once to gradient and update in one program.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import memsave_jax
from memsave_jax import nnx as mnnx

from .harness import Experiment
from .render import mib, table
from .results import Record

#: Largest difference between the updates of both models, to the largest update.
TOLERANCE = 1e-4
MODELS = ("stock", "memsave_jax")


class Way(NamedTuple):
    """A loss, its arguments, which leaves of the first are wanted, and how they are asked for."""

    loss: Callable[..., jax.Array]
    arguments: tuple[Any, ...]
    gradient: Callable[..., Any]
    wrt: Callable[[str, Any], bool] = lambda path, leaf: path.startswith("[0]")


def is_bias(path: Any, value: Any) -> bool:
    """What is trained."""
    return "bias" in path


def _loss(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def _argument(model: nnx.Module, x: jax.Array) -> Way:
    graph, biases, rest = nnx.split(model, is_bias, ...)

    def loss(biases: Any, rest: Any) -> jax.Array:
        return _loss(nnx.merge(graph, biases, rest), x)

    return Way(loss, (biases, rest), jax.grad(loss))


def _diff_state(model: nnx.Module, x: jax.Array) -> Way:
    def loss(model: Any) -> jax.Array:
        return _loss(model, x)

    gradient = nnx.grad(loss, argnums=nnx.DiffState(0, is_bias))
    return Way(loss, (model,), gradient, lambda path, leaf: "bias" in path)


def _stop_gradient(model: nnx.Module, x: jax.Array) -> Way:
    graph, state = nnx.split(model)

    def loss(state: Any) -> jax.Array:
        biases, rest = nnx.split_state(state, is_bias, ...)
        return _loss(nnx.merge(graph, biases, jax.lax.stop_gradient(rest)), x)

    return Way(loss, (state,), jax.grad(loss))


def _optimizer(model: nnx.Module, x: jax.Array) -> Way:
    graph, state = nnx.split(model)

    def loss(state: Any) -> jax.Array:
        return _loss(nnx.merge(graph, state), x)

    return Way(loss, (state,), jax.grad(loss))


WAYS = {
    "jax.grad with respect to the biases alone (argnums, partition)": _argument,
    "nnx.grad, argnums=nnx.DiffState(0, biases)": _diff_state,
    "jax.grad with respect to everything, stop_gradient on the rest": _stop_gradient,
    "jax.grad with respect to everything, optax.multi_transform on the rest": _optimizer,
}


@dataclass(frozen=True)
class Config:
    """Which ways, in a network of how many layers, on how many images."""

    ways: tuple[str, ...] = tuple(WAYS)
    layers: int = 8
    batch: int = 16


@dataclass(frozen=True)
class Case:
    """A way of freezing."""

    way: str
    layers: int
    batch: int


def cases(config: Config) -> Iterator[Case]:
    """By way."""
    for way in config.ways:
        yield Case(way, config.layers, config.batch)


def network(layers: int) -> nnx.Module:
    """``(n, h, w, 16)`` to the same."""
    rngs = nnx.Rngs(0)
    stack: list[Any] = []
    for _ in range(layers):
        stack += [nnx.Conv(16, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, rngs=rngs), nnx.relu]
    model = nnx.Sequential(*stack)
    model.eval()
    return model


def update(way: Way) -> Callable[..., Any]:
    """A step of training: arguments to what is to be added to the parameters."""
    rules: dict[Hashable, Any] = {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}

    def labels(gradients: Any) -> Any:
        return nnx.map_state(
            lambda path, leaf: "train" if is_bias(path, leaf) else "freeze", gradients
        )

    def step(*arguments: Any) -> Any:
        gradients = way.gradient(*arguments)
        transform = optax.multi_transform(rules, labels)
        return transform.update(gradients, transform.init(gradients))[0]

    return step


def _largest(tree: Any) -> float:
    return max((float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree)), default=0.0)


def measure(case: Case) -> dict[str, Any]:
    """Bytes by model; and whether both train the same, and only the biases."""
    images = np.random.default_rng(0).standard_normal((case.batch, 32, 32, 16))
    x = jnp.asarray(images, jnp.float32)
    models = (network(case.layers), mnnx.convert(network(case.layers)))
    ways = {name: WAYS[case.way](model, x) for name, model in zip(MODELS, models, strict=True)}
    reports = {
        name: memsave_jax.report(way.loss, *way.arguments, wrt=way.wrt)
        for name, way in ways.items()
    }
    steps: dict[str, Any] = {
        name: jax.jit(update(way)).lower(*way.arguments).compile() for name, way in ways.items()
    }
    updates = {name: steps[name](*way.arguments) for name, way in ways.items()}
    parts = {name: nnx.split_state(each, is_bias, ...) for name, each in updates.items()}
    biases = [part[0] for part in parts.values()]
    difference = _largest(jax.tree.map(jnp.subtract, *biases))
    return {
        "kept_bytes": {name: report.now for name, report in reports.items()},
        "temp_bytes": {name: report.now_temp for name, report in reports.items()},
        "step_temp_bytes": {
            name: step.memory_analysis().temp_size_in_bytes for name, step in steps.items()
        },
        "frozen_change": max(_largest(part[1]) for part in parts.values()),
        "update_difference": difference / _largest(biases),
    }


COLUMNS = {
    "kept_bytes": "kept MiB",
    "temp_bytes": "temporaries of the gradient MiB",
    "step_temp_bytes": "of gradient and update MiB",
}


def show(records: Sequence[Record[Case]]) -> str:
    """A row per way."""
    heads = [(f"{text}: stock", "memsave_jax") for text in COLUMNS.values()]
    return table(
        ("way of freezing", *(head for pair in heads for head in pair), "updates differ by"),
        [
            (
                record.case.way,
                *(mib(record.figures[what][name], 2) for what in COLUMNS for name in MODELS),
                f"{record.figures['update_difference']:.1e}",
            )
            for record in records
        ],
    )


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """What is above stock, not frozen, or trained differently."""
    for record in records:
        way, figures = record.case.way, record.figures
        for what, text in COLUMNS.items():
            if figures[what]["memsave_jax"] > figures[what]["stock"]:
                yield f"{way}: {text} above stock"
        if figures["frozen_change"]:
            yield f"{way}: changes what is frozen by {figures['frozen_change']}"
        if figures["update_difference"] > TOLERANCE:
            yield f"{way}: updates differ by {figures['update_difference']:.1e} of the largest"


EXPERIMENT = Experiment(
    sizes={"tiny": Config(tuple(WAYS)[::3], layers=1, batch=2), "default": Config()},
    choices={"ways": WAYS},
    libraries=("optax",),
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    exact=True,
    backend="jax",
)
