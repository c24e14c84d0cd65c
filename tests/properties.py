"""What holds for every row, on every backend, under every mask; each property raises if not.

``PROPERTIES`` says on which cases each is checked. ``test_properties`` checks them on the rows as
they are, ``test_properties_can_fail`` on broken ones. All tolerances are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from arrays import Array
from strategies import Case, fits, is_elementwise, wanted

from memsave.spec import TABLE, Layer

#: Largest difference of a gradient from stock's, as a part of the gradient's largest element (or
#: of 1, where that is smaller: the values are of order 1): that of sums of a thousand terms, in
#: the coarsest dtype of the arguments, as stock may round to that in between.
TOLERANCES = {
    "float64": 1e-12,
    "float32": 1e-4,
    "bfloat16": 4e-2,
    "float16": 4e-3,
}
#: The same between backends, which are to agree where their stock ops do: PyTorch's constants are
#: of float32 in places (the sixth of hardsigmoid).
BETWEEN_BACKENDS = 1e-8


def check_implemented(backend: Any, row: Layer) -> None:
    """The backend has a rule for the row, and means this very row."""
    assert backend.rows().get(row.name) == row, f"{backend} does not implement {row}"


def check_output_equals_stock(backend: Any, row: Layer, case: Case) -> None:
    """Outputs, and arguments afterwards, are those of stock to the bit, in the same layout."""
    ours, stock = backend.run(row, case), backend.run(row, case, stock=True)
    assert len(ours.outputs) == len(stock.outputs)
    for mine, its in zip(ours.outputs, stock.outputs, strict=True):
        _assert_same(mine, its)
        assert mine.layout == its.layout
    for name in stock.args:
        _assert_same(ours.args[name], stock.args[name])
    assert ours.drawn == stock.drawn, "drew other random numbers than stock"


def check_gradient_equals_stock(backend: Any, row: Layer, case: Case) -> None:
    """Gradients are those of stock: to the bit where they only select."""
    ours, stock = backend.run(row, case), backend.run(row, case, stock=True)
    try:
        _assert_equal_gradients(row, case, ours.grads, stock.grads)
    except AssertionError:
        if is_elementwise(row) or not {"bfloat16", "float16"} & set(case.dtypes.values()):
            raise
        # It may be stock that is off, which in JAX adds up in 16 bits.
        wide = dict.fromkeys(case.dtypes.keys() - case.indices.keys(), "float64")
        exact = backend.run(row, replace(case, dtypes={**case.dtypes, **wide}), stock=True).grads
        exact = {n: grad._replace(dtype=ours.grads[n].dtype) for n, grad in exact.items()}
        _assert_equal_gradients(row, case, ours.grads, exact)


def check_fails_as_stock(backend: Any, row: Layer, case: Case) -> None:
    """Forward raises stock's type of error, or returns stock's shapes and dtypes; and where stock
    takes what the row's axes do not fit (it broadcasts, say), the gradients are stock's. (A row
    for wide dtypes never gets narrow ones, which are drawn here.)
    """
    ours, stock = backend.outcome(row, case), backend.outcome(row, case, stock=True)
    assert ours == stock, f"{ours}, stock: {stock}"
    if not isinstance(stock, type) and not row.wide and backend.accepts(row, case):
        check_gradient_equals_stock(backend, row, case)


def check_keeps_what_the_table_says(backend: Any, row: Layer, case: Case) -> None:
    """The saved tensors are the residuals of the row, to the bit."""
    case = _own(backend, row, case)
    kept, predicted = backend.kept(row, case), backend.predicted(row, case)
    assert kept == predicted, f"keeps {kept}, the table says {predicted}"


def check_nothing_else_stays_alive(backend: Any, row: Layer, case: Case) -> None:
    """Of all arrays that a call saw or made, the graph holds those that the row says."""
    case = _own(backend, row, case)
    alive, predicted = backend.alive(row, case), backend.predicted(row, case)
    assert alive.named.keys() <= predicted.named.keys(), f"alive: {alive}, not {predicted}"
    assert Counter(alive.extras) <= Counter(predicted.extras), f"alive: {alive}, not {predicted}"


def check_needs_everything_it_keeps(backend: Any, row: Layer, case: Case) -> None:
    """A rule from which one residual is withheld fails with the name of it.

    (That a stock op reads what it keeps is not ours to show.)
    """
    if not backend.has_backward(row):
        return
    for name in row.saves(case.wrt):
        less = replace(
            row,
            reads={arg: tuple(n for n in read if n != name) for arg, read in row.reads.items()},
            extras={n: extra for n, extra in row.extras.items() if n != name},
        )
        error = backend.following(less).error(less, case)
        assert isinstance(error, backend.missing_residual), (
            f"{row} keeps {name!r} for {sorted(case.wrt)} in vain; without it: {error}"
        )
        assert repr(name) in str(error)


def check_smaller_mask_keeps_no_more(backend: Any, row: Layer, case: Case) -> None:
    """Of two masks, one inside the other, the smaller one keeps no more: by table and measured."""
    masks = [mask for mask in wanted(row) if mask <= case.wrt]
    some = [replace(case, wrt=mask) for mask in masks]
    for measure in (backend.predicted, backend.kept):
        sizes = {one.wrt: measure(row, one).total() for one in some}
        for small in masks:
            for large in masks:
                if small < large:
                    assert sizes[small] <= sizes[large], f"{measure.__name__}: {sizes}"


def of_one_op(row: Layer) -> list[Layer]:
    """The rows of an op, this one among them."""
    return [other for other in TABLE.values() if other.op == row.op]


def check_rows_of_one_op_agree(backend: Any, row: Layer, case: Case) -> None:
    """Rows of one op have the same outputs and the same gradients."""
    dtypes = case.dtypes.values()
    others = [other for other in of_one_op(row) if all(fits(other, dtype) for dtype in dtypes)]
    results = [backend.run(other, case) for other in others]
    for one, other in pairwise(results):
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            _assert_same(mine, its)
        _assert_equal_gradients(row, case, one.grads, other.grads)


def check_backends_agree(torch: Any, jax: Any, row: Layer, case: Case) -> None:
    """The same numbers give the same output and gradients, and the same is kept, by name and bits.

    But for what is a backend's own: random numbers, and along which axis bits are packed.
    """
    ours, others = torch.kept(row, case), jax.kept(row, case)
    assert ours.named == others.named
    whole = [extra for extra in row.extras.values() if not extra.bits]
    if len(whole) == len(row.extras) and not jax.draws(row):
        assert ours.extras == others.extras
    assert len(ours.extras) == len(others.extras)
    if jax.draws(row):
        return
    one, other = torch.run(row, case), jax.run(row, case)
    _assert_close(case, one.outputs[0], other.outputs[0], BETWEEN_BACKENDS)
    assert one.grads.keys() == other.grads.keys()
    for name in one.grads:
        _assert_close(case, one.grads[name], other.grads[name], BETWEEN_BACKENDS)


def check_backward_twice(backend: Any, row: Layer, case: Case) -> None:
    """A second backward through the same graph gives the same."""
    first, second = backend.run_twice(row, case)
    for name in first:
        _assert_same(first[name], second[name])


def check_batched_backward(backend: Any, row: Layer, case: Case) -> None:
    """Several incoming gradients at once give what they give one by one."""
    try:
        batched, loop = backend.run_batched(row, case)
    except RuntimeError:
        if "circular" not in case.options.values():
            raise
        with pytest.raises(RuntimeError):
            backend.run_batched(row, case, stock=True)
        return  # torch refuses to pad nothing circularly
    for name in loop:
        _assert_close(case, batched[name], loop[name])


def check_gradient(backend: Any, row: Layer, case: Case) -> None:
    """The gradient is that of finite differences."""
    backend.check_derivatives(row, case, order=1)


def check_second_derivative(backend: Any, row: Layer, case: Case) -> None:
    """The derivative of the gradient is that of finite differences."""
    backend.check_derivatives(row, case, order=2)


#: On which cases each property is checked (arguments of ``strategies.cases``).
PROPERTIES: dict[Callable[..., None], dict[str, Any]] = {
    check_output_equals_stock: {"special": True},
    check_gradient_equals_stock: {"special": True},
    check_keeps_what_the_table_says: {"empty": False},
    check_nothing_else_stays_alive: {"empty": False, "largest": 3},
    check_needs_everything_it_keeps: {"empty": False},
    check_smaller_mask_keeps_no_more: {"empty": False},
    check_rows_of_one_op_agree: {"special": True},
    check_backward_twice: {"special": True},
    check_batched_backward: {"dtypes": ("float64",)},
}
#: The same for those that are checked on every mask.
DERIVATIVES: dict[Callable[..., None], dict[str, Any]] = {
    check_gradient: {"dtypes": ("float64",), "largest": 3, "empty": False},
    check_second_derivative: {"dtypes": ("float64",), "largest": 3, "empty": False},
}


def _own(backend: Any, row: Layer, case: Case) -> Case:
    """The case in a layout for which what is kept is the backend's own doing.

    A stock op alone may keep a contiguous copy of an argument, in the argument's place.
    """
    return case if backend.has_backward(row) else replace(case, layout="contiguous")


def _assert_equal_gradients(
    row: Layer, case: Case, ours: dict[str, Array], its: dict[str, Array]
) -> None:
    assert ours.keys() == its.keys()
    # What a row for wide dtypes reads is rounded to them, and maybe multiplied by a large rstd.
    times = 10 if any(other.wide for other in of_one_op(row)) else 1
    for name in ours:
        if is_elementwise(row):
            _assert_same(ours[name], its[name])
        else:
            _assert_close(case, ours[name], its[name], times=times)


def _assert_same(ours: Array, its: Array) -> None:
    """Equal to the bit, except that one nan is as good as another."""
    assert (ours.dtype, ours.shape) == (its.dtype, its.shape)
    number = ~np.isnan(its.values)
    assert np.array_equal(ours.values, its.values, equal_nan=True), f"{ours}, not {its}"
    assert np.array_equal(np.signbit(ours.values)[number], np.signbit(its.values)[number])


def _assert_close(
    case: Case, ours: Array, its: Array, slack: float = 0.0, times: float = 1
) -> None:
    assert (ours.dtype, ours.shape) == (its.dtype, its.shape)
    finite = np.isfinite(its.values)
    assert np.array_equal(ours.values[~finite], its.values[~finite], equal_nan=True)
    scale = np.abs(its.values[finite]).max(initial=1.0)
    error = np.abs(ours.values[finite] - its.values[finite]).max(initial=0.0)
    dtypes = case.dtypes.keys() - case.indices.keys()
    tolerance = times * max(slack, *(TOLERANCES[case.dtypes[name]] for name in dtypes))
    assert error <= tolerance * scale, f"off by {error}: {ours}, not {its}"
