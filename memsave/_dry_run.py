"""A forward pass that is run to see what it keeps, and leaves the model as it was.

By default on fake tensors, which have shapes and storages but no memory.
"""

from __future__ import annotations

import copy
import gc
import logging
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import _lru_cache_wrapper, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from ._record import Recorder, storage_key
from ._trace import Trace

Trainable = Callable[[nn.Module, str], bool]
#: What fake tensors raise where an op depends on values.
NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


class NeedsValues(RuntimeError):
    """A forward depends on values, which fake tensors do not have."""


class CannotRecord(RuntimeError):
    """A forward runs, but not while somebody records what autograd keeps."""


def _dry_state(
    model: nn.Module, trainable: Trainable | None, fake: FakeTensorMode | None
) -> dict[str, Tensor]:
    """Stand-ins for parameters and buffers, with the wanted ``requires_grad``.

    Those of a module with several names are there once, by the last: replaced twice, they would be
    put back once.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    if lazy := [name for name, module in modules.items() if _is_uninitialized(module)]:
        raise RuntimeError(
            f"modules {lazy} are lazy and not initialized yet, so nothing can be measured; "
            "run the model once before"
        )
    last = {id(module): name for name, module in modules.items()}
    state: dict[str, Tensor] = {}
    made: dict[Tensor, Tensor] = {}

    def put(name: str, tensor: Tensor) -> None:
        path = name.rpartition(".")[0]
        if last[id(modules[path])] == path:
            state[name] = tensor

    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = modules[name.rpartition(".")[0]]
        wanted = parameter.requires_grad if trainable is None else trainable(owner, name)
        if parameter not in made:
            made[parameter] = _stand_in(parameter, fake)
            if fake is None:  # Hooks may put others of the same class in their place.
                made[parameter] = nn.Parameter(made[parameter], wanted)
            made[parameter].requires_grad_(wanted)
            # What is said of it, as a scale by which it is quantized.
            own = vars(made[parameter])
            own.update({name: said for name, said in vars(parameter).items() if name not in own})
        elif wanted:
            made[parameter].requires_grad_()
        put(name, made[parameter])
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if buffer not in made:
            made[buffer] = _stand_in(buffer, fake)
        put(name, made[buffer])
    return state


def _is_uninitialized(module: nn.Module) -> bool:
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()  # type: ignore[misc]


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Undo in the end what a forward has set in its modules (a cache, a counter), which may be fake
    tensors, or has drawn.
    """
    modules, containers, values = _reached(model)
    classes = [type(module) for module, _ in modules]
    with_stand_ins = {*model.parameters(), *model.buffers()}
    plain = _versions(values, with_stand_ins)
    hidden = {buffer for module, _ in modules for buffer in module.buffers()} - with_stand_ins
    numpy = sys.modules.get("numpy")
    restore = [partial(random.setstate, random.getstate()), *_states(values, numpy)]
    if numpy:
        restore.append(partial(numpy.random.set_state, numpy.random.get_state()))
    try:
        yield
    finally:
        for as_before in restore:
            as_before()
        for tensor, version, before in plain:
            # (Batch norms overwrite their statistics without a new version.)
            if tensor._version != version or tensor in hidden:
                tensor.data.copy_(before)
        for (module, before), cls in zip(modules, classes, strict=True):
            if type(module) is not cls:
                module.__class__ = cls
            now = vars(module)
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for container, content in containers:
            container.clear()
            has_places = isinstance(container, list | deque)
            (container.extend if has_places else container.update)(content)


_CONTAINERS = {list, dict, set, OrderedDict, defaultdict, Counter, deque}


def _reached(
    model: nn.Module,
) -> tuple[list[tuple[nn.Module, dict[str, Any]]], list[tuple[Any, Any]], list[Any]]:
    """All modules, also those that are attributes or in containers without being registered, with
    copies of their attributes; all lists, dictionaries and sets in those, with copies; and all that
    is in any of them, or in tuples.
    """
    modules: list[Any] = []
    containers: list[Any] = []
    values: list[Any] = [*model.modules()]
    seen: set[int] = set()
    for value in values:  # which grow
        is_module, is_tuple = isinstance(value, nn.Module), isinstance(value, tuple)
        if id(value) in seen or not (is_module or is_tuple or type(value) in _CONTAINERS):
            continue
        seen.add(id(value))
        content = dict(vars(value)) if is_module else value if is_tuple else copy.copy(value)
        if not is_tuple:
            (modules if is_module else containers).append((value, content))
        values += content.values() if isinstance(content, dict) else content
    return modules, containers, values


def _versions(values: list[Any], others: set[Tensor]) -> list[tuple[Tensor, int, Tensor]]:
    """Tensors but ``others``, with their versions and copies."""
    tensors = {value for value in values if type(value) is Tensor and not value.is_inference()}
    return [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors - others]


def _states(values: list[Any], numpy: Any) -> Iterator[Callable[[], Any]]:
    """What puts random generators, and arrays of NumPy, back to where they are now."""
    for value in {id(value): value for value in values}.values():
        if isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())
        elif type(value) is random.Random:
            yield partial(value.setstate, value.getstate())
        elif numpy and isinstance(value, numpy.random.Generator):
            yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)
        elif numpy and isinstance(value, numpy.random.RandomState):
            yield partial(value.set_state, value.get_state())
        elif numpy and type(value) is numpy.ndarray and value.flags.writeable:
            yield partial(numpy.copyto, value, value.copy())


def _forget(fake: FakeTensorMode) -> None:
    """Clear the caches of functions (``functools.cache``) that have fake tensors now."""
    for cache in gc.get_objects():
        if type(cache) is _lru_cache_wrapper and any(
            isinstance(value, FakeTensor) and value.fake_mode is fake for value in _cached(cache)
        ):
            cache.cache_clear()


