"""JAX: what XLA makes of a step, for a CPU or a GPU: temporaries, bytes moved, kernels.

The models of ``flax_scenarios`` and small nets around one layer, stock and ours, as one program:
what XLA keeps for backward, and what it computes again, is up to XLA, and another on a GPU. Nothing
is run, so that ``--target h100`` does without one. Bytes moved are what the kernels read and write,
each array once: where a step is bound by memory, its time. For the figures of a CPU, read
temporaries: how many loops there are says little.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memsave.spec import Shape
from memsave_jax import functional as F
from memsave_jax.function import using

from . import flax_scenarios, hlo
from .harness import Experiment
from .render import mib, table
from .results import Record

#: What is between two matrix products or convolutions.
CURVES = ("relu", "leaky_relu", "relu6", "hard_silu", "elu", "silu", "gelu", "mish", "softplus")
GATES = ("swiglu", "geglu")
NORMS = ("layer_norm", "rms_norm", "group_norm", "instance_norm")
DROPOUTS = ("dropout", "alpha_dropout")
POOLS = ("max_pool", "avg_pool")
LAYERS = {
    "MLP": (*CURVES, *GATES, *DROPOUTS, *NORMS[:-1]),
    "CNN, BN train": (*CURVES, *POOLS),
    "CNN, BN eval": (*CURVES, *POOLS),
    "CNN, norm in front": NORMS,
    "CNN, norm behind": NORMS,
}
DTYPES = ("float32", "bfloat16")
WANTED = ("input", "all")
NAMES = ("stock", "memsave_jax")
BLOCKS = 3


@dataclass(frozen=True)
class Config:
    """Which nets, and which of their layers or scenarios (none: all); for which processor."""

    nets: tuple[str, ...] = (*LAYERS, "ResNet-20", "Transformer")
    layers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = DTYPES
    wanted: tuple[str, ...] = WANTED
    width: int = 512
    target: str = "cpu"


@dataclass(frozen=True)
class Case:
    """A net with this layer, or a model in this scenario."""

    net: str
    layer: str
    dtype: str
    wanted: str
    width: int
    target: str


def cases(config: Config) -> Iterator[Case]:
    """By net and layer. A model has a scenario, and its own dtype and width."""
    for net in config.nets:
        is_model = net not in LAYERS
        for name in _names(net):
            if config.layers and name not in config.layers:
                continue
            if is_model:
                yield Case(net, name, "float32", name, 0, config.target)
                continue
            for dtype, wanted in itertools.product(config.dtypes, config.wanted):
                yield Case(net, name, dtype, wanted, config.width, config.target)


def _names(net: str) -> tuple[str, ...]:
    """The layers that go into it, or the scenarios of a model."""
    return LAYERS.get(net) or tuple(s.name for s in flax_scenarios.MODELS[net].scenarios)


def _layer(name: str, x: Array, vector: Array, key: Array) -> Array:
    function = getattr(F, name)
    if name in DROPOUTS:
        return function(x, 0.1, key)
    if name in POOLS:
        return function(x, (2, 2), (2, 2))
    if name == "rms_norm":
        return function(x, vector)
    return function(x, vector, vector) if name in NORMS else function(x)


def _mlp(name: str, x: Array, weights: dict[str, Array], key: Array) -> Array:
    """A layer between two products, beside a shortcut."""
    up = x @ weights["up"] + weights["vector"]
    if name in GATES:
        y = getattr(F, name)(up, x @ weights["gate"])
    else:
        y = _layer(name, up, weights["vector"], key)
    return x + y @ weights["down"]


def _conv(x: Array, kernel: Array) -> Array:
    axes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=axes)


def _cnn(train: bool) -> Callable[[str, Array, dict[str, Array], Array], Array]:
    """A layer behind convolution and BatchNorm."""

    def block(name: str, x: Array, weights: dict[str, Array], key: Array) -> Array:
        vector = weights["vector"]
        mean, var = (None, None) if train else (vector, vector)
        y, *_ = F.batch_norm(
            _conv(x, weights["kernel"]),
            *(mean, var, vector, vector),
            use_running_average=not train,
        )
        return _layer(name, y, vector, key)

    return block


def _norm_in_front(name: str, x: Array, weights: dict[str, Array], key: Array) -> Array:
    """Of an activation and a convolution, beside a shortcut."""
    y = F.silu(_layer(name, x, weights["vector"], key))
    return x + _conv(y, weights["kernel"]) + weights["vector"]


def _norm_behind(name: str, x: Array, weights: dict[str, Array], key: Array) -> Array:
    """A convolution, before an activation."""
    return F.relu(_layer(name, _conv(x, weights["kernel"]), weights["vector"], key))


NETS = {
    "MLP": _mlp,
    "CNN, BN train": _cnn(train=True),
    "CNN, BN eval": _cnn(train=False),
    "CNN, norm in front": _norm_in_front,
    "CNN, norm behind": _norm_behind,
}


def _net(case: Case) -> hlo.Program:
    """Of a step of blocks that share their weights, as traced."""
    block, width = NETS[case.net], case.width
    shapes: dict[str, Shape] = dict.fromkeys(("up", "down", "gate"), (width, width))
    x, count = (4096, width), width
    if case.net != "MLP":
        x, count = (32, 32, 32, width // 8), width // 8
        shapes = {"kernel": (3, 3, count, count)}
    shapes["vector"] = (count,)
    weights = {name: jax.ShapeDtypeStruct(shape, case.dtype) for name, shape in shapes.items()}

    def loss(x: Array, weights: dict[str, Array], key: Array) -> Array:
        for number in range(BLOCKS):
            x = block(case.layer, x, weights, jax.random.fold_in(key, number))
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    step = jax.value_and_grad(loss, (0, 1) if case.wanted == "all" else 0)
    types = jax.ShapeDtypeStruct(x, case.dtype), weights, jax.eval_shape(jax.random.key, 0)
    return hlo.compiled(step, *types, target=case.target)


def measure(case: Case) -> dict[str, Any]:
    """Of stock's program, and of ours."""
    if case.net not in LAYERS:
        batch = flax_scenarios.MODELS[case.net].batch
        steps = flax_scenarios.prepare(flax_scenarios.Case(case.net, case.layer, batch, 0))
        return {
            name: asdict(hlo.compiled(step.gradient, *step.arguments(), target=case.target))
            for name, step in steps.items()
            if name in NAMES
        }
    with using("stock"):
        stock = _net(case)
    return {"stock": asdict(stock), "memsave_jax": asdict(_net(case))}


