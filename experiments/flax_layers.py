"""JAX: every layer that keeps less than stock, alone: bytes kept, and time of a jitted step.

Beside stock stands ``jax.checkpoint`` of the stock layer, which keeps its input and computes the
layer again. Alternatives of one op (two rows of dropout, of relu) are there to be compared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import memsave_jax
from memsave_jax import function, functional as F

from .measure import paired_times, print_table, ratio, write_results


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="of the images, in pixels")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=31)


def layers(channels: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """Functions of ``x``."""
    key, vector = jax.random.key(0), jnp.ones(channels)
    return {
        "relu": F.relu,
        "relu_from_output": F.relu_from_output,
        "dropout": lambda x: F.dropout(x, 0.1, key),
        "dropout_from_rng": lambda x: F.dropout_from_rng(x, 0.1, key),
        "max_pool2d, 2x2": lambda x: F.max_pool(x, (2, 2), (2, 2)),
        "max_pool2d, 3x3 by 2": lambda x: F.max_pool(x, (3, 3), (2, 2), "SAME"),
        "batch_norm_train": lambda x: F.batch_norm(
            x, None, None, vector, vector, use_running_average=False
        )[0],
    }


def _step(layer: Callable[[jax.Array], jax.Array], x: jax.Array, form: Any) -> Any:
    """Forward and backward, compiled. (The output goes out, as to a next layer.)"""

    def step(x: jax.Array, g: jax.Array) -> Any:
        y, pull = jax.vjp(layer, x)
        return y, pull(g)[0]

    with function.using(form):
        g = jnp.ones(jax.eval_shape(layer, x).shape)
        program = jax.jit(step).lower(x, g).compile()
    return lambda: jax.block_until_ready(program(x, g))


def main(args: argparse.Namespace) -> int:
    """Print a row per layer."""
    x = jax.random.normal(jax.random.key(1), (args.batch, args.size, args.size, args.channels))
    rows = []
    for name, layer in tqdm(layers(args.channels).items(), "layers", leave=False):
        # (Of an activation: an input of the whole function would be free.)
        report = memsave_jax.report(lambda x, layer=layer: layer(2 * x), x, compiled=False)
        steps = {
            "stock": _step(layer, x, "stock"),
            "memsave_jax": _step(layer, x, "custom_jvp"),
            "custom_vjp": _step(layer, x, "custom_vjp"),
            "checkpoint": _step(jax.checkpoint(layer), x, "stock"),
        }
        times = paired_times(steps, args.repeats, name)
        rows.append(
            {
                "layer": name,
                "stock_bytes": report.stock,
                "kept_bytes": report.now,
                "stock_s": statistics.median(times["stock"]),
                "time_ratio": {n: ratio(times[n], times["stock"]) for n in steps},
            }
        )
    print_table(
        ("layer", "stock keeps", "memsave_jax", "ms", "time ratio", "custom_vjp", "checkpoint"),
        [
            (
                row["layer"],
                f"{row['stock_bytes'] / x.nbytes:.3f}",
                f"{row['kept_bytes'] / x.nbytes:.4f}",
                f"{row['stock_s'] * 1e3:.2f}",
                *(f"{row['time_ratio'][n]:.3f}" for n in ("memsave_jax", "custom_vjp")),
                f"{row['time_ratio']['checkpoint']:.3f}",
            )
            for row in rows
        ],
    )
    print("(kept bytes as parts of the input's)")
    command = f"python -m experiments run flax_layers --repeats {args.repeats}"
    print(f"written to {write_results('flax_layers', command, rows)}")
    return 0
