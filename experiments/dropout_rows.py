"""The two rows of dropout against stock: time of forward + backward, and bytes kept."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import nn
from tqdm import tqdm

import memsave

from .measure import paired_times, print_table, ratio, write_results

LAYERS: dict[str, type[nn.Dropout]] = {
    "stock": nn.Dropout,
    "dropout": memsave.nn.Dropout,
    "dropout_from_rng": memsave.nn.DropoutFromRng,
}


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 14, 1 << 20, 1 << 24])
    parser.add_argument("--repeats", type=int, default=31)


def _step(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        x.grad = None
        layer(x).backward(g)

    return step


def main(args: argparse.Namespace) -> int:
    """Print a row per size and row of the table."""
    rows = []
    for size in tqdm(args.sizes, "sizes", leave=False):
        x = torch.randn(size, requires_grad=True)
        g = torch.randn(size)
        layers = {name: cls(0.1) for name, cls in LAYERS.items()}
        steps = {name: _step(layer, x, g) for name, layer in layers.items()}
        times = paired_times(steps, args.repeats, f"{size}")
        for name, layer in layers.items():
            report = memsave.report(layer, x)
            rows.append(
                {
                    "elements": size,
                    "row": name,
                    "median_s": statistics.median(times[name]),
                    "ratio": ratio(times[name], times["stock"]),
                    "kept_bytes": report.now,
                }
            )
    print_table(
        ("elements", "row", "ms", "ratio to stock", "kept bytes"),
        [
            (
                str(row["elements"]),
                row["row"],
                f"{row['median_s'] * 1e3:.3f}",
                f"{row['ratio']:.3f}",
                str(row["kept_bytes"]),
            )
            for row in rows
        ],
    )
    command = f"python -m experiments run dropout_rows --repeats {args.repeats}"
    print(f"written to {write_results('dropout_rows', command, rows)}")
    return 0
