"""One forward pass, recorded: which tensors autograd keeps, by layer and op, and what the table
predicts of them. By default on fake tensors, which have shapes and storages but no memory.
"""

from __future__ import annotations

import copy
import logging
import random
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .function import Call, observe
from .layers.module import OF_RECORDERS
from .spec import Layer

Trainable = Callable[[nn.Module, str], bool]
#: What fake tensors raise where an op depends on values.
NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


# Recording one forward pass.


@dataclass(eq=False)
class ModuleCall:
    """A call of a module, and the storages of its inputs and outputs."""

    module: str
    inputs: list[int]
    outputs: list[int]


class Place(NamedTuple):
    """Names a tensor alike in every run: an input or output of the n-th call of a module."""

    module: str
    time: int
    port: str
    position: int


@dataclass(eq=False)
class Held:
    """A tensor that autograd keeps, and who keeps it. Lives as long as the graph does."""

    tensor: Tensor
    version: int
    number: int
    call: ModuleCall
    op: str
    is_io: bool = False

    @property
    def module(self) -> str:
        return self.call.module

    @property
    def is_stale(self) -> bool:
        """Whether it has been overwritten since, so that backward will fail."""
        return self.tensor._version != self.version

    @property
    def key(self) -> int:
        return storage_key(self.tensor)

    @property
    def nbytes(self) -> int:
        return sum(part.untyped_storage().nbytes() for part in _parts(self.tensor))


@dataclass(frozen=True)
class Prediction:
    """What the table says of one layer call: bytes by residual, with storages where known."""

    module: str
    row: Layer
    wrt: frozenset[str]
    residuals: tuple[tuple[str, int | None, int], ...]


def storage_key(tensor: Tensor) -> int:
    """Identifies a tensor's storage while it lives; views of one tensor have one key."""
    return _reference(tensor).cdata


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(_parts(tensor)[-1].untyped_storage())


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor itself, or those of which a sparse one is made; the values come last."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


