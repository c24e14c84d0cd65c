"""Who computes bits best: ReLU's forward and backward on the CPU, by whatever could; and who calls.

``y`` and one bit per element from ``x``; then the gradient from ``g`` and the bits. All are taken
in turn, and times are medians of ratios to stock (``relu`` and ``threshold_backward``, which keep
``y`` instead). What lost is here for the record: :mod:`memsave.kernels` has the reference, which
runs everywhere, and the C.

- operations of torch: :mod:`memsave.kernels.reference`
- C: :mod:`memsave.kernels.native`
- torch.compile: the reference, fused
- numba: the same loops, where it is installed (``pip install numba``)
- numpy: ``packbits`` and a product with ``unpackbits``

Then a whole step, by autograd: C, called by the rule, which is an autograd function in Python; and
by a node, which is one of C++ (:mod:`memsave.kernels.nodes`, where it is compiled).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from memsave import function, functional, kernels, spec
from memsave.kernels import reference
from memsave.kernels.reference import Like

from .harness import Experiment
from .measure import compare, keep_freed_memory
from .render import AGAIN, quartiles, table
from .results import Record


class Kernel(NamedTuple):
    """A forward ``x -> y, kept`` and a backward ``g, kept -> dx``."""

    forward: Callable[[Tensor], tuple[Tensor, Any]]
    backward: Callable[[Tensor, Any], Tensor]


def _stock(x: Tensor) -> Kernel:
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x)
        return y, y

    return Kernel(forward, lambda g, y: torch.ops.aten.threshold_backward(g, y, 0))


def _operations(x: Tensor) -> Kernel:
    like = Like.of(x)
    return Kernel(
        lambda x: reference.relu(x, False), lambda g, bits: reference.select(g, bits, like)
    )


def _c(x: Tensor) -> Kernel:
    native: Any = importlib.import_module("memsave.kernels.native")  # if it is compiled
    like = Like.of(x)
    return Kernel(lambda x: native.relu(x, False), lambda g, bits: native.select(g, bits, like))


def _compiled(x: Tensor) -> Kernel:
    like = Like.of(x)

    def backward(g: Tensor, bits: Tensor) -> Tensor:
        return torch.where(reference.unpack(bits, like, True, torch.bool), g, 0.0)

    torch.compiler.reset()
    forward = torch.compile(lambda x: reference.relu(x, False), fullgraph=True, dynamic=False)
    return Kernel(forward, torch.compile(backward, fullgraph=True, dynamic=False))


def _numpy(x: Tensor) -> Kernel:
    shape = x.shape

    def forward(x: Tensor) -> tuple[Tensor, np.ndarray]:
        y = torch.relu(x)
        return y, np.packbits(y.numpy() > 0)

    def backward(g: Tensor, bits: np.ndarray) -> Tensor:
        flags = torch.from_numpy(np.unpackbits(bits, count=g.numel()))
        return g * flags.view(shape)

    return Kernel(forward, backward)


def _numba(x: Tensor) -> Kernel:
    import numba  # type: ignore[import-not-found]

    @numba.njit(parallel=True)
    def loop_forward(x: Any, y: Any, bits: Any) -> None:
        for byte in numba.prange(bits.size):
            found = 0
            for bit in range(8):
                place = 8 * byte + bit
                if place < x.size:
                    v = x[place]
                    y[place] = np.float32(0) if v < 0 else v
                    found |= (not v <= 0) << bit
            bits[byte] = found

    @numba.njit(parallel=True)
    def loop_backward(g: Any, bits: Any, dx: Any) -> None:
        for byte in numba.prange(bits.size):
            for bit in range(8):
                place = 8 * byte + bit
                if place < g.size:
                    dx[place] = g[place] if bits[byte] >> bit & 1 else np.float32(0)

    numba.set_num_threads(torch.get_num_threads())

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8)
        loop_forward(x.view(-1).numpy(), y.view(-1).numpy(), bits.numpy())
        return y, bits

    def backward(g: Tensor, bits: Tensor) -> Tensor:
        dx = torch.empty_like(g)
        loop_backward(g.view(-1).numpy(), bits.numpy(), dx.view(-1).numpy())
        return dx

    return Kernel(forward, backward)


KERNELS: dict[str, Callable[[Tensor], Kernel]] = {
    "stock": _stock,
    "operations of torch": _operations,
    "C": _c,
    "torch.compile": _compiled,
    "numba": _numba,
    "numpy": _numpy,
}


NODE = "node"
#: Of few rows so many calls are timed as one.
FEW_ROWS, CALLS = 4, 100


def _steps(x: Tensor, g: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Forward and backward of layers."""
    x = x.clone().requires_grad_()
    rule = function.RULES[spec.RELU.name]
    layers = {"stock": torch.relu, "C": function.differentiable(rule._replace(node=None))}
    if kernels.nodes is not None:
        layers[NODE] = functional.relu
    return {
        name: lambda layer=layer: torch.autograd.grad(layer(x), x, g)[0]
        for name, layer in layers.items()
    }


@dataclass(frozen=True)
class Config:
    """At which sizes (rows of 1024 float32), and how often."""

    rows: tuple[int, ...] = (4, 256, 1024, 25600)
    repeats: int = 41


@dataclass(frozen=True)
class Case:
    """A size."""

    rows: int
    repeats: int


def cases(config: Config) -> Iterator[Case]:
    """By size."""
    for rows in config.rows:
        yield Case(rows, config.repeats)


def measure(case: Case) -> dict[str, Any]:
    """Times of both passes, and of steps; whoever gives another gradient than stock is an error."""
    keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(case.rows, 1024, generator=generator) for _ in range(2))
    steps: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "backward": {}}
    expected: tuple[Tensor, Tensor] | None = None
    for name, make in KERNELS.items():
        try:
            kernel = make(x)
        except ImportError:
            continue
        y, kept = kernel.forward(x)
        dx = kernel.backward(g, kept)
        expected = expected or (y, dx)
        if not (y.equal(expected[0]) and dx.equal(expected[1])):
            raise AssertionError(f"{name} computes something else")
        steps["forward"][name] = lambda kernel=kernel: kernel.forward(x)
        steps["backward"][name] = lambda kernel=kernel, kept=kept: kernel.backward(g, kept)
    assert expected is not None
    steps["step"] = dict(_steps(x, g))
    for name, step in steps["step"].items():
        if not step().equal(expected[1]):
            raise AssertionError(f"{name} computes something else")
    return {
        name: compare({**each, AGAIN: each["stock"]}, case.repeats, calls=_calls(case))
        for name, each in steps.items()
    }


def _calls(case: Case) -> int:
    """That are timed as one."""
    return CALLS if case.rows <= FEW_ROWS else 1


def show(records: Sequence[Record[Case]]) -> str:
    """A row per size and pass, a column per kernel."""
    columns = (*list(KERNELS)[1:], NODE, AGAIN)
    return table(
        ("MiB", "pass", "microseconds of stock", *columns),
        (
            (
                f"{record.case.rows / 256:g}",
                name,
                f"{times['stock']['seconds'] * 1e6:.3g}",
                *(_cell(times, column) for column in columns),
            )
            for record in records
            for name, times in record.figures.items()
        ),
    )


def _cell(times: dict[str, Any], kernel: str) -> str:
    if kernel not in times:
        return ""
    return f"{times[kernel]['ratio']:.2f} ({quartiles(times[kernel])})"


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config((4,), repeats=3),
        "quick": Config((4, 1024), repeats=11),
        "default": Config(),
    },
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    accelerator=False,
)
