"""JAX: bytes that every row keeps per element, stock's and ours, eagerly and compiled.

A layer is a frozen mix of the channels, then the row, then, where it changes the shape, a cut or
zeros. None of these keeps anything but its weight, so what a row reads are activations that nobody
else keeps: ``x`` and ``y`` count in full. Inputs and parameters are alive anyway and do not count.
Eagerly, it is what ``jax.vjp`` of one layer holds; compiled, by how much the temporaries of a
gradient grow with each layer of a deep stack, by what mixes the channels. (Where that is 0, what is
kept fits into what the last layer needs anyway.) Nothing is run.

All columns are bytes per element of ``x``, which has four. A row of the table may be above stock
where another row of the same op is not: they are there to be chosen from.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import memsave_jax
import memsave_jax.functional  # defines the rules
from memsave.spec import TABLE, Shape
from memsave_jax.function import RULES, Rule, differentiable, using

from .harness import Experiment
from .render import table
from .results import Record

#: Options of the table that mean nothing to a JAX rule.
UNKNOWN = {"inplace", "return_indices", "momentum"}
#: By the name without dimensions, what to call a row with, where the defaults of the table are too
#: few for numbers to tell, or not all that there is.
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "conv": ({}, {"padding": 1, "padding_mode": "circular"}),
    "conv_transpose": ({}, {"flip": False}),
    "max_pool": ({}, {"kernel_size": 3, "stride": 2, "padding": 1}),
    "group_norm": ({"num_groups": 8},),
    "group_norm_from_output": ({"num_groups": 8},),
    "gelu": ({}, {"approximate": "tanh"}),
    "geglu": ({}, {"approximate": "tanh"}),
    "cross_entropy": ({"reduction": "none"}, {"reduction": "none", "label_smoothing": 0.1}),
    "cross_entropy_of_probabilities": ({"reduction": "none"},),
}
#: Sizes of the spatial axes, by their names, and of any other axis.
SPATIAL = {"": (1024,), "h w": (32, 32), "d h w": (16, 8, 8)}
CHANNELS, KERNEL = 64, 3
PARAMETERS = {"weight", "bias"}
#: What mixes the channels, and the shape of its weight. (XLA treats the two quite differently: on
#: CPU it merges dense layers with what is around them.)
MIXES = {"dense": (CHANNELS, CHANNELS), "convolution": (3, CHANNELS, CHANNELS)}
HOW = ("eager", *MIXES)
#: Machine code that nobody runs need not be fast. (Where arrays lie is settled before it is made.)
QUICKLY: dict[str, bool | int | float | str] = {"xla_backend_optimization_level": 0}
#: The part, and the bytes per element, by which ours may be above stock's: padding of buffers, and
#: vectors per channel or example, of which stock may keep fewer.
TOLERANCE = 0.01


#: The ops, each with its rows.
ROWS: dict[str, list[str]] = {}
for _name in RULES:
    ROWS.setdefault(TABLE[_name].op, []).append(_name)


@dataclass(frozen=True)
class Config:
    """Which ops, on how many examples, in stacks of how many layers."""

    ops: tuple[str, ...] = tuple(ROWS)
    batch: int = 64
    few: int = 4
    many: int = 12


@dataclass(frozen=True)
class Case:
    """An op: all of its rows."""

    op: str
    batch: int
    few: int
    many: int


def cases(config: Config) -> Iterator[Case]:
    """By op, in the order of the table."""
    for op in config.ops:
        yield Case(op, config.batch, config.few, config.many)


class Call(NamedTuple):
    """A row, called with these options, of which these gradients are wanted.

    ``shapes`` are those of the arguments that are there; ``activations`` are the arguments that
    come out of a mix, each of its own. ``state`` is the shape of what goes from layer to layer.
    """

    rule: Rule
    options: dict[str, Any]
    variant: dict[str, Any]
    wrt: frozenset[str]
    shapes: dict[str, Shape]
    activations: tuple[str, ...]
    state: Shape

    @property
    def is_stock(self) -> bool:
        """Whether the stock op runs."""
        types = {name: self._type(name) for name in self.shapes}
        args = [types.get(name) for name in self.rule.row.args]
        return self.rule.bwd is None or self.rule.stock_op(*args, **self.options)

    def _type(self, name: str) -> Any:
        integer = name in self.rule.row.integers
        return jax.ShapeDtypeStruct(self.shapes[name], jnp.int32 if integer else jnp.float32)

    def types(self, depth: int, mix: str) -> tuple[Any, Any]:
        """What is wanted, and the rest: of every layer its own."""
        weight = jax.ShapeDtypeStruct(MIXES[mix], jnp.float32)
        key = jax.eval_shape(jax.random.key, 0)
        names = [name for name in self.shapes if name not in self.activations]
        wanted = {name: self._type(name) for name in names if name in self.wrt}
        rest = {name: self._type(name) for name in names if name not in self.wrt}
        weights = dict.fromkeys(self.activations or ("state",), weight)
        state = jax.ShapeDtypeStruct(self.state, jnp.float32)
        return (state, [wanted] * depth), ([(rest, weights, key)] * depth, weight)

    def stack(self, wanted: Any, rest: Any) -> Array:
        """Layer upon layer, and a last mix."""
        (state, layers), (frozen, last) = wanted, rest
        for parameters, (others, weights, key) in zip(layers, frozen, strict=True):
            mixed = {name: _mixed(state, weight) for name, weight in weights.items()}
            y = self._row({**mixed, **parameters, **others}, key)
            # (An embedding has no activation to go on from.)
            state = _resized(y, self.state) + (0 if self.activations else mixed["state"])
        return _mixed(state, last)

    def _row(self, named: dict[str, Array], key: Any) -> Array:
        draws = "key" in inspect.signature(self.rule.primal).parameters
        options = {**self.options, "key": key} if draws else self.options
        args = [named.get(name) for name in self.rule.row.args]
        y = differentiable(self.rule)(*args, **options)
        return y[0] if isinstance(y, tuple) else y


def _mixed(state: Array, weight: Array) -> Array:
    """By a matrix, or by a convolution along all axes between the first and the last as one."""
    if weight.ndim == 2:
        return state @ weight
    flat = state.reshape(len(state), -1, state.shape[-1])
    axes = ("NHC", "HIO", "NHC")
    y = lax.conv_general_dilated(flat, weight, (1,), "SAME", dimension_numbers=axes)
    return y.reshape(state.shape)


def _resized(y: Array, shape: Shape) -> Array:
    """Cut, or with zeros around it: what is linear, and keeps nothing."""
    y = y.reshape(y.shape + (1,) * (len(shape) - y.ndim))
    pads = [(0, size - here, 0) for here, size in zip(y.shape, shape, strict=True)]
    return lax.pad(y, jnp.zeros((), y.dtype), pads)


def calls(name: str, batch: int) -> Iterator[Call]:
    """With the gradients of the activations alone, and with those of the parameters as well."""
    rule = RULES[name]
    row, layout = rule.row, rule.layout
    present = [arg for arg in row.args if arg in row.reads or arg not in row.optional]
    activations = tuple(arg for arg in row.reads if arg not in PARAMETERS)
    axes = layout[activations[0] if activations else "y"]
    state, sizes = _sizes(axes, batch)
    shapes = {arg: _shape(layout[arg], sizes) for arg in present}
    defaults = {option: values[0] for option, values in row.options.items()}
    masks = dict.fromkeys([frozenset(activations), frozenset(row.reads)])
    for variant in VARIANTS.get(name, VARIANTS.get(name[:-2], ({},))):
        given = {k: v for k, v in {**defaults, **variant}.items() if k not in UNKNOWN}
        for wrt in filter(None, masks):
            yield Call(rule, given, variant, wrt, shapes, activations, state)


def _sizes(axes: str, batch: int) -> tuple[Shape, dict[str, Shape]]:
    """An activation's shape, and the sizes of its named axes (of a starred one, any number)."""
    tokens = axes.split()
    spatial = " ".join(token for token in tokens if token in ("d", "h", "w"))
    state = rest = (batch, *SPATIAL[spatial], CHANNELS)
    sizes = {}
    for token in tokens:
        count = len(state) - len(tokens) + 1 if token.startswith("*") else 1
        sizes[token.lstrip("*")], rest = rest[:count], rest[count:]
    return state, sizes