class Recorder(TorchFunctionMode):
    """Context manager: records every tensor that autograd saves, by module and op.

    Args:
        model: Whose submodules to attribute tensors to; ``None`` attributes by op only.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self._names = {} if model is None else {m: name for name, m in model.named_modules()}
        self._running = [ModuleCall("", [], [])]
        self._saving: list[list[weakref.ref[Held]]] = [[]]
        self._op = ""
        self._held: weakref.WeakSet[Held] = weakref.WeakSet()
        self._count = 0
        self._thread = get_ident()
        self._references: list[StorageWeakRef] = []  # so that no address is used twice
        self._stack = ExitStack()
        self.calls: list[ModuleCall] = []
        self.predictions: list[Prediction] = []

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:  # which undoes what there was, if torch refuses one
            # Hooks that are seen would change what is kept: a layer may do without its activation.
            before = register_module_forward_pre_hook(self._enter)
            after = register_module_forward_hook(self._leave, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
            OF_RECORDERS.update((before.id, after.id))
            stack.callback(OF_RECORDERS.difference_update, (before.id, after.id))
            # remove() forgets this one (torch 2.13), and torch.compile would warn of a global hook.
            stack.callback(_global_forward_hooks_with_kwargs.pop, after.id, None)
            stack.enter_context(observe(self._observe))
            stack.enter_context(saved_tensors_hooks(self._pack, lambda held: held.tensor))
            super().__enter__()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self._op = self._op, func.__name__ if self._op == "" else self._op
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._op = outer

    def held(self) -> list[Held]:
        """What the graph holds now, in the order in which it was saved."""
        return sorted(self._held, key=lambda held: held.number)

    def _note(self, values: Any) -> list[int]:
        tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
        references = [_reference(tensor) for tensor in tensors]
        self._references += references
        return [reference.cdata for reference in references]

    def _watches(self, module: nn.Module) -> bool:
        """Whether a call of it is one to record. (Hooks see those of all threads.)"""
        return get_ident() == self._thread and module in self._names

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._watches(module):
            self._running.append(ModuleCall(self._names[module], [], []))
            self.calls.append(self._running[-1])
            self._saving.append([])

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._watches(module):
            return
        while self._running[-1].module != self._names[module]:  # left by an exception
            self._running.pop()
            self._saving.pop()
        call = self._running.pop()
        call.inputs, call.outputs = self._note((args, kwargs)), self._note(output)
        for reference in self._saving.pop():
            held = reference()
            if held is not None:
                held.is_io = held.key in (*call.inputs, *call.outputs)

    def _pack(self, tensor: Tensor) -> Held:
        call = self._running[-1]
        self._count += 1
        # Detached: an output would hold the node that holds it, and the graph would never die.
        held = Held(tensor.detach(), tensor._version, self._count, call, self._op)
        self._held.add(held)
        self._saving[-1].append(weakref.ref(held))
        return held

    def _observe(self, call: Call) -> None:
        arrays = {name: array for name, array in call.arrays.items() if array is not None}
        bits = call.row.saved_bits(
            call.wrt,
            {name: tuple(array.shape) for name, array in arrays.items()},
            {name: array.itemsize * 8 for name, array in arrays.items()},
            call.options,
        )
        residuals = tuple(
            (name, None if name in call.row.extras else storage_key(arrays[name]), size // 8)
            for name, size in bits.items()
        )
        self.predictions.append(Prediction(self._running[-1].module, call.row, call.wrt, residuals))


class NeedsValues(RuntimeError):
    """A forward depends on values, which fake tensors do not have."""


# A model's state for a dry run.


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
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Where what it logs as an error is none: it is tried otherwise."""
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@torch.inference_mode(False)
def run(
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
            with _quiet(logging.getLogger("torch._subclasses.fake_tensor")):
                return run(model, inputs, kwargs, trainable, fake=True)
        except Exception as error:  # Of a mistake the real ones tell, too.
            logging.getLogger("memsave").info(
                "fake tensors will not do, so the model runs on real ones: %s", error
            )
            return run(model, inputs, kwargs, trainable, fake=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    state = _dry_state(model, trainable, mode)

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _copied(value)
        return _stand_in(value, mode).requires_grad_(value.requires_grad)

    inputs, kwargs = tree_map(own, (inputs, kwargs))
    with (
        torch.random.fork_rng(_cuda_devices()),
        torch.enable_grad(),
        _left_as_it_was(model),
        Recorder(model) as recorder,
    ):
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):  # There is no backward to wait for.
                module.require_backward_grad_sync = module.require_forward_param_sync = False
        try:
            # (Of what is compiled, nobody could observe the layers.)
            with mode or nullcontext(), torch.compiler.set_stance("force_eager"):
                output = torch.func.functional_call(model, state, inputs, kwargs)
        except NEEDS_VALUES as error:
            raise NeedsValues(
                "the model's forward depends on values, which fake tensors do not have; "
                "memsave.report(..., fake=False) runs it on the real ones"
            ) from error
        except Exception as error:
            if fake:
                error.add_note(
                    "(This was a dry run on fake tensors. If the model itself takes these inputs, "
                    "memsave.report(..., fake=False) does so, too.)"
                )
            raise
    free = {storage_key(tensor) for tensor in state.values()}
    given = {
        storage_key(value) for value in tree_leaves((inputs, kwargs)) if isinstance(value, Tensor)
    }
    trace = Trace(recorder.held(), recorder.calls, recorder.predictions, free, given)
    del output
    return trace


def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP runs in its calls, or another of torch's ways to distribute what is there."""
    involved = [type(module), *module._forward_pre_hooks.values()]
    names = [getattr(one, "__module__", None) or "" for one in involved]
    return any(name.startswith(_DISTRIBUTED) for name in names)


_DISTRIBUTED = ("torch.distributed.fsdp", "torch.distributed._composable")


def _cuda_devices() -> list[int]:
    """All whose random state may change. (Unnamed, torch warns where there are several.)"""
    return [*range(torch.cuda.device_count())] if torch.cuda.is_initialized() else []


class Trace:
    """What one forward pass keeps: per layer, in total, and as the table predicts it."""

    def __init__(
        self,
        held: list[Held],
        calls: list[ModuleCall],
        predictions: list[Prediction],
        parameters: set[int],
        inputs: set[int],
    ) -> None:
        self.predictions = predictions
        #: By layer, each storage that it holds, and its bytes; layers that have kept what was
        #: overwritten later.
        self.holds: dict[str, dict[int, int]] = {}
        self.stale: set[str] = set()
        for item in held:
            if item.key not in parameters and item.key not in inputs:
                self.holds.setdefault(item.module, {})[item.key] = item.nbytes
            if item.is_stale:
                self.stale.add(item.module)
        #: The storages that the model has returned.
        self.returned = {key for call in calls if not call.module for key in call.outputs}
        #: Of each storage that a module has got or returned, where that was first.
        self.places = _places(calls)
        #: Bytes by layer, each storage counted once, at the first layer that keeps it.
        self.kept: dict[str, int] = {}
        #: All that a layer holds, by kind, whoever else holds it.
        self.kinds: dict[str, dict[str, int]] = {}
        self.ops: dict[str, dict[str, int]] = {}
        seen: set[int] = set()
        per_layer: set[tuple[str, int]] = set()
        for item in held:
            key, size, name = item.key, item.nbytes, item.module
            first = key not in seen and key not in parameters and key not in inputs
            self.kept[name] = self.kept.get(name, 0) + first * size
            ops = self.ops.setdefault(name, {})
            ops[item.op] = ops.get(item.op, 0) + first * size
            seen.add(key)
            if (name, key) in per_layer:
                continue
            per_layer.add((name, key))
            kinds = self.kinds.setdefault(name, dict.fromkeys(KINDS, 0))
            kinds[_kind(item, parameters, inputs)] += size
        self.total = sum(self.kept.values())
        self.predicted = _predict(predictions, held, parameters | inputs)


def _places(calls: list[ModuleCall]) -> dict[int, Place]:
    places: dict[int, Place] = {}
    times: Counter[str] = Counter()
    for call in calls:
        for port, keys in (("inputs", call.inputs), ("outputs", call.outputs)):
            for position, key in enumerate(keys):
                places.setdefault(key, Place(call.module, times[call.module], port, position))
        times[call.module] += 1
    return places


KINDS = ("parameters", "inputs", "shared", "owned")


def _kind(item: Held, parameters: set[int], inputs: set[int]) -> str:
    if item.key in parameters:
        return "parameters"
    if item.key in inputs:
        return "inputs"
    return "shared" if item.is_io else "owned"


def _predict(predictions: list[Prediction], held: list[Held], free: set[int]) -> dict[str, int]:
    """Bytes by layer that the table predicts, each storage counted once.

    A storage that a layer outside of the table has kept before is that layer's.
    """
    layers = {call.module for call in predictions}
    first = {item.key: item.module for item in reversed(held)}
    seen = free | {key for key, module in first.items() if module not in layers}
    predicted: dict[str, int] = {}
    for call in predictions:
        for _, key, size in call.residuals:
            if key is None or key not in seen:
                predicted[call.module] = predicted.get(call.module, 0) + size
            if key is not None:
                seen.add(key)
    return predicted
