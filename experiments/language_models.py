"""Kept bytes of Mistral-7B, T5-base, BERT-base, ViT-B and ConvNeXt, per scenario: stock, converted.

Exact counts on fake tensors, of the architectures at full size: needs neither memory nor a GPU.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

import memsave

from .measure import print_table, write_results

Inputs = dict[str, Any]


class Job(NamedTuple):
    """A model, the scenario (``Norm``, ``Input`` or ``All``), the mode, and the largest ratio."""

    model: str
    scenario: str
    train: bool
    target: float


JOBS = (
    Job("Mistral-7B layers", "Norm", train=False, target=0.65),
    Job("Mistral-7B layers", "Input", train=False, target=0.70),
    Job("T5-base", "Norm", train=False, target=0.62),
    Job("T5-base", "Input", train=False, target=0.72),
    Job("T5-base and loss", "Norm", train=False, target=1.0),
    Job("T5-base and loss", "Input", train=False, target=1.0),
    *(
        Job(model, scenario, train, target=1.0)
        for model in ("BERT-base", "ViT-B/16", "ConvNeXt-T")
        for scenario in ("All", "Norm", "Input")
        for train in (False, True)
    ),
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")


class Layers(nn.Module):
    """The decoder layers of a model, causal and without a mask.

    (The whole model looks at values to see that it needs no mask. Fake tensors have none, and with
    a mask, attention expands keys and values to all heads.)
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layers, self.rotary_emb = model.layers, model.rotary_emb

    def forward(self, inputs_embeds: torch.Tensor) -> torch.Tensor:
        x = inputs_embeds
        places = torch.arange(x.shape[1], device=x.device)[None]
        rotation = self.rotary_emb(x, places)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=places, position_embeddings=rotation)
        return x


def models(batch: int, attention: str) -> dict[str, Callable[[], tuple[nn.Module, Inputs]]]:
    """How to make each model, on the meta device, with the inputs of the paper."""
    import transformers as hf

    def make(cls: Any, dtype: torch.dtype, inputs: dict[str, tuple[int, ...]], **options: Any):
        model = cls(cls.config_class(**options)).to(dtype)
        return model, {name: torch.empty(shape, dtype=dtype) for name, shape in inputs.items()}

    attending: dict[str, Any] = {"attn_implementation": attention}
    t5 = {**attending, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "use_cache": False}
    t5 |= {"d_model": 768, "decoder_start_token_id": 0}

    def with_labels(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        return model, {**inputs, "labels": torch.empty(batch, 256, dtype=torch.long)}

    def layers(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
        return Layers(model), inputs

    def embeddings(width: int) -> dict[str, tuple[int, ...]]:
        return {"inputs_embeds": (batch, 256, width)}

    image = {"pixel_values": (batch, 3, 224, 224)}
    float32 = torch.float32
    return {
        "Mistral-7B layers": lambda: layers(
            *make(hf.MistralModel, torch.bfloat16, embeddings(4096), use_cache=False, **attending)
        ),
        "T5-base": lambda: make(
            hf.T5Model,
            float32,
            {**embeddings(768), "decoder_inputs_embeds": (batch, 256, 768)},
            **t5,
        ),
        "T5-base and loss": lambda: with_labels(
            *make(hf.T5ForConditionalGeneration, float32, embeddings(768), **t5)
        ),
        "BERT-base": lambda: make(hf.BertModel, float32, embeddings(768), **attending),
        "ViT-B/16": lambda: make(hf.ViTModel, float32, image, hidden_dropout_prob=0.1, **attending),
        "ConvNeXt-T": lambda: make(hf.ConvNextModel, float32, image, drop_path_rate=0.1),
    }


def apply(job: Job, model: nn.Module, inputs: Inputs) -> None:
    """Set ``requires_grad`` and the mode."""
    model.train(job.train)
    for module in model.modules():
        wants = job.scenario == "All" and not isinstance(module, nn.Embedding)
        wants |= job.scenario == "Norm" and "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(wants)
    for x in inputs.values():
        x.requires_grad_(job.scenario == "Input" and x.is_floating_point())


def main(args: argparse.Namespace) -> int:
    """Print the table; 1 if a ratio is above its target."""
    make, rows = models(args.batch, args.attention), []
    for job in tqdm(JOBS, "kept bytes", leave=False):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, inputs = make[job.model]()
        apply(job, model, inputs)
        report = memsave.report(model, **inputs)
        rows.append(
            {
                "model": job.model,
                "scenario": f"{job.scenario}, {'train' if job.train else 'eval'}",
                "stock_bytes": report.stock,
                "converted_bytes": report.converted,
                "ratio": report.converted / report.stock,
                "target": job.target,
                "table_bytes": report.table,
                "rest": report.rest,
            }
        )
    print_table(
        (
            *("model", "gradients wanted", "stock GiB", "memsave GiB", "ratio", "target"),
            *("the table's GiB", "the rest"),
        ),
        [
            (
                row["model"],
                row["scenario"],
                f"{row['stock_bytes'] / 2**30:.3f}",
                f"{row['converted_bytes'] / 2**30:.3f}",
                f"{row['ratio']:.3f}",
                f"<= {row['target']:.2f}",
                f"{row['table_bytes'] / 2**30:.3f}",
                "; ".join(f"{what} {size / 2**30:.3f}" for what, size in _largest(row["rest"])),
            )
            for row in rows
        ],
    )
    command = (
        "python -m experiments run language_models "
        f"--batch {args.batch} --attention {args.attention}"
    )
    print(f"written to {write_results('language_models', command, rows)}")
    return any(row["ratio"] > row["target"] for row in rows)


def _largest(rest: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(rest.items(), key=lambda item: -item[1])[:2]
