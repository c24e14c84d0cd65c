"""A model with its data in one of the paper's scenarios, as it is measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor

from . import paper
from .measure import again, best_device


class Subject:
    """What takes steps, forward and backward, and may be changed before.

    Attributes:
        step: The model and its loss.
        x, labels: A batch.
        around: Makes the context of a forward pass.
    """

    def __init__(self, step: Any, x: Tensor, labels: Tensor) -> None:
        self.step, self.x, self.labels = step, x, labels
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @classmethod
    def of(cls, model: str, scenario: str, batch: int, layers: int = 0, size: int = 0) -> Self:
        """A stock model with its weights and data, the same every time.

        Args:
            model, scenario: Of the paper's.
            batch: Examples.
            layers: Of a transformer, 0 as published.
            size: Of images in pixels, or of sequences in tokens; 0 as published.
        """
        torch.manual_seed(0)
        with best_device():
            step = paper.MODELS[model].step(layers or None)
            x, labels = paper.MODELS[model].data(batch, size or None)
        subject = cls(step, x, labels)
        subject.apply(scenario)
        return subject

    def apply(self, scenario: str) -> None:
        """Say which gradients are wanted, and the mode of BatchNorm."""
        paper.apply(scenario, self.step)
        self.x.requires_grad_(paper.SCENARIOS[scenario].input)

    def again(self) -> Self:
        """Another one of the same parameters and data."""
        return type(self)(again(self.step), self.x, self.labels)

    def forward(self) -> Tensor:
        """The loss, from the same random numbers."""
        torch.manual_seed(0)
        with self.around():
            return self.step(self.x, self.labels)

    def __call__(self) -> Tensor:
        """A forward and a backward pass, which leave fresh gradients; the loss."""
        self.forget()
        loss = self.forward()
        loss.backward()
        return loss.detach()

    def forget(self) -> None:
        """Free the gradients."""
        self.step.zero_grad()
        self.x.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """Copies of them by the names of the parameters; and of x."""
        named = [*self.step.named_parameters(), ("x", self.x)]
        return {name: p.grad.clone() for name, p in named if p.grad is not None}
