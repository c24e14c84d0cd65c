"""Every property can fail: for each there is a broken table, rule or engine that it finds out."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import properties
import pytest
import torch
from hypothesis import Phase, find, settings
from jax_backend import Jax
from properties import DERIVATIVES, PROPERTIES
from strategies import Case, accepted, flawed
from torch.autograd.function import FunctionCtx
from torch_backend import Torch

from memsave import function
from memsave.spec import TABLE, Layer

SOUND = Torch()
JAX = Jax()


def assert_found_out(check: Callable[..., None], backend: Any, row: Layer) -> None:
    """Some case makes the property raise (``find`` raises where none does)."""

    def fails(case: Case) -> bool:
        try:
            check(backend, row, case)
        except AssertionError:
            return True
        return False

    if check is properties.check_fails_as_stock:
        cases = flawed(backend, row)
    else:
        cases = accepted(backend, row, **{**PROPERTIES, **DERIVATIVES}[check])
    find(
        cases,
        fails,
        settings=settings(max_examples=500, phases=[Phase.generate], derandomize=True),
    )


def with_row(name: str, **fields: Any) -> tuple[Torch, Layer]:
    """The backend follows a changed row."""
    row = replace(TABLE[name], **fields)
    return SOUND.changed(name, row=row), row


def with_bwd(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Torch, Layer]:
    """Every gradient is changed."""
    bwd = SOUND.rules[name].bwd
    assert bwd is not None

    def changed(*args: Any, **options: Any) -> function.Grads:
        return {name: change(grad) for name, grad in bwd(*args, **options).items()}

    return SOUND.changed(name, bwd=changed), TABLE[name]


def with_fwd(name: str, change: Callable[..., Any]) -> tuple[Torch, Layer]:
    """The result of forward is changed: ``change(y, extras, wrt, *args) -> y, extras``."""
    fwd = SOUND.rules[name].fwd

    def changed(wrt: function.Mask, *args: Any, **options: Any) -> Any:
        return change(*fwd(wrt, *args, **options), wrt, *args)

    return SOUND.changed(name, fwd=changed), TABLE[name]


def with_arguments(name: str, change: Callable[[Any], Any]) -> tuple[Torch, Layer]:
    """Forward computes with changed arguments."""
    fwd = SOUND.rules[name].fwd

    def changed(wrt: function.Mask, *args: Any, **options: Any) -> Any:
        return fwd(wrt, *[change(arg) for arg in args], **options)

    return SOUND.changed(name, fwd=changed), TABLE[name]


def with_errors(name: str) -> tuple[Torch, Layer]:
    """Forward fails with another type of error."""
    fwd = SOUND.rules[name].fwd

    def changed(wrt: function.Mask, *args: Any, **options: Any) -> Any:
        try:
            return fwd(wrt, *args, **options)
        except (RuntimeError, ValueError) as error:
            raise KeyError(error) from error

    return SOUND.changed(name, fwd=changed), TABLE[name]


def wrong_derivative(grad: torch.Tensor) -> torch.Tensor:
    """The same value with three times the derivative."""
    return 3 * grad - 2 * grad.detach()


def inexact(grad: torch.Tensor) -> torch.Tensor:
    return grad * (1 + 1e-11)


def drifting() -> Callable[[torch.Tensor], torch.Tensor]:
    calls = itertools.count(1)
    return lambda grad: grad * next(calls)


def draw(y: torch.Tensor, extras: Any, *_: Any) -> Any:
    torch.rand(())
    return y, extras


def round_up(y: torch.Tensor, extras: Any, *_: Any) -> Any:
    return y.nextafter(torch.full_like(y, torch.inf)) if y.dtype == torch.float64 else y, extras


def relayout(y: torch.Tensor, extras: Any, *_: Any) -> Any:
    return y.clone(memory_format=torch.contiguous_format), extras


def to_float(y: torch.Tensor, extras: Any, *_: Any) -> Any:
    return y.float(), extras


def unpacked(y: torch.Tensor, extras: Any, *_: Any) -> Any:
    return y, {"positive": y > 0}


def view_of_more(y: torch.Tensor, extras: Any, *_: Any) -> Any:
    (name,) = extras
    return y, {name: torch.stack([extras[name]] * 2)[0]}


def wide_if_few(y: torch.Tensor, extras: Any, wrt: function.Mask, *_: Any) -> Any:
    return y, {n: e.double() if len(wrt) == 1 else e for n, e in extras.items()}


LEAKED: list[torch.Tensor] = []


def leak(y: torch.Tensor, extras: Any, *_: Any) -> Any:
    LEAKED.append(y.clone())
    return y, extras


def in_jax(name: str, **changes: Callable[..., Any]) -> tuple[Jax, Layer]:
    """Every gradient is changed by ``bwd``; the result of forward by ``fwd(y, extras)``."""
    rule = JAX.rules[name]
    bwd, fwd = rule.bwd, rule.fwd
    assert bwd is not None

    def changed_bwd(*args: Any, **options: Any) -> Any:
        return {n: changes["bwd"](grad) for n, grad in bwd(*args, **options).items()}

    def changed_fwd(*args: Any, **options: Any) -> Any:
        return changes["fwd"](*fwd(*args, **options))

    mine = {"bwd": changed_bwd, "fwd": changed_fwd}
    return JAX.changed(name, **{key: mine[key] for key in changes}), rule.row


def in_jax_with_row(name: str, **fields: Any) -> tuple[Jax, Layer]:
    """The backend follows a changed row."""
    row = replace(TABLE[name], **fields)
    return JAX.changed(name, row=row), row


def leak_array(y: Any, extras: Any) -> Any:
    LEAKED_ARRAYS.append(y + 1)
    return y, extras


LEAKED_ARRAYS: list[Any] = []

IN_JAX: list[tuple[Callable[..., None], str, tuple[Any, Layer]]] = [
    (
        properties.check_output_equals_stock,
        "jax: last bit",
        in_jax("dropout", fwd=lambda y, extras: (y * (1 + 1e-15), extras)),
    ),
    (
        properties.check_gradient_equals_stock,
        "jax: factor",
        in_jax("batch_norm_train", bwd=lambda grad: grad * (1 + 1e-6)),
    ),
    (
        properties.check_keeps_what_the_table_says,
        "jax: bytes for bits",
        in_jax("relu", fwd=lambda y, extras: (y, {"positive": y > 0})),
    ),
    (
        properties.check_keeps_what_the_table_says,
        "jax: table says more",
        (JAX, replace(TABLE["max_pool1d"], reads={"x": ("x", "offsets")})),
    ),
    (properties.check_nothing_else_stays_alive, "jax: global", in_jax("relu", fwd=leak_array)),
    (
        properties.check_needs_everything_it_keeps,
        "jax: output",
        in_jax_with_row("dropout", reads={"x": ("y", "kept")}),
    ),
    (
        properties.check_rows_of_one_op_agree,
        "jax: bwd",
        in_jax("relu_from_output", bwd=lambda grad: 2 * grad),
    ),
    (properties.check_gradient, "jax: bwd", in_jax("relu", bwd=lambda grad: 1.01 * grad)),
]


BROKEN: list[tuple[Callable[..., None], str, tuple[Any, Layer]]] = [
    *IN_JAX,
    (properties.check_output_equals_stock, "last bit", with_fwd("batch_norm_eval", round_up)),
    (properties.check_output_equals_stock, "random numbers", with_fwd("relu", draw)),
    (properties.check_output_equals_stock, "layout", with_fwd("batch_norm_train", relayout)),
    (
        properties.check_output_equals_stock,
        "running statistics",
        with_arguments("batch_norm_train", lambda arg: None if arg is None else arg.clone()),
    ),
    (properties.check_gradient_equals_stock, "factor", with_bwd("conv1d", inexact)),
    (properties.check_gradient_equals_stock, "signed zero", with_bwd("relu", lambda g: g + 0.0)),
    (properties.check_gradient_equals_stock, "nan", with_bwd("dropout", torch.nan_to_num)),
    (properties.check_fails_as_stock, "error", with_errors("conv2d")),
    (properties.check_fails_as_stock, "dtype", with_fwd("relu", to_float)),
    (properties.check_fails_as_stock, "gradient", with_bwd("prelu_from_input", lambda g: 2 * g)),
    (
        properties.check_keeps_what_the_table_says,
        "table says less",
        (SOUND, replace(TABLE["conv2d"], reads={"x": (), "weight": ("x",), "bias": ()})),
    ),
    (
        properties.check_keeps_what_the_table_says,
        "table says more",
        (SOUND, replace(TABLE["relu"], reads={"x": ("x", "positive")})),
    ),
    (properties.check_keeps_what_the_table_says, "bytes for bits", with_fwd("relu", unpacked)),
    (properties.check_keeps_what_the_table_says, "view", with_fwd("max_pool1d", view_of_more)),
    (
        properties.check_keeps_what_the_table_says,
        "stock keeps more",
        (
            SOUND.changed("conv1d", stock_keeps=lambda wrt, **_: TABLE["conv1d"].saves(wrt)),
            TABLE["conv1d"],
        ),
    ),
    (properties.check_nothing_else_stays_alive, "global", with_fwd("relu", leak)),
    (
        properties.check_needs_everything_it_keeps,
        "argument",
        with_row("conv3d", reads={"x": ("x", "weight"), "weight": ("x",), "bias": ()}),
    ),
    (
        properties.check_needs_everything_it_keeps,
        "output",
        with_row("dropout", reads={"x": ("y", "kept")}),
    ),
    (properties.check_smaller_mask_keeps_no_more, "", with_fwd("batch_norm_train", wide_if_few)),
    (properties.check_rows_of_one_op_agree, "bwd", with_bwd("relu", lambda g: 2 * g)),
    (properties.check_rows_of_one_op_agree, "fwd", with_fwd("dropout", round_up)),
    (properties.check_backward_twice, "", with_bwd("max_pool1d", drifting())),
    (properties.check_batched_backward, "", with_bwd("max_pool1d", drifting())),
    (properties.check_gradient, "", with_bwd("batch_norm_train", lambda g: 1.01 * g)),
    (properties.check_second_derivative, "", with_bwd("conv2d", wrong_derivative)),
]


@pytest.mark.parametrize(
    ("check", "broken"),
    [pytest.param(check, broken, id=f"{check.__name__} {what}") for check, what, broken in BROKEN],
)
def test_broken_rule_is_found_out(check: Callable[..., None], broken: tuple[Any, Layer]) -> None:
    assert_found_out(check, *broken)


def test_every_property_can_fail() -> None:
    shown = {check for check, _, _ in BROKEN}
    assert shown == {*PROPERTIES, *DERIVATIVES, properties.check_fails_as_stock}


def test_backends_that_disagree_are_found_out() -> None:
    broken, row = in_jax("conv_transpose1d", bwd=lambda grad: grad * (1 + 1e-6))
    domain = {"dtypes": ("float64",), "layouts": ("contiguous",), "empty": False}

    def fails(case: Case) -> bool:
        if not broken.accepts(row, case, empty=False):
            return False
        try:
            properties.check_backends_agree(SOUND, broken, row, case)
        except AssertionError:
            return True
        return False

    find(
        accepted(SOUND, row, **domain).map(lambda case: replace(case, g_layout="contiguous")),
        fails,
        settings=settings(max_examples=500, phases=[Phase.generate], derandomize=True),
    )


def test_row_that_is_not_implemented_is_found_out() -> None:
    row = TABLE["relu"]
    without = Torch({name: rule for name, rule in SOUND.rules.items() if name != row.name})
    other, _ = with_row("relu", options={}, inplace=False)
    for backend in (without, other):
        with pytest.raises(AssertionError, match="does not implement"):
            properties.check_implemented(backend, row)


def test_engine_that_saves_one_more_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    save = FunctionCtx.save_for_backward
    monkeypatch.setattr(
        FunctionCtx, "save_for_backward", lambda ctx, *saved: save(ctx, *saved, torch.ones(1))
    )
    assert_found_out(properties.check_keeps_what_the_table_says, SOUND, TABLE["relu"])


def test_engine_that_hides_a_copy_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    save = FunctionCtx.save_for_backward

    def hide(ctx: Any, *saved: torch.Tensor) -> None:
        ctx.hidden = saved[0].clone()
        save(ctx, *saved)

    monkeypatch.setattr(FunctionCtx, "save_for_backward", hide)
    assert_found_out(properties.check_nothing_else_stays_alive, SOUND, TABLE["max_pool1d"])


def test_engine_that_holds_its_arguments_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensor_itself(like: type, values: tuple[Any, ...]) -> Any:
        return sys._getframe(1).f_locals["array"]  # of which these were to be told

    monkeypatch.setattr(function, "_new_tuple", tensor_itself)
    assert_found_out(properties.check_nothing_else_stays_alive, SOUND, TABLE["max_pool1d"])
