"""LoRA (PEFT) on a bfloat16 model: bytes kept for backward, in multiples of the shared input.

Of the layers for queries, keys and values, which share one input, with and without dropout; and of
a whole Llama of a few layers. Exact counts on fake tensors: needs neither the memory nor a GPU. The
limit is what the rows say must be kept; of the Llama, which has other layers too, there is none.

The last columns compare PEFT's layers and memsave's on real tensors, in a smaller model of the same
kind under the same seed: the largest difference of the outputs, and of the adapters' gradients
relative to the largest element.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import memsave

from .harness import Experiment
from .render import table
from .results import Record

PROJECTIONS, LLAMA = "q, k, v", "Llama"
ROUNDING = 1e-6


@dataclass(frozen=True)
class Config:
    """Width, tokens, rank of the adapters, and ``depth``: layers of the Llama."""

    hidden: int = 4096
    sequence: int = 256
    rank: int = 8
    depth: int = 2
    dropouts: tuple[float, ...] = (0.0, 0.1)


@dataclass(frozen=True)
class Case:
    """A model, and the probability of dropout before the adapters."""

    model: str
    dropout: float
    hidden: int
    sequence: int
    rank: int
    depth: int


def cases(config: Config) -> Iterator[Case]:
    """The projections, then the Llama."""
    for model in (PROJECTIONS, LLAMA):
        for p in config.dropouts:
            yield Case(model, p, config.hidden, config.sequence, config.rank, config.depth)


class Projections(nn.Module):
    """Queries, keys and values of an activation (as which a copy of the input stands in)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        return torch.stack((self.q(x), self.k(x), self.v(x)))


def _adapted(model: nn.Module, case: Case, targets: list[str] | str) -> Any:
    """With adapters in float32, which is PEFT's default."""
    import peft

    config = peft.LoraConfig(r=case.rank, lora_dropout=case.dropout, target_modules=targets)
    return peft.get_peft_model(model.to(torch.bfloat16), config)  # type: ignore[arg-type]


def _projections(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    model = _adapted(Projections(case.hidden), case, ["q", "k", "v"])
    return model, {
        "x": torch.randn(1, case.sequence, case.hidden, dtype=torch.bfloat16, requires_grad=True)
    }


def _llama(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=case.hidden,
        intermediate_size=11 * case.hidden // 4,
        num_hidden_layers=case.depth,
        num_attention_heads=max(case.hidden // 128, 1),
    )
    model = _adapted(LlamaForCausalLM(config), case, "all-linear")
    ids = torch.arange(case.sequence)[None]
    return model, {"input_ids": ids, "labels": ids}


MODELS = {PROJECTIONS: _projections, LLAMA: _llama}


def _limit(case: Case) -> int:
    """Bytes that the rows say the projections must keep."""
    from memsave.extensions.peft import CAST_LINEAR, DROPOUT_LINEAR

    row = DROPOUT_LINEAR if case.dropout else CAST_LINEAR
    bits = row.saved_bits(
        row.reads,
        {
            "x": (1, case.sequence, case.hidden),
            "weight": (case.rank, case.hidden),
            "y": (1, case.sequence, case.rank),
        },
        {"x": 16, "weight": 32, "y": 32},
        {"p": case.dropout},
    )
    product = case.sequence * case.rank * 32
    return (bits["x"] + 3 * (bits.get("kept", 0) + product)) // 8


def measure(case: Case) -> dict[str, Any]:
    """Bytes kept by stock, converted, and at the limit; and how far the two are apart."""
    with torch.device("meta"):
        model, inputs = MODELS[case.model](case)
    report = memsave.report(model.train(), **inputs)
    kept = {"stock": report.stock, "memsave": report.converted}
    if case.model == PROJECTIONS:
        kept["limit"] = _limit(case)
    return {"kept_bytes": kept, **agreement(replace(case, hidden=256, sequence=16, depth=1))}


def agreement(case: Case) -> dict[str, float]:
    """Largest differences between stock and converted on real tensors, under the same seed."""
    torch.manual_seed(0)
    model, inputs = MODELS[case.model](case)
    for name, parameter in model.train().named_parameters():
        if "lora_B" in name:  # zeros at first, and then the gradients of the others are zero
            nn.init.normal_(parameter)
    output, gradients = _results(copy.deepcopy(model), inputs)
    memsave.convert(model, inputs)
    other, others = _results(model, inputs)
    pairs = zip(gradients, others, strict=True)
    return {
        "converted_layers": sum(entry.status == "converted" for entry in memsave.coverage(model)),
        "output_off": (output - other).abs().max().item(),
        "gradient_off": max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs),
    }


def _results(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of the adapters."""
    torch.manual_seed(1)
    result: Any = model(**inputs)
    output = result if isinstance(result, Tensor) else result.logits
    output.float().sin().sum().backward()
    return output.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def show(records: Sequence[Record[Case]]) -> str:
    """A row per model and dropout; sizes in multiples of the input's."""
    header = ("model", "dropout", "PEFT", "memsave", "ratio", "limit of the rows", "outputs off by")
    return table((*header, "gradients off by"), map(_cells, records))


def _cells(record: Record[Case]) -> tuple[str, ...]:
    case, kept = record.case, record.figures["kept_bytes"]
    x = case.sequence * case.hidden * 2
    return (
        case.model + f" of depth {case.depth}" * (case.model == LLAMA),
        str(case.dropout),
        f"{kept['stock'] / x:.3f}",
        f"{kept['memsave'] / x:.3f}",
        f"{kept['memsave'] / kept['stock']:.4f}",
        f"{kept['limit'] / x:.3f}" if "limit" in kept else "",
        f"{record.figures['output_off']:.0e}",
        f"{record.figures['gradient_off']:.0e}",
    )


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """What is not below stock, not at the limit, or not what PEFT computes."""
    for record in records:
        kept, figures = record.figures["kept_bytes"], record.figures
        what = f"{record.case.model}, dropout {record.case.dropout}"
        if kept["memsave"] >= kept["stock"]:
            yield f"{what}: keeps {kept['memsave']} bytes, stock {kept['stock']}"
        if kept["memsave"] != kept.get("limit", kept["memsave"]):
            yield f"{what}: keeps {kept['memsave']} bytes, the rows say {kept['limit']}"
        if figures["output_off"] or figures["gradient_off"] > ROUNDING:
            yield f"{what}: outputs or gradients are not PEFT's"
        if not figures["converted_layers"]:
            yield f"{what}: nothing was converted in the comparison"


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(hidden=256, sequence=32, depth=1),
        "default": Config(),
    },
    libraries=("peft",),
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    exact=True,
    accelerator=False,
)
