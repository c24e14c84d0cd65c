"""Bytes kept for backward by LoRA (PEFT) on a bfloat16 model, in multiples of the shared input.

Of the layers for queries, keys and values, which share one input, with and without dropout; and of
a whole Llama of a few layers. Exact counts on fake tensors: needs neither the memory nor a GPU.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import memsave

from .measure import print_table, write_results
from .torchvision_stub import declare_missing_ops

DROPOUTS = (0.0, 0.1)


class Projections(nn.Module):
    """Queries, keys and values of an activation (as which a copy of the input stands in)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.clone()
        return self.q(x), self.k(x), self.v(x)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--depth", type=int, default=2, help="layers of the Llama")


def _adapted(model: nn.Module, rank: int, p: float, targets: list[str] | str) -> Any:
    """With adapters in float32, which is PEFT's default."""
    import peft

    config = peft.LoraConfig(r=rank, lora_dropout=p, target_modules=targets)
    return peft.get_peft_model(model.to(torch.bfloat16), config)  # type: ignore[arg-type]


def _projections(args: argparse.Namespace, p: float) -> tuple[memsave.Report, int]:
    """The report, and the bytes that the rows allow."""
    from memsave.extensions.peft import CAST_LINEAR, DROPOUT_LINEAR

    with torch.device("meta"):
        model = _adapted(Projections(args.hidden), args.rank, p, ["q", "k", "v"])
        x = torch.empty(1, args.sequence, args.hidden, dtype=torch.bfloat16, requires_grad=True)
    row = DROPOUT_LINEAR if p else CAST_LINEAR
    y = (1, args.sequence, args.rank)
    bits = row.saved_bits(
        row.reads,
        {"x": tuple(x.shape), "weight": (args.rank, args.hidden), "y": y},
        {"x": 16, "weight": 32, "y": 32},
        {"p": p},
    )
    product = args.sequence * args.rank * 32
    return memsave.report(model, x), (bits["x"] + 3 * (bits.get("kept", 0) + product)) // 8


def _llama(args: argparse.Namespace, p: float) -> memsave.Report:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=args.hidden,
        intermediate_size=11 * args.hidden // 4,
        num_hidden_layers=args.depth,
        num_attention_heads=args.hidden // 128,
    )
    with torch.device("meta"):
        model = _adapted(LlamaForCausalLM(config), args.rank, p, "all-linear")
        ids = torch.zeros(1, args.sequence, dtype=torch.int64)
    return memsave.report(model.train(), input_ids=ids, labels=ids)


def _row(what: str, p: float, report: memsave.Report, limit: int | None) -> dict[str, Any]:
    return {
        "model": what,
        "dropout": p,
        "stock_bytes": report.stock,
        "converted_bytes": report.converted,
        "limit_bytes": limit,
    }


def main(args: argparse.Namespace) -> int:
    """Print the table; 1 if a count misses the limit, or is not below stock's."""
    declare_missing_ops()
    x = args.sequence * args.hidden * 2
    rows = []
    for p in tqdm(DROPOUTS, "lora", leave=False):
        rows.append(_row("q, k, v", p, *_projections(args, p)))
        rows.append(_row(f"Llama, {args.depth} layers", p, _llama(args, p), None))
    print_table(
        ("model", "dropout", "stock", "memsave", "ratio", "limit of the rows"),
        [
            (
                row["model"],
                str(row["dropout"]),
                f"{row['stock_bytes'] / x:.3f}",
                f"{row['converted_bytes'] / x:.3f}",
                f"{row['converted_bytes'] / row['stock_bytes']:.4f}",
                f"{row['limit_bytes'] / x:.3f}" if row["limit_bytes"] else "",
            )
            for row in rows
        ],
    )
    command = (
        f"python -m experiments run lora --hidden {args.hidden} --sequence {args.sequence} "
        f"--rank {args.rank} --depth {args.depth}"
    )
    print(f"written to {write_results('lora', command, rows)}")
    return any(
        row["converted_bytes"] >= row["stock_bytes"]
        or row["converted_bytes"] != (row["limit_bytes"] or row["converted_bytes"])
        for row in rows
    )
