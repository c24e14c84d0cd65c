"""Which of its options each layer takes, so that all together keep least.

What a layer keeps costs nothing where another keeps the same tensor, so the options of neighbours
belong together. Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple, Protocol

Tensor = Hashable
Choice = dict[str, int]


class Option(NamedTuple):
    """What a layer keeps: tensors that others may keep too, and bytes of its own."""

    keeps: frozenset[Tensor]
    owned: int


Options = Mapping[str, Sequence[Option | None]]


def choose(options: Options, sizes: Mapping[Tensor, int]) -> Choice:
    """The option of each layer, by its place, with which least is kept: every tensor once.

    The least of all where the layers form a forest: every option of a layer keeps some of two
    tensors, its input and its output, and no tensor is the output of two layers. So it is in chains
    and in residual networks. Elsewhere a minimum that changing one layer does not improve. Never
    more than with the first options of all, or the last. Of two equals, the earlier option.

    Args:
        options: Of every layer; ``None`` is one that cannot be taken (not all are ``None``).
        sizes: Bytes of the tensors. A tensor that is kept in any case is not in it.
    """
    # Places count less than any byte.
    byte = 1 + sum(len(its_options) for its_options in options.values())
    weighed = {t: size * byte for t, size in sizes.items()}
    numbered = {
        layer: [
            option and Option(option.keeps & weighed.keys(), option.owned * byte + place)
            for place, option in enumerate(its_options)
        ]
        for layer, its_options in options.items()
    }
    starts = (_forest(numbered, weighed), _first(numbered), _first(numbered, last=True))
    return min(
        (_improved(start, numbered, weighed) for start in starts),
        key=lambda choice: total(choice, numbered, weighed),
    )


class Measured(Protocol):
    """A recorded forward pass: see :class:`memsave._trace.Trace`."""

    holds: dict[str, dict[int, int]]
    places: Mapping[int, Tensor]
    stale: set[str]
    returned: set[int]


def measured(
    layers: Mapping[str, int], traces: Sequence[Measured]
) -> tuple[dict[str, list[Option | None]], dict[Tensor, int]]:
    """Options and sizes as ``choose`` takes them, from a run for each place.

    Args:
        layers: Those to choose for, with the number of their options.
        traces: What was kept when every layer had the option of the same place (or its last, which
            is the stock layer's).
    """
    first = traces[0] if traces else None
    known = set(first.places.values()) if first else set()
    overwritable = _overwritable(traces[-1]) if traces else set()
    options: dict[str, list[Option | None]] = {}
    sizes: dict[Tensor, int] = {}
    for layer, count in layers.items():
        options[layer] = []
        for trace in traces[:count]:
            held = {trace.places.get(k, k): n for k, n in trace.holds.get(layer, {}).items()}
            shared = {t: size for t, size in held.items() if t in known}
            sizes.update(shared)
            owned = sum(held.values()) - sum(shared.values())
            stale = layer in trace.stale or overwritable & held.keys()
            options[layer].append(None if stale else Option(frozenset(shared), owned))
        if not any(options[layer]):
            options[layer][0] = Option(frozenset(), 0)  # nothing is right, nor was it before
    if first:
        for layer, held in first.holds.items():
            for key in held if layer not in layers else ():
                sizes.pop(first.places.get(key), None)
    return options, sizes


def _overwritable(stock: Measured) -> set[Tensor]:
    """What the model returns and stock keeps nothing of: so its caller may write to it."""
    held = set().union(*stock.holds.values())
    return {stock.places.get(key, key) for key in stock.returned - held}


def total(choice: Choice, options: Options, sizes: Mapping[Tensor, int]) -> int:
    """Bytes kept with a choice."""
    taken = [_option(options, layer, place) for layer, place in choice.items()]
    kept = frozenset().union(*(option.keeps for option in taken))
    return sum(option.owned for option in taken) + sum(sizes[t] for t in kept if t in sizes)


def _option(options: Options, layer: str, place: int) -> Option:
    option = options[layer][place]
    assert option is not None
    return option


def _first(options: Options, *, last: bool = False) -> Choice:
    """The first, or last, option of every layer that it can take."""
    able = {
        layer: [k for k, option in enumerate(its_options) if option is not None]
        for layer, its_options in options.items()
    }
    return {layer: places[-1 if last else 0] for layer, places in able.items()}


def _improved(choice: Choice, options: Options, sizes: Mapping[Tensor, int]) -> Choice:
    """Change one layer at a time as long as that keeps less."""
    choice = dict(choice)
    holders = Counter(t for layer, k in choice.items() for t in _option(options, layer, k).keeps)

    def cost(option: Option) -> int:
        return option.owned + sum(sizes[t] for t in option.keeps if not holders[t])

    changed = True
    while changed:
        changed = False
        for layer, its_options in options.items():
            holders.subtract(_option(options, layer, choice[layer]).keeps)
            costs = {k: cost(option) for k, option in enumerate(its_options) if option is not None}
            least = min(costs, key=costs.__getitem__)
            if costs[least] < costs[choice[layer]]:
                choice[layer], changed = least, True
            holders.update(_option(options, layer, choice[layer]).keeps)
    return choice


def _forest(options: Options, sizes: Mapping[Tensor, int]) -> Choice:
    """The least choice of the layers that form a forest, given the first options of the others.

    Tensors are the nodes, layers the edges. From the leaves to the roots: what all beyond an edge
    costs at least, if its nearer tensor is kept, and if it is not.
    """
    costs: dict[Tensor, list[float]] = {t: [0, size] for t, size in sizes.items()}
    edges: dict[Tensor, list[tuple[Tensor, str]]] = {}
    trees: dict[Tensor, Tensor] = {}
    others: Choice = {}

    def root(t: Tensor) -> Tensor:
        while t in trees:
            t = trees[t]
        return t

    for layer, its_options in options.items():
        ends = list(frozenset().union(*(option.keeps for option in its_options if option)))
        if len(ends) == 2 and root(ends[0]) != root(ends[1]):
            trees[root(ends[0])] = root(ends[1])
            for near, far in (ends, ends[::-1]):
                edges.setdefault(near, []).append((far, layer))
        elif len(ends) == 1:
            (t,) = ends
            for kept in (False, True):
                costs[t][kept] += _owned(its_options, ends if kept else ())
        elif ends:
            others[layer] = _first({layer: its_options})[layer]
    for layer, place in others.items():
        for t in _option(options, layer, place).keeps:
            costs[t][False] = inf
    kept = _least(costs, edges, options)
    return {
        layer: others[layer]
        if layer in others
        else min(
            (k for k, option in enumerate(its_options) if option and option.keeps <= kept),
            key=lambda k: its_options[k].owned,  # type: ignore[union-attr]
        )
        for layer, its_options in options.items()
    }


def _least(
    costs: dict[Tensor, list[float]],
    edges: Mapping[Tensor, list[tuple[Tensor, str]]],
    options: Options,
) -> frozenset[Tensor]:
    """The tensors to keep, in a forest."""
    kept: dict[Tensor, bool] = {}
    for start in costs:
        if start in kept:
            continue
        order = _from_root(start, edges)
        for t, parent, layer in reversed(order):
            if parent is not None:
                for is_kept in (False, True):
                    costs[parent][is_kept] += min(
                        _beyond(costs, options[layer], t, parent, is_kept, also)
                        for also in (False, True)
                    )
        for t, parent, layer in order:
            if parent is None:
                kept[t] = costs[t][True] < costs[t][False]
            else:
                without, with_it = (
                    _beyond(costs, options[layer], t, parent, kept[parent], also)
                    for also in (False, True)
                )
                kept[t] = with_it < without
    return frozenset(t for t, is_kept in kept.items() if is_kept)


def _from_root(
    start: Tensor, edges: Mapping[Tensor, list[tuple[Tensor, str]]]
) -> list[tuple[Tensor, Tensor | None, str]]:
    """The tensors of a tree, each after its parent, with the layer between the two."""
    order: list[tuple[Tensor, Tensor | None, str]] = [(start, None, "")]
    for t, parent, _ in order:
        order += [(far, t, layer) for far, layer in edges.get(t, ()) if far != parent]
    return order


def _beyond(
    costs: Mapping[Tensor, Sequence[float]],
    its_options: Sequence[Option | None],
    t: Tensor,
    parent: Tensor,
    parent_kept: bool,
    kept: bool,
) -> float:
    """The cost of a tensor, all beyond it, and the layer between it and its parent."""
    ends = [end for end, is_kept in ((t, kept), (parent, parent_kept)) if is_kept]
    return costs[t][kept] + _owned(its_options, ends)


def _owned(its_options: Sequence[Option | None], kept: Iterable[Tensor]) -> float:
    """What a layer owns at least where these tensors, of its own, are kept."""
    kept = frozenset(kept)
    return min((o.owned for o in its_options if o is not None and o.keeps <= kept), default=inf)
