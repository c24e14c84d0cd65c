"""The main job: the gradient of a loss with respect to photographs, through a frozen ResNet-101.

Stock and converted, in PyTorch and, with the same weights, in Flax, on the two photographs that
scikit-learn ships, cut into crops. BatchNorm is in eval mode: such a step needs to keep a bit per
activation and little else. Kept bytes are exact, from the report, which is shown below the table
for the layers that keep most. The peak is the allocator's over a forward and backward pass, beyond
parameters and photographs, in a process of its own; temporaries are those that XLA allots to the
jitted step. Stock and converted alternate for the times; the ratio is the median over pairs.

In float32 the two frameworks differ from each other by more than stock and converted do: the last
bit decides here and there on which side of a kink an activation lies. In float64 they agree.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import memsave

from . import paper
from .harness import GIB, Experiment
from .measure import best_device, compare, peak_bytes
from .render import mib, quartiles, table
from .resnet import resnet, step
from .results import Record

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

MODELS = ("stock", "memsave")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, per colour
TORCH, FLAX = "PyTorch", "Flax"
PEAKS = {f"peak of {name}": name for name in MODELS}
#: Largest ratios to stock, of ResNet-101 and photographs of 224 pixels.
TARGETS = {"kept_bytes": 0.0165, "peak_bytes": 0.12}
ROUNDING = 1e-4  # relative to the largest element of a gradient


@dataclass(frozen=True)
class Config:
    """A ResNet of ``depth`` 50 or 101, ``crops`` of each photograph, ``size`` in pixels.

    ``repeats``: timed pairs of steps. ``rows``: layers of the report to show.
    """

    depth: int = 101
    crops: int = 4
    size: int = 224
    repeats: int = 5
    rows: int = 15


@dataclass(frozen=True)
class Case:
    """A framework (with the times of stock and converted), or the peak of one model."""

    what: str
    depth: int
    crops: int
    size: int
    repeats: int
    rows: int


def cases(config: Config) -> Iterator[Case]:
    """PyTorch, the peaks, Flax."""
    of = config
    for what in (TORCH, *PEAKS, FLAX):
        yield Case(what, of.depth, of.crops, of.size, of.repeats, of.rows)


def photographs(crops: int, size: int = 224) -> Tensor:
    """``crops`` crops of each photograph, normalized; shape ``(2 * crops, 3, size, size)``."""
    from sklearn.datasets import load_sample_images

    batch = []
    for image in load_sample_images().images:
        photo = torch.from_numpy(image.copy()).permute(2, 0, 1) / 255
        for left in torch.linspace(0, photo.shape[2] - photo.shape[1], crops).int().tolist():
            square = photo[:, :, left : left + photo.shape[1]]
            batch.append(nn.functional.interpolate(square[None], size, mode="area"))
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (torch.cat(batch) - mean) / std


def prepare(
    name: str, case: Case, device: torch.device | None = None
) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, its batch and the labels; the same for every ``name`` but for the conversion."""
    torch.manual_seed(0)
    model = resnet(case.depth).to(device)
    x = photographs(case.crops, case.size).to(device)
    # Random weights have no statistics: take those of the photographs.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        labels = model(x).logits.argmin(1)
    paper.apply("Input (BN eval)", model)
    if name == "memsave":
        memsave.convert(model)
    return model, x.requires_grad_(), labels


def measure(case: Case) -> dict[str, Any]:
    """Figures of a framework, or a peak."""
    if case.what == FLAX:
        from . import flax_input_gradient

        return flax_input_gradient.measure(case)
    device = best_device()
    if case.what in PEAKS:
        model, x, labels = prepare(PEAKS[case.what], case, device)

        def forget() -> None:
            x.grad = None

        return {"peak_bytes": peak_bytes(partial(step, model, x, labels), x.device, forget)}
    return _measure_torch(case, device)


def _measure_torch(case: Case, device: torch.device) -> dict[str, Any]:
    """Kept bytes, report, times, losses, and gradients, of which two as pictures."""
    prepared = {name: prepare(name, case, device) for name in MODELS}
    model, x, _ = prepared["stock"]
    report = memsave.report(model, x)
    results = {name: gradient(*of) for name, of in prepared.items()}
    gradients = {name: g.cpu() for name, (_, g) in results.items()}
    return {
        "kept_bytes": {"stock": report.stock, "memsave": report.converted},
        "times": compare({name: partial(step, *prepared[name]) for name in MODELS}, case.repeats),
        "loss": {name: loss for name, (loss, _) in results.items()},
        **differences({name: g.numpy() for name, g in gradients.items()}),
        "report": report.format(case.rows),
        "maps": [picture(gradients["memsave"][k]) for k in (0, case.crops)],
    }


