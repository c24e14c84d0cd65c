"""The main job: the gradient of a loss with respect to photographs, through a frozen ResNet-101.

Stock and converted, on the two photographs that scikit-learn ships, cut into crops: kept bytes,
whole-step peak, time, the largest difference between the gradients, the report, and a plot.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import memsave

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
    bar = tqdm(total=5, desc="preparing")
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
    advance(bar, "done")
    bar.close()

    print(report.format(args.rows))
    print()
    difference = (gradients["stock"] - gradients["memsave"]).abs().max().item()
    largest = gradients["stock"].abs().max().item()
    kept = {"stock": report.stock, "memsave": report.converted}
    seconds = {name: statistics.median(times[name]) for name in MODELS}
    slower = ratio(times["memsave"], times["stock"])
    print(f"ResNet-101, frozen, BatchNorm in eval mode; gradient of the input, {tuple(x.shape)}")
    print_table(
        ("", "stock", "memsave", "ratio"),
        [
            ("kept for backward", *_sizes(kept)),
            ("peak of the whole step", *_sizes(peaks)),
            ("seconds", *(f"{seconds[name]:.2f}" for name in MODELS), f"{slower:.3f}"),
            ("loss", *(f"{loss[name]:.6f}" for name in MODELS), ""),
        ],
    )
    print(f"largest difference between the gradients: {difference:g} (of at most {largest:g})")
    command = f"python -m experiments run input_gradient --crops {args.crops}"
    figures = {
        "kept_bytes": kept,
        "peak_bytes": peaks,
        "seconds": seconds,
        "time_ratio": slower,
        "gradient_difference": difference,
        "gradient_largest": largest,
    }
    print(f"written to {write_results('input_gradient', command, [figures])}")
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
