"""The main job: the gradient of a loss with respect to photographs, through a frozen ResNet-101.

Stock and converted, in PyTorch and in Flax, on the two photographs that scikit-learn ships, cut
into crops: kept bytes, whole-step peak or temporaries, time, the largest difference between the
gradients, the report, and a plot.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import memsave

from .flax_input_gradient import measure as flax_measure
from .measure import (
    RESULTS,
    in_fresh_process,
    paired_times,
    peak_bytes,
    print_table,
    ratio,
    write_results,
)
from .scenarios import SCENARIOS, apply, resnet, step

MODELS = ("stock", "memsave")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, per colour
FROZEN = next(scenario for scenario in SCENARIOS if scenario.name == "Input (BN eval)")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command line."""
    parser.add_argument("--crops", type=int, default=4, help="crops of each photograph")
    parser.add_argument("--repeats", type=int, default=5, help="timed pairs of steps")
    parser.add_argument("--rows", type=int, default=15, help="layers of the report to print")


def photographs(crops: int) -> Tensor:
    """``crops`` crops of each photograph, normalized; shape ``(2 * crops, 3, 224, 224)``."""
    from sklearn.datasets import load_sample_images

    batch = []
    for image in load_sample_images().images:
        photo = torch.from_numpy(image.copy()).permute(2, 0, 1) / 255
        for left in torch.linspace(0, photo.shape[2] - photo.shape[1], crops).int().tolist():
            square = photo[:, :, left : left + photo.shape[1]]
            batch.append(nn.functional.interpolate(square[None], 224, mode="area"))
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (torch.cat(batch) - mean) / std


