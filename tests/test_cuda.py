"""Layers on CUDA: on real tensors where there is a device; where torch is only built for it, on
fake ones, which have shapes, dtypes and devices. (Elsewhere all is skipped.)
"""

from typing import Any

import pytest
import torch
from helpers import every_row, first, inputs, options, ours, outcome, same, stock
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memsave import function
from memsave.kernels.reference import Like
from memsave.spec import Layer

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
needs_build = pytest.mark.skipif(torch.version.cuda is None, reason="torch is not built for CUDA")


def moved(row: Layer, wrt: frozenset[str], dtype: torch.dtype) -> list[Any]:
    """Arguments of this dtype on the device, of which some want gradients."""
    args = inputs(row, wrt, dtype=torch.float32).values()
    return [
        arg.detach()
        .to("cuda", dtype if arg.is_floating_point() else arg.dtype)
        .requires_grad_(arg.requires_grad)
        for arg in args
    ]


def last(args: list[Tensor]) -> list[Tensor]:
    """The first of them with its channels last, if it is an image."""
    x, *others = args
    if x.ndim != 4:
        return args
    x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_(x.requires_grad)
    return [x, *others]


@needs_device
@every_row
@pytest.mark.parametrize("by", [list, last], ids=["contiguous", "channels last"])
def test_gradients_equal_stock(row: Layer, by: Any) -> None:
    for wrt in row.masks()[1:]:
        actual, expected = (
            outcome(call, by(moved(row, wrt, torch.float32)), **options(row))
            for call in (ours(row), stock(row))
        )
        same(actual, expected, layout=True, rtol=1e-4, atol=1e-5)


@needs_build
@every_row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_autocast", [False, True])
def test_outputs_are_like_those_of_stock(
    row: Layer, is_autocast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shape, layout, dtype and device."""
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
    for wrt in row.masks()[1:]:
        made = []
        for call in (ours(row), stock(row)):
            with FakeTensorMode():
                args = moved(row, wrt, dtype)
                # (torch.autocast does nothing where there is no device.)
                torch.set_autocast_dtype("cuda", torch.bfloat16)
                torch.set_autocast_enabled("cuda", is_autocast)
                try:
                    y = first(call(*args, **options(row)))
                finally:
                    torch.set_autocast_enabled("cuda", False)
                    torch.clear_autocast_cache()
            made.append((y.shape, y.stride(), y.dtype, y.device))
        assert made[0] == made[1]


@needs_build
@every_row
@pytest.mark.parametrize("by", [list, last], ids=["contiguous", "channels last"])
def test_rules_stay_on_the_device(row: Layer, by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients have the shapes and the device of their arguments; nothing comes from elsewhere."""
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
    rule = function.RULES[row.name]
    if rule.bwd is None:
        return  # that is stock
    for wrt in row.masks()[1:]:
        with FakeTensorMode(), torch.no_grad():
            args = by(moved(row, wrt, torch.float32))
            result, extras = rule.fwd(wrt, *args, **options(row))
            y = first(result)
            arrays = {**dict(zip(row.args, args, strict=True)), "y": y, **extras}
            saved = {name: arrays[name] if name in row.saves(wrt) else None for name in arrays}
            shapes = {name: Like.of(arrays[name]) for name in rule.shapes}
            g = torch.empty_like(y)
            grads = rule.bwd({"y": g} if rule.smooth else g, wrt, saved, shapes, **options(row))
            for name in wrt:
                assert grads[name].shape == arrays[name].shape
                assert grads[name].device == arrays[name].device
