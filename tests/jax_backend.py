"""The JAX backend, as the properties ask it. A case's shapes are translated by the axes' names."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import Array, Kept, Result, remembered
from hypothesis import settings
from jax import lax
from jax.extend.core import Literal
from jax.test_util import check_jvp, check_vjp
from properties import (
    check_backward_twice,
    check_batched_backward,
    check_gradient,
    check_nothing_else_stays_alive,
)
from strategies import Case

import memsave_jax.functional  # noqa: F401  (defines the rules)
from memsave.spec import Layer, MissingResidual, permutation
from memsave_jax import function
from memsave_jax.function import Form, Rule

#: Options of the table that mean nothing to a JAX rule: arrays are not changed in place, no op
#: returns indices, and running statistics are updated outside of it.
UNKNOWN = {"inplace", "return_indices", "momentum"}
#: Every row is checked in the default form. What the other one does does not depend on the row, nor
#: what is the engine's doing, so unless there is time these are checked on rows that differ in
#: kind: in what they keep, in how many outputs they have, in what they draw, in what they take.
KINDS = {
    *("batch_norm_train", "conv2d", "dropout_from_rng", "max_pool2d", "relu"),
    *("cross_entropy", "embedding_compact"),
}
#: (The gradients themselves are compared with stock's, for every row and mask.)
OF_THE_ENGINE = {
    check_backward_twice,
    check_batched_backward,
    check_gradient,
    check_nothing_else_stays_alive,
}


def _wide(method: Callable[..., Any]) -> Callable[..., Any]:
    """With float64, and the backend's form."""

    @functools.wraps(method)
    def wrapped(self: Jax, *args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(True), function.using(self.form):
            return method(self, *args, **kwargs)

    return wrapped


class Jax:
    """The JAX backend, in one of its forms."""

    layouts = ("contiguous",)
    missing_residual = MissingResidual

    def __init__(
        self, form: Form = "custom_jvp", rules: Mapping[str, Rule] = function.RULES
    ) -> None:
        self.form: Form = form
        #: The part of a property's examples that is drawn: a new shape is a program to compile.
        self.effort = 0.15
        self.name = f"jax-{form}"
        self.rules = rules
        #: Why stock refused what it last refused.
        self.refusal: Exception | None = None
        self._layers: dict[str, Callable[..., Any]] = {}

    def __repr__(self) -> str:
        return self.name

    def rows(self) -> dict[str, Layer]:
        """The rows that it implements."""
        return {name: rule.row for name, rule in self.rules.items()}

    def checks(self, row: Layer, check: Callable[..., None] | None = None) -> bool:
        """Whether to check a row: in every way, or by a property.

        (That of one and three dimensions is the code of two, and PyTorch agrees with it.)
        """
        if settings().max_examples > 100:
            return True
        if self.form == "custom_vjp" or check in OF_THE_ENGINE:
            return row.name in KINDS
        return not row.name.endswith(("1d", "3d"))

    def every_mask(self, check: Callable[..., None]) -> bool:
        """Whether to check a property of derivatives on every mask, or on the largest alone.

        (Gradients are compared with stock's on every mask anyway.)
        """
        return self.form == "custom_jvp" and settings().max_examples > 100

    def has_backward(self, row: Layer) -> bool:
        """Whether it has a backward of its own for a row, or stock's."""
        return row.name in self.rules and self.rules[row.name].bwd is not None

    def changed(self, name: str, **fields: Any) -> Jax:
        """The same, with another rule for the row of this name."""
        return Jax(self.form, {**self.rules, name: self.rules[name]._replace(**fields)})

    def following(self, row: Layer) -> Jax:
        """The same, with this row in place of the one of its name, and no stock op for it."""
        return self.changed(row.name, row=row, stock_op=lambda *_, **__: False)

    def draws(self, row: Layer) -> bool:
        """Whether a row draws random numbers."""
        return draws(self.rules[row.name])

    def layer(self, row: Layer) -> Callable[..., Any]:
        if row.name not in self._layers:
            self._layers[row.name] = function.differentiable(self.rules[row.name])
        return self._layers[row.name]

    def stock(self, row: Layer) -> Callable[..., Any]:
        return self.rules[row.name].primal

    def crashes(self, case: Case) -> bool:
        return False

    def accepts(self, row: Layer, case: Case, *, empty: bool = True) -> bool:
        """Whether the stock op accepts a case (backward, too), and has finite outputs."""
        try:
            outputs = self.run(row, replace(case, special=False), stock=True).outputs
        except Exception as error:
            self.refusal = error
            return False
        finite = all(np.isfinite(y.values).all() for y in outputs)
        return finite and (empty or outputs[0].values.size > 0)

    @_wide
    def outcome(self, row: Layer, case: Case, *, stock: bool = False) -> Any:
        """Of forward, as differentiation runs it: the type of the error, or types of outputs."""
        try:
            call = self._call(row, case, stock=stock)
            outputs = jax.eval_shape(lambda *wanted: jax.vjp(call, *wanted)[0], *call.wanted)
        except Exception as error:
            return type(error)
        return [(str(y.dtype), y.shape, y.weak_type) for y in jax.tree.leaves(outputs)]

    def differentiates(self, row: Layer, case: Case) -> bool:
        """Whether the stock op accepts the types of a case, backward too."""
        self.refusal = self.error(row, case, stock=True)
        return self.refusal is None

    @remembered
    @_wide
    def run(self, row: Layer, case: Case, *, stock: bool = False) -> Result:
        """Forward and backward."""
        step, call = self._step(row, case, stock=stock)
        outputs, grads = jax.jit(step)(*call.wanted)
        ys = outputs if isinstance(outputs, tuple) else (outputs,)
        return Result(
            [self._array(row, "y" if k == 0 else "", y) for k, y in enumerate(ys)],
            {},
            {n: self._array(row, n, g) for n, g in zip(call.names, grads, strict=True)},
            0.0,
        )

    @_wide
    def error(self, row: Layer, case: Case, *, stock: bool = False) -> Exception | None:
        """What forward or backward raises, if anything."""
        step, call = self._step(row, case, stock=stock)
        try:
            jax.eval_shape(step, *call.wanted)
        except Exception as error:
            return error
        return None

    @_wide
    def predicted(self, row: Layer, case: Case) -> Kept:
        """What the table says that a call keeps (of arrays with their axes as they are here)."""
        call = self._call(row, case, stock=False)
        rule = self.rules[row.name]
        fwd = functools.partial(rule.fwd, case.wrt)
        y, extras = jax.eval_shape(lambda args, key: fwd(*args, **call.options(key)), *call.inputs)
        named = {**call.args, "y": y[0] if isinstance(y, tuple) else y}
        free = {n: e for n, e in extras.items() if not row.extras[n].bits}
        here = replace(
            row,
            args={name: rule.layout[name] for name in row.args},
            y=rule.layout["y"],
            extras={n: replace(e, axes=rule.layout[n]) for n, e in row.extras.items()},
        )
        saved = here.saved_bits(
            case.wrt,
            {n: None if array is None else array.shape for n, array in {**named, **free}.items()},
            {n: 8 * a.dtype.itemsize for n, a in {**named, **extras}.items() if a is not None},
            case.options,
            "last",
        )
        named = {name: size for name, size in saved.items() if name not in row.extras}
        return Kept.of(named, [size for name, size in saved.items() if name in row.extras])

    @_wide
    def kept(self, row: Layer, case: Case) -> Kept:
        """What a call keeps: what ``jax.vjp`` returns in its function."""
        call = self._call(row, case, stock=False)

        def held(args: Any, key: Any) -> Any:
            rest = {n: arg for n, arg in zip(row.args, args, strict=True) if n not in case.wrt}
            wanted = [arg for n, arg in zip(row.args, args, strict=True) if n in case.wrt]
            y, pull = jax.vjp(lambda *w: call.with_inputs(w, rest, key), *wanted)
            return y, jax.tree.leaves(pull)

        # Traced, so that an array is what it is by its name in the program.
        program, (y, _) = jax.make_jaxpr(held, return_shape=True)(*call.inputs)
        variables = program.jaxpr.outvars
        count = len(jax.tree.leaves(y))
        present = [n for n, arg in call.args.items() if arg is not None]
        names = dict(zip(program.jaxpr.invars, present, strict=False))
        # A barrier gives an array another name. (Scalars known while tracing have none.)
        of_barrier = {
            one: other
            for equation in program.jaxpr.eqns
            if equation.primitive.name == "optimization_barrier"
            for one, other in zip(equation.outvars, equation.invars, strict=True)
        }
        variables = [v if isinstance(v, Literal) else of_barrier.get(v, v) for v in variables]
        names[variables[0]] = "y"
        kept = {id(v) if isinstance(v, Literal) else v: v.aval for v in variables[count:]}
        bits = {v: 8 * function.bytes_of(aval) for v, aval in kept.items()}
        return Kept.of(
            {names[v]: size for v, size in bits.items() if v in names},
            [size for v, size in bits.items() if v not in names],
        )

    @_wide
    def alive(self, row: Layer, case: Case) -> Kept:
        """What is alive once the caller has dropped all but the function that ``vjp`` returned.

        Eagerly, unlike the rest: op by op, with nothing traced as a whole.
        """
        self._hold(row, case)  # makes what is cached for all calls
        gc.collect()
        before = {id(array) for array in jax.live_arrays()}
        pull, names = self._hold(row, case)
        gc.collect()
        assert callable(pull)
        alive = {_place(a): 8 * a.nbytes for a in jax.live_arrays() if id(a) not in before}
        return Kept.of(
            {names[place]: bits for place, bits in alive.items() if place in names},
            [bits for place, bits in alive.items() if place not in names],
        )

    def _hold(self, row: Layer, case: Case) -> tuple[Any, dict[Any, str]]:
        """What ``vjp`` returns for backward, and where the arguments and ``y`` lie, or lay."""
        call = self._call(row, case, stock=False)
        outputs, pull = jax.vjp(call, *call.wanted)
        y = outputs[0] if isinstance(outputs, tuple) else outputs
        named = {**call.args, "y": y}
        return pull, {_place(a): name for name, a in named.items() if a is not None}

    @_wide
    def run_twice(self, row: Layer, case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
        """The gradients of two backwards through one graph."""
        call = self._call(row, case, stock=False)

        @jax.jit
        def run(*wanted: jax.Array) -> Any:
            outputs, pull = jax.vjp(call, *wanted)
            g = self._g(row, outputs, case)
            return pull(g), pull(g)

        first, second = (
            {n: self._array(row, n, grad) for n, grad in zip(call.names, grads, strict=True)}
            for grads in run(*call.wanted)
        )
        return first, second

    @_wide
    def run_batched(
        self, row: Layer, case: Case, *, stock: bool = False
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The gradients for three incoming ones at once, and one by one."""
        call = self._call(row, case, stock=stock)

        @jax.jit
        def run(*wanted: jax.Array) -> Any:
            outputs, pull = jax.vjp(call, *wanted)
            g = self._g(row, outputs, case)
            gs = [jax.tree.map(lambda leaf, scale=scale: scale * leaf, g) for scale in (1, -2, 3)]
            batched = jax.vmap(pull)(jax.tree.map(lambda *leaves: jnp.stack(leaves), *gs))
            return batched, [jnp.stack(grads) for grads in zip(*map(pull, gs), strict=True)]

        batched, loop = run(*call.wanted)
        return (
            {n: self._array(row, "", grad) for n, grad in zip(call.names, batched, strict=True)},
            {n: self._array(row, "", grad) for n, grad in zip(call.names, loop, strict=True)},
        )

    @_wide
    def check_derivatives(self, row: Layer, case: Case, *, order: int) -> None:
        """Compare the derivatives of some order with finite differences of those before."""
        call = self._call(row, case, stock=False)
        forward = order == 1 and self.form == "custom_jvp"

        def gradient(*wanted: jax.Array) -> Any:
            y, pull = jax.vjp(call, *wanted)
            return pull(jax.tree.map(jnp.cos, y))

        function = {1: call, 2: gradient}[order]

        @jax.jit  # (All that is compared, as most of the time goes into compiling.)
        def run(args: Any, tangents: Any, cotangents: Any) -> Any:
            y, pull = jax.vjp(function, *args)
            pushed = jax.jvp(function, args, tangents) if forward else None
            return function(*args), (y, pull(cotangents)), pushed

        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, *call.wanted))

        def value(*args: Any) -> Any:
            return run(args, args, zeros)[0]

        def vjp(*args: Any) -> Any:
            y, _ = run(args, args, zeros)[1]
            return y, lambda cotangents: run(args, args, cotangents)[1][1]

        def jvp(args: Any, tangents: Any) -> Any:
            return run(args, tangents, zeros)[2]

        wanted = tuple(call.wanted)
        check_vjp(value, vjp, wanted, atol=1e-4, rtol=1e-4)
        if forward:
            check_jvp(value, jvp, wanted, atol=1e-4, rtol=1e-4)

    def _call(self, row: Layer, case: Case, *, stock: bool) -> Call:
        function = self.stock(row) if stock else self.layer(row)
        return Call(function, self.rules[row.name], case)

    def _step(self, row: Layer, case: Case, *, stock: bool) -> tuple[Callable[..., Any], Call]:
        """Forward and backward as a function of the wanted arguments; and the call."""
        call = self._call(row, case, stock=stock)

        def step(*wanted: jax.Array) -> Any:
            outputs, pull = jax.vjp(call, *wanted)
            return outputs, pull(self._g(row, outputs, case))

        return step, call

    def _g(self, row: Layer, outputs: Any, case: Case) -> Any:
        """The incoming gradient; zero for all but the first output."""
        y = outputs[0] if isinstance(outputs, tuple) else outputs
        order = _order(row.y, self.rules[row.name].layout["y"], y.ndim)
        shape = tuple(y.shape[axis] for axis in np.argsort(order))
        g = jnp.asarray(case.values("g", shape).transpose(order), y.dtype)
        g = lax.optimization_barrier(g)  # no constant, with which XLA rounds otherwise
        if not isinstance(outputs, tuple):
            return g
        return g, *(jnp.zeros_like(output) for output in outputs[1:])

    def _array(self, row: Layer, name: str, array: jax.Array) -> Array:
        """In the order of the row's axes."""
        values = np.asarray(array).astype(np.float64)
        if name:
            axes = row.y if name == "y" else row.args[name]
            order = _order(axes, self.rules[row.name].layout[name], array.ndim)
            values = values.transpose(np.argsort(order))
        return Array(str(array.dtype), values.shape, (), values)


def _order(axes: str, to: str, ndim: int) -> tuple[int, ...]:
    """As :func:`permutation`; those of a flawed case, as they are."""
    try:
        return permutation(axes, to, ndim)
    except ValueError:
        return tuple(range(ndim))


class Call:
    """A function of the wanted arguments; the others are those of the case."""

    def __init__(self, function: Callable[..., Any], rule: Rule, case: Case) -> None:
        self.function, self.case = function, case
        self.names = sorted(case.wrt, key=list(case.shapes).index)
        self.args = {
            name: None if shape is None else _argument(rule, case, name, shape)
            for name, shape in case.shapes.items()
        }
        self.key = _key(case.seed) if draws(rule) else None
        self.wanted = [self.args[name] for name in self.names]
        self.inputs = (list(self.args.values()), self.key)

    def options(self, key: Any) -> dict[str, Any]:
        options = {n: value for n, value in self.case.options.items() if n not in UNKNOWN}
        return options if key is None else {**options, "key": key}

    def with_inputs(self, wanted: Any, rest: Mapping[str, Any], key: Any) -> Any:
        args = {**rest, **dict(zip(self.names, wanted, strict=True))}
        return self.function(*(args[name] for name in self.args), **self.options(key))

    def __call__(self, *wanted: Any) -> Any:
        return self.with_inputs(wanted, self.args, self.key)


def _place(array: jax.Array) -> Any:
    """Where an array lies. (Keys, and what has no elements, are told apart by identity.)"""
    plain = array.size and not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return array.unsafe_buffer_pointer() if plain else ("object", id(array))


def draws(rule: Rule) -> bool:
    """Whether a rule draws random numbers."""
    return "key" in inspect.signature(rule.primal).parameters


def _key(seed: int) -> Any:
    """A typed key or a raw one."""
    return jax.random.key(seed) if seed % 2 else jax.random.PRNGKey(seed)


def _argument(rule: Rule, case: Case, name: str, shape: tuple[int, ...]) -> jax.Array:
    values = case.values(name, shape)
    values = values.transpose(_order(rule.row.args[name], rule.layout[name], values.ndim))
    return jnp.asarray(values, case.dtypes[name])
