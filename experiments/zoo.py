"""Kept bytes of many architectures, stock and converted, exact counts on fake tensors.

Models of timm, transformers and torchvision, small or of full size: never above stock.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import memsave

from .harness import Experiment
from .render import table
from .results import Record

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


class Scenario(NamedTuple):
    """What is trainable (by the names of parameters), whether x is, and the mode."""

    name: str
    trainable: Callable[[str, int, int], bool]
    input: bool
    train: bool


def _norm(name: str, place: int, count: int) -> bool:
    return any(part in name.lower() for part in ("norm", "bn", ".ln", "ln_"))


SCENARIOS = (
    Scenario("All, train", lambda name, place, count: True, input=False, train=True),
    Scenario("All, eval", lambda name, place, count: True, input=False, train=False),
    Scenario("Norm, train", _norm, input=False, train=True),
    Scenario("Last half, train", lambda name, place, n: place >= n // 2, input=False, train=True),
    Scenario("Input, eval", lambda name, place, count: False, input=True, train=False),
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


def apply(scenario: Scenario, model: nn.Module, inputs: Inputs) -> Inputs:
    """Set ``requires_grad`` and the mode; returns the inputs, wanting a gradient if they do."""
    names = [name for name, _ in model.named_parameters()]
    for place, (name, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(scenario.trainable(name, place, len(names)))
    model.train(scenario.train)
    return {
        name: x.detach().requires_grad_(scenario.input and x.is_floating_point())
        for name, x in inputs.items()
    }


def fits(scenario: Scenario, model: nn.Module, inputs: Inputs) -> bool:
    """Whether anything wants a gradient."""
    inputs = apply(scenario, model, inputs)
    return any(t.requires_grad for t in (*model.parameters(), *inputs.values()))


# The experiment.


@dataclass(frozen=True)
class Config:
    """Which models: small ones of three libraries, or every model of timm at full size.

    ``every``: Only each n-th of them.
    """

    full: bool = False
    every: int = 1


@dataclass(frozen=True)
class Case:
    """An architecture, in every scenario (at full size: every second)."""

    model: str
    full: bool


def cases(config: Config) -> Iterator[Case]:
    """By name."""
    import timm

    for name in [*(timm.list_models() if config.full else small())][:: config.every]:
        yield Case(name, config.full)


def full_size(name: str) -> tuple[nn.Module, Inputs]:
    """A model of timm on the meta device."""
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
        size = timm.data.resolve_data_config({}, model=model)["input_size"]  # type: ignore[attr-defined]
        return model, {"x": torch.empty(2, *size)}


def named(model: nn.Module, inputs: Inputs) -> Inputs:
    """The image by the name that the model's forward has for it."""
    if "x" not in inputs:
        return inputs
    return {next(iter(inspect.signature(model.forward).parameters)): inputs["x"]}


def measure(case: Case) -> dict[str, Any]:
    """Kept bytes by scenario, or the model's own error."""
    warnings.simplefilter("ignore")
    logging.disable()
    figures = {}
    try:
        model, inputs = full_size(case.model) if case.full else small()[case.model]()
        for scenario in SCENARIOS[::2] if case.full else SCENARIOS:
            if fits(scenario, model, inputs):
                report = memsave.report(model, **named(model, apply(scenario, model, inputs)))
                figures[scenario.name] = [report.stock, report.converted]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0]}
    return figures


def _ratios(record: Record[Case]) -> dict[str, float]:
    bytes_kept = {} if "error" in record.figures else record.figures
    return {name: ours / stock if stock else 1.0 for name, (stock, ours) in bytes_kept.items()}


def show(records: Sequence[Record[Case]]) -> str:
    """Ratios of bytes by model and scenario; of many models, how they are distributed."""
    ratios = {r.case.model: _ratios(r) for r in records if "error" not in r.figures}
    names = [scenario.name for scenario in SCENARIOS]
    lines = [(model, *(_number(of.get(name)) for name in names)) for model, of in ratios.items()]
    text = [table(("bytes kept, ratio to stock", *names), lines)] if len(lines) < 200 else []
    return "\n".join([*text, summary(records), *_errors(records)])


def summary(records: Sequence[Record[Case]]) -> str:
    """How the ratios are distributed."""
    ratios = [_ratios(record) for record in records]
    rows = []
    for name in (scenario.name for scenario in SCENARIOS):
        of = sorted(ratio[name] for ratio in ratios if name in ratio)
        if of:
            ends = (f"{ratio:.4f}" for ratio in (of[0], of[len(of) // 2], of[-1]))
            counts = (sum(ratio == 1 for ratio in of), sum(ratio > 1 for ratio in of))
            rows.append((name, str(len(of)), *ends, *map(str, counts)))
    header = ("gradients wanted", "models", "lowest", "median", "highest", "at stock", "above")
    return table(header, rows)


def _errors(records: Sequence[Record[Case]]) -> Iterator[str]:
    for record in records:
        if "error" in record.figures:
            yield f"Not measured: {record.case.model}: {record.figures['error']}\n"


def _number(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.4f}"


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """All that is above stock, or could not be measured."""
    for record in records:
        if "error" in record.figures:
            yield f"{record.case.model}: {record.figures['error']}"
        for name, ratio in _ratios(record).items():
            if ratio > 1:
                yield f"{record.case.model}, {name}: {ratio:.4f} of stock"


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(every=24),
        "quick": Config(every=6),
        "default": Config(),
        "paper": Config(full=True),
    },
    libraries=("timm",),
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    summary=summary,
    misses=misses,
    exact=True,
    accelerator=False,
)
