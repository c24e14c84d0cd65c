"""The engine: turns a row of the table and three pure functions into a differentiable function.

The only file of Python that makes nodes of autograd's graph. For every row alike it reads the mask,
asks the table what to keep, saves exactly that, and hands ``bwd`` only what was saved.

A rule is ``primal`` (the stock op), ``fwd`` and ``bwd``::

    primal(*args, **options) -> y
    fwd(wrt, *args, **options) -> y, {extra: tensor}
    bwd(g, wrt, saved, shapes, **options) -> {argument: gradient}

``y`` may be a tuple, of which the first is differentiable and the others carry integers. ``bwd``
must be differentiable in ``g`` and in what it reads: then double backward is exact. Extras count as
constants there, unless the rule is ``smooth``: then they are differentiated like ``y`` is, and
``g`` is a dict of the gradients of ``y`` and, in double backward, of extras.

The stock op itself runs where there is nothing to save (no gradient wanted; a mask for which stock
keeps exactly what the row says, as ``stock_keeps`` declares and the tests check; or, of a module,
no more bytes: see :func:`for_stock`), and where Python autograd functions cannot follow:
``torch.func``, forward-mode AD, ``torch.jit``, ``torch.fx``, ``torch.export`` and ONNX, tensor
subclasses, complex, sparse and nested tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Number
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, compiler, is_grad_enabled, nn
from torch._C import (
    _are_functorch_transforms_active,
    _is_any_autocast_enabled,
    _is_tracing,
    _len_torch_function_stack,
)
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily

from ._context import (
    AUTOCAST,
    OF_TORCH,
    Autocast,
    amp_enabled,
    autocast_args,
    autocast_dtype,
    has_other_meaning,
    has_tangent,
    is_exported,
    is_special,
    is_unmapped,
    is_writable,
)
from .kernels import are_arrays, nodes
from .kernels.reference import Like
from .spec import Layer, Residuals

_new_tuple = tuple.__new__

Mask = frozenset[str]
Saved = Mapping[str, Any]
Shapes = Mapping[str, Any]  # of ``Like``, or ``None`` where an argument is absent
Grads = dict[str, Tensor]


class Rule(NamedTuple):
    """How this backend implements a row (see :func:`define`)."""

    row: Layer
    primal: Callable[..., Any]
    bwd: Callable[..., Grads] | None
    fwd: Callable[..., tuple[Any, dict[str, Tensor]]]
    stock_keeps: Callable[[Mask], Sequence[str]] | None
    unless: Callable[..., bool] | None
    covers: Callable[..., bool] | None
    autocast: Autocast | None
    compiled: bool
    smooth: bool
    shapes: tuple[str, ...]
    node: Callable[..., Tensor | None] | None = None
    node_casts: bool = False
    draws: bool = False


class Call(NamedTuple):
    """One call of a layer, as :func:`observe` reports it, with its arguments, ``y`` and extras."""

    row: Layer
    wrt: Mask
    arrays: Mapping[str, Tensor | None]
    options: Mapping[str, Any]


RULES: dict[str, Rule] = {}
#: By thread. (Mostly none, which is quick to see.)
_observers: dict[int, Callable[[Call], None]] = {}


def define(
    row: Layer,
    primal: Callable[..., Any],
    bwd: Callable[..., Grads] | None = None,
    fwd: Callable[..., tuple[Any, dict[str, Tensor]]] | None = None,
    *,
    stock_keeps: Callable[[Mask], Sequence[str]] | None = None,
    unless: Callable[..., bool] | None = None,
    covers: Callable[..., bool] | None = None,
    autocast: Autocast | None = None,
    compiled: bool = True,
    smooth: bool = False,
    shapes: tuple[str, ...] | None = None,
    node: Callable[..., Tensor | None] | None = None,
    node_casts: bool = False,
    draws: bool = False,
) -> Callable[..., Any]:
    """Make the differentiable function of a row and register its rule.

    Args:
        row: The row of the table.
        primal: The stock op, called as ``primal(*args, **options)``.
        bwd: The gradients. ``None`` if stock already keeps what the row says for every mask.
        fwd: Forward with the row's extras. Default: ``primal``, for rows without extras.
        stock_keeps: ``stock_keeps(wrt)``: the residuals that the stock op keeps. Where they are
            those of the row, the stock op runs.
        unless: ``unless(**options)``: whether with these options it keeps something else.
        covers: ``covers(*args)``: whether the row is about these. (Stock runs where it is not.)
        autocast: ``autocast(device_type)``: what torch's autocast casts this op's arguments to
            (:func:`lowered`, :func:`widened`), or ``None`` where it leaves them alone.
        compiled: Whether ``torch.compile`` traces the rule. ``False`` where it makes the saving
            by itself from the stock op.
        smooth: Whether ``bwd`` takes the gradients of the extras, too.
        shapes: Of which arguments, and of ``y``, ``bwd`` reads the shapes. Default: of all.
        node: ``node(row.name, wrt, *args, **options)``: the layer by :mod:`memsave.kernels.nodes`,
            if that is compiled, or ``None`` where it does not apply. It keeps what the row says.
        node_casts: Whether the node casts arguments as autocast says. (Elsewhere, while it is on,
            it does not apply to a row that autocast casts.)
        draws: Whether ``fwd`` draws random numbers, of which vmap has its own meaning.

    Returns:
        A function of the row's arguments (positional, ``None`` where absent) and its options
        (keywords: numbers, strings, tuples or ``None``; with others the stock op runs).
    """
    if row.extras and fwd is None:
        raise ValueError(f"row {row.name!r} has extras, so its rule needs a fwd")
    if row.name in RULES:
        raise ValueError(f"row {row.name!r} has a rule already")
    if bwd is None:
        stock_keeps = stock_keeps or row.saves
    rule = Rule(
        row,
        primal,
        bwd,
        fwd or (lambda wrt, *args, **options: (primal(*args, **options), {})),
        stock_keeps,
        unless,
        covers,
        autocast,
        compiled and bwd is not None,
        smooth,
        (*row.args, "y") if shapes is None else shapes,
        node if nodes is not None else None,
        node_casts,
        draws,
    )
    RULES[row.name] = rule
    return differentiable(rule)


#: The bit of each device in what ``nodes.wanted`` takes for ``casts``.
_CASTS = (("cpu", 1), ("cuda", 2))


def differentiable(rule: Rule) -> Callable[..., Any]:
    """The differentiable function of a rule (see :func:`define`)."""
    # What follows runs at every call of a layer, mostly with cold caches, where it is the number
    # of Python functions that costs: so it calls few, and looks up at definition what it can.
    row, primal, unless, autocast = rule.row, rule.primal, rule.unless, rule.autocast
    overwrites, smooth, function = row.inplace, rule.smooth, _function(rule)
    casts = 0
    if autocast is not None and not rule.node_casts:
        casts = sum(bit for device, bit in _CASTS if autocast(device) is not None)
    # Not the row's own mappings, which torch.compile cannot trace in every version.
    names = tuple(row.args)
    wantable = tuple(place for place, name in enumerate(names) if name in row.reads)
    bit_of = tuple((place, 1 << k) for k, place in enumerate(wantable))
    # By the bits of what is wanted.
    plans = tuple(
        Plan.of(rule, frozenset(names[place] for place, bit in bit_of if bits & bit))
        for bits in range(1 << len(wantable))
    )
    at_once = (primal, *(_at_once(rule, plan) for plan in plans[1:]))

    # As ``function.apply``, but for what that does about the tensors of ``torch.func``: not plain.
    apply = super(Function, function).apply  # type: ignore[misc]

    def layer(*args: Any, **options: Any) -> Any:
        if not is_dynamo_compiling() and not _observers and nodes is not None:
            bits = nodes.wanted(wantable, args, casts)
            if bits is not None and (direct := at_once[bits]) is not None:
                y = direct(*args, **options)
                if y is not None:
                    return y
        # (As is_compiling(), which runs two Python functions.)
        compiling = is_dynamo_compiling() or compiler._is_compiling_flag
        if compiling and not rule.compiled:
            return primal(*args, **options)
        if not compiling and _len_torch_function_stack() and _asks_for_layers():
            with _pop_mode_temporarily():
                return layer(*args, **options)
        transformed = not compiling and _are_functorch_transforms_active()
        if transformed and not rule.draws and is_unmapped(*args, *options.values()):
            with temporarily_clear_interpreter_stack():
                return layer(*args, **options)
        wanted = 0
        if is_grad_enabled():
            for place, bit in bit_of:
                # (No variable, after which torch.jit.trace would name the argument.)
                if isinstance(args[place], Tensor):
                    # It may not even say what it wants.
                    is_known = compiling or type(args[place]) in OF_TORCH
                    if not is_known and has_other_meaning(args[place]):
                        return primal(*args, **options)
                    if args[place].requires_grad:
                        wanted |= bit
        stock_only, run = (_untraceable, function.apply) if compiling else (_unservable, apply)
        if not wanted or stock_only(rule, args, options):
            return primal(*args, **options)
        plan = plans[wanted]
        if compiling:
            if overwrites and options.get("inplace"):
                if "y" in plan.saves:
                    return primal(*args, **options)  # which keeps what it writes
                return args[0].copy_(layer(*args, **{**options, "inplace": False}))
            options = {name: _settled(option) for name, option in options.items()}
        elif not _PLAIN.issuperset(map(type, options.values())):
            given, options = options, {name: _plain(option) for name, option in options.items()}
            if not _PLAIN.issuperset(map(type, options.values())):
                return primal(*args, **given)  # which says what it is not
        if plan.is_stock and not (unless is not None and unless(**options)):
            y = primal(*args, **options)
            if _observers:
                arrays = {**dict(zip(names, args, strict=True)), "y": _first(y)}
                _tell(Call(row, plan.wrt, arrays, options))
        elif (
            autocast is not None
            and (compiling or _is_any_autocast_enabled())
            and (dtype := autocast_dtype(autocast, args)) is not None
        ):
            device = args[0].device.type
            cast = autocast_args(args, dtype)
            with torch.autocast(device, enabled=False):
                y = run(plan, options, *cast)
        else:
            y = run(plan, options, *args)
        return y[0] if smooth else y

    layer.__name__ = layer.__qualname__ = row.name
    layer.__doc__ = f"The row ``{row.name}`` as a differentiable function."
    return layer


def _at_once(rule: Rule, plan: Plan) -> Callable[..., Any] | None:
    """What serves a plan of plain tensors, where nothing is on that gives operations another
    meaning; or ``None``, as it may return for some arguments.
    """
    node = None if rule.node is None else partial(rule.node, rule.row.name, plan.wrt)
    primal, unless = rule.primal, rule.unless
    if not plan.is_stock:
        return node
    if unless is None:
        return primal

    def run(*args: Any, **options: Any) -> Any:
        if not unless(**options):
            return primal(*args, **options)
        return None if node is None else node(*args, **options)

    return run


class Plan(NamedTuple):
    """What is known of a call as soon as its mask is.

    Attributes:
        saves: Names of what is kept.
        places: Of each, its place among the arguments and ``y``, or ``None`` for an extra.
        grads: Of each argument its name, or ``None`` if its gradient is not wanted.
        residuals: What is kept, by name, for ``bwd``.
        is_stock: Whether the stock op keeps the same (unless the options say otherwise).
    """

    wrt: Mask
    saves: tuple[str, ...]
    places: tuple[int | None, ...]
    grads: tuple[str | None, ...]
    residuals: type[Residuals]
    is_stock: bool

    @classmethod
    def of(cls, rule: Rule, wrt: Mask) -> Plan:
        """The plan of a mask."""
        row, saves = rule.row, rule.row.saves(wrt)
        is_stock = rule.stock_keeps is not None and tuple(rule.stock_keeps(wrt)) == saves
        grads = tuple(name if name in wrt else None for name in row.args)
        place_of = {name: place for place, name in enumerate((*row.args, "y"))}
        places = tuple(map(place_of.get, saves))
        return cls(wrt, saves, places, grads, Residuals.of(row, wrt), is_stock)


def _function(rule: Rule) -> type[Function]:
    """The autograd function of a rule, named after its row."""
    row, fwd, bwd, smooth = rule.row, rule.fwd, rule.bwd, rule.smooth
    everything = (*row.args, "y")
    overwrites = row.inplace
    told = tuple((name, everything.index(name)) for name in rule.shapes)

    def forward(ctx: Any, plan: Plan, options: dict[str, Any], *args: Any) -> Any:
        inplace = overwrites and options.get("inplace")
        result, extras = fwd(plan.wrt, *args, **options)
        y = result[0] if isinstance(result, tuple) else result
        compiling = is_dynamo_compiling()
        if not inplace and (compiling or y._is_view()):
            # Of a batch of one, say. The user may overwrite y, but not a view made in here. (To the
            # compiler, which cannot ask, this makes no difference otherwise.)
            y = torch.ops.aten._unsafe_view(y, y.shape) if compiling else y.data
            result = (y, *result[1:]) if isinstance(result, tuple) else y
        arrays, kept, shapes = (*args, y), [], {}
        for name, place in zip(plan.saves, plan.places):  # noqa: B905 (as below)
            kept.append(extras[name] if place is None else arrays[place])
        for name, place in told:
            array = arrays[place]
            if array is None:
                shapes[name] = None
            elif compiling:
                shapes[name] = Like.of(array)
            else:  # which runs no Python
                like = (array.shape, array.stride(), array.dtype)
                shapes[name] = _new_tuple(Like, like)  # type: ignore[type-var]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)
        ctx.call = plan, options, shapes
        if inplace:
            ctx.mark_dirty(args[0])
        if _observers:
            named = dict(zip(everything, arrays, strict=True))
            _tell(Call(row, plan.wrt, named | extras, options))
        if smooth:
            return y, *[extras[name] for name in row.extras if name in plan.saves]
        if isinstance(result, tuple):
            ctx.mark_non_differentiable(*result[1:])
        return result

    def backward(ctx: Any, *gs: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, options, shapes = ctx.call
        given = next((g for g in gs if g is not None), None) if smooth else gs[0]
        if given is None:
            return (None, None, *[None for _ in plan.grads])
        assert bwd is not None
        g: Any = _with_extras(plan, shapes["y"], gs) if smooth else given
        named = zip(plan.saves, ctx.saved_tensors)  # noqa: B905 (a keyword costs as much again)
        compiling = is_dynamo_compiling()
        saved = dict(named) if compiling else plan.residuals(named)
        device = given.device.type
        # The caller may run backward under autocast; gradients have the dtypes of forward. (To be
        # compiled, it is traced under that of the whole forward, which is not known here.)
        if device in AUTOCAST if compiling else _is_any_autocast_enabled() and amp_enabled(device):
            with torch.autocast(device, enabled=False):
                grads = bwd(g, plan.wrt, saved, shapes, **options)
        else:
            grads = bwd(g, plan.wrt, saved, shapes, **options)
        wanted: list[Tensor | None] = [None, None]
        for name in plan.grads:
            wanted.append(None if name is None else grads[name])
        return tuple(wanted)

    def _with_extras(plan: Plan, like: Like, gs: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
        """The gradient of ``y``, and of the extras that have one."""
        extras = [name for name in row.extras if name in plan.saves]
        given = {n: g for n, g in zip(("y", *extras), gs, strict=True) if g is not None}
        if "y" not in given:
            zero = next(iter(given.values())).new_zeros((), dtype=like.dtype)
            given["y"] = zero.expand(like.shape)
        return given

    parts = row.name.replace(".", "_").split("_")
    name = "Memsave" + "".join(part.capitalize() for part in parts)
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function = type(name, (Function,), body)
    # As the node's own ``apply``, but for what that looks up on the way.
    function._backward_cls.apply = backward  # type: ignore[attr-defined]
    return function


def _asks_for_layers() -> bool:
    """Whether the innermost mode would replace the stock ops of a layer, which is one already."""
    return getattr(_get_current_function_mode(), "asks_for_layers", False)


@contextmanager
def observe(observer: Callable[[Call], None]) -> Iterator[None]:
    """Report every layer call of this thread that wants a gradient (not inside compiled code)."""
    thread = get_ident()
    before = _observers.get(thread)
    _observers[thread] = observer
    try:
        yield
    finally:
        del _observers[thread]
        if before is not None:
            _observers[thread] = before


def _tell(call: Call) -> None:
    if (observer := _observers.get(get_ident())) is not None:
        observer(call)


#: Types of options that are what they are.
_PLAIN = {bool, float, int, str, tuple, type(None)}


def _plain(option: Any) -> Any:
    """A number of another library, or in a tensor, as Python's; a list, which its owner may change
    before backward, as a tuple.
    """
    if isinstance(option, list | tuple):
        return tuple(option)
    if isinstance(option, Tensor):
        return option if option.ndim or option.requires_grad else option.item()
    return getattr(option, "item", lambda: option)() if isinstance(option, Number) else option


def _settled(option: Any) -> Any:
    """Of a float for which ``torch.compile(dynamic=True)`` has a symbol, the number: two autograd
    functions cannot share the symbol, in torch 2.13. (Nor one that they find in a variable: the
    rules have such numbers in their code.)
    """
    return guard_scalar(option) if isinstance(option, float) else option


def _first(y: Any) -> Tensor:
    return y[0] if isinstance(y, tuple) else y


def _untraceable(rule: Rule, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether ``torch.compile`` is to trace the stock op."""
    if _are_functorch_transforms_active():
        return True
    for arg in args:
        if isinstance(arg, Tensor) and (type(arg) not in OF_TORCH or is_special(arg)):
            return True
    if is_exported():
        return True
    return rule.covers is not None and not rule.covers(*args)


