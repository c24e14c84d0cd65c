"""Flax: bytes kept, jitted temporaries and time of a step of a ResNet and of a transformer.

Stock, memsave_jax, and, beside them, stock under ``jax.checkpoint`` of every block (which computes
every block twice): the same model, the same weights, the same dropout. Kept bytes are those of an
eager ``jax.vjp``, temporaries those that XLA allots to the compiled step; times are medians of
ratios to stock, taken in turn (what that of stock to itself is off 1 is noise). The last column is
the largest difference of a gradient to stock's, to the largest element of that gradient.

The attention of ``nnx.MultiHeadAttention`` and the loss are functions that no table has: stock in
all three.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import memsave_jax
from memsave_jax import nnx as mnnx

from . import flax_transformer
from .flax_resnet import KINDS, ResNet
from .flax_transformer import Transformer
from .harness import GIB, Experiment
from .measure import compare_in_jax, difference
from .render import AGAIN, mib, noise, quartiles, table
from .results import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Path = tuple[Any, ...]

#: Largest difference of the loss, and of a gradient, to stock's.
TOLERANCE = 1e-4
NAMES = ("stock", "memsave_jax", "checkpoint")


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


#: Of a ResNet.
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


def _is_norm(path: Path) -> bool:
    return any("norm" in str(name) for name in path)


def _blocks(*places: int) -> Callable[[Path], bool]:
    return lambda path: path[0] == "blocks" and path[1] in places


#: Of the transformer.
TRANSFORMER_SCENARIOS = (
    Scenario("All", lambda path: True),
    Scenario("Input", lambda path: False, input=True),
    Scenario("Norm", _is_norm),
    Scenario("Biases", lambda path: path[-1] == "bias"),
    Scenario("First layers", _blocks(0, 1)),
    Scenario("Last layers, and input", _blocks(4, 5), input=True),
)


class Model(NamedTuple):
    """How to make one, of random weights; the shapes of an example and of its labels.

    ``batch`` is how many examples it is measured on, unless said otherwise.
    """

    make: Callable[..., nnx.Module]
    x: tuple[int, ...]
    labels: tuple[int, ...]
    classes: int
    batch: int
    scenarios: tuple[Scenario, ...]


def _resnet(depth: int) -> Model:
    kind = KINDS[depth]
    size, batch = (32, 64) if kind.small else (224, 8)
    return Model(partial(ResNet, depth), (size, size, 3), (), kind.classes, batch, SCENARIOS)


MODELS = {
    **{f"ResNet-{depth}": _resnet(depth) for depth in sorted(KINDS)},
    "Transformer": Model(
        Transformer,
        (flax_transformer.LENGTH, flax_transformer.WIDTH),
        (flax_transformer.LENGTH,),
        flax_transformer.CLASSES,
        16,
        TRANSFORMER_SCENARIOS,
    ),
}


CHOICES: dict[str, Collection[str]] = {
    "models": MODELS,
    "scenarios": {scenario.name for model in MODELS.values() for scenario in model.scenarios},
}


@dataclass(frozen=True)
class Config:
    """Which models in which of their scenarios (none: all); ``batch`` 0 is the model's own."""

    models: tuple[str, ...] = ("ResNet-20", "Transformer")
    scenarios: tuple[str, ...] = ()
    batch: int = 0
    repeats: int = 7


@dataclass(frozen=True)
class Case:
    """A model in a scenario."""

    model: str
    scenario: str
    batch: int
    repeats: int

    @property
    def of(self) -> Scenario:
        """The scenario itself."""
        scenarios = MODELS[self.model].scenarios
        return next(scenario for scenario in scenarios if scenario.name == self.scenario)


def cases(config: Config) -> Iterator[Case]:
    """By model."""
    for name in config.models:
        model = MODELS[name]
        for scenario in model.scenarios:
            if not config.scenarios or scenario.name in config.scenarios:
                yield Case(name, scenario.name, config.batch or model.batch, config.repeats)


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
        loss = -jnp.take_along_axis(logits, labels[..., None], -1).mean()
        return loss, nnx.state(model, nnx.BatchStat)

    def arguments(self) -> tuple[Any, Any, Any]:
        """Of the loss, and of its gradient."""
        return self.wanted, self.rest, self.data

    @property
    def gradient(self) -> Callable[..., Any]:
        """The loss and its gradients, of the arguments."""
        return jax.value_and_grad(self.loss, has_aux=True)

    def compiled(self) -> Any:
        """The same, compiled."""
        return jax.jit(self.gradient).lower(*self.arguments()).compile()

    def kept(self) -> int:
        """Bytes that an eager backward would find kept."""
        return memsave_jax.report(self.loss, *self.arguments(), compiled=False).now


def prepare(case: Case) -> dict[str, Step]:
    """The same model in three versions."""
    of = MODELS[case.model]
    x = jax.random.normal(jax.random.key(1), (case.batch, *of.x))
    labels = jax.random.randint(jax.random.key(2), (case.batch, *of.labels), 0, of.classes)
    steps = {}
    for name in NAMES:
        model = of.make(rngs=nnx.Rngs(0), remat=name == "checkpoint")
        model.train()
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.BatchNorm) and case.of.batch_norm_eval:
                module.eval()
        if name == "memsave_jax":
            mnnx.convert(model)
        steps[name] = Step(model, case.of, x, labels)
    return steps


