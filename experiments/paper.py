"""The paper's models, inputs, scenarios and published numbers.

Every model is a :class:`Step`: ``step(x, labels)`` is the cross-entropy loss. Weights are random.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

SEQUENCE = 256


class Step(nn.Module):
    """A model and its loss.

    Shapes: x ``(n, 3, h, w)`` or ``(n, sequence, width)``; logits ``(n, classes)``, ``(n, classes,
    h, w)`` or ``(n, sequence, classes)``; labels as the logits without the classes.
    """

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()
        self._call = call

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(x)
        return self.loss(logits.movedim(-1, 1) if labels.ndim == 2 else logits, labels)

    def logits(self, x: Tensor) -> Tensor:
        """Without the loss."""
        return self._call(self.model, x)


@dataclass(frozen=True)
class Model:
    """How to make a model, and its data.

    Attributes:
        make: Makes it; of transformers, with so many layers (``None``: as published).
        call: The logits of x.
        width: Of embeddings that are its input; ``None`` of images.
        labels: Shape of the labels of one example.
        classes: How many.
        batch: The paper's.
        train: The mode: convolutional models in train mode, transformers in eval mode.
        dtype: Of the parameters and of x.
        has_layers: Whether it is a transformer, of which fewer layers can be made.
    """

    make: Callable[[int | None], nn.Module]
    call: Callable[[nn.Module, Tensor], Tensor]
    width: int | None = None
    labels: tuple[int, ...] = ()
    classes: int = 1000
    batch: int = 64
    train: bool = True
    dtype: torch.dtype = torch.float32
    has_layers: bool = False

    def step(self, layers: int | None = None) -> Step:
        """The model and its loss."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return Step(self.make(layers), self.call).train(self.train)
        finally:
            torch.set_default_dtype(default)

    def said(self, layers: int) -> str:
        """Of how many layers it is made, where these are not the published ones (0)."""
        return f", {layers} layers" if layers and self.has_layers else ""

    def data(self, batch: int | None = None, size: int | None = None) -> tuple[Tensor, Tensor]:
        """Random x and labels; ``size`` of images in pixels (224), or sequences in tokens (256)."""
        n, labels = batch or self.batch, self.labels
        if self.width is None:
            size = size or 224
            x = torch.randn(n, 3, size, size)
            labels = (size,) * len(labels)
        else:
            size = size or SEQUENCE
            x = torch.randn(n, size, self.width, dtype=self.dtype)
            labels = (size,)
        return x, torch.randint(self.classes, (n, *labels))


def _makes_fake() -> bool:
    """Whether tensors have no values now, which drawing from a truncated distribution looks at."""
    return isinstance(torch.empty(0), FakeTensor)


def _images(
    name: str,
    call: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    backbone: dict[str, None] | None = None,
    **options: Any,
) -> Model:
    def make(layers: int | None) -> nn.Module:
        from torchvision import models

        undrawn = mock.patch.object(nn.init, "trunc_normal_", lambda tensor, *_, **__: tensor)
        with undrawn if _makes_fake() else nullcontext():
            return models.get_model(name, weights=None, **(backbone or {}))

    return Model(make, call, **options)


def _segmentation(name: str) -> Model:
    return _images(
        *(name, lambda model, x: model(x)["out"], {"weights_backbone": None}),
        labels=(224, 224),
        classes=21,
    )


def _transformer(
    cls: str,
    width: int | None,
    classes: int,
    depth: str = "num_hidden_layers",
    dtype: torch.dtype = torch.float32,
    batch: int = 64,
    **config: Any,
) -> Model:
    def make(layers: int | None) -> nn.Module:
        import transformers
        from transformers.initialization import no_init_weights

        kind: Any = getattr(transformers, cls)
        options = config if layers is None else {**config, depth: layers}
        with no_init_weights() if _makes_fake() else nullcontext():
            return kind(kind.config_class(**options))

    def call(model: Any, x: Tensor) -> Tensor:
        if width is None:
            return model(pixel_values=x).logits
        both = {"decoder_inputs_embeds": x} if model.config.is_encoder_decoder else {}
        return model(inputs_embeds=x, use_cache=False, **both).logits

    labels = () if width is None else (SEQUENCE,)
    return Model(make, call, width, labels, classes, batch, False, dtype, has_layers=True)