def _shape(axes: str, sizes: dict[str, Shape]) -> Shape:
    shape: Shape = ()
    for token in axes.split():
        axis = token.lstrip("*").partition("/")[0]
        shape += sizes.get(axis, (KERNEL if axis.startswith("k") else CHANNELS,))
    return shape


def _temporaries(call: Call, depth: int, mix: str) -> int:
    """Of a stack's gradient, compiled."""

    def step(wanted: Any, rest: Any) -> Any:
        y, pull = jax.vjp(lambda wanted: call.stack(wanted, rest), wanted)
        return y, pull(jnp.ones_like(y))

    program = jax.jit(step, compiler_options=QUICKLY).lower(*call.types(depth, mix)).compile()
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


def _growth(call: Call, case: Case, mix: str, form: Any) -> float:
    """Of the temporaries, per layer."""
    with using(form):
        grown = _temporaries(call, case.many, mix) - _temporaries(call, case.few, mix)
    return grown / (case.many - case.few)


def _per_element(call: Call, case: Case) -> dict[str, Any]:
    """Bytes per element, eagerly and by mix."""
    report = memsave_jax.report(call.stack, *call.types(1, "dense"), compiled=False)
    sizes = {"eager": {"stock": float(report.stock), "memsave_jax": float(report.now)}}
    for mix in MIXES:
        forms = {"stock": "stock", "memsave_jax": "custom_jvp"}
        sizes[mix] = {name: _growth(call, case, mix, form) for name, form in forms.items()}
    elements = math.prod(call.state)
    return {how: {name: size / elements for name, size in of.items()} for how, of in sizes.items()}


