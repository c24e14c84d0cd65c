"""A forward pass that is run to see what it keeps, and leaves the model as it was.

By default on fake tensors, which have shapes and storages but no memory.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
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
    attributes = [(m, type(m), dict(vars(m)), _contents(m)) for m in model.modules()]
    values = [value for _, _, before, _ in attributes for value in before.values()]
    for *_, contents in attributes:
        for container, _ in contents:
            values += container.values() if isinstance(container, dict) else container
    plain, generators = _state_of(values, {*model.parameters(), *model.buffers()})
    numpy = sys.modules.get("numpy.random")
    drawn = random.getstate(), numpy and numpy.get_state()
    try:
        yield
    finally:
        random.setstate(drawn[0])
        if numpy:
            numpy.set_state(drawn[1])
        for generator, state in generators:
            generator.set_state(state)
        for tensor, version, before in plain:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(before)
        for module, cls, before, contents in attributes:
            if type(module) is not cls:
                module.__class__ = cls
            now = vars(module)
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
            for container, content in contents:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """Its lists, dictionaries and sets (those of its parameters and buffers, and those in others,
    too), with copies.
    """
    found: dict[int, tuple[Any, Any]] = {}
    todo = [*vars(module).values()]
    while todo:
        value = todo.pop()
        if type(value) in _CONTAINERS and id(value) not in found:
            found[id(value)] = value, value.copy()
            todo += value.values() if isinstance(value, dict) else value
    return [*found.values()]


def _state_of(values: list[Any], others: set[Tensor]) -> tuple[list[Any], list[Any]]:
    """Tensors but ``others``, with their versions and copies; and random generators, with their
    states.
    """
    tensors = {value for value in values if type(value) is Tensor and not value.is_inference()}
    tensors -= others
    generators = {value for value in values if isinstance(value, torch.Generator)}
    return (
        [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors],
        [(generator, generator.get_state()) for generator in generators],
    )


def _copied(value: Any) -> Any:
    """An input that is no tensor, as a cache, which a forward may fill."""
    if isinstance(value, nn.Module):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # of whatever kind: it is the user's class
        return value


_CONTAINERS = {list, dict, set, OrderedDict}


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
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
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
        if fake:
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
        with quiet, fake or nullcontext(), torch.compiler.set_stance("force_eager"):
            return torch.func.functional_call(runs, tensors, inputs, kwargs, tie_weights=False)


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