#: Of the names of models with the attention that transformers had for them then.
_EAGER = ", eager attention"


def _t5(attention: str) -> Model:
    return _transformer(
        *("T5ForConditionalGeneration", 768, 32128, "num_layers"),
        d_model=768,
        d_ff=3072,
        num_layers=12,
        num_heads=12,
        decoder_start_token_id=0,
        attn_implementation=attention,
    )


_LLAMA3: dict[str, Any] = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
}
MODELS = {
    "ResNet-18": _images("resnet18"),
    "ResNet-50": _images("resnet50"),
    "ResNet-101": _images("resnet101"),
    "ResNeXt101_64x4d": _images("resnext101_64x4d"),
    "VGG-16": _images("vgg16"),
    "MobileNetV3": _images("mobilenet_v3_large"),
    "EfficientNetV2-L": _images("efficientnet_v2_l"),
    "ConvNeXt": _images("convnext_base"),
    "DeepLabv3": _segmentation("deeplabv3_resnet101"),
    "FCN": _segmentation("fcn_resnet101"),
    "ViT": _transformer("ViTForImageClassification", None, 1000, num_labels=1000),
    "BERT": _transformer("BertLMHeadModel", 768, 30522, is_decoder=True),
    "GPT-2": _transformer("GPT2LMHeadModel", 768, 50257, "n_layer"),
    "T5-base": _t5("sdpa"),
    f"T5-base{_EAGER}": _t5("eager"),
    "Mistral-7B": _transformer(
        "MistralForCausalLM", 4096, 32000, dtype=torch.bfloat16, batch=16, sliding_window=4096
    ),
    "Llama-3-8B": _transformer(
        "LlamaForCausalLM", 4096, 128256, dtype=torch.bfloat16, batch=8, **_LLAMA3
    ),
}


@contextmanager
def without_values() -> Iterator[None]:
    """For transformers on fake tensors: sequences are not packed.

    They look at the values of ``position_ids`` to see this. With fake tensors, which have none,
    they build a mask instead, and attention keeps copies of keys and values for it.
    """
    where = "transformers.masking_utils.find_packed_sequence_indices"
    with mock.patch(where, return_value=None):
        yield


# Scenarios.


@dataclass(frozen=True)
class Scenario:
    """What is differentiable.

    Attributes:
        trainable: Of the leaf modules with parameters (linear, convolution, norm), those that are.
        input: Whether x is.
        batch_norm_eval: Whether BatchNorm is in eval mode.
    """

    trainable: Callable[[list[nn.Module]], list[nn.Module]]
    input: bool = False
    batch_norm_eval: bool = False


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _is_linear_like(module: nn.Module) -> bool:
    # Conv1D is the linear layer of GPT-2.
    return isinstance(module, (nn.Linear, _ConvNd)) or type(module).__name__ == "Conv1D"


def _of_kind(is_kind: Callable[[nn.Module], bool]) -> Callable[[list[nn.Module]], list[nn.Module]]:
    return lambda layers: [layer for layer in layers if is_kind(layer)]