def measure(case: Case) -> dict[str, Any]:
    """Bytes per element of every row of an op, however called, and whatever is wanted."""
    lines = [
        {
            "row": name,
            "called_with": call.variant,
            "wrt": sorted(call.wrt),
            "stock_op": call.is_stock,
            **_per_element(call, case),
        }
        for name in ROWS[case.op]
        for call in calls(name, case.batch)
    ]
    return {"calls": lines}


def _is_above(line: dict[str, Any]) -> bool:
    """Whether it keeps more than stock anywhere."""
    return any(
        line[how]["memsave_jax"] > line[how]["stock"] * (1 + TOLERANCE) + TOLERANCE for how in HOW
    )


def _instead(line: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    """Another row of the op, called the same, that is not above stock."""
    same = (
        other["row"]
        for other in lines
        if all(other[key] == line[key] for key in ("called_with", "wrt")) and not _is_above(other)
    )
    return next(same, "")


def _remark(line: dict[str, Any], lines: Sequence[dict[str, Any]]) -> str:
    if not _is_above(line):
        return "stock op" if line["stock_op"] else ""
    other = _instead(line, lines)
    return f"above stock: {other} is not" if other else "ABOVE STOCK"


def _called(line: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in line["called_with"].items())


def show(records: Sequence[Record[Case]]) -> str:
    """A line per row of the table, call and wanted gradients."""
    columns = [(how, name) for how in HOW for name in ("stock", "memsave_jax")]
    return table(
        ("row", "called with", "gradients", *(f"{how}: {name}" for how, name in columns), ""),
        [
            (
                line["row"],
                _called(line),
                ", ".join(line["wrt"]),
                *(f"{line[how][name]:.3f}" for how, name in columns),
                _remark(line, record.figures["calls"]),
            )
            for record in records
            for line in record.figures["calls"]
        ],
    )


def summary(records: Sequence[Record[Case]]) -> str:
    """Of usual rows in their first form: the gradient of all inputs but parameters."""
    lines = [next(_of_inputs(record)) for record in records if record.case.op in USUAL]
    return table(
        ("row, gradient of the inputs", "eager, stock to ours", "jit, stock to ours"),
        [
            (line["row"], *(" to ".join(f"{x:.3f}" for x in line[how].values()) for how in HOW[:2]))
            for line in lines
        ],
    )


def _of_inputs(record: Record[Case]) -> Iterator[dict[str, Any]]:
    inputs = {"x", "gate", "up", "input"}
    return (line for line in record.figures["calls"] if {*line["wrt"]} <= inputs)


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Rows above stock, where no other row of the op is not."""
    for record in records:
        lines = record.figures["calls"]
        for line in lines:
            if _is_above(line) and not _instead(line, lines):
                yield f"{line['row']}, gradients of {', '.join(line['wrt'])}: above stock"


USUAL = (
    *("relu", "leaky_relu", "gelu", "silu", "mish", "softmax", "layer_norm", "rms_norm"),
    *("group_norm", "instance_norm", "swiglu", "geglu", "cross_entropy"),
)
EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(("relu",), batch=8),
        "quick": Config(USUAL),
        "default": Config(),
    },
    choices={"ops": ROWS},
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    summary=summary,
    misses=misses,
    exact=True,
    backend="jax",
)
