"""What one recorded forward pass keeps: per layer, in total, and as the table predicts it."""

from __future__ import annotations

from collections import Counter

from ._record import Held, ModuleCall, Place, Prediction


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
