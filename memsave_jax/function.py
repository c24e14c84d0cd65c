"""The engine: turns a row of the table and three pure functions into a differentiable function.

The only file that talks to JAX's custom derivatives. For every row alike it reads the mask, asks
the table what to keep, keeps exactly that, and hands ``bwd`` only what was kept.

A rule is ``primal`` (the stock op), ``fwd`` and ``bwd``::

    primal(*args, **options) -> y
    fwd(wrt, *args, **options) -> y, {extra: array}
    bwd(g, wrt, saved, shapes, **options) -> {argument: gradient}

``y`` may be a tuple, of which the table describes the first; ``g`` is one then, too. ``fwd`` and
``bwd`` must themselves be differentiable, ``fwd`` with the derivative of the stock op: then higher
derivatives are exact. ``bwd`` must be linear in ``g``. The option ``key``, a PRNG key, reaches
``primal`` and ``fwd`` but not ``bwd``: what backward needs of it is an extra.

The triple can drive two forms. Which one is used is a matter of :func:`using`:

``custom_jvp``, the default
    The tangent of ``y`` is the linear transpose of ``bwd``, and JAX transposes it back for reverse
    mode; ``jax.checkpoint`` around it says that nothing but the residuals may be kept (and
    :func:`_opaque`, that a checkpoint of the user's does not look into it). It serves
    forward mode (``jvp``, ``linearize``, ``jacfwd``) as well, and as JAX itself asks the rule anew
    for every mask, no structure has to be kept fixed. Compiled, it is the same program as the
    other form; only eager calls pay for the tracing.
``custom_vjp``
    JAX stores the structure of the residuals once per traced call, and reads it at pull-back: a
    function that is jitted once and differentiated under two masks would be read with the wrong
    one. So the structure is fixed per row: what is not kept is an array without elements, the mask
    is the shape of another one, and no residual is an input as it is (JAX would forward it, which
    is part of the structure). Forward mode is an error of JAX.

The stock op itself runs where it already keeps what the row says, for complex numbers, where the
derivative by an argument is wanted for which the table has no gradient, where an ``Explicit``
mesh cuts bytes of bits apart, and where another option than the key is an array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, core, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from memsave.spec import Layer, Residuals

from .kernels import is_packable

Mask = frozenset[str]
Saved = Mapping[str, Any]
Shapes = Mapping[str, Any]
Grads = dict[str, Array]
#: Of any arguments: JAX types them.
Function = Callable[..., Any]
Form = Literal["custom_jvp", "custom_vjp", "stock"]


class Rule(NamedTuple):
    """How this backend implements a row (see :func:`define`)."""

    row: Layer
    primal: Callable[..., Any]
    bwd: Callable[..., Grads] | None
    fwd: Callable[..., tuple[Any, dict[str, Array]]]
    stock_op: Callable[..., bool]
    layout: Mapping[str, str]
    linear: bool = False


RULES: dict[str, Rule] = {}
#: A context of JAX, so that a function that was jitted under another value is traced again.
_form = jax.make_user_context("custom_jvp")


def using(form: Form) -> Any:
    """Context manager: every layer called in it takes this form (``"stock"``: the stock op)."""
    if form not in (*_FORMS, "stock"):
        raise ValueError(f"the forms are {[*_FORMS, 'stock']}, not {form!r}")
    return _form(form)


def define(
    row: Layer,
    primal: Callable[..., Any],
    bwd: Callable[..., Grads] | None = None,
    fwd: Callable[..., tuple[Any, dict[str, Array]]] | None = None,
    *,
    stock_op: Callable[..., bool] | None = None,
    layout: Mapping[str, str] | None = None,
    linear: bool = False,
) -> Callable[..., Any]:
    """Make the differentiable function of a row and register its rule.

    Args:
        row: The row of the table.
        primal: The stock op, called as ``primal(*args, **options)``.
        bwd: The gradients. ``None`` if stock already keeps what the row says for every mask.
        fwd: Forward with the row's extras. Default: ``primal``, for rows without extras.
        stock_op: ``stock_op(*args, **options)``: whether the stock op runs in such a call: because
            it already keeps what the row says, for every mask, or because it is another op.
        layout: The order of the row's named axes here, by argument, ``y`` and extra, where it is
            not the row's own.
        linear: Whether ``primal`` is linear in its one argument: then JAX transposes it itself
            (once, where that of ``bwd`` transposed would be a longer program).

    Returns:
        A function of the row's arguments (positional, ``None`` where absent) and its options
        (keywords).
    """
    if row.extras and fwd is None:
        raise ValueError(f"row {row.name!r} has extras, so its rule needs a fwd")
    if row.name in RULES:
        raise ValueError(f"row {row.name!r} has a rule already")
    extras = {name: extra.axes for name, extra in row.extras.items()}
    rule = Rule(
        row,
        primal,
        bwd,
        fwd or (lambda wrt, *args, **options: (primal(*args, **options), {})),
        stock_op or (lambda *args, **options: False),
        {**row.args, "y": row.y, **extras, **(layout or {})},
        linear,
    )
    RULES[row.name] = rule
    return differentiable(rule)


def differentiable(rule: Rule) -> Callable[..., Any]:
    """The differentiable function of a rule (see :func:`define`)."""

    has_bits = any(extra.bits == 1 for extra in rule.row.extras.values())

    @functools.lru_cache(maxsize=1024)
    def specialized(form: str, static: tuple[tuple[str, Any, str], ...]) -> Function:
        """To options: of each its name, its value, and what else tells it from equal ones."""
        return _FORMS[form](rule, {name: option for name, option, _ in static})

    def layer(*args: Any, **options: Any) -> Any:
        args = tuple(map(_array, args))
        form = _form.value
        if (
            form == "stock"
            or rule.bwd is None
            or rule.stock_op(*args, **options)
            or (has_bits and not is_packable(args[0]))
            or any(arg is not None and jnp.iscomplexobj(arg) for arg in args)
            or _are_values_checked()
        ):
            return rule.primal(*args, **options)
        arrays = {name: value for name, value in options.items() if _is_array(value)}
        if not arrays.keys() <= {"key"}:
            return rule.primal(*args, **options)
        static = tuple(
            (name, _hashable(value), _distinction(value))
            for name, value in options.items()
            if name not in arrays
        )
        return specialized(form, static)(arrays, *args)

    layer.__name__ = layer.__qualname__ = rule.row.name
    layer.__doc__ = f"The row ``{rule.row.name}`` as a differentiable function."
    return layer


def _are_values_checked() -> bool:
    """Whether operations note errors (``jax.config.jax_error_checking_behavior_nan``), which they
    cannot do within a rule.
    """
    names = ("nan", "divide", "oob")
    flags = (getattr(jax.config, f"jax_error_checking_behavior_{n}", "ignore") for n in names)
    return any(flag != "ignore" for flag in flags)


def _array(value: Any) -> Any:
    """What else JAX takes for an array (a variable of NNX), as one."""
    if isinstance(value, Array) or not hasattr(value, "__jax_array__"):
        return value
    return value.__jax_array__()


def _is_array(option: Any) -> bool:
    return isinstance(option, jax.Array | np.ndarray)


def _hashable(option: Any) -> Any:
    return tuple(map(_hashable, option)) if isinstance(option, list | tuple) else option


def _distinction(option: Any) -> str:
    """What equal numbers may differ in: 1 and 1.0 (or NumPy's, which promote), 0.0 and -0.0."""
    return repr(option) if isinstance(option, int | float | np.generic) else ""


def is_number(option: Any) -> bool:
    """No array, nor a scalar of NumPy's, which has a dtype to promote to."""
    return type(option) in (int, float)


def is_typed(value: Any) -> bool:
    """An array, or a variable: stock layers raise for most of what else becomes one."""
    return hasattr(value, "dtype")


def _named(rule: Rule, options: dict[str, Any]) -> Function:
    """The stock op, under the name of the row, which programs show."""

    def function(arrays: dict[str, Any], *args: Any) -> Any:
        return rule.primal(*args, **arrays, **options)

    function.__name__ = function.__qualname__ = rule.row.name
    return function


def _by_custom_jvp(rule: Rule, options: dict[str, Any]) -> Callable[..., Any]:
    """The form whose tangent is the linear transpose of ``bwd``."""

    def pushing(wrt: Mask, shapes: tuple[tuple[str, Any], ...], types: Any) -> Callable[..., Any]:
        # (With prevent_cse, XLA could not fuse a layer's backward with that of the next one.)
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def push(saved: dict[str, Any], wanted: dict[str, Any]) -> Any:
            def pull(g: Any) -> Grads:
                return _backward(rule, g, wrt, saved, dict(shapes), options)

            grads = jax.eval_shape(pull, types)
            tangents = {name: _varying(wanted[name], grads[name]) for name in grads}
            return jax.linear_transpose(pull, types)(tangents)[0]

        return _opaque(push)

    # JAX remembers what it has traced of a function: so there is one for all layers of the same
    # types. (But for those on a mesh, as some of its operations remember the devices, too.)
    remembered = functools.lru_cache(maxsize=64)(pushing)

    function = jax.custom_jvp(_named(rule, options))

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        (arrays, *args), (_, *dxs) = primals, tangents
        wanted = {
            name: dx
            for name, dx in zip(rule.row.args, dxs, strict=True)
            if dx is not None and type(dx) is not SymbolicZero
        }
        wrt = frozenset(wanted)
        if not wrt <= rule.row.reads.keys():
            return _jvp_of_stock(rule, args, wanted, {**arrays, **options})
        if not wrt:
            y = rule.primal(*args, **arrays, **options)
            return y, jax.tree.map(lambda leaf: _no_tangent(jax.typeof(leaf)), y)
        if rule.linear:
            # (In a checkpoint, as it may multiply by what it computes.)
            along = jax.checkpoint(functools.partial(rule.primal, **options), prevent_cse=False)
            return rule.primal(*args, **options), along(*wanted.values())
        # (y by the function itself: its further derivatives are those of the rule, too.)
        fwd = rule.fwd if rule.row.extras else lambda *_, **__: (function(arrays, *args), {})
        y, residuals, shapes = _forward(rule, fwd, wrt, args, arrays, options)
        saved = {name: residuals[name] for name in rule.row.saves(wrt)}
        make = remembered if jax.sharding.get_abstract_mesh().empty else pushing
        push = make(wrt, tuple(shapes.items()), jax.tree.map(jax.typeof, y))
        return y, push(saved, wanted)

    function.defjvp(jvp, symbolic_zeros=True)
    return function


def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, as one operation to a checkpoint around it.

    That would have a checkpoint within it return what it keeps: the input of a layer, which the
    policy of the outer one may have saved already, a second time.
    """
    outer = jax.custom_jvp(function)

    def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        values, tree = jax.tree.flatten(primals)
        dvalues = jax.tree.leaves(tangents, is_leaf=lambda leaf: type(leaf) is SymbolicZero)
        moving = [k for k, dvalue in enumerate(dvalues) if type(dvalue) is not SymbolicZero]

        def of_moving(*moved: Any) -> Any:
            now = dict(zip(moving, moved, strict=True))
            return function(*tree.unflatten([now.get(k, value) for k, value in enumerate(values)]))

        return jax.jvp(of_moving, [values[k] for k in moving], [dvalues[k] for k in moving])

    outer.defjvp(jvp, symbolic_zeros=True)
    return outer


def _jvp_of_stock(
    rule: Rule, args: list[Any], wanted: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Where the derivative by an argument is wanted for which the table has no gradient.

    (Running statistics, if somebody differentiates by all of a model's state.)
    """
    named = dict(zip(rule.row.args, args, strict=True))

    def primal(wanted: dict[str, Any]) -> Any:
        return rule.primal(*{**named, **wanted}.values(), **options)

    return jax.jvp(primal, ({name: named[name] for name in wanted},), (wanted,))


def _by_custom_vjp(rule: Rule, options: dict[str, Any]) -> Callable[..., Any]:
    """The form with one fixed structure of residuals."""
    row = rule.row
    names = tuple(row.args)
    every = row.saves(frozenset(row.reads))

    function = jax.custom_vjp(_named(rule, options))

    def forward(arrays: dict[str, Any], *args: Any) -> Any:
        arrays = {name: array.value for name, array in arrays.items()}
        perturbed = [arg is not None and arg.perturbed for arg in args]
        args = tuple(None if arg is None else arg.value for arg in args)
        wrt = frozenset(n for n, wants in zip(names, perturbed, strict=True) if wants)
        if not wrt <= row.reads.keys():
            raise NotImplementedError(
                f"row {row.name!r} has gradients for {[*row.reads]}, not for {sorted(wrt)}; the "
                "form custom_jvp takes the stock op for these"
            )
        y, residuals, shapes = _forward(rule, rule.fwd, wrt, args, arrays, options)
        saves = row.saves(wrt) if wrt else ()
        kept = tuple(_unforwarded(residuals[n]) if n in saves else jnp.zeros(0) for n in every)
        code = sum(1 << k for k, name in enumerate(names) if name in wrt)
        return y, (jnp.zeros((0, code)), kept, _Static(shapes))

    def backward(residuals: Any, g: Any) -> tuple[Any, ...]:
        mask, kept, shapes = residuals
        wrt = frozenset(name for k, name in enumerate(names) if mask.shape[1] >> k & 1)
        if not wrt or type(g) is SymbolicZero:
            return (None, *(None for _ in names))
        g = jax.tree.map(_instantiated, g, is_leaf=lambda leaf: type(leaf) is SymbolicZero)
        saves = row.saves(wrt)
        saved = {name: array for name, array in zip(every, kept, strict=True) if name in saves}
        grads = _backward(rule, g, wrt, saved, shapes.value, options)
        return None, *(
            _unvarying(grads[name], shapes.value[name]) if name in wrt else None for name in names
        )

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


_FORMS = {"custom_jvp": _by_custom_jvp, "custom_vjp": _by_custom_vjp}


def _forward(
    rule: Rule,
    fwd: Callable[..., tuple[Any, dict[str, Array]]],
    wrt: Mask,
    args: Any,
    arrays: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """``y``, all residuals by name, and the types of arguments and ``y``."""
    row = rule.row
    y, extras = fwd(wrt, *args, **arrays, **options)
    named = {**dict(zip(row.args, args, strict=True)), "y": y[0] if isinstance(y, tuple) else y}
    shapes = {name: None if array is None else jax.typeof(array) for name, array in named.items()}
    extras = {n: checkpoint_name(extra, f"{row.name}.{n}") for n, extra in extras.items()}
    return y, {**named, **extras}, shapes


def _backward(
    rule: Rule, g: Any, wrt: Mask, saved: Saved, shapes: Shapes, options: dict[str, Any]
) -> Grads:
    """The gradients in the dtypes of their arguments, and as those lie on an ``Explicit`` mesh."""
    assert rule.bwd is not None
    grads = rule.bwd(g, wrt, Residuals.of(rule.row, wrt)(saved), shapes, **options)
    for name in sorted(wrt):
        if grads[name].shape != shapes[name].shape:
            raise TypeError(
                f"the rule of row {rule.row.name!r} gives {name!r}, which has the shape "
                f"{shapes[name].shape}, a gradient of shape {grads[name].shape}"
            )
    return {
        name: placed(cast(grads[name], shapes[name].dtype), shapes[name]) for name in sorted(wrt)
    }


def cast(array: Array, dtype: Any) -> Array:
    """To a dtype. (What is of that and weakly typed stays so.)"""
    return array if array.dtype == dtype else array.astype(dtype)


def placed(grad: Array, like: Any) -> Array:
    """As what is of this type, on an ``Explicit`` mesh."""
    found, spec = jax.typeof(grad).sharding, like.sharding.spec
    if found.spec == spec:
        return grad
    return jax.sharding.reshard(grad, jax.sharding.NamedSharding(found.mesh, spec))


def _no_tangent(aval: Any) -> Any:
    return SymbolicZero(aval.to_tangent_aval())


def _instantiated(g: Any) -> Any:
    shape, dtype = g.shape, g.dtype
    return jnp.zeros(shape, dtype) if type(g) is SymbolicZero else g


def _unforwarded(array: Any) -> Any:
    """The same array under another name, where JAX could see that it is an input."""
    if isinstance(array, core.Tracer):
        return jax.tree.map(lax.optimization_barrier, array)
    return array


# Under shard_map, an array either has the same value on all devices of a mesh axis or varies.


def _axes(type_: Any) -> frozenset[str]:
    """The mesh axes along which values of this type vary."""
    manual = getattr(type_, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def _varying(array: Any, like: Any) -> Any:
    """The array, as varying along the axes that ``like`` varies along."""
    missing = tuple(sorted(_axes(like) - _axes(jax.typeof(array))))
    return lax.pcast(array, missing, to="varying") if missing else array


def _unvarying(grad: Array, like: Any) -> Array:
    """The gradient of an argument: a sum over the axes along which only the gradient varies."""
    extra = tuple(sorted(_axes(jax.typeof(grad)) - _axes(like)))
    return lax.psum(grad, extra) if extra else _varying(grad, like)


@jax.tree_util.register_static
class _Static:
    """A value that is part of a structure, not of the data."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(tuple(self.value.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self.value == other.value


def bytes_of(array: Any) -> int:
    """Size of an array, or of its type, in bytes. (A PRNG key counts the bits that it holds.)"""
    return math.prod(array.shape) * array.dtype.itemsize
