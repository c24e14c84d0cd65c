"""The PyTorch backend, as the properties ask it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from arrays import Array, Kept, Result, remembered
from helpers import seed
from strategies import LAYOUTS, Case
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck, gradgradcheck
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memsave.functional  # noqa: F401  (defines the rules)
from memsave import function
from memsave.function import Rule
from memsave.spec import Layer, MissingResidual

#: Layouts of five and four axes that store the channels last.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Torch:
    """The PyTorch backend: by nodes of C++ where a rule has one, if they are compiled."""

    name = "torch"
    layouts = LAYOUTS
    effort = 1.0
    missing_residual = MissingResidual

    def __init__(self, rules: Mapping[str, Rule] = function.RULES) -> None:
        self.rules = rules
        #: Why stock refused what it last refused.
        self.refusal: Exception | None = None
        self._layers: dict[str, Callable[..., Any]] = {}

    def __repr__(self) -> str:
        return self.name

    def rows(self) -> dict[str, Layer]:
        """The rows that it implements."""
        return {name: rule.row for name, rule in self.rules.items()}

    def checks(self, row: Layer, check: Any = None) -> bool:
        """Whether to check a row: in every way, or by a property."""
        return True

    def in_python(self) -> Torch:
        """The same by rules alone, for the rows that have a node."""
        return TorchInPython({name: rule._replace(node=None) for name, rule in self.rules.items()})

    def every_mask(self, check: Any) -> bool:
        """Whether to check a property of derivatives on every mask, or on the largest alone."""
        return True

    def has_backward(self, row: Layer) -> bool:
        """Whether it has a backward of its own for a row, or stock's."""
        return row.name in self.rules and self.rules[row.name].bwd is not None

    def changed(self, name: str, **fields: Any) -> Torch:
        """The same, with another rule for the row of this name (which a node would not run)."""
        return Torch({**self.rules, name: self.rules[name]._replace(**fields, node=None)})

    def following(self, row: Layer) -> Torch:
        """The same, with this row in place of the one of its name, and no stock op for it."""
        return self.changed(row.name, row=row, stock_keeps=None)

    def layer(self, row: Layer) -> Callable[..., Any]:
        if row.name not in self._layers:
            self._layers[row.name] = function.differentiable(self.rules[row.name])
        return self._layers[row.name]

    def stock(self, row: Layer) -> Callable[..., Any]:
        return self.rules[row.name].primal

    def crashes(self, case: Case) -> bool:
        """Whether torch itself may crash: oneDNN does in a bfloat16 convolution (torch 2.13), e.g.

        >>> weight = torch.ones(2, 6, 1, 3, 1, dtype=torch.bfloat16)
        >>> weight = weight.to(memory_format=torch.channels_last_3d)
        >>> F.conv3d(torch.ones(1, 6, 6, 6, 1, dtype=torch.bfloat16), weight, None, 2, 1, 2)
        """
        channels_last = case.layout in ("channels_last", "sliced")
        if channels_last and "num_groups" in case.options and "x" not in case.wrt:
            # group_norm in channels_last_3d does without the gradient of x:
            # >>> x = torch.ones(3, 4, 3, 3, 3).to(memory_format=torch.channels_last_3d)
            # >>> weight = torch.ones(4, requires_grad=True)
            # >>> F.group_norm(x, 1, weight, torch.zeros(4)).sum().backward()
            return True
        return (
            channels_last
            and "bfloat16" in case.dtypes.values()
            and any(shape and len(shape) == 5 and 1 in shape[2:] for shape in case.shapes.values())
        )

    def accepts(self, row: Layer, case: Case, *, empty: bool = True) -> bool:
        """Whether the stock op accepts a case, and what it does is defined.

        Not so for max_pool. Of a window outside of the input, stock gives ``-inf`` and an index
        with which its backward writes outside of its memory; in a channels_last window of nothing
        but ``-inf``, the index of another place.
        """
        if self.crashes(case):
            return False
        try:
            plain = replace(case, special=False, layout="contiguous")
            outputs = _call(self.stock(row), _args(_leaves(plain), plain), plain)
            if not all(output.isfinite().all() for output in outputs):
                return False
            if not (empty or outputs[0].numel()):
                return False
            result = self.run(row, case, stock=True)
            if not case.special:
                return True
            # Its kernels for vectors and for single elements disagree about nan in places.
            plainly = {n: n != "inplace" and value for n, value in case.options.items()}
            others = [
                self.run(row, replace(case, layout="contiguous"), stock=True),
                self.run(row, replace(case, layout="strided", options=plainly), stock=True),
            ]
            return all(
                np.array_equal(one.values, two.values, equal_nan=True)
                for other in others
                for one, two in zip(result.results(), other.results(), strict=True)
            )
        except Warning:
            raise
        except Exception as error:
            self.refusal = error
            return False

    def outcome(self, row: Layer, case: Case, *, stock: bool = False) -> Any:
        """Of forward: type of the error, or dtype, shape and layout of the outputs."""
        leaves = _leaves(case)
        try:
            outputs = _call(
                self.stock(row) if stock else self.layer(row), _args(leaves, case), case
            )
        except Warning:
            raise
        except Exception as error:
            return type(error)
        return [_array(output)[:3] for output in outputs]

    @remembered
    def run(self, row: Layer, case: Case, *, stock: bool = False) -> Result:
        """Forward and backward."""
        leaves = _leaves(case)
        args = _args(leaves, case)
        outputs = _call(self.stock(row) if stock else self.layer(row), args, case)
        g = _g(outputs[0], case)
        # (Of one example, stock's instance_norm misreads one that is channels_last, in torch 2.13.)
        grads = _gradients(outputs[0], leaves, case, g.contiguous() if stock else g)
        return Result(
            [_array(output) for output in outputs],
            {name: _array(arg) for name, arg in args.items() if arg is not None},
            grads,
            torch.rand(()).item(),
        )

    def error(self, row: Layer, case: Case) -> Exception | None:
        """What forward or backward raises, if anything."""
        try:
            self.run(row, case)
        except Exception as error:
            return error
        return None

    def predicted(self, row: Layer, case: Case) -> Kept:
        """What the table says that a call keeps."""
        args = _args(_leaves(case), case)
        with torch.no_grad():
            y, extras = self.rules[row.name].fwd(case.wrt, *args.values(), **case.options)
        arrays = {**args, "y": y[0] if isinstance(y, tuple) else y, **extras}
        shapes = {name: None if a is None else tuple(a.shape) for name, a in arrays.items()}
        bits = {name: 8 * a.element_size() for name, a in arrays.items() if a is not None}
        saved = row.saved_bits(case.wrt, shapes, bits, case.options, "storage")
        named = {name: size for name, size in saved.items() if name not in row.extras}
        return Kept.of(named, [size for name, size in saved.items() if name in row.extras])

    def kept(self, row: Layer, case: Case) -> Kept:
        """What a call keeps, as hooks on saved tensors see it."""
        saved: list[Tensor] = []
        args = _args(_leaves(case), case)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
        ):
            outputs = _call(self.layer(row), args, case)
        names = {_storage(a): name for name, a in _named(args, outputs).items()}
        named = {names[_storage(t)]: _bits(t) for t in saved if _storage(t) in names}
        extras = {_storage(t): 8 * t.untyped_storage().nbytes() for t in saved}
        return Kept.of(named, [size for key, size in extras.items() if key not in names])

    def alive(self, row: Layer, case: Case) -> Kept:
        """What lives on in the graph, however it is kept, once the caller has dropped all else."""
        leaves = _leaves(case)
        with Births():  # makes what is cached for all calls, by the kernels that modes can see
            _call(self.layer(row), _args(leaves, case), case)
        args = _args(leaves, case)
        with Births() as births:
            outputs = _call(self.layer(row), args, case)
        # Of what follows: in torch 2.11 a Python node does not live by being referred to.
        graph = outputs[0].sum().grad_fn
        storages = {
            name: (_storage(array), StorageWeakRef(array.untyped_storage()), _bits(array))
            for name, array in _named(args, outputs).items()
        }
        del args, outputs
        named = {name: bits for name, (_, ref, bits) in storages.items() if not ref.expired()}
        known = {key for key, _, _ in storages.values()}
        extras = [
            bits
            for key, (ref, bits) in births.born.items()
            if key not in known and not ref.expired()
        ]
        assert graph is not None
        return Kept.of(named, extras)

    def run_twice(self, row: Layer, case: Case) -> tuple[dict[str, Array], dict[str, Array]]:
        """The gradients of two backwards through one graph."""
        leaves = _leaves(case)
        y = _call(self.layer(row), _args(leaves, case), case)[0]
        g = _g(y, case)
        return _gradients(y, leaves, case, g, retain_graph=True), _gradients(y, leaves, case, g)

    def run_batched(
        self, row: Layer, case: Case, *, stock: bool = False
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """The gradients for three incoming ones at once, and one by one."""
        leaves = _leaves(case)
        y = _call(self.stock(row) if stock else self.layer(row), _args(leaves, case), case)[0]
        g = _g(y, case)
        gs = torch.stack([g, -2 * g, g.flip(0) if g.ndim else g])
        loop = [torch.autograd.grad(y, _wanted(leaves, case), one, retain_graph=True) for one in gs]
        batched = torch.autograd.grad(y, _wanted(leaves, case), gs, is_grads_batched=True)
        names = sorted(case.wrt)
        return (
            {name: _array(grad) for name, grad in zip(names, batched, strict=True)},
            {
                name: _array(torch.stack(grads))
                for name, grads in zip(names, zip(*loop, strict=True), strict=True)
            },
        )

    def check_derivatives(self, row: Layer, case: Case, *, order: int) -> None:
        """Compare the derivatives of some order with finite differences of those before."""
        leaves = _leaves(case)
        names = sorted(case.wrt)

        def of_wanted(*wanted: Tensor) -> Tensor:
            args = _args({**leaves, **dict(zip(names, wanted, strict=True))}, case)
            return _call(self.layer(row), args, case)[0]

        check = {1: gradcheck, 2: gradgradcheck}[order]
        try:
            check(of_wanted, _wanted(leaves, case), fast_mode=True)
        except GradcheckError as error:
            raise AssertionError(f"{row} {case}: {error}") from error


class Births(TorchDispatchMode):
    """Weak references to the storages of all that torch ops return."""

    def __init__(self) -> None:
        super().__init__()
        self.born: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.born[storage._cdata] = (StorageWeakRef(storage), 8 * storage.nbytes())
        return result


class TorchInPython(Torch):
    """The PyTorch backend without nodes, where it would have them."""

    name = "torch_in_python"
    effort = 0.5

    def checks(self, row: Layer, check: Any = None) -> bool:
        """Whether the row has a node, so that :class:`Torch` leaves out the rule."""
        rule = function.RULES.get(row.name)
        return rule is not None and rule.node is not None


def _leaves(case: Case) -> dict[str, Tensor | None]:
    return {
        name: None
        if shape is None
        else torch.tensor(
            case.values(name, shape), dtype=getattr(torch, case.dtypes[name])
        ).requires_grad_(name in case.wrt)
        for name, shape in case.shapes.items()
    }


def _args(leaves: Mapping[str, Tensor | None], case: Case) -> dict[str, Tensor | None]:
    """Copies of the leaves, as a model's activations are: nothing else keeps them alive."""
    return {
        name: None if leaf is None else _laid_out(leaf, case.layout)
        for name, leaf in leaves.items()
    }


def _laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy with the layout, where its number of axes allows."""
    if layout == "channels_last" and tensor.ndim in CHANNELS_LAST:
        return tensor.clone(memory_format=CHANNELS_LAST[tensor.ndim])
    if layout == "sliced" and tensor.ndim in CHANNELS_LAST:
        both = torch.cat([tensor, tensor], 1).contiguous(memory_format=CHANNELS_LAST[tensor.ndim])
        return both[:, : tensor.shape[1]]
    if layout == "transposed" and tensor.ndim > 1:
        return tensor.mT.clone(memory_format=torch.contiguous_format).mT
    if layout == "strided":
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    if layout == "expanded" and tensor.numel():
        return tensor.flatten()[0].expand(tensor.shape)
    return tensor.clone()


def _call(
    function: Callable[..., Any], args: Mapping[str, Tensor | None], case: Case
) -> tuple[Tensor, ...]:
    seed(case.seed)
    result = function(*args.values(), **case.options)
    return result if isinstance(result, tuple) else (result,)


def _g(y: Tensor, case: Case) -> Tensor:
    """The incoming gradient."""
    values = torch.tensor(case.values("g", tuple(y.shape)), dtype=y.dtype)
    return _laid_out(values, case.g_layout)


def _wanted(leaves: Mapping[str, Tensor | None], case: Case) -> list[Tensor]:
    return [leaf for name in sorted(case.wrt) if (leaf := leaves[name]) is not None]


def _gradients(
    y: Tensor, leaves: Mapping[str, Tensor | None], case: Case, g: Tensor, **options: Any
) -> dict[str, Array]:
    grads = torch.autograd.grad(y, _wanted(leaves, case), g, **options)
    return {name: _array(grad) for name, grad in zip(sorted(case.wrt), grads, strict=True)}


def _array(tensor: Tensor) -> Array:
    values = tensor.detach().double().numpy().copy()
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    layout = tuple(stride if size > 1 else 0 for stride, size in strides) if tensor.numel() else ()
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), layout, values)


def _named(args: Mapping[str, Tensor | None], outputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Arguments and ``y``; what ``y`` has overwritten is ``y``."""
    y = outputs[0]
    present = {name: arg for name, arg in args.items() if arg is not None}
    return {**{n: a for n, a in present.items() if _storage(a) != _storage(y)}, "y": y}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bits(tensor: Tensor) -> int:
    """Of the elements that differ: an expanded axis is stored once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return 8 * math.prod(sizes) * tensor.element_size() if tensor.numel() else 0