def prepare(name: str, crops: int) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, its batch and the labels; the same for every ``name`` but for the conversion."""
    torch.manual_seed(0)
    model = resnet(101)
    x = photographs(crops)
    # Random weights have no statistics: take those of the photographs.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        labels = model(x).logits.argmin(1)
    apply(FROZEN, model)
    if name == "memsave":
        memsave.convert(model)
    return model, x.requires_grad_(), labels


def peak(name: str, crops: int) -> int:
    """Allocator peak in bytes of one step."""
    model, x, labels = prepare(name, crops)
    return peak_bytes(lambda: step(model, x, labels))


def main(args: argparse.Namespace) -> int:
    """Run everything, print the figures, save the plot."""
    bar = tqdm(total=6, desc="preparing")
    prepared = {name: prepare(name, args.crops) for name in MODELS}
    model, x, _ = prepared["stock"]
    report = memsave.report(model, x)
    advance(bar, "gradients")
    loss = {name: step(*prepared[name]).item() for name in MODELS}
    gradients = {name: gradient(prepared[name][1]) for name in MODELS}
    advance(bar, "peak of stock")
    peaks = {"stock": in_fresh_process(peak, "stock", args.crops)}
    advance(bar, "peak of memsave")
    peaks["memsave"] = in_fresh_process(peak, "memsave", args.crops)
    advance(bar, "time")
    steps = {name: lambda name=name: step(*prepared[name]) for name in MODELS}
    times = paired_times(steps, args.repeats)
    advance(bar, "the same in Flax")
    flax = in_fresh_process(flax_measure, args.crops, args.repeats)
    advance(bar, "done")
    bar.close()

    print(report.format(args.rows))
    print()
    kept = {"stock": report.stock, "memsave": report.converted}
    seconds = {name: statistics.median(times[name]) for name in MODELS}
    torch_gradients = {name: gradients[name].numpy() for name in MODELS}
    figures = {
        "kept_bytes": kept,
        "peak_bytes": peaks,
        "seconds": seconds,
        "time_ratio": ratio(times["memsave"], times["stock"]),
        "loss": loss,
        **differences(torch_gradients),
    }
    flax_gradients = flax.pop("gradients")
    flax |= differences(flax_gradients)
    print(f"ResNet-101, frozen, BatchNorm in eval mode; gradient of the input, {tuple(x.shape)}")
    print_table(
        ("", "PyTorch", "memsave", "ratio", "Flax", "memsave_jax", "ratio"),
        [
            ("kept for backward", *_sizes(kept), *_sizes(flax["kept_bytes"])),
            ("peak of the whole step", *_sizes(peaks), "", "", ""),
            ("temporaries of the jitted step", "", "", "", *_sizes(flax["temp_bytes"])),
            ("seconds", *_seconds(figures), *_seconds(flax)),
            ("loss", *_loss(figures), *_loss(flax)),
        ],
    )
    for name, of in (("PyTorch", figures), ("Flax", flax)):
        print(
            f"largest difference between the gradients in {name}: {of['gradient_difference']:g} "
            f"(of at most {of['gradient_largest']:g})"
        )
    off = abs(torch_gradients["memsave"] - flax_gradients["memsave"]).max()
    print(f"between the converted models of the two: {off:g}")
    command = f"python -m experiments run input_gradient --crops {args.crops}"
    rows = [{"backend": "torch", **figures}, {"backend": "jax", **flax}]
    print(f"written to {write_results('input_gradient', command, rows)}")
    print(f"plot saved to {plot(prepared['memsave'][1], gradients['memsave'], kept, peaks)}")
    return 0


def advance(bar: tqdm, what: str) -> None:
    """One stage is done, ``what`` is next."""
    bar.update()
    bar.set_description(what)


def gradient(x: Tensor) -> Tensor:
    """The gradient of a leaf, which a step has computed."""
    assert x.grad is not None
    return x.grad.clone()


def differences(gradients: dict[str, Any]) -> dict[str, float]:
    """Between two gradients, and how large they are."""
    stock, ours = (gradients[name] for name in MODELS)
    return {
        "gradient_difference": float(abs(stock - ours).max()),
        "gradient_largest": float(abs(stock).max()),
    }


def _seconds(figures: dict[str, Any]) -> tuple[str, str, str]:
    seconds = (f"{figures['seconds'][name]:.2f}" for name in MODELS)
    return (*seconds, f"{figures['time_ratio']:.3f}")  # type: ignore[return-value]


def _loss(figures: dict[str, Any]) -> tuple[str, str, str]:
    return (*(f"{figures['loss'][name]:.6f}" for name in MODELS), "")  # type: ignore[return-value]


def _sizes(sizes: dict[str, int]) -> tuple[str, str, str]:
    mib = (f"{sizes[name] / 2**20:.1f} MiB" for name in MODELS)
    return (*mib, f"{sizes['memsave'] / sizes['stock']:.4f}")  # type: ignore[return-value]


def plot(x: Tensor, g: Tensor, kept: dict[str, int], peaks: dict[str, int]) -> Path:
    """A crop of each photograph, where its gradient is large, and the memory it took."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 5, figsize=(15, 3), layout="constrained")
    for row, k in enumerate((0, len(x) // 2)):
        mean, std = torch.tensor(MEAN), torch.tensor(STD)
        axes[2 * row].imshow((x[k].detach().permute(1, 2, 0) * std + mean).clamp(0, 1))
        axes[2 * row].set_title("photograph")
        heat = g[k].abs().sum(0)
        axes[2 * row + 1].imshow(heat / heat.quantile(0.99), vmax=1, cmap="magma")
        axes[2 * row + 1].set_title("|gradient|")
    for axis in axes[:4]:
        axis.axis("off")
    for k, (label, sizes) in enumerate((("kept", kept), ("peak", peaks))):
        for j, (name, colour) in enumerate(zip(MODELS, ("tab:gray", "tab:green"), strict=True)):
            bar = axes[4].bar(k + 0.4 * j, sizes[name] / 2**20, 0.38, color=colour)
            axes[4].bar_label(bar, fmt="%.0f")
            if k == 0:
                bar.set_label(name)
        axes[4].text(k + 0.2, -0.03, label, ha="center", va="top", transform=_mixed(axes[4]))
    axes[4].set(xticks=[], ylabel="MiB", title="memory of a step")
    axes[4].margins(y=0.12)
    axes[4].legend(loc="center right")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "input_gradient.png"
    figure.savefig(path, dpi=100)
    return path


def _mixed(axis):
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axis.transData, axis.transAxes)
