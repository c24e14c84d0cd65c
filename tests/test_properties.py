"""Every property holds for every row of the table, on every backend. Adding a row adds no code."""

from __future__ import annotations

from typing import Any

import pytest
from backends import BACKENDS
from hypothesis import given
from hypothesis import strategies as st
from properties import DERIVATIVES, PROPERTIES, check_fails_as_stock, check_implemented
from strategies import accepted, flawed, wanted

from memsave.spec import TABLE, Layer

ROWS = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
ON = pytest.mark.parametrize("backend", BACKENDS, ids=repr)


@ON
@ROWS
def test_implemented(backend: Any, row: Layer) -> None:
    check_implemented(backend, row)


@ON
def test_implements_nothing_else(backend: Any) -> None:
    assert backend.rows().keys() == TABLE.keys()


@ON
@ROWS
@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
@given(data=st.data())
def test_property(check: Any, row: Layer, backend: Any, data: st.DataObject) -> None:
    check(backend, row, data.draw(accepted(backend, row, **PROPERTIES[check])))


@ON
@pytest.mark.parametrize(
    ("row", "wrt"),
    [(row, wrt) for row in TABLE.values() for wrt in wanted(row)],
    ids=lambda value: value.name if isinstance(value, Layer) else "+".join(sorted(value)),
)
@pytest.mark.parametrize("check", DERIVATIVES, ids=lambda check: check.__name__)
@given(data=st.data())
def test_derivative(
    check: Any, row: Layer, wrt: frozenset[str], backend: Any, data: st.DataObject
) -> None:
    check(backend, row, data.draw(accepted(backend, row, wrt=wrt, **DERIVATIVES[check])))


@ON
@ROWS
@given(data=st.data())
def test_fails_as_stock(row: Layer, backend: Any, data: st.DataObject) -> None:
    check_fails_as_stock(backend, row, data.draw(flawed(backend, row)))