def _unservable(rule: Rule, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether this call is one that a Python autograd function cannot serve."""
    if _are_functorch_transforms_active() or _is_tracing():
        return True
    if rule.row.inplace and options.get("inplace") and not is_writable(args[0]):
        return True
    if not are_arrays(*args):
        if has_other_meaning(*args):
            return True
        tensors = [arg for arg in args if arg is not None]
        if any(map(is_special, tensors)) or any(map(is_functorch_wrapped_tensor, tensors)):
            return True
    if rule.covers is not None and not rule.covers(*args):
        return True
    return forward_ad._current_level >= 0 and any(map(has_tangent, args))


def by_node(name: str, row: Layer, module: nn.Module, input: Any, *rest: Any) -> Tensor | None:
    """What a function of :mod:`memsave.kernels.nodes` makes of the attributes of a module, or
    ``None``. It spares the time of the search of ``torch.nn.Module`` for each, which is as much as
    all else that calls a small layer.
    """
    if nodes is None or is_dynamo_compiling() or _observers:
        return None
    y: Tensor | None = getattr(nodes, name)(row.name, module.__dict__, input, *rest)
    return y


def by_attributes(
    row: Layer, stock: type[nn.Module], name: str | None, *args: Any, casts: int = 0
) -> Callable[[nn.Module, Any], Any]:
    """The same, as a function of a module and its input, of a layer that has no parameters. Where
    no gradient is wanted, it is the forward of the stock class.

    Args:
        name: Of the function, if there is one.
        *args: What it takes after the input: strings are names of attributes of the module, in a
            tuple of the negative of a number.
        casts: On which devices autocast casts the input, as :data:`_CASTS` has them.
    """
    call = None if nodes is None or name is None else (getattr(nodes, name), int(casts), *args)
    forward = stock.forward

    def of_module(module: nn.Module, input: Any) -> Any:
        if call is None or nodes is None or is_dynamo_compiling() or _observers:
            return None
        y = nodes.by_attributes(row.name, module.__dict__, input, call)
        return forward(module, input) if y is False else y

    return of_module


#: Bits of what :func:`for_stock` takes for ``wanted``.
INPUT, WEIGHT, BIAS = 1, 2, 4


def for_stock(
    module: nn.Module, wanted: int, input: Any, casts: bool = False, has_bias: bool = True
) -> tuple[Any, Any] | None:
    """Weight and bias of a module that may call its stock op at once; ``None`` if it may not.

    It may if no gradient is wanted, or one of those with which the stock op keeps no bytes beyond
    those of the row: what the row says, and parameters and buffers, which live anyway. It spares
    the time of the engine, and ``torch.compile`` that of tracing it. (But not while somebody
    observes what layers keep, or others trace; nor with tensors of other classes, and of what is no
    parameter, or is computed, or lies elsewhere than the module's attributes are found first.
    Whether a mode is on makes no difference: a checkpoint may run the layer once with and once
    without.)

    Args:
        wanted: Which gradients, the sum of some of :data:`INPUT`, :data:`WEIGHT`, :data:`BIAS`.
        casts: Whether autocast is to cast the arguments: it keeps the copies, also of parameters.
        has_bias: Whether there is one; otherwise it is ``None``.
    """
    if is_dynamo_compiling():
        # (Which looks attributes up while it traces, at no price for the call.)
        if casts and isinstance(input, Tensor) and amp_enabled(input.device.type):
            return None
        weight: Any = module.weight
        bias: Any = module.bias if has_bias else None
    elif _observers:
        return None
    elif nodes is not None:
        return nodes.for_stock(module.__dict__, wanted, input, casts, has_bias)
    else:
        if compiler._is_compiling_flag or _is_tracing():
            return None
        own, names = module._parameters, {"weight", "bias"} if has_bias else {"weight"}
        if (casts and _is_any_autocast_enabled()) or type(own) is not dict:
            return None
        if not own.keys() >= names or module.__dict__.keys() & names:
            return None
        weight, bias = own["weight"], own["bias"] if has_bias else None
    bits = 0
    for place, tensor in enumerate((input, weight, bias)):
        if tensor is not None:
            if type(tensor) not in OF_TORCH or (place and not tensor.is_leaf):
                return None
            bits |= tensor.requires_grad << place
    return (weight, bias) if not bits or bits & wanted or not is_grad_enabled() else None
