"""Flax: which ways of freezing let JAX, and so these layers, keep less.

A network of convolution, BatchNorm (in eval mode) and ReLU, of which the biases are trained. What
counts is whether JAX knows, while it traces the loss, that the gradient of a weight is not wanted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import memsave_jax
from memsave_jax import nnx as mnnx

from .measure import print_table, write_results


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)


def network(layers: int) -> nnx.Module:
    """``(n, h, w, 16)`` to the same."""
    rngs = nnx.Rngs(0)
    stack: list[Any] = []
    for _ in range(layers):
        stack += [nnx.Conv(16, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, rngs=rngs), nnx.relu]
    model = nnx.Sequential(*stack)
    model.eval()
    return model


def is_bias(path: Any, value: Any) -> bool:
    """What is trained."""
    return "bias" in path


def ways(model: nnx.Module, x: jax.Array) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """A loss and its arguments; the gradient is that with respect to the first."""
    graph, state = nnx.split(model)
    biases, rest = nnx.split_state(state, is_bias, ...)

    def loss(state: Any) -> jax.Array:
        return (nnx.merge(graph, state)(x) ** 2).mean()

    def of_biases(biases: Any, rest: Any) -> jax.Array:
        return loss(nnx.merge_state(biases, rest))

    def stopped(state: Any) -> jax.Array:
        biases, rest = nnx.split_state(state, is_bias, ...)
        return of_biases(biases, jax.lax.stop_gradient(rest))

    return {
        "jax.grad with respect to the biases alone (partition, DiffState)": (
            of_biases,
            (biases, rest),
        ),
        "jax.grad with respect to everything, stop_gradient on the rest": (stopped, (state,)),
        "jax.grad with respect to everything, optax.multi_transform on the rest": (loss, (state,)),
    }


def updated(model: nnx.Module, x: jax.Array) -> float:
    """That multi_transform freezes, all the same: the largest change of what is not trained."""
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    labels = nnx.map_state(lambda path, _: "train" if is_bias(path, _) else "freeze", parameters)
    transform = optax.multi_transform(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, lambda _: labels
    )

    def loss(parameters: Any) -> jax.Array:
        return (nnx.merge(graph, parameters, rest)(x) ** 2).mean()

    grads = jax.grad(loss)(parameters)
    updates: Any = transform.update(grads, transform.init(parameters), parameters)[0]
    _, frozen = nnx.split_state(updates, is_bias, ...)
    return max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(frozen))


def main(args: argparse.Namespace) -> int:
    """Print a row per way."""
    x = jax.random.normal(jax.random.key(0), (args.batch, 32, 32, 16))
    model = network(args.layers)
    assert updated(model, x) == 0
    stock = ways(model, x)
    ours = ways(mnnx.convert(network(args.layers)), x)
    rows = []
    for name in stock:
        reports = {
            model: memsave_jax.report(loss, *arguments)
            for model, (loss, arguments) in (("stock", stock[name]), ("memsave_jax", ours[name]))
        }
        rows.append(
            {
                "way": name,
                "kept_bytes": {model: report.now for model, report in reports.items()},
                "temp_bytes": {model: report.now_temp for model, report in reports.items()},
            }
        )
    print_table(
        ("way of freezing", "kept MiB: stock", "memsave_jax", "temp MiB: stock", "memsave_jax"),
        [
            (
                row["way"],
                *(f"{row['kept_bytes'][n] / 2**20:.2f}" for n in ("stock", "memsave_jax")),
                *(f"{row['temp_bytes'][n] / 2**20:.2f}" for n in ("stock", "memsave_jax")),
            )
            for row in rows
        ],
    )
    command = f"python -m experiments run flax_freezing --layers {args.layers} --batch {args.batch}"
    print(f"written to {write_results('flax_freezing', command, rows)}")
    return 0
