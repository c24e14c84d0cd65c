"""Many architectures, converted: outputs and gradients are those of stock, and never more is kept.

The architectures are those of ``experiments.zoo``, small, with random weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import kept
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import memsave
from experiments import zoo

pytest.importorskip("timm")
pytest.importorskip("transformers")

SMALL = zoo.small()
#: Every case for some architectures, one case for each of the others.
EVERY_CASE = ("timm test_resnet", "timm test_vit", "timm test_byobnet", "transformers llama")
RUNS = [
    (name, case)
    for place, name in enumerate(SMALL)
    for k, case in enumerate(zoo.SCENARIOS)
    if name in EVERY_CASE or k == place % len(zoo.SCENARIOS)
]


def results(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Outputs, and the gradients of all that wants one; and the bytes that were kept."""
    wanted = [t for t in (*inputs.values(), *model.parameters()) if t.requires_grad]
    outputs: list[Tensor] = []

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        leaves = [leaf for leaf in tree_leaves(model(**inputs)) if isinstance(leaf, Tensor)]
        outputs.extend(leaf for leaf in leaves if leaf.grad_fn)
        return outputs

    size = kept(run, [*model.parameters(), *model.buffers(), *inputs.values()])
    generator = torch.Generator().manual_seed(2)
    gs = [torch.randn(y.shape, generator=generator) for y in outputs]
    grads = torch.autograd.grad(outputs, wanted, gs, allow_unused=True)
    return [*outputs, *(grad for grad in grads if grad is not None)], size


def test_there_are_many() -> None:
    assert len(SMALL) >= 60


@pytest.mark.parametrize(("name", "case"), RUNS, ids=[f"{name}-{case.name}" for name, case in RUNS])
def test_model(name: str, case: zoo.Scenario) -> None:
    torch.manual_seed(0)
    model, inputs = SMALL[name]()
    case = case if zoo.fits(case, model, inputs) else zoo.SCENARIOS[0]
    inputs = zoo.apply(case, model, zoo.named(model, inputs))
    buffers = [buffer.clone() for buffer in model.buffers()]
    classes = [type(module) for module in model.modules()]
    stock, most = results(model, inputs)
    largest = max(t.abs().max().item() for t in stock if t.numel() and not t.grad_fn)
    sizes = []
    for example_inputs in (None, inputs):
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)
        memsave.convert(model, example_inputs)
        ours, size = results(model, inputs)
        sizes.append(size)
        for one, other in zip(ours, stock, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            if one.grad_fn is not None:
                assert torch.equal(one, other)
            else:  # some gradients are zero but for rounding
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 * largest)
    assert sizes[1] <= min(most, sizes[0])
    memsave.revert(model)
    assert [type(module) for module in model.modules()] == classes