def gradient(model: nn.Module, x: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """The loss, and its gradient with respect to the photographs."""
    loss = step(model, x, labels).item()
    assert x.grad is not None
    return loss, x.grad.clone()


def differences(gradients: dict[str, np.ndarray]) -> dict[str, float]:
    """Between two gradients, and how large they are."""
    stock, ours = (gradients[name] for name in MODELS)
    return {
        "gradient_difference": float(abs(stock - ours).max()),
        "gradient_largest": float(abs(stock).max()),
    }


def picture(g: Tensor) -> dict[str, Any]:
    """A gradient ``(3, h, w)`` summed over colours, as a grey PNG, in which ``white`` is white."""
    from PIL import Image

    heat = g.abs().sum(0)
    white = heat.quantile(0.99)
    grey = (heat / white).clamp(max=1).mul(255).round().to(torch.uint8)
    file = io.BytesIO()
    Image.fromarray(grey.numpy()).save(file, "PNG", optimize=True)
    return {"png": base64.b64encode(file.getvalue()).decode(), "white": white.item()}


# What it looks like.


def _runs(records: Sequence[Record[Case]]) -> dict[Case, dict[str, dict[str, Any]]]:
    """Figures by run (as the case of PyTorch) and by what was measured."""
    runs: dict[Case, dict[str, dict[str, Any]]] = {}
    for record in records:
        run = replace(record.case, what=TORCH)
        runs.setdefault(run, {what: {} for what in (TORCH, *PEAKS, FLAX)})
        runs[run][record.case.what] = record.figures
    return runs


def _peaks(run: dict[str, dict[str, Any]]) -> dict[str, int]:
    sizes = {name: run[what].get("peak_bytes") for what, name in PEAKS.items()}
    return {} if None in sizes.values() else sizes  # type: ignore[return-value]


def show(records: Sequence[Record[Case]]) -> str:
    """The figures of both frameworks side by side, and the report."""
    text = [summary(records)]
    for run in _runs(records).values():
        if run[TORCH]:
            text.append(f"The report in PyTorch:\n\n```\n{run[TORCH]['report']}\n```\n")
    return "\n".join(text)


def summary(records: Sequence[Record[Case]]) -> str:
    """The figures of both frameworks side by side."""
    return "\n".join(_text(case, run) for case, run in _runs(records).items())


def _text(case: Case, run: dict[str, dict[str, Any]]) -> str:
    ours, its = run[TORCH], run[FLAX]
    rows = [
        ("kept for backward, MiB", *_sizes(ours.get("kept_bytes")), *_sizes(its.get("kept_bytes"))),
        ("peak of the whole step, MiB", *_sizes(_peaks(run)), *_sizes(None)),
        ("temporaries of the jitted step, MiB", *_sizes(None), *_sizes(its.get("temp_bytes"))),
        ("seconds", *_seconds(ours.get("times")), *_seconds(its.get("times"))),
        ("loss", *_losses(ours.get("loss")), *_losses(its.get("loss"))),
    ]
    shape = (2 * case.crops, 3, case.size, case.size)
    of = f"ResNet-{case.depth}, frozen, BatchNorm in eval mode; gradient of the input, {shape}."
    text = [of, "", table(("", TORCH, "memsave", "ratio", FLAX, "memsave_jax", "ratio"), rows)]
    for name in (TORCH, FLAX):
        if run[name]:
            text.append(
                f"Largest difference between the gradients in {name}: "
                f"{run[name]['gradient_difference']:.2g} (of at most "
                f"{run[name]['gradient_largest']:.2g}).\n"
            )
    if its:
        versions = ", ".join(f"{name} {version}" for name, version in its["versions"].items())
        text.append(
            f"Between the converted models of the two: {its['to_torch']:.2g}. (Flax: {versions}.)\n"
        )
    return "\n".join(text)


def _sizes(sizes: dict[str, int] | None) -> tuple[str, ...]:
    if not sizes:
        return ("",) * 3
    return (*(mib(sizes[name]) for name in MODELS), f"{sizes['memsave'] / sizes['stock']:.4f}")


def _seconds(times: dict[str, Any] | None) -> tuple[str, ...]:
    if not times:
        return ("",) * 3
    seconds = (f"{times[name]['seconds']:.3f}" for name in MODELS)
    return (*seconds, f"{times['memsave']['ratio']:.3f} ({quartiles(times['memsave'])})")


def _losses(losses: dict[str, float] | None) -> tuple[str, ...]:
    return (*(f"{losses[name]:.6f}" for name in MODELS), "") if losses else ("",) * 3


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Memory above its target or above stock; losses and gradients that are not stock's."""
    for case, run in _runs(records).items():
        as_published = case.depth == 101 and case.size == 224
        measured = {
            (TORCH, "kept_bytes"): run[TORCH].get("kept_bytes"),
            (TORCH, "peak_bytes"): _peaks(run),
            (FLAX, "kept_bytes"): run[FLAX].get("kept_bytes"),
            (FLAX, "temp_bytes"): run[FLAX].get("temp_bytes"),
        }
        for (name, what), sizes in measured.items():
            target = TARGETS.get(what, 1.0) if as_published and name == TORCH else 1.0
            if sizes and sizes["memsave"] > target * sizes["stock"]:
                ratio = sizes["memsave"] / sizes["stock"]
                yield f"{name}, {what}: {ratio:.4f} of stock, target {target}"
        for name in (TORCH, FLAX):
            yield from _wrong(name, run[name]) if run[name] else ()


def _wrong(name: str, figures: dict[str, Any]) -> Iterator[str]:
    stock, ours = (figures["loss"][model] for model in MODELS)
    if abs(stock - ours) > (0 if name == TORCH else 1e-6 * abs(stock)):
        yield f"{name}: the losses are {stock} and {ours}"
    if figures["gradient_difference"] > ROUNDING * figures["gradient_largest"]:
        yield f"{name}: the gradients differ by {figures['gradient_difference']:g}"


def plot(records: Sequence[Record[Case]]) -> Figure:
    """A crop of each photograph, where its gradient is large, and the memory it took."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 5, figsize=(15, 3), layout="constrained")
    case, run = next(iter(_runs(records).items()))
    for k, heat in enumerate(run[TORCH].get("maps", ())):
        axes[2 * k].imshow(_crop(case, k * case.crops))
        axes[2 * k].set_title("photograph")
        image = plt.imread(io.BytesIO(base64.b64decode(heat["png"])), "png")
        axes[2 * k + 1].imshow(image, vmin=0, vmax=1, cmap="magma")
        axes[2 * k + 1].set_title("|gradient|")
    for axis in axes[:4]:
        axis.axis("off")
    _bars(axes[4], {"kept": run[TORCH].get("kept_bytes", {}), "peak": _peaks(run)})
    return figure


def _crop(case: Case, k: int) -> np.ndarray:
    """As it is looked at; shape ``(h, w, 3)``."""
    image = photographs(case.crops, case.size)[k].permute(1, 2, 0)
    return (image * torch.tensor(STD) + torch.tensor(MEAN)).clamp(0, 1).numpy()


def _bars(axis: Any, memory: dict[str, dict[str, int]]) -> None:
    for j, (name, colour) in enumerate(zip(MODELS, ("tab:gray", "tab:green"), strict=True)):
        places = [k + 0.4 * j for k, sizes in enumerate(memory.values()) if sizes]
        heights = [sizes[name] / 2**20 for sizes in memory.values() if sizes]
        axis.bar_label(axis.bar(places, heights, 0.38, color=colour, label=name), fmt="%.0f")
    axis.set(ylabel="MiB", title="memory of a step", xticks=[0.2, 1.2], xticklabels=[*memory])
    axis.tick_params(axis="x", length=0)
    axis.margins(y=0.12)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1))


def memory(case: Case) -> int:
    """Two models, and a step of stock: at 8 crops, 1 GiB in PyTorch, and less in Flax."""
    return 2 * GIB + case.crops * GIB * case.size**2 // 224**2 // 2


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(depth=50, crops=1, size=64, repeats=1),
        "quick": Config(crops=1, repeats=3),
        "default": Config(),
        "paper": Config(crops=32),
    },
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    plot=plot,
    summary=summary,
    memory=memory,
)
