"""Kept bytes of many architectures, stock and converted, exact counts on fake tensors.

Models of timm, transformers and torchvision, small or of full size: never above stock.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

import memsave

from .measure import RESULTS, print_table, write_results

Inputs = dict[str, Any]

#: Architectures of timm with the arguments that make a small one.
TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {"layers": (1, 1, 1, 1)},
    "resnet26d": {"layers": (1, 1, 1, 1)},
    "seresnet50": {"layers": (1, 1, 1, 1)},
    "resnext50_32x4d": {"layers": (1, 1, 1, 1)},
    "resnetv2_50": {"layers": (1, 1, 1, 1)},
    "wide_resnet50_2": {"layers": (1, 1, 1, 1)},
    "vit_tiny_patch16_224": {"depth": 2, "img_size": 32},
    "vit_relpos_small_patch16_224": {"depth": 2, "img_size": 32},
    "deit_tiny_distilled_patch16_224": {"depth": 2, "img_size": 32},
    "eva02_tiny_patch14_224": {"depth": 2, "img_size": 28},
    "mixer_s32_224": {"img_size": 64},
    "gmlp_s16_224": {"img_size": 32},
    "convnext_atto": {"depths": (1, 1, 1, 1)},
    "convnextv2_atto": {"depths": (1, 1, 1, 1)},
    "poolformer_s12": {},
    "cait_xxs24_224": {"depth": 2, "img_size": 32},
    "xcit_nano_12_p16_224": {"depth": 2, "img_size": 32},
    **{
        name: {}
        for name in (
            "test_resnet",
            "test_vit",
            "test_convnext",
            "test_efficientnet",
            "test_byobnet",
            "test_nfnet",
            "test_mambaout",
            "mobilenetv3_small_050",
            "mobilenetv2_035",
            "lcnet_035",
            "tinynet_e",
            "regnetx_002",
            "ghostnet_050",
            "starnet_s1",
            "hardcorenas_a",
            "fasternet_t0",
            "mnasnet_small",
            "edgenext_xx_small",
            "dla46_c",
        )
    },
}
TORCHVISION = (
    "squeezenet1_1",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "mobilenet_v3_small",
    "regnet_y_400mf",
    "resnet18",
)
#: Model types of transformers.
TEXT = (
    *("bert", "roberta", "distilbert", "electra", "albert", "mpnet", "deberta-v2"),
    *("gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "mistral", "qwen2", "qwen3"),
    *("gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo2", "stablelm", "t5", "bart"),
)
IMAGE = ("vit", "deit", "resnet", "dinov2", "beit")
TINY = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_model": 32},
    **{"d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "n_embd": 32, "n_layer": 2},
    **{"n_head": 4, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "ffn_dim": 48},
    **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "embedding_size": 32},
    **{"word_embed_proj_dim": 32, "image_size": 32, "patch_size": 16, "pad_token_id": 0},
    **{
        "hidden_sizes": [16, 24, 32, 48],
        "depths": [1, 1, 1, 1],
        "attention_types": [[["global", "local"], 1]],
    },
    **{"decoder_start_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


class Case(NamedTuple):
    """What is trainable (by the names of parameters), whether x is, and the mode."""

    name: str
    trainable: Callable[[str, int, int], bool]
    input: bool
    train: bool


def _norm(name: str, place: int, count: int) -> bool:
    return any(part in name.lower() for part in ("norm", "bn", ".ln", "ln_"))


CASES = (
    Case("All, train", lambda name, place, count: True, input=False, train=True),
    Case("All, eval", lambda name, place, count: True, input=False, train=False),
    Case("Norm, train", _norm, input=False, train=True),
    Case("Last half, train", lambda name, place, n: place >= n // 2, input=False, train=True),
    Case("Input, eval", lambda name, place, count: False, input=True, train=False),
)


def images(size: int, batch: int = 2) -> Tensor:
    """The same at each call."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator("cpu").manual_seed(0))


def small() -> dict[str, Callable[[], tuple[nn.Module, Inputs]]]:
    """Architectures, and how to make a small one with random weights and its inputs."""
    return {
        **{f"timm {name}": lambda n=name: _timm(n) for name in TIMM},
        **{f"torchvision {name}": lambda n=name: _torchvision(n) for name in TORCHVISION},
        **{f"transformers {name}": lambda n=name: _transformers(n) for name in (*TEXT, *IMAGE)},
    }


def _timm(name: str) -> tuple[nn.Module, Inputs]:
    import timm

    options = TIMM[name]
    model = timm.create_model(name, num_classes=10, **options)
    return model, {"x": images(options.get("img_size", 64))}


def _torchvision(name: str) -> tuple[nn.Module, Inputs]:
    from torchvision import models

    return models.get_model(name, num_classes=10), {"x": images(64)}


