"""Time of one training step of a ResNet in every scenario: memsave against stock, in turn."""

from __future__ import annotations

import argparse
import copy
import statistics

import torch
from tqdm import tqdm

import memsave

from .measure import paired_times, print_table, ratio, write_results
from .scenarios import SCENARIOS, apply, resnet, step


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--depth", type=int, choices=(50, 101), default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)


def main(args: argparse.Namespace) -> int:
    """Print a row per scenario: median seconds, median ratio of pairs, and their quartiles."""
    torch.manual_seed(0)
    stock = resnet(args.depth)
    ours = memsave.convert(copy.deepcopy(stock))
    labels = torch.randint(1000, (args.batch,))
    rows = []
    for scenario in tqdm(SCENARIOS, "scenarios", leave=False):
        x = torch.randn(args.batch, 3, 224, 224, requires_grad=scenario.input)
        steps = {}
        for name, model in (("stock", stock), ("memsave", ours)):
            apply(scenario, model)
            steps[name] = lambda model=model, x=x: step(model, x, labels)
        times = paired_times(steps, args.repeats, scenario.name)
        ratios = [a / b for a, b in zip(times["memsave"], times["stock"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "scenario": scenario.name,
                "stock_s": statistics.median(times["stock"]),
                "memsave_s": statistics.median(times["memsave"]),
                "ratio": ratio(times["memsave"], times["stock"]),
                "quartiles": [low, high],
            }
        )
    print_table(
        ("scenario", "stock s", "memsave s", "ratio", "quartiles"),
        [
            (
                row["scenario"],
                f"{row['stock_s']:.3f}",
                f"{row['memsave_s']:.3f}",
                f"{row['ratio']:.3f}",
                "{:.3f} to {:.3f}".format(*row["quartiles"]),
            )
            for row in rows
        ],
    )
    command = (
        f"python -m experiments run step_time --depth {args.depth} --batch {args.batch} "
        f"--repeats {args.repeats}"
    )
    print(f"written to {write_results('step_time', command, rows)}")
    return 0