SCENARIOS = {
    "All": Scenario(lambda layers: layers),
    "Input": Scenario(lambda layers: [], input=True),
    "Input (BN eval)": Scenario(lambda layers: [], input=True, batch_norm_eval=True),
    "Conv": Scenario(_of_kind(lambda layer: isinstance(layer, _ConvNd))),
    "Norm": Scenario(_of_kind(_is_norm)),
    "Surgical": Scenario(lambda layers: layers[: len(layers) // 4 + 1]),
    "SurgicalLast": Scenario(lambda layers: layers[-(len(layers) // 4 + 1) :], input=True),
}
#: Of the options of experiments.
CHOICES: dict[str, Collection[str]] = {"models": MODELS, "scenarios": SCENARIOS}
#: An untied head stays trainable in these.
_WITH_HEAD = ("All", "Input", "Norm")


def layers(model: nn.Module) -> list[nn.Module]:
    """Linear, convolution and norm layers with parameters, in the order of registration."""
    return [
        module
        for module in model.modules()
        if (_is_linear_like(module) or _is_norm(module))
        and any(True for _ in module.parameters(recurse=False))
    ]


def apply(scenario: str, model: nn.Module) -> bool:
    """Set ``requires_grad`` of the parameters and the mode of BatchNorm.

    Returns:
        Whether the scenario makes sense: it has something to differentiate, and its BatchNorm.
    """
    of = SCENARIOS[scenario]
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model.model if isinstance(model, Step) else model, "lm_head", None)
    model.requires_grad_(False)
    chosen = of.trainable(layers(model))
    if scenario in _WITH_HEAD and isinstance(head, nn.Linear):
        chosen = [*chosen, head]
    for module in chosen:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(parameter not in embeddings)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in norms:
        module.train(not of.batch_norm_eval)
    wanted = of.input or any(p.requires_grad for p in model.parameters())
    return wanted and (bool(norms) or not of.batch_norm_eval)


def published(model: str, scenario: str) -> tuple[float, float, float, float] | None:
    """What the paper says of a model, whatever its attention is here."""
    return PUBLISHED.get((model.removesuffix(_EAGER), scenario))


#: The published memory (forward pass only, with parameters and data) and time: stock GiB,
#: paper GiB, stock seconds, paper seconds. arXiv 2404.12406, full precision of its results files.
PUBLISHED = {
    ("ResNet-101", "All"): (7.83, 8.56, 0.457, 0.443),
    ("ResNet-101", "Input"): (7.83, 5.24, 0.379, 0.361),
    ("ResNet-101", "Input (BN eval)"): (7.83, 1.42, 0.345, 0.334),
    ("ResNet-101", "Norm"): (7.83, 5.24, 0.372, 0.358),
    ("ResNet-101", "Surgical"): (7.83, 6.86, 0.404, 0.391),
    ("ResNeXt101_64x4d", "All"): (15.15, 16.75, 0.651, 0.641),
    ("ResNeXt101_64x4d", "Input"): (15.15, 9.87, 0.533, 0.520),
    ("ResNeXt101_64x4d", "Norm"): (15.15, 9.87, 0.533, 0.519),
    ("ResNeXt101_64x4d", "Surgical"): (15.15, 13.32, 0.584, 0.563),
    ("EfficientNetV2-L", "All"): (26.81, 26.81, 0.767, 0.784),
    ("EfficientNetV2-L", "Input"): (26.81, 18.64, 0.621, 0.628),
    ("EfficientNetV2-L", "Input (BN eval)"): (26.81, 10.45, 0.585, 0.579),
    ("EfficientNetV2-L", "Norm"): (26.81, 18.64, 0.618, 0.626),
    ("EfficientNetV2-L", "Surgical"): (26.81, 22.05, 0.678, 0.692),
    ("T5-base", "All"): (33.40, 31.84, 1.701, 1.947),
    ("T5-base", "Input"): (25.94, 22.80, 1.373, 1.515),
    ("T5-base", "Norm"): (28.85, 22.80, 1.390, 1.539),
    ("T5-base", "Surgical"): (27.77, 25.28, 1.469, 1.594),
    ("Mistral-7B", "All"): (41.67, 37.67, 2.085, 2.549),
    ("Mistral-7B", "Input"): (34.20, 32.17, 1.549, 1.444),
    ("Mistral-7B", "Norm"): (36.17, 32.17, 1.558, 1.460),
    ("Mistral-7B", "Surgical"): (36.01, 33.54, 1.668, 1.712),
}