def _transformers(name: str) -> tuple[nn.Module, Inputs]:
    from transformers import AutoConfig, AutoModel

    default = AutoConfig.for_model(name)
    config = AutoConfig.for_model(
        name, **{key: value for key, value in TINY.items() if hasattr(default, key)}
    )
    model = AutoModel.from_config(config)
    if name in IMAGE:
        return model, {"pixel_values": images(config.image_size if "vit" in name else 32)}
    width = model.get_input_embeddings().embedding_dim
    names = ["inputs_embeds", *["decoder_inputs_embeds"] * config.is_encoder_decoder]
    return model, {name: images(width)[:, 0, :24] for name in names}


def apply(case: Case, model: nn.Module, inputs: Inputs) -> Inputs:
    """Set ``requires_grad`` and the mode; returns the inputs, wanting a gradient if they do."""
    names = [name for name, _ in model.named_parameters()]
    for place, (name, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(case.trainable(name, place, len(names)))
    model.train(case.train)
    return {
        name: x.detach().requires_grad_(case.input and x.is_floating_point())
        for name, x in inputs.items()
    }


def fits(case: Case, model: nn.Module, inputs: Inputs) -> bool:
    """Whether anything wants a gradient."""
    inputs = apply(case, model, inputs)
    return any(t.requires_grad for t in (*model.parameters(), *inputs.values()))


# The command.


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument(
        "--all", action="store_true", help="every model of timm, of full size (an hour or two)"
    )
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--resume", action="store_true", help="go on where a run was stopped")
    parser.add_argument("--workers", type=int, default=2)


def full_size(name: str) -> tuple[nn.Module, Inputs]:
    """A model of timm on the meta device."""
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
        size = timm.data.resolve_data_config({}, model=model)["input_size"]  # type: ignore[attr-defined]
        return model, {"x": torch.empty(2, *size)}


def measure(name: str, full: bool) -> list[dict[str, Any]]:
    """Kept bytes of one architecture in every case."""
    warnings.simplefilter("ignore")
    logging.disable()
    rows = []
    try:
        model, inputs = full_size(name) if full else small()[name]()
        for case in CASES[::2] if full else CASES:
            if not fits(case, model, inputs):
                continue
            report = memsave.report(model, **named(model, apply(case, model, inputs)))
            rows.append(
                {
                    "model": name,
                    "case": case.name,
                    "stock_bytes": report.stock,
                    "converted_bytes": report.converted,
                    "ratio": report.converted / report.stock if report.stock else 1.0,
                }
            )
    except Exception as error:  # the model's own; it is listed
        rows.append({"model": name, "error": f"{type(error).__name__}: {error}".split("\n")[0]})
    return rows


def named(model: nn.Module, inputs: Inputs) -> Inputs:
    """The image by the name that the model's forward has for it."""
    if "x" not in inputs:
        return inputs
    import inspect

    return {next(iter(inspect.signature(model.forward).parameters)): inputs["x"]}


COMMAND = "python -m experiments run zoo"


def _already(file: str) -> list[dict[str, Any]]:
    """The results of a run that was stopped, but for the models that failed."""
    path = RESULTS / f"{file}.jsonl"
    lines = path.read_text().splitlines()[1:] if path.exists() else []
    return [row for row in map(json.loads, lines) if "error" not in row]


def main(args: argparse.Namespace) -> int:
    """Print ratios by architecture and case; 1 if one is above stock."""
    import timm

    names = [name for name in (timm.list_models() if args.all else small()) if args.only in name]
    file, command = ("zoo_all", f"{COMMAND} --all") if args.all else ("zoo", COMMAND)
    rows = _already(file) if args.resume else []
    done = {row["model"] for row in rows}
    names = [name for name in names if name not in done]
    with ProcessPoolExecutor(args.workers) as pool:
        found = pool.map(measure, names, [args.all] * len(names))
        for some in tqdm(found, "zoo", total=len(names)):
            rows += some
            write_results(file, command, rows)
    ratios: dict[str, dict[str, float]] = {}
    for row in rows:
        if "ratio" in row:
            ratios.setdefault(row["model"], {})[row["case"]] = row["ratio"]
    print_table(
        ("model", *(case.name for case in CASES)),
        [
            (name, *(f"{cases[case.name]:.4f}" if case.name in cases else "" for case in CASES))
            for name, cases in ratios.items()
        ],
    )
    failed = [row for row in rows if "error" in row]
    for row in failed:
        print(f"not measured: {row['model']}: {row['error']}")
    above = [row for row in rows if row.get("ratio", 0) > 1]
    print(f"{len(ratios)} models measured, {len(failed)} not; above stock: {len(above)} cases")
    print(f"written to {write_results(file, command, rows)}")
    return bool(above)
