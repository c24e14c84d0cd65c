"""Drop-ins of the user's own: ``memsave.register`` and ``memsave.unregister``."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from helpers import kept, same, step
from torch import Tensor, fx, nn

import memsave
from memsave import spec
from memsave.layers.module import DROP_INS


class MLP(nn.Module):
    """A gated layer of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class Special(MLP):
    """Derives from it, so may mean something else."""


class SavingMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(memsave.functional.swiglu(self.gate(x), self.up(x)))


@pytest.fixture
def drop_in() -> Iterator[type[nn.Module]]:
    cls = memsave.register(spec.SWIGLU)(SavingMLP)
    yield cls
    if cls in DROP_INS.get(MLP, []):
        memsave.unregister(cls)


def model(cls: type[nn.Module] = MLP) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(cls(), nn.Tanh())


def test_convert_uses_it(drop_in: type[nn.Module]) -> None:
    x = torch.randn(5, 4, requires_grad=True)
    net = memsave.convert(model())
    assert type(net[0]) is drop_in
    assert "memsave.SavingMLP" in repr(net)
    same(step(net, x), step(model(), x))
    one = 5 * 6 * 4
    sizes = [kept(lambda n=n: n(x), [x, *n.parameters()]) for n in (model(), net)]
    assert sizes[0] - sizes[1] == one
    assert ("0", "SavingMLP", "converted", "rows: swiglu") in memsave.coverage(net)
    assert type(memsave.revert(net)[0]) is MLP


def test_by_exact_class(drop_in: type[nn.Module]) -> None:
    net = memsave.convert(model(Special))
    assert type(net[0]) is Special
    (entry,) = [entry for entry in memsave.coverage(net) if entry.name == "0"]
    assert entry == ("0", "Special", "skipped", "subclass of MLP which may mean more than its base")


def test_unregister(drop_in: type[nn.Module]) -> None:
    """What is converted stays so, and can be reverted."""
    before = memsave.convert(model())
    memsave.unregister(drop_in)
    after = memsave.convert(model())
    assert type(after[0]) is MLP
    assert type(before[0]) is drop_in
    assert type(memsave.revert(before)[0]) is MLP
    assert MLP not in DROP_INS
    with pytest.raises(ValueError, match="not registered"):
        memsave.unregister(drop_in)


def test_registered_twice(drop_in: type[nn.Module]) -> None:
    """It is there once."""
    memsave.register(spec.SWIGLU)(drop_in)
    memsave.unregister(drop_in)
    assert type(memsave.convert(model())[0]) is MLP


def test_defined_twice() -> None:
    """As where a notebook's cell runs again: the later class is there alone."""

    def cell() -> type[nn.Module]:
        @memsave.register(spec.SWIGLU)
        class Again(MLP):
            forward = SavingMLP.forward

        return Again

    cell()
    before = memsave.convert(model())
    last = cell()
    try:
        assert DROP_INS[MLP] == [last]
        assert type(memsave.convert(model())[0]) is last
        assert type(memsave.revert(before)[0]) is MLP
        assert type(memsave.convert(before)[0]) is last
    finally:
        memsave.unregister(last)
    assert type(memsave.convert(model())[0]) is MLP


def test_the_last_registered_is_the_default() -> None:
    class Louder(nn.ReLU):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    memsave.register(spec.RELU)(Louder)
    try:
        assert type(memsave.convert(nn.ReLU())) is Louder
    finally:
        memsave.unregister(Louder)
    assert type(memsave.convert(nn.ReLU())) is memsave.nn.ReLU


def test_copies_pickles_and_graphs(drop_in: type[nn.Module]) -> None:
    x = torch.randn(5, 4, requires_grad=True)
    net = memsave.convert(model())
    expected = step(net, x)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other[0]) is drop_in
        same(step(other, x), expected)
    same(step(fx.symbolic_trace(net), x), expected)


class Own(nn.Module):
    pass


class Two(MLP, nn.Identity):
    pass


class OfADropIn(memsave.nn.ReLU):
    pass


@pytest.mark.parametrize(
    ("rows", "cls"),
    [
        ((), SavingMLP),
        (("swiglu",), SavingMLP),
        ((spec.SWIGLU,), Own),
        ((spec.SWIGLU,), Two),
        ((spec.RELU,), OfADropIn),
    ],
)
def test_what_cannot_be_registered(rows, cls) -> None:
    known = {stock: list(candidates) for stock, candidates in DROP_INS.items()}
    with pytest.raises(TypeError):
        memsave.register(*rows)(cls)
    assert known == DROP_INS


def test_only_what_was_registered_can_be_unregistered() -> None:
    for cls in (MLP, nn.SiLU, Own):
        with pytest.raises(ValueError, match="not registered"):
            memsave.unregister(cls)
