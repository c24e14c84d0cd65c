"""Bytes kept for backward by ResNet-101 at 64x3x224x224, per scenario: stock, converted, table.

Exact counts on fake tensors: needs neither the memory nor a GPU.
"""

from __future__ import annotations

import argparse

import torch
from tqdm import tqdm

import memsave

from .measure import print_table, write_results
from .scenarios import SCENARIOS, apply, resnet


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--depth", type=int, choices=(50, 101), default=101)
    parser.add_argument("--batch", type=int, default=64)


def main(args: argparse.Namespace) -> int:
    """Print the table; 1 if a count misses its target or the table's prediction."""
    rows = []
    for scenario in tqdm(SCENARIOS, "kept bytes", leave=False):
        model = resnet(args.depth, device="meta")
        apply(scenario, model)
        x = torch.empty(args.batch, 3, 224, 224, device="meta", requires_grad=scenario.input)
        report = memsave.report(model, x)
        rows.append(
            {
                "scenario": scenario.name,
                "stock_bytes": report.stock,
                "converted_bytes": report.converted,
                "table_bytes": report.table + sum(report.rest.values()),
                "ratio": report.converted / report.stock,
                "target": scenario.target if args.depth == 101 else None,
            }
        )
    print_table(
        ("scenario", "stock GiB", "memsave GiB", "ratio", "target", "table = measured"),
        [
            (
                row["scenario"],
                f"{row['stock_bytes'] / 2**30:.3f}",
                f"{row['converted_bytes'] / 2**30:.4f}",
                f"{row['ratio']:.4f}",
                f"<= {row['target']}" if row["target"] else "",
                "yes" if row["table_bytes"] == row["converted_bytes"] else "NO",
            )
            for row in rows
        ],
    )
    command = f"python -m experiments run kept_bytes --depth {args.depth} --batch {args.batch}"
    print(f"written to {write_results('kept_bytes', command, rows)}")
    return any(
        row["ratio"] > (row["target"] or 1.0) or row["table_bytes"] != row["converted_bytes"]
        for row in rows
    )
