"""What ``memsave.functional_mode`` costs: time of a torch call, and of a step of a ResNet."""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from memsave import functional
from memsave._functional_mode import functional_mode

from .measure import paired_times, print_table, ratio, write_results

CALLS = 1000


class Block(nn.Module):
    """A residual block that calls functions for all that has no parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Eight blocks; input ``(n, 3, h, w)``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        widths = (32, 32, 64, 128, 256)
        self.blocks = nn.ModuleList(
            block
            for i, o in pairwise(widths)
            for block in (Block(i, o, 1 if i == o else 2), Block(o, o, 1))
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        for block in self.blocks:
            x = block(x)
        return self.head(F.dropout(F.adaptive_avg_pool2d(x, 1).flatten(1), 0.1, self.training))


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=31)


def _under(mode: bool, function: Callable[[], Any], calls: int = 1) -> Callable[[], None]:
    def run() -> None:
        with functional_mode() if mode else nullcontext():
            for _ in range(calls):
                function()

    return run


def _calls() -> dict[str, Callable[[], Any]]:
    """Small ones, so that most of their time is that of Python."""
    x, wanted = torch.randn(4), torch.randn(4, requires_grad=True)
    return {
        "torch.add, which it leaves alone": lambda: torch.add(x, x),
        "x.shape": lambda: x.shape,
        "F.relu without a gradient": lambda: F.relu(x),
        "F.relu": lambda: F.relu(wanted),
        "memsave.functional.relu": lambda: functional.relu(wanted),
    }


def _step(model: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], None]:
    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        F.cross_entropy(model(x), labels).backward()

    return step


def main(args: argparse.Namespace) -> int:
    """Print a row per call, in microseconds, and per scenario of the ResNet, in milliseconds."""
    torch.manual_seed(0)
    trained = ResNet()
    frozen = copy.deepcopy(trained).requires_grad_(False)
    x, labels = torch.randn(args.batch, 3, args.size, args.size), torch.randint(10, (args.batch,))
    steps = {
        "ResNet, all trainable": _step(trained, x, labels),
        "ResNet, input gradient": _step(frozen, x.clone().requires_grad_(), labels),
    }
    cases = [
        *[(name, call, CALLS, 1e6, "us") for name, call in _calls().items()],
        *[(name, step, 1, 1e3, "ms") for name, step in steps.items()],
    ]
    rows = []
    for name, function, calls, scale, unit in tqdm(cases, "cases", leave=False):
        pair = {mode: _under(mode == "mode", function, calls) for mode in ("none", "mode")}
        times = paired_times(pair, args.repeats, name)
        none, mode = (statistics.median(times[key]) / calls * scale for key in ("none", "mode"))
        rows.append(
            {
                "case": name,
                "unit": unit,
                "none": none,
                "mode": mode,
                "ratio": ratio(times["mode"], times["none"]),
            }
        )
    print_table(
        ("case", "without", "with", "ratio"),
        [
            (
                row["case"],
                f"{row['none']:.2f} {row['unit']}",
                f"{row['mode']:.2f} {row['unit']}",
                f"{row['ratio']:.3f}",
            )
            for row in rows
        ],
    )
    command = (
        f"python -m experiments run functional_mode --batch {args.batch} --size {args.size} "
        f"--repeats {args.repeats}"
    )
    print(f"written to {write_results('functional_mode', command, rows)}")
    return 0