def measure(case: Case) -> dict[str, Any]:
    """Bytes and times of the three versions, and whether stock and ours agree."""
    steps = prepare(case)
    programs = {name: step.compiled() for name, step in steps.items()}
    run = {name: lambda name=name: programs[name](*steps[name].arguments()) for name in NAMES}
    times = compare_in_jax({**run, AGAIN: run["stock"]}, case.repeats)
    ((loss, _), gradients), ((our_loss, _), our_gradients) = (run[name]() for name in NAMES[:2])
    return {
        "kept_bytes": {name: step.kept() for name, step in steps.items()},
        "temp_bytes": {
            name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()
        },
        "times": times,
        "loss": {"stock": float(loss), "memsave_jax": float(our_loss)},
        "gradient_difference": difference(*map(jax.tree.leaves, (gradients, our_gradients))),
    }


def _ratio(sizes: dict[str, int], name: str = "memsave_jax") -> float:
    return sizes[name] / sizes["stock"]


def show(records: Sequence[Record[Case]]) -> str:
    """A row per model and scenario."""
    return table(
        (
            *("model (batch)", "gradients wanted"),
            *("kept MiB: stock", "memsave_jax", "checkpoint", "ratio"),
            *("temporaries MiB: stock", "memsave_jax", "checkpoint", "ratio"),
            *("stock ms", "time: memsave_jax", "quartiles", "checkpoint"),
            *("stock to itself", "quartiles", "gradients differ by"),
        ),
        [tuple(_line(record)) for record in records],
    )


def _line(record: Record[Case]) -> Iterator[str]:
    case, figures, times = record.case, record.figures, record.figures["times"]
    yield f"{case.model} ({case.batch})"
    yield case.scenario
    for what in ("kept_bytes", "temp_bytes"):
        yield from (mib(figures[what][name]) for name in NAMES)
        yield f"{_ratio(figures[what]):.3f}"
    yield f"{times['stock']['seconds'] * 1e3:.3g}"
    yield f"{times['memsave_jax']['ratio']:.3f}"
    yield quartiles(times["memsave_jax"])
    yield f"{times['checkpoint']['ratio']:.3f}"
    yield from noise(times)
    yield f"{figures['gradient_difference']:.1e}"


def summary(records: Sequence[Record[Case]]) -> str:
    """Ratios to stock, of ours and of ``jax.checkpoint``."""
    return table(
        (
            *("model (batch)", "gradients wanted", "kept", "(checkpoint)"),
            *("temporaries, jitted", "(checkpoint)", "time", "(checkpoint)", "stock to itself"),
        ),
        [tuple(_summary_line(record)) for record in records],
    )


def _summary_line(record: Record[Case]) -> Iterator[str]:
    case, figures = record.case, record.figures
    yield from (f"{case.model} ({case.batch})", case.scenario)
    for what in ("kept_bytes", "temp_bytes"):
        yield f"{_ratio(figures[what]):.3f}"
        yield f"({_ratio(figures[what], 'checkpoint'):.3f})"
    yield f"{figures['times']['memsave_jax']['ratio']:.3f}"
    yield f"({figures['times']['checkpoint']['ratio']:.3f})"
    yield next(noise(figures["times"]))


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Counts above their targets or stock, and losses or gradients that are not stock's."""
    for record in records:
        case, figures = record.case, record.figures
        what = f"{case.model}, {case.scenario}"
        target = case.of.temp_target if case.batch == MODELS[case.model].batch else 1.0
        for name, limit in (("kept_bytes", 1.0), ("temp_bytes", target)):
            ratio = _ratio(figures[name])
            if ratio > limit:
                yield f"{what}: {name} {ratio:.3f} of stock, target {limit}"
        loss = figures["loss"]
        if abs(loss["memsave_jax"] - loss["stock"]) > TOLERANCE * abs(loss["stock"]):
            yield f"{what}: loss {loss['memsave_jax']}, stock {loss['stock']}"
        if figures["gradient_difference"] > TOLERANCE:
            yield f"{what}: gradients differ by {figures['gradient_difference']:.1e}"


#: What is plotted, and of which version.
BARS = {
    "kept, memsave_jax": ("kept_bytes", "memsave_jax", "tab:green"),
    "temporaries, memsave_jax": ("temp_bytes", "memsave_jax", "tab:blue"),
    "temporaries, checkpoint": ("temp_bytes", "checkpoint", "tab:gray"),
}


def plot(records: Sequence[Record[Case]]) -> Figure:
    """Ratios to stock: a panel per model, a group of bars per scenario."""
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(record.case.model for record in records))
    figure, axes = plt.subplots(
        1, len(models), figsize=(1 + 4.5 * len(models), 4.5), squeeze=False, layout="constrained"
    )
    for axis, model in zip(axes[0], models, strict=True):
        own = [record for record in records if record.case.model == model]
        for k, (label, (what, name, color)) in enumerate(BARS.items()):
            ratios = [_ratio(record.figures[what], name) for record in own]
            places = [place + 0.25 * (k - 1) for place in range(len(own))]
            axis.barh(places, ratios, 0.23, color=color, label=label)
        axis.axvline(1, color="black", linewidth=0.8)
        names = [record.case.scenario for record in own]
        axis.set(title=model, yticks=range(len(own)), yticklabels=names)
        axis.invert_yaxis()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle("memory of a step, ratio to stock Flax")
    return figure


def memory(case: Case) -> int:
    """Stock's temporaries, generously, twice: ours are there as well."""
    elements = {"ResNet-20": 1 << 20, "Transformer": 1 << 22}.get(case.model, 1 << 26)
    return GIB + 2 * 4 * elements * case.batch


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(("Transformer",), ("Input",), batch=2, repeats=3),
        "quick": Config(scenarios=("Input",), batch=8, repeats=3),
        "default": Config(),
        "paper": Config(("ResNet-101",), batch=64, repeats=3),
    },
    choices=CHOICES,
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    plot=plot,
    summary=summary,
    memory=memory,
    backend="jax",
)
