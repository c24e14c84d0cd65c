"""The paper's models and scenarios: which gradients of a ResNet are wanted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

Trainable = Callable[[nn.Module, str], bool]


class Scenario(NamedTuple):
    """What is differentiable. ``trainable(model)`` makes the choice of parameters.

    ``target`` is the ratio of kept bytes, converted to stock, that ResNet-101 must reach.
    """

    name: str
    trainable: Callable[[nn.Module], Trainable]
    input: bool
    batch_norm_eval: bool = False
    target: float = 1.0


def _all(model: nn.Module) -> Trainable:
    return lambda module, name: True


def _none(model: nn.Module) -> Trainable:
    return lambda module, name: False


def _conv(model: nn.Module) -> Trainable:
    return lambda module, name: isinstance(module, _ConvNd)


def _norm(model: nn.Module) -> Trainable:
    return lambda module, name: isinstance(module, _BatchNorm)


def _quarter(model: nn.Module, last: bool) -> Trainable:
    """The first (or last) ``n // 4 + 1`` of the ``n`` leaf modules with parameters."""
    leaves = [
        module
        for module in model.modules()
        if not any(module.children()) and any(True for _ in module.parameters())
    ]
    size = len(leaves) // 4 + 1
    chosen = set(leaves[-size:] if last else leaves[:size])
    return lambda module, name: module in chosen


SCENARIOS = (
    Scenario("All", _all, input=False, target=0.976),
    Scenario("Input", _none, input=True, target=0.531),
    Scenario("Input (BN eval)", _none, input=True, batch_norm_eval=True, target=0.0165),
    Scenario("Conv", _conv, input=False, target=0.976),
    Scenario("Norm", _norm, input=False, target=0.531),
    Scenario("Surgical", lambda model: _quarter(model, last=False), input=False, target=0.745),
    Scenario("SurgicalLast", lambda model: _quarter(model, last=True), input=True, target=0.60),
)

DEPTHS = {50: [3, 4, 6, 3], 101: [3, 4, 23, 3]}


def resnet(depth: int, device: str = "cpu") -> nn.Module:
    """ResNet-50 or ResNet-101 of transformers with random weights, 1000 classes, in train mode.

    Its input is ``(n, 3, 224, 224)``; it returns an object with ``logits`` ``(n, 1000)``.
    """
    from transformers import ResNetConfig, ResNetForImageClassification

    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = ResNetConfig(depths=DEPTHS[depth], num_labels=1000)  # type: ignore[call-arg]
        return ResNetForImageClassification(config).train()


def apply(scenario: Scenario, model: nn.Module) -> None:
    """Set ``requires_grad`` and the mode of a model to those of a scenario."""
    modules = dict(model.named_modules())
    trainable = scenario.trainable(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable(modules[name.rpartition(".")[0]], name))
    model.train()
    if scenario.batch_norm_eval:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()


def step(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """One forward and backward pass; returns the loss. ``x.grad`` and ``p.grad`` start anew."""
    model.zero_grad()
    x.grad = None
    loss = nn.functional.cross_entropy(model(x).logits, labels)
    loss.backward()
    return loss
