"""The ResNet that PyTorch and Flax share (:mod:`experiments.flax_resnet` has its twin)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

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


def step(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """One forward and backward pass; returns the loss. ``x.grad`` and ``p.grad`` start anew."""
    model.zero_grad()
    x.grad = None
    loss = nn.functional.cross_entropy(model(x).logits, labels)
    loss.backward()
    return loss
