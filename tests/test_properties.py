"""Every property holds for every row of the table, on every backend. Adding a row adds no code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from backends import BACKENDS, JAX, TORCH
from hypothesis import given, settings, strategies as st
from hypothesis.errors import Unsatisfiable
from properties import (
    DERIVATIVES,
    PROPERTIES,
    check_backends_agree,
    check_fails_as_stock,
    check_gradient_equals_stock,
    check_implemented,
    check_output_equals_stock,
    check_rows_of_one_op_agree,
    of_one_op,
)
from strategies import DTYPES, accepted, at_bounds, flawed, is_elementwise, label, wanted

from memsave.spec import TABLE, Layer

#: Activations that are linear in pieces.
PIECEWISE = [row for row in TABLE.values() if is_elementwise(row) and "p" not in row.options]
ROWS = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
ON = pytest.mark.parametrize("backend", BACKENDS, ids=repr)
ROWS_ON = pytest.mark.parametrize(
    ("row", "backend"),
    [(row, backend) for backend in BACKENDS for row in TABLE.values() if backend.checks(row)],
    ids=label,
)


@ON
@ROWS
def test_implemented(backend: Any, row: Layer) -> None:
    check_implemented(backend, row)


@ON
def test_implements_nothing_else(backend: Any) -> None:
    own = {name for name in backend.rows() if "." not in name}  # not those of extensions
    assert own == TABLE.keys()


def holds_for(
    backend: Any, strategy: st.SearchStrategy[Any], check: Callable[..., None], share: float = 1.0
) -> None:
    """Check a property on a share, and the backend's share of that, of the profile's examples."""
    profile = settings()
    examples = max(2, round(profile.max_examples * backend.effort * share))
    try:
        settings(profile, max_examples=examples)(given(strategy)(check))()
    except Unsatisfiable as error:
        raise AssertionError("stock refuses all that is drawn, for example so:") from (
            backend.refusal or error
        )


@pytest.mark.parametrize(
    ("row", "backend", "option", "value"),
    [
        (row, backend, option, value)
        for backend in (TORCH, JAX)
        for row in TABLE.values()
        if backend.checks(row)
        for option, values in row.options.items()
        for value in values
        # (JAX cannot pool backwards by windows that are dilated.)
        if not (backend is JAX and "max_pool" in row.name and (option, value) == ("dilation", 2))
    ],
    ids=str,
)
def test_stock_accepts_every_option(row: Layer, backend: Any, option: str, value: Any) -> None:
    """What it refuses is dropped, and might be a mistake of the rule's primal."""
    alone = replace(row, options={**row.options, option: (value,)}, inplace=False)
    dtypes = ("float64", "float32")
    holds_for(backend, accepted(backend, alone, dtypes=dtypes), lambda case: None, share=0)


@pytest.mark.parametrize(
    ("check", "row", "backend"),
    [
        (check, row, backend)
        for backend in BACKENDS
        for row in TABLE.values()
        for check in PROPERTIES  # (one after another: what stock does in a case is remembered)
        if backend.checks(row, check)
        and (check is not check_rows_of_one_op_agree or len(of_one_op(row)) > 1)
    ],
    ids=label,
)
def test_property(check: Any, row: Layer, backend: Any) -> None:
    cases = accepted(backend, row, **PROPERTIES[check])
    holds_for(backend, cases, lambda case: check(backend, row, case))


@pytest.mark.parametrize("backend", [TORCH, TORCH.in_python()], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", PIECEWISE, ids=label)
def test_at_bounds(row: Layer, dtype: str, backend: Any) -> None:
    """Where a bound is not a number of the dtype, torch rounds it or not. (JAX does.)"""
    cases = [case for case in at_bounds(row, dtype) if backend.accepts(row, case)]
    assert cases
    for case in cases:
        check_output_equals_stock(backend, row, case)
        check_gradient_equals_stock(backend, row, case)


@pytest.mark.parametrize(
    ("check", "backend", "row", "wrt"),
    [
        (check, backend, row, wrt)
        for check in DERIVATIVES
        for backend in BACKENDS
        for row in TABLE.values()
        for wrt in wanted(row)
        if backend.checks(row, check) and (wrt == frozenset(row.reads) or backend.every_mask(check))
    ],
    ids=label,
)
def test_derivative(check: Any, row: Layer, wrt: frozenset[str], backend: Any) -> None:
    cases = accepted(backend, row, wrt=wrt, **DERIVATIVES[check])
    holds_for(backend, cases, lambda case: check(backend, row, case), share=0.5)


@ROWS_ON
def test_fails_as_stock(row: Layer, backend: Any) -> None:
    holds_for(backend, flawed(backend, row), lambda case: check_fails_as_stock(backend, row, case))


@ROWS
@pytest.mark.parametrize("wide", ["float64", "float32"])
def test_backends_agree(row: Layer, wide: str) -> None:
    cases = accepted(TORCH, row, dtypes=(wide,), empty=False, layouts=("contiguous",))
    plain = cases.map(lambda case: replace(case, g_layout="contiguous"))
    both = plain.filter(lambda case: JAX.differentiates(row, case))
    holds_for(JAX, both, lambda case: check_backends_agree(TORCH, JAX, row, case))
