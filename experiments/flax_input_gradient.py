"""The main job's other half: the same ResNet-101, weights and photographs in Flax.

Its weights are those of the PyTorch model, moved by :mod:`memsave_jax.interop`.
"""

from __future__ import annotations

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memsave_jax import interop, nnx as mnnx

from .flax_resnet import ResNet
from .flax_scenarios import SCENARIOS, Step
from .measure import paired_times, ratio

FROZEN = next(scenario for scenario in SCENARIOS if scenario.name == "Input (BN eval)")


def measure(crops: int, repeats: int) -> dict[str, Any]:
    """Kept and temporary bytes, seconds, losses and gradients (channels first), by model."""
    from .input_gradient import MODELS, prepare

    twin, photographs, classes = prepare("stock", crops)
    x = jnp.asarray(photographs.detach().permute(0, 2, 3, 1).numpy())
    labels = jnp.asarray(classes.numpy())
    steps = {}
    for name in MODELS:
        model = nnx.eval_shape(lambda: ResNet(101, nnx.Rngs(0)))
        interop.load_state_dict(model, twin.state_dict())
        model.eval()
        steps[name] = Step(mnnx.convert(model) if name == "memsave" else model, FROZEN, x, labels)
    programs = {name: step.compiled() for name, step in steps.items()}
    run = {
        name: lambda name=name: jax.block_until_ready(programs[name](*steps[name].arguments()))
        for name in MODELS
    }
    times = paired_times(run, repeats, "Flax")
    (stock, _), (memsave, _) = (run[name]() for name in MODELS)
    gradients = [np.moveaxis(np.asarray(run[name]()[1]["x"]), -1, 1) for name in MODELS]
    return {
        "kept_bytes": {name: step.kept() for name, step in steps.items()},
        "temp_bytes": {
            name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()
        },
        "seconds": {name: statistics.median(times[name]) for name in MODELS},
        "time_ratio": ratio(times["memsave"], times["stock"]),
        "loss": {"stock": float(stock[0]), "memsave": float(memsave[0])},
        "gradients": dict(zip(MODELS, gradients, strict=True)),
    }
