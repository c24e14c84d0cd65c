"""The table contradicts itself nowhere, counts bits rightly, and needs no framework."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from memsave.spec import TABLE, Extra, Layer, Packing, adaptive_kernel, offset_bits

ROWS = pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)

#: A row with everything: arguments of one and several axes, an option in an axis, both extras.
GATE: dict[str, Any] = {
    "name": "gate",
    "args": {"x": "*n i", "weight": "o i/groups", "bias": "o", "mean": "i"},
    "y": "*n o",
    "reads": {"x": ("weight", "sign"), "weight": ("x", "y", "norm"), "bias": ()},
    "extras": {"sign": Extra("*n o", bits=1), "norm": Extra("*n")},
    "optional": ("bias",),
    "options": {"groups": (1, 2)},
}
SHAPES = {"x": (2, 3, 4), "weight": (5, 2), "bias": (5,), "mean": (4,), "y": (2, 3, 5)}
BITS = {"x": 32, "weight": 16, "bias": 16, "mean": 16, "y": 32, "norm": 64}
OPTIONS = {"groups": 2}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"extras": {**GATE["extras"], "bias": Extra("o")}}, "the name of an argument"),
        ({"extras": {**GATE["extras"], "y": Extra("o")}}, "or of the output"),
        ({"reads": {"scale": ()}}, "reads for 'scale', which is no argument"),
        ({"reads": {"x": ("scale",)}}, "of 'x' reads 'scale', which the row does not declare"),
        ({"extras": {**GATE["extras"], "scale": Extra("o")}}, "extra 'scale' is read by no"),
        ({"optional": ("scale",)}, "the optional 'scale' is no argument"),
        ({"y": "*n *s"}, "more than one starred axis"),
        ({"options": {"scale": ()}}, "option 'scale' has no value"),
        ({"inplace": True}, "inplace, which is no option"),
    ],
)
def test_contradiction_fails_by_name(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        Layer(**{**GATE, **fields})
    assert "row 'gate'" in str(error.value)


def test_row_is_frozen() -> None:
    row = Layer(**GATE)
    with pytest.raises(FrozenInstanceError):
        row.y = "*n"  # type: ignore[misc]
    with pytest.raises(TypeError):
        row.reads["x"] = ()  # type: ignore[index]


def test_op_is_the_name_unless_given() -> None:
    assert Layer(**GATE).op == "gate"
    assert Layer(**GATE, op="multiply").op == "multiply"


def test_names_of_the_table_are_those_of_its_rows() -> None:
    assert all(row.name == name for name, row in TABLE.items())


@ROWS
def test_masks_are_all_subsets(row: Layer) -> None:
    masks = row.masks()
    assert len(masks) == len({*masks}) == 2 ** len(row.reads)
    assert all(mask <= row.reads.keys() for mask in masks)


@ROWS
def test_saves_the_union_of_what_is_read_in_the_order_declared(row: Layer) -> None:
    order = [*row.args, "y", *row.extras]
    for wrt in row.masks():
        saves = row.saves(wrt)
        assert {*saves} == {name for arg in wrt for name in row.reads[arg]}
        assert [*saves] == sorted(saves, key=order.index)


def test_saves_nothing_for_no_gradient() -> None:
    assert Layer(**GATE).saves(frozenset()) == ()


@pytest.mark.parametrize("name", ["mean", "scale"])
def test_mask_of_something_without_gradient_fails(name: str) -> None:
    with pytest.raises(ValueError, match=f"'gate' has gradients for .* not .*{name}"):
        Layer(**GATE).saves(frozenset({"x", name}))


def test_reason_names_gradients_and_what_they_read() -> None:
    reason = Layer(**GATE).reason({"bias", "x"})
    assert reason == "x reads weight, sign; bias reads nothing"


@pytest.mark.parametrize(("packing", "sign"), [("storage", 32), ("last", 48)])
def test_bits_of_packed_extras(packing: Packing, sign: int) -> None:
    """30 bits are 4 bytes over the whole array, and a byte for each of the 6 last axes."""
    row = Layer(**GATE)
    saved = row.saved_bits({"x"}, SHAPES, BITS, OPTIONS, packing)
    assert saved == {"weight": 160, "sign": sign}


def test_bits_of_everything() -> None:
    saved = Layer(**GATE).saved_bits({"x", "weight", "bias"}, SHAPES, BITS, OPTIONS)
    assert saved == {"x": 768, "weight": 160, "y": 960, "sign": 32, "norm": 384}


def test_absent_argument_costs_nothing() -> None:
    row = Layer(**{**GATE, "reads": {"x": ("bias",)}, "extras": {}})
    assert row.saved_bits({"x"}, {**SHAPES, "bias": None}, BITS, OPTIONS) == {}


@pytest.mark.parametrize("packing", ["storage", "last"])
def test_bits_of_a_scalar_and_of_nothing(packing: Packing) -> None:
    row = TABLE["relu"]
    for shape, bits in (((), 8), ((0, 3), 0), ((3, 0), 0)):
        shapes = {"x": shape, "y": shape}
        assert row.saved_bits({"x"}, shapes, {}, packing=packing) == {"positive": bits}


def test_bits_that_depend_on_an_option() -> None:
    shapes = {"x": (1, 64, 64), "y": (1, 4, 4)}
    for size, bits in ((2, 8), (16, 8), (17, 16), (182, 32), ((2, 128), 8), ((2, 129), 16)):
        saved = TABLE["max_pool2d"].saved_bits({"x"}, shapes, {}, {"kernel_size": size})
        assert saved == {"offsets": 16 * bits}


@pytest.mark.parametrize(
    "kernel", [(1,), (16, 16), (17, 16), (32, 32, 32), (33, 32, 32), (2**31 + 1,)]
)
def test_offset_bits_suffice(kernel: tuple[int, ...]) -> None:
    """uint8, or a signed integer, holds every offset; and none smaller does."""
    bits = offset_bits(kernel)
    capacity = {8: 2**8, 16: 2**15, 32: 2**31, 64: 2**63}
    places = 1
    for size in kernel:
        places *= size
    assert places <= capacity[bits]
    assert all(places > capacity[less] for less in capacity if less < bits)


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"bias": (6,)}, r"axis 'o' is \(5,\) and, in 'bias', \(6,\)"),
        ({"y": (2, 4, 5)}, "axis 'n' is"),
        ({"mean": (5,)}, "axis 'i' is"),
        ({"weight": (5,)}, "gate: weight has shape"),
        ({"bias": (5, 1)}, "gate: bias has shape"),
    ],
)
def test_shapes_that_do_not_fit_fail_by_name(shapes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Layer(**GATE).saved_bits({"x"}, {**SHAPES, **shapes}, BITS, OPTIONS)


def modules_after(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after a statement."""
    program = f"import sys; {statement}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return {*done.stdout.split()}


def test_the_table_needs_the_standard_library_only() -> None:
    more = modules_after("import memsave.spec") - modules_after("pass")
    assert more - sys.stdlib_module_names == {"memsave"}


def test_an_import_of_torch_would_be_noticed() -> None:
    assert "torch" in modules_after("import memsave.function")


def test_windows_of_adaptive_pooling() -> None:
    """The largest of all that torch documents."""
    for size, count in itertools.product(range(24), range(1, 24)):
        begins = [k * size // count for k in range(count)]
        ends = [-(-(k + 1) * size // count) for k in range(count)]
        widest = max(end - begin for begin, end in zip(begins, ends, strict=True))
        assert adaptive_kernel([size], [count]) == [max(1, widest)]
