"""The main job's other half: the same ResNet, weights and photographs in Flax.

Its weights are those of the PyTorch model, moved by :mod:`memsave_jax.interop`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from memsave_jax import interop, nnx as mnnx

from .flax_resnet import ResNet
from .flax_scenarios import SCENARIOS, Step
from .input_gradient import MODELS, Case, differences, gradient, prepare
from .measure import compare_in_jax
from .results import settings

FROZEN = next(scenario for scenario in SCENARIOS if scenario.name == "Input (BN eval)")


def measure(case: Case) -> dict[str, Any]:
    """Kept and temporary bytes, times, losses and differences between gradients."""
    twin, photographs, classes = prepare("memsave", case)
    theirs = gradient(twin, photographs, classes)[1].numpy()
    x = jnp.asarray(photographs.detach().permute(0, 2, 3, 1).numpy())
    labels = jnp.asarray(classes.numpy())
    steps = {}
    for name in MODELS:
        model = nnx.eval_shape(lambda: ResNet(case.depth, nnx.Rngs(0)))
        interop.load_state_dict(model, twin.state_dict())
        model.eval()
        steps[name] = Step(mnnx.convert(model) if name == "memsave" else model, FROZEN, x, labels)
    programs = {name: step.compiled() for name, step in steps.items()}
    run = {name: partial(_run, programs[name], step) for name, step in steps.items()}
    results = {name: step() for name, step in run.items()}
    gradients = {
        name: np.moveaxis(np.asarray(wanted["x"]), -1, 1) for name, (_, wanted) in results.items()
    }
    temp = {name: of.memory_analysis().temp_size_in_bytes for name, of in programs.items()}
    taken = settings("jax")
    return {
        "kept_bytes": {name: step.kept() for name, step in steps.items()},
        "temp_bytes": temp,
        "times": compare_in_jax(run, case.repeats),
        "loss": {name: float(loss) for name, ((loss, _), _) in results.items()},
        **differences(gradients),
        "to_torch": float(abs(theirs - gradients["memsave"]).max()),
        "versions": {name: taken[name] for name in ("jax", "flax", "device")},
    }


def _run(program: Any, step: Step) -> Any:
    return program(*step.arguments())
