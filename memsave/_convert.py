"""Convert a model to drop-in layers, in place, and back; and say what was converted and why.

Converting swaps ``module.__class__``: parameters, buffers, hooks, tied and repeated modules, names,
``state_dict``, optimizers and wrappers are untouched.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from . import extensions, nn as _  # noqa: F401 - registers the drop-ins
from .layers.module import DROP_INS, ROWS, STOCK, offered
from .spec import Layer

logger = logging.getLogger("memsave")

Filter = Callable[[nn.Module, str], bool]
Policy = Callable[[nn.Module, str, tuple[Layer, ...]], Layer]
Status = Literal["converted", "convertible", "skipped"]


class Entry(NamedTuple):
    """One module: its name and class, whether it is converted, and why not."""

    name: str
    layer: str
    status: Status
    reason: str


class Coverage(list[Entry]):
    """What :func:`convert` has done, or could do, to each layer of a model. Prints as a table."""

    def __str__(self) -> str:
        lines = []
        for status in ("converted", "convertible", "skipped"):
            entries = [entry for entry in self if entry.status == status]
            groups: dict[tuple[str, str], list[str]] = {}
            for entry in entries:
                groups.setdefault((entry.layer, entry.reason), []).append(entry.name or "(root)")
            lines.append(f"{status}: {len(entries)}")
            for (layer, reason), names in groups.items():
                shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                because = f" - {reason}" if reason else ""
                lines.append(f"  {len(names):4} x {layer}{because}: {shown}")
        return "\n".join(lines)


def convert(
    model: nn.Module, *, filter_fn: Filter | None = None, policy: Policy | None = None
) -> nn.Module:
    """Replace stock layers by their drop-ins, in place.

    Only modules whose class is exactly a stock class of the table are touched; ``coverage(model)``
    lists the others with the reason. Converting twice changes nothing; :func:`revert` undoes it.
    Lazy modules become drop-ins when their first forward materializes them. Parametrized modules
    (``torch.nn.utils.parametrizations``) keep their parametrizations.

    Args:
        model: Any module; a stock layer itself is fine.
        filter_fn: ``filter_fn(module, name) -> bool``: which modules to convert. Default: all.
        policy: ``policy(module, name, rows) -> row``: which of the interchangeable rows of an op to
            use, e.g. ``memsave.spec.RELU_FROM_OUTPUT``. Default: the first.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``policy`` returned a row that it was not offered. Nothing is converted then.

    Warns:
        UserWarning: Nothing in the model could be converted.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert needs a torch.nn.Module, got {type(model).__name__}")
    extensions.load()
    plan = [
        (module, _choose(module, name, policy))
        for name, module in model.named_modules()
        if _stock_class(module) and (filter_fn is None or filter_fn(module, name))
    ]
    for module, drop_in in plan:
        if drop_in is not _layer_class(module):
            _set_class(module, drop_in)
    result = coverage(model)
    logger.info("%s", result)
    if not any(entry.status == "converted" for entry in result):
        warnings.warn(
            "memsave.convert found nothing to convert; print(memsave.coverage(model)) lists why",
            stacklevel=2,
        )
    return model


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
            yield Entry(name, layer, "convertible", "")
        elif stock is not None:
            own = "forward" in _defined_between(type(module), stock)
            why = "with a forward of its own" if own else "which may mean more than its base"
            yield Entry(name, layer, "skipped", f"subclass of {stock.__name__} {why}")
        elif not any(module.children()):
            yield Entry(name, layer, "skipped", "not in the table")


def _defined_between(cls: type, base: type) -> set[str]:
    """Names of attributes that the classes between ``cls`` and ``base`` define."""
    between = cls.__mro__[: cls.__mro__.index(base)]
    names = {name for c in between for name in vars(c)}
    return names | ({"forward"} if "_conv_forward" in names else set())


def _choose(module: nn.Module, name: str, policy: Policy | None) -> type[nn.Module]:
    stock = _stock_class(module)
    assert stock is not None
    candidates = offered(stock)
    if policy is None or len(candidates) == 1:
        return candidates[0]
    rows = tuple(ROWS[candidate][0] for candidate in candidates)
    row = policy(module, name, rows)
    if row not in rows:
        raise ValueError(f"the policy chose {row!r} for {name!r}, which offers {rows}")
    return candidates[rows.index(row)]


# A module's class, seen through what stands before it: a lazy module has the class that it will
# become, a parametrized one a class of its own derived from it.


def _layer_class(module: nn.Module) -> type[nn.Module]:
    if isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:  # type: ignore[truthy-function]
        return module.cls_to_become
    if parametrize.is_parametrized(module):
        return type(module).__bases__[0]
    return type(module)


def _stock_class(module: nn.Module) -> type[nn.Module] | None:
    cls = _layer_class(module)
    return cls if offered(cls) else None


def _drop_in_class(module: nn.Module) -> type[nn.Module] | None:
    cls = _layer_class(module)
    return cls if cls in STOCK else None


def _set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    if isinstance(module, LazyModuleMixin):
        module.cls_to_become = cls  # type: ignore[assignment]
    elif parametrize.is_parametrized(module):
        # Parametrizing made a class for this module, with a property for each parametrized tensor
        # and the layer as its base; make the same one upon another base. (Copies of the module
        # share the class, so it is not changed itself.)
        old = type(module)
        body = {k: v for k, v in vars(old).items() if k not in ("__dict__", "__weakref__")}
        module.__class__ = type(old.__name__, (cls,), body)
    else:
        module.__class__ = cls