def _ratio(record: Record[Case], what: str) -> float:
    return record.figures["memsave_jax"][what] / record.figures["stock"][what]


def show(records: Sequence[Record[Case]]) -> str:
    """A row per net, layer, dtype, and what is wanted."""
    return table(
        (
            *("net", "layer or scenario", "dtype", "gradients", "temporaries MiB: stock"),
            *("memsave_jax", "ratio", "bytes moved: ratio", "kernels: stock", "memsave_jax"),
        ),
        [tuple(_line(record)) for record in records],
    )


def _line(record: Record[Case]) -> Iterator[str]:
    case, programs = record.case, [record.figures[name] for name in NAMES]
    yield from (case.net, case.layer, case.dtype, case.wanted if case.net in LAYERS else "")
    yield from (mib(program["temp_bytes"]) for program in programs)
    yield f"{_ratio(record, 'temp_bytes'):.3f}"
    yield f"{_ratio(record, 'moved_bytes'):.3f}"
    yield from (str(program["kernels"]) for program in programs)


def summary(records: Sequence[Record[Case]]) -> str:
    """Ratios to stock: of models by scenario, of nets the range over layers. (Of a CPU the
    temporaries alone, as what its loops read may be small, and stay in a cache.)
    """
    lines = []
    for net in dict.fromkeys(record.case.net for record in records):
        own = [record for record in records if record.case.net == net]
        groups: dict[tuple[str, str], list[Record[Case]]] = {}
        for record in own:
            key = (record.case.wanted, record.case.dtype if net in LAYERS else "")
            groups.setdefault(key, []).append(record)
        lines += [(net, *key, *_ranges(group)) for key, group in groups.items()]
    head = ("net", "gradients wanted", "dtype", "temporaries", "bytes moved", "kernels")
    return table(head[: len(lines[0])], lines)


def _ranges(records: Sequence[Record[Case]]) -> Iterator[str]:
    shown = 1 if records[0].case.target == "cpu" else 3
    for what in ("temp_bytes", "moved_bytes", "kernels")[:shown]:
        ratios = sorted(_ratio(record, what) for record in records)
        ends = dict.fromkeys(f"{ratio:.3f}" for ratio in (ratios[0], ratios[-1]))
        yield " to ".join(ends)


#: The part by which temporaries may be above stock's: a bit of 32, or of 16, where XLA has to keep
#: the input or the output as well.
TOLERANCE = 1 / 16


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Programs with more temporaries than stock's."""
    for record in records:
        ratio, case = _ratio(record, "temp_bytes"), record.case
        if ratio > 1 + TOLERANCE:
            yield f"{case.net}, {case.layer}, {case.dtype}, {case.wanted}: {ratio:.3f} of stock"


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(("MLP",), ("relu",), ("float32",), width=64),
        "default": Config(),
    },
    choices={
        "nets": {*LAYERS, *flax_scenarios.MODELS},
        "layers": dict.fromkeys(
            name for net in (*LAYERS, *flax_scenarios.MODELS) for name in _names(net)
        ),
        "dtypes": DTYPES,
        "wanted": WANTED,
        "target": hlo.TARGETS,
    },
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    summary=summary,
    misses=misses,
    exact=True,
    accelerator=False,
    backend="jax",
)
