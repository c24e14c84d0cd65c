"""Convert a model to drop-in layers, in place, and back; and say what was converted and why.

Converting swaps ``module.__class__``: parameters, buffers, hooks, tied and repeated modules, names,
``state_dict``, optimizers and wrappers are untouched.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from . import _choose, extensions, nn as _  # noqa: F401 - registers the drop-ins
from ._dry_run import CannotRecord, dry_run
from ._text import Coverage, Entry
from ._trace import Trace
from .layers.module import BY_POLICY, DROP_INS, ROWS, STOCK, Class, has_own_forward, offered
from .spec import Layer

logger = logging.getLogger("memsave")

Filter = Callable[[nn.Module, str], bool]
Policy = Callable[[nn.Module, str, tuple[Layer, ...]], Layer]
Plan = dict[nn.Module, Class]


def convert(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    filter_fn: Filter | None = None,
    policy: Policy | None = None,
) -> nn.Module:
    """Replace stock layers by their drop-ins, in place.

    Only modules whose class is exactly a stock class of the table are touched; ``coverage(model)``
    lists the others with the reason. Converting twice changes nothing; :func:`revert` undoes it.
    Lazy modules become drop-ins when their first forward materializes them. Parametrized modules
    (``torch.nn.utils.parametrizations``) keep their parametrizations. ``isinstance`` sees stock
    layers; tools that ask for the exact class (``torch.ao.quantization``) do not: revert first.

    Some ops have several rows: one keeps the input, another the output or a bit per element. Which
    is least depends on what the neighbours keep. With example inputs, the model runs forward a few
    times, and each layer gets the row (or stays the stock layer) with which the whole model keeps
    least, for the parameters and inputs that want a gradient now and the mode that the model is in.
    That is never more than stock keeps (but for a bit per element of LoRA's inputs, with dropout).
    Gradients are right in any other case, too; to choose anew for it, convert again. It runs on
    fake tensors, which take neither memory nor time, or where it fails on those (as where it
    depends on values) on real ones. They stand in for its own, so no other thread may use the model
    meanwhile.

    Args:
        model: Any module; a stock layer itself is fine.
        example_inputs: A tensor, the positional inputs as a tuple, or the keyword inputs as a dict;
            real, meta or fake. Only shapes, dtypes, devices and ``requires_grad`` matter.
        filter_fn: ``filter_fn(module, name) -> bool``: which modules to convert. Default: all.
        policy: ``policy(module, name, rows) -> row``: which of the interchangeable rows of an op to
            use, e.g. ``memsave.spec.RELU_FROM_OUTPUT``. Default: the first, or by
            ``example_inputs``.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: There are ``example_inputs``, and FSDP has taken the model over.
        ValueError: ``policy`` returned a row that it was not offered, or there are
            ``example_inputs`` besides. Nothing is converted then.

    Warns:
        UserWarning: Nothing in the model could be converted; or the forward may not be recorded (it
            calls ``torch.func.grad``), so that ``example_inputs`` choose nothing.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert needs a torch.nn.Module, got {type(model).__name__}")
    if policy is not None and example_inputs is not None:
        raise ValueError("rows are chosen by a policy or by example_inputs, not by both")
    found = layers(model, filter_fn)
    if example_inputs is None:
        plan = _planned(found, policy)
    else:
        args, kwargs = _inputs(example_inputs)
        try:
            plan = least(model, found, lambda: dry_run(model, args, kwargs))
        except CannotRecord as error:
            warnings.warn(f"each layer takes its first row: {error}", stacklevel=2)
            plan = _planned(found, None)
        except TypeError as error:
            if isinstance(example_inputs, Mapping):
                error.add_note(
                    "(A dict gives the inputs by keyword; for one that is a dict: (x,).)"
                )
            raise
    place(plan)
    result = coverage(model)
    logger.info("%s", result)
    # (Stock layers may be the least; that is no reason to warn.)
    is_chosen = example_inputs is not None and any(STOCK.keys() & _candidates(m) for m in found)
    if not is_chosen and not any(entry.status == "converted" for entry in result):
        warnings.warn(
            "memsave.convert found nothing to convert; print(memsave.coverage(model)) lists why",
            stacklevel=2,
        )
    return model


def _planned(found: Mapping[nn.Module, str], policy: Policy | None) -> Plan:
    return {m: _chosen(m, name, policy) for m, name in found.items() if _stock_class(m)}


def revert(model: nn.Module) -> nn.Module:
    """Undo :func:`convert`, in place. Modules built as drop-ins become stock modules too.

    Returns:
        ``model`` itself.
    """
    for module in model.modules():
        drop_in = _drop_in_class(module)
        if drop_in is not None:
            _set_class(module, STOCK[drop_in])
    return model


def coverage(model: nn.Module) -> Coverage:
    """Each layer of a model: converted, convertible, or skipped with the reason.

    A layer is a module without children, or one of a class that derives from a stock layer.
    """
    extensions.load()
    return Coverage(_entries(model))


def _entries(model: nn.Module) -> Iterator[Entry]:
    for name, module in model.named_modules():
        layer = type(module).__name__
        drop_in = _drop_in_class(module)
        stock = next((base for base in type(module).__mro__ if base in DROP_INS), None)
        if drop_in is not None:
            rows = ", ".join(row.name for row in ROWS[drop_in])
            yield Entry(name, layer, "converted", f"rows: {rows}")
        elif _layer_class(module) in ROWS:
            yield Entry(name, layer, "skipped", "keeps what the table says as it is")
        elif _stock_class(module):
            replaced = _is_replaced(module)
            why = "its forward is replaced by another" if replaced else ""
            yield Entry(name, layer, "skipped" if replaced else "convertible", why)
        elif stock is not None:
            own = "forward" in _defined_between(type(module), stock)
            why = "with a forward of its own" if own else "which may mean more than its base"
            yield Entry(name, layer, "skipped", f"subclass of {stock.__name__} {why}")
        elif not _has_children(module):
            yield Entry(name, layer, "skipped", "not in the table")


def _defined_between(cls: type, base: type) -> set[str]:
    """Names of attributes that the classes between ``cls`` and ``base`` define."""
    between = cls.__mro__[: cls.__mro__.index(base)]
    names = {name for c in between for name in vars(c)}
    return names | ({"forward"} if "_conv_forward" in names else set())


def place(plan: Plan) -> None:
    """Give modules the planned classes."""
    for module, cls in plan.items():
        if cls is not _layer_class(module):
            _set_class(module, cls)


def _chosen(module: nn.Module, name: str, policy: Policy | None) -> Class:
    candidates = offered(_origin(module))
    if policy is None or len(candidates) == 1:
        return candidates[0]
    rows = tuple(ROWS[candidate][0] for candidate in candidates)
    row = policy(module, name, rows)
    if row not in rows:
        raise ValueError(f"the policy chose {row!r} for {name!r}, which offers {rows}")
    return candidates[rows.index(row)]


def _inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


def layers(model: nn.Module, filter_fn: Filter | None = None) -> dict[nn.Module, str]:
    """The modules that can be converted, or are, with their names."""
    extensions.load()
    return {
        module: name
        for name, module in model.named_modules()
        if offered(_origin(module))
        and not (_stock_class(module) and _is_replaced(module))
        and (filter_fn is None or filter_fn(module, name))
    }


def least(model: nn.Module, layers: Mapping[nn.Module, str], run: Callable[[], Trace]) -> Plan:
    """The classes of the layers with which the model keeps least.

    Args:
        layers: The layers to convert, with their names.
        run: Records a forward pass. It is called once per place in the lists of candidates.
    """
    candidates = {name: _candidates(module) for module, name in layers.items()}
    traces = []
    with classes_restored(model):
        for k in range(max(map(len, candidates.values()), default=0)):
            place({m: candidates[name][min(k, len(candidates[name]) - 1)]
                   for m, name in layers.items()})  # fmt: skip
            traces.append(run())
    places = {name: len(classes) for name, classes in candidates.items() if len(classes) > 1}
    choice = _choose.choose(*_choose.measured(places, traces))
    return {m: candidates[name][choice.get(name, 0)] for m, name in layers.items()}


def _candidates(module: nn.Module) -> list[Class]:
    """What a layer may become: the default, the stock class, and the others."""
    stock = _origin(module)
    default, *others = [cls for cls in offered(stock) if cls not in BY_POLICY]
    if _has_children(module):  # what is kept then depends on theirs
        return [default]
    others = [cls for cls in others if getattr(cls, "fits", _always)(module)]
    return [default, *others, stock]


def _has_children(module: nn.Module) -> bool:
    """(Some children have no truth value: those of ``torch.compile``.)"""
    return next(module.children(), None) is not None


def _always(module: nn.Module) -> bool:
    return True


@contextmanager
def classes_restored(model: nn.Module) -> Iterator[None]:
    """Undo in the end what is converted or reverted meanwhile."""
    classes = [(m, m.__class__, getattr(m, "cls_to_become", None)) for m in model.modules()]
    try:
        yield
    finally:
        for module, cls, lazily in classes:
            if module.__class__ is not cls:
                _become(module, cls)
            if isinstance(module, LazyModuleMixin):
                module.cls_to_become = lazily


# A module's class, seen through what stands before it: a lazy module has the class that it will
# become, a parametrized or sharded one a class of its own derived from it.


def _layer_class(module: nn.Module) -> Class:
    if isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:  # type: ignore[truthy-function]
        return module.cls_to_become
    before = _before_layer(module)
    return type(module) if before is None else type(module).__bases__[len(before)]


def _before_layer(module: nn.Module) -> tuple[type, ...] | None:
    """Of a class that torch has made for the module (or for all sharded ones of a class), what is
    before the layer among its bases.
    """
    if parametrize.is_parametrized(module):
        return ()
    first, *rest = type(module).__bases__
    is_sharded = rest and first.__module__.startswith("torch.distributed.fsdp")
    return (first,) if is_sharded else None


def _origin(module: nn.Module) -> Class:
    """The class that it has, or had before it was converted."""
    cls = _layer_class(module)
    return STOCK.get(cls, cls)


def _stock_class(module: nn.Module) -> Class | None:
    cls = _layer_class(module)
    return cls if offered(cls) else None


def _drop_in_class(module: nn.Module) -> Class | None:
    cls = _layer_class(module)
    return cls if cls in STOCK else None


def _set_class(module: nn.Module, cls: Class) -> None:
    if isinstance(module, LazyModuleMixin):
        module.cls_to_become = cls  # type: ignore[assignment]
    elif (before := _before_layer(module)) is not None:
        # Parametrizing made a class for this module, with a property for each parametrized tensor
        # and the layer as its base, as sharding does; make the same one upon another base. (Copies
        # of the module share the class, so it is not changed itself.)
        old = type(module)
        _become(module, type(old.__name__, (*before, cls), dict(vars(old))))
    else:
        _become(module, cls)


def _become(module: nn.Module, cls: Class) -> None:
    attributes, bound = vars(module), _bound_forwards(module)
    module.__class__ = cls
    for name in bound:
        attributes[name] = MethodType(cls.forward, module)
    # What torch 2.11 compiled looks at the class again only if some dictionary has changed.
    attributes["_changed"] = True
    del attributes["_changed"]


def _bound_forwards(module: nn.Module) -> list[str]:
    """Attributes of the module itself that are the forward of its class: who puts another one in
    its place (as the hooks of accelerate) may call it by them.
    """
    forward = type(module).forward
    forwards = [MethodType(f, module) for f in (forward, getattr(forward, "own", forward))]
    # (Tensors among them compare element by element.)
    methods = [item for item in vars(module).items() if type(item[1]) is MethodType]
    return [name for name, method in methods if method in forwards]


def _is_replaced(module: nn.Module) -> bool:
    """Whether a call of the module need not come to the forward that its class had at first."""
    is_own = "forward" in vars(module) and not _bound_forwards(module)
    return is_own or not has_own_forward(_origin(module))