def _cached(cache: Any) -> Iterator[Any]:
    """What it has returned, and the parts of that."""
    for value in gc.get_referents(cache):  # Its dictionary, where it has no bound.
        for result in [*value.values()] if type(value) is dict else [value]:
            yield from result if type(result) in (tuple, list) else (result,)


def _copied(value: Any) -> Any:
    """An input that is no tensor, as a cache, which a forward may fill."""
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # of whatever kind: it is the user's class
        return value


def _stand_in(tensor: Tensor, fake: FakeTensorMode | None) -> Tensor:
    if fake is None or tensor.layout is not torch.strided:
        return tensor.detach().clone()  # A forward may overwrite it.
    # A meta tensor has no device of its own; any serves.
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    with fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Where what a logger tells of an error is told by its exception, or is none."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@torch.inference_mode(False)
def dry_run(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    trainable: Trainable | None = None,
    fake: bool | None = None,
) -> Trace:
    """Record a forward pass. The model is left as it was.

    Args:
        trainable: Which parameters want a gradient. Default: those that require it.
        fake: Whether on fake tensors. Default: if the model's forward runs on them.
    """
    if any(map(_is_sharded, model.modules())):
        raise RuntimeError(
            "FSDP has taken this model over, and would take the stand-ins of a dry run for its own "
            "parameters: run it before the model is sharded (or convert without example inputs)"
        )
    if fake is None:
        try:
            return dry_run(model, inputs, kwargs, trainable, fake=True)
        except Exception as error:  # Of a mistake the real ones tell, too.
            logging.getLogger("memsave").info(
                "fake tensors will not do, so the model runs on real ones: %s", error
            )
            return dry_run(model, inputs, kwargs, trainable, fake=False)
    if not fake:
        return _recorded(model, inputs, kwargs, trainable, None)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    references = sys.getrefcount(mode)
    try:
        return _recorded(model, inputs, kwargs, trainable, mode)
    finally:
        if sys.getrefcount(mode) > references:
            gc.collect(1)  # Functions of torch's that have it, in cycles.
            if sys.getrefcount(mode) > references:  # Fake tensors have it.
                _forget(mode)


def _recorded(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    trainable: Trainable | None,
    mode: FakeTensorMode | None,
) -> Trace:
    state = _dry_state(model, trainable, mode)
    inputs, kwargs = _dry_inputs(inputs, kwargs, mode)
    try:
        with Recorder(model) as recorder:
            output = _forward(model, state, inputs, kwargs, mode)
    except NEEDS_VALUES as error:
        raise NeedsValues(
            "the model's forward depends on values, which fake tensors do not have; "
            "memsave.report(..., fake=False) runs it on the real ones"
        ) from error
    except Exception as error:
        told, other = error, _error(model, state, inputs, kwargs, mode)
        if other is None:
            told = CannotRecord(
                "the model runs, but not while what autograd keeps is recorded (which "
                "torch.func.grad and torch.autograd.graph.disable_saved_tensors_hooks forbid in a "
                f"forward), so nothing can be measured: {error}"
            )
        elif str(other) != str(error):
            error.add_note(f"(If nothing is recorded, it raises {other!r}.)")
        if mode is not None:
            told.add_note(
                "(This was a dry run on fake tensors. If the model itself takes these inputs, "
                "memsave.report(..., fake=False) may do so, too.)"
            )
        if told is error:
            raise
        raise told from error
    free = {storage_key(tensor) for tensor in state.values()}
    given = {
        storage_key(value) for value in tree_leaves((inputs, kwargs)) if isinstance(value, Tensor)
    }
    trace = Trace(recorder.held(), recorder.calls, recorder.predictions, free, given)
    del output
    return trace


def _dry_inputs(inputs: Any, kwargs: Any, fake: FakeTensorMode | None) -> Any:
    """Stand-ins for inputs."""

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _copied(value)
        own = _stand_in(value, fake).requires_grad_(value.requires_grad)
        # (What is no leaf may be overwritten.)
        return own if value.is_leaf else own.clone()

    return tree_map(own, (inputs, kwargs))


def _forward(
    model: nn.Module,
    state: dict[str, Tensor],
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    fake: FakeTensorMode | None,
) -> Any:
    """The output with stand-ins. The model is left as it was."""
    runs, tensors = model, state
    if isinstance(model, nn.DataParallel):  # One of its replicas; functional_call takes no others.
        runs = model.module
        tensors = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    with torch.random.fork_rng(_cuda_devices()), torch.enable_grad(), _left_as_it_was(model):
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):  # There is no backward to wait for.
                module.require_backward_grad_sync = module.require_forward_param_sync = False
        # (Of what is compiled, nobody could observe the layers. What is tied, the state has tied.)
        quiet = _quiet("torch._subclasses.fake_tensor")
        try:
            with quiet, fake or nullcontext(), torch.compiler.set_stance("force_eager"):
                return torch.func.functional_call(runs, tensors, inputs, kwargs, tie_weights=False)
        finally:
            torch.clear_autocast_cache()


def _error(*args: Any) -> Exception | None:
    """What a forward raises if nobody records it, if anything."""
    try:
        _forward(*args)
    except Exception as error:  # of whatever kind: it is the user's
        return error
    return None


def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP runs in its calls, or another of torch's ways to distribute what is there."""
    involved = [type(module), *module._forward_pre_hooks.values()]
    names = [getattr(one, "__module__", None) or "" for one in involved]
    return any(name.startswith(_DISTRIBUTED) for name in names)


_DISTRIBUTED = ("torch.distributed.fsdp", "torch.distributed._composable")


def _cuda_devices() -> list[int]:
    """All whose random state may change. (Unnamed, torch warns where there are several.)"""
    return [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []
