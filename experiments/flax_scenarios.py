"""Flax: bytes kept, jitted temporaries and time of a step of a ResNet, per scenario.

Stock, memsave_jax, and, beside them, stock under ``jax.checkpoint`` of every block: the same model,
the same weights. Kept bytes are those of an eager ``jax.vjp``, temporaries those that XLA allots to
the compiled step.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

import memsave_jax
from memsave_jax import nnx as mnnx

from .flax_resnet import KINDS, ResNet
from .measure import paired_times, print_table, ratio, write_results

Path = tuple[Any, ...]


class Scenario(NamedTuple):
    """What is differentiable: parameters by their path, and the input; and the mode of BatchNorm.

    ``temp_target`` is the ratio of jitted temporaries to stock's that must be reached.
    """

    name: str
    trainable: Callable[[Path], bool]
    input: bool = False
    batch_norm_eval: bool = False
    temp_target: float = 1.0


def _part(*stages: int) -> Callable[[Path], bool]:
    return lambda path: path[1] == "encoder" and path[3] in stages


SCENARIOS = (
    Scenario("All", lambda path: True, temp_target=0.70),
    Scenario("Input", lambda path: False, input=True),
    Scenario("Input (BN eval)", lambda path: False, input=True, batch_norm_eval=True),
    Scenario("Biases (BN eval)", lambda path: path[-1] == "bias", False, True, 0.35),
    Scenario("Conv", lambda path: "convolution" in path),
    Scenario("Norm", lambda path: "normalization" in path),
    Scenario("First stage", _part(0)),
    Scenario("Last stages, and input", _part(2, 3), input=True),
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--depth", type=int, choices=sorted(KINDS), default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32, help="of the images, in pixels")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--scenarios", nargs="+", default=[s.name for s in SCENARIOS])


class Step:
    """A step of a model in a scenario: its loss, and the gradients that it wants."""

    def __init__(self, model: nnx.Module, scenario: Scenario, x: jax.Array, labels: Any) -> None:
        def is_wanted(path: Path, variable: nnx.Variable) -> bool:
            return isinstance(variable, nnx.Param) and scenario.trainable(path)

        self.graph, wanted, self.rest = nnx.split(model, is_wanted, ...)
        self.wanted = {"model": wanted} | ({"x": x} if scenario.input else {})
        self.data = (x, labels)

    def loss(self, wanted: dict[str, Any], rest: Any, data: Any) -> tuple[jax.Array, Any]:
        """The loss, and the running statistics after the step."""
        x, labels = wanted.get("x", data[0]), data[1]
        model = nnx.merge(self.graph, wanted["model"], rest, copy=True)
        logits = jax.nn.log_softmax(model(x))
        loss = -jnp.take_along_axis(logits, labels[:, None], 1).mean()
        return loss, nnx.state(model, nnx.BatchStat)

    def arguments(self) -> tuple[Any, Any, Any]:
        """Of the loss, and of its gradient."""
        return self.wanted, self.rest, self.data

    def compiled(self) -> Any:
        """The loss and its gradients, compiled."""
        step = jax.value_and_grad(self.loss, has_aux=True)
        return jax.jit(step).lower(*self.arguments()).compile()

    def kept(self) -> int:
        """Bytes that an eager backward would find kept."""
        return memsave_jax.report(self.loss, *self.arguments(), compiled=False).now


def prepare(args: argparse.Namespace, scenario: Scenario) -> dict[str, Step]:
    """The same model in three versions."""
    x = jax.random.normal(jax.random.key(1), (args.batch, args.size, args.size, 3))
    labels = jax.random.randint(jax.random.key(2), (args.batch,), 0, 10)
    steps = {}
    for name in ("stock", "memsave_jax", "checkpoint"):
        model = ResNet(args.depth, nnx.Rngs(0), remat=name == "checkpoint")
        model.train()
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.BatchNorm) and scenario.batch_norm_eval:
                module.eval()
        if name == "memsave_jax":
            mnnx.convert(model)
        steps[name] = Step(model, scenario, x, labels)
    return steps


def measure(args: argparse.Namespace, scenario: Scenario) -> dict[str, Any]:
    """One line of the results."""
    steps = prepare(args, scenario)
    compiled = {name: step.compiled() for name, step in steps.items()}
    run = {
        name: lambda name=name: jax.block_until_ready(compiled[name](*steps[name].arguments()))
        for name in steps
    }
    times = paired_times(run, args.repeats, scenario.name)
    temp = {n: program.memory_analysis().temp_size_in_bytes for n, program in compiled.items()}
    gradients = {name: run[name]()[1] for name in ("stock", "memsave_jax")}
    leaves = zip(*map(jax.tree.leaves, gradients.values()), strict=True)
    return {
        "scenario": scenario.name,
        "kept_bytes": {name: step.kept() for name, step in steps.items()},
        "temp_bytes": temp,
        "median_s": {name: statistics.median(times[name]) for name in steps},
        "time_ratio": {name: ratio(times[name], times["stock"]) for name in steps},
        "gradient_difference": max(
            float(jnp.abs(one - other).max() / jnp.abs(one).max()) for one, other in leaves
        ),
        "temp_target": scenario.temp_target,
    }


def main(args: argparse.Namespace) -> int:
    """Print a row per scenario; 1 if a count is over its target or over stock's."""
    chosen = [scenario for scenario in SCENARIOS if scenario.name in args.scenarios]
    rows = [measure(args, scenario) for scenario in tqdm(chosen, "scenarios", leave=False)]

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        kept, temp = row["kept_bytes"], row["temp_bytes"]
        return (
            row["scenario"],
            *(f"{kept[n] / 2**20:.1f}" for n in kept),
            f"{kept['memsave_jax'] / kept['stock']:.3f}",
            *(f"{temp[n] / 2**20:.1f}" for n in temp),
            f"{temp['memsave_jax'] / temp['stock']:.3f}",
            f"{row['time_ratio']['memsave_jax']:.3f}",
            f"{row['time_ratio']['checkpoint']:.3f}",
            f"{row['gradient_difference']:.1e}",
        )

    print_table(
        (
            "scenario",
            *("kept MiB: stock", "memsave", "checkpoint", "ratio"),
            *("temp MiB: stock", "memsave", "checkpoint", "ratio"),
            *("time: memsave", "checkpoint", "gradient off by"),
        ),
        [cells(row) for row in rows],
    )
    command = (
        f"python -m experiments run flax_scenarios --depth {args.depth} --batch {args.batch} "
        f"--size {args.size} --repeats {args.repeats}"
    )
    print(f"written to {write_results('flax_scenarios', command, rows)}")
    return any(
        row["kept_bytes"]["memsave_jax"] > row["kept_bytes"]["stock"]
        or row["temp_bytes"]["memsave_jax"] > row["temp_target"] * row["temp_bytes"]["stock"]
        for row in rows
    )
