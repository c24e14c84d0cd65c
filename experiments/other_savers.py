"""Other exact savers beside memsave: those that torch has, and the paper's code.

All of them change what is kept for the backward pass and nothing else that training needs. Stock
has the ReLUs not in place (torchvision has them so: the row "in-place ReLU"). For all alike:

- Kept: bytes that the allocator has handed out in the forward pass and not got back at its end.
  So masks that an implementation hides from the hooks on saved tensors are counted as well.
- Peak: of the allocator over forward and backward pass, above parameters and data.
- Time: of both passes, in turn with stock in one process; the median ratio.
- Gradients off by: the largest difference from stock's, relative to stock's largest gradient. Up
  to some 1e-4 it is rounding, which decides here and there on which side of a kink an activation
  lies.

On a CPU ``save_on_cpu`` has nowhere to move tensors to; compiled convolutions there copy their
weights and inputs to another layout.

The paper's code is no dependency. To measure it as well, get it and say where it is:

    git clone https://github.com/plutonium-239/memsave_torch CHECKOUT
    python -m experiments run other_savers --paper-code CHECKOUT

Then there is a second table, of single layers with the parameters frozen and a gradient wanted for
x: how far the outputs and gradients are from stock's, or the error.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memsave

from . import paper
from .harness import GIB, Experiment
from .measure import compare, kept_bytes, peak_bytes
from .render import matrix, mib, quartiles, table
from .results import Record
from .strategies import (
    TOLERANCE,
    checkpoint_blocks,
    compile_with_budget,
    largest_difference,
    moving_to_cpu,
    set_in_place,
)
from .subject import Subject

HOW_TO_ADD = (
    "Without the paper's code; with a checkout of https://github.com/plutonium-239/memsave_torch, "
    "`--paper-code CHECKOUT` measures it too.\n"
)


@dataclass(frozen=True)
class Config:
    """Which models in which scenarios.

    ``paper_code`` is a checkout of the paper's code. ``layers`` are those of a transformer and
    ``size`` that of images in pixels, both 0 as published. ``compiled`` are the scenarios in which
    the compiler is measured too, which takes it minutes; ``strategies`` does so by itself.
    """

    models: tuple[str, ...] = ("ResNet-101", "ViT")
    scenarios: tuple[str, ...] = ("All", "Input (BN eval)")
    compiled: tuple[str, ...] = ()
    paper_code: str = ""
    batch: int = 4
    layers: int = 2
    size: int = 0
    repeats: int = 9


@dataclass(frozen=True)
class Case:
    """A saver on a model in a scenario; or, without a scenario, on a layer."""

    model: str
    scenario: str
    saver: str
    paper_code: str
    batch: int
    layers: int
    size: int
    repeats: int


# Models in the hands of a saver.


def _convert(subject: Subject, case: Case) -> None:
    memsave.convert(subject.step, (subject.x, subject.labels))


def _checkpoint(subject: Subject, case: Case) -> None:
    checkpoint_blocks(subject.step)


def _save_on_cpu(subject: Subject, case: Case) -> None:
    subject.around = moving_to_cpu


def _in_place(subject: Subject, case: Case) -> None:
    set_in_place(subject.step)


def _compile(subject: Subject, case: Case, budget: float) -> None:
    subject.around = compile_with_budget(subject.step, budget)


def check_paper_code(path: str) -> None:
    """Whether it is there, if anywhere.

    Raises:
        ValueError: It is not; what is measured without it would be taken for its failures.
    """
    if path and not Path(path, "memsave_torch").expanduser().is_dir():
        raise ValueError(f"{path} is no checkout of the paper's code: it has no memsave_torch")


def convert_by_paper(path: str, model: nn.Module, **options: bool) -> nn.Module:
    """Convert a model by the paper's code at a path. It returns another model."""
    folder = str(Path(path).expanduser().resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("memsave_torch.nn").convert_to_memory_saving(model, **options)


def _paper(subject: Subject, case: Case, **options: bool) -> None:
    subject.step = convert_by_paper(case.paper_code, subject.step, **options)
    subject.apply(case.scenario)  # of which it does not keep everything


@dataclass(frozen=True)
class Saver:
    """What keeps less for the backward pass.

    Attributes:
        apply: To the subject of a case.
        computes_again: Whether it computes parts of the forward pass twice.
        needs: A layer that the model must have.
        by_paper: Whether it is the paper's code.
    """

    apply: Callable[[Subject, Case], Any] = lambda subject, case: None
    computes_again: bool = False
    needs: type[nn.Module] = nn.Module
    by_paper: bool = False


SAVERS = {
    "stock": Saver(),
    "memsave": Saver(_convert),
    "paper's code": Saver(_paper, by_paper=True),
    "paper's code, dropout=False": Saver(
        partial(_paper, dropout=False), needs=nn.Dropout, by_paper=True
    ),
    "in-place ReLU": Saver(_in_place, needs=nn.ReLU),
    "save_on_cpu": Saver(_save_on_cpu),
    "checkpointing of blocks": Saver(_checkpoint, computes_again=True),
    "torch.compile": Saver(partial(_compile, budget=1.0), computes_again=True),
    "torch.compile, memory budget 0.5": Saver(partial(_compile, budget=0.5), computes_again=True),
}


# Layers, which are compared with stock's.


class Standardized(nn.Conv2d):
    """A convolution whose weight has mean zero: a subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """As the weight says when its mean is taken off."""
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


def _images(dtype: torch.dtype = torch.float32, *, lowest: float = -10.0) -> Tensor:
    x = torch.randn(2, 8, 9, 9).clamp(min=-2.0)
    return x.masked_fill(x == -2.0, lowest).to(dtype)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "Conv2d": (lambda: nn.Conv2d(8, 8, 3), _images),
    "Conv2d in float64": (lambda: nn.Conv2d(8, 8, 3).double(), lambda: _images(torch.float64)),
    "Conv2d, padding='same'": (lambda: nn.Conv2d(8, 8, 3, padding="same"), _images),
    "Conv2d, padding_mode='circular'": (
        lambda: nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
        _images,
    ),
    "a subclass of Conv2d": (lambda: Standardized(8, 8, 3), _images),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), _images),
    "BatchNorm2d, eval": (lambda: nn.BatchNorm2d(8).eval(), _images),
    "BatchNorm2d, eval, in float64": (
        lambda: nn.BatchNorm2d(8).double().eval(),
        lambda: _images(torch.float64),
    ),
    "BatchNorm2d, affine=False": (lambda: nn.BatchNorm2d(8, affine=False), _images),
    "BatchNorm2d, momentum=None": (lambda: nn.BatchNorm2d(8, momentum=None), _images),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), _images),
    "MaxPool2d, ceil_mode=True": (lambda: nn.MaxPool2d(2, ceil_mode=True), _images),
    "MaxPool2d in float64": (lambda: nn.MaxPool2d(2), lambda: _images(torch.float64)),
    "ReLU": (nn.ReLU, _images),
    "ReLU, of infinity": (nn.ReLU, lambda: _images(lowest=-math.inf)),
    "Dropout(0.1)": (lambda: nn.Dropout(0.1), _images),
    "Dropout(0.1), eval": (lambda: nn.Dropout(0.1).eval(), _images),
}


def _outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = model(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    assert x.grad is not None
    return {"outputs": y.detach(), "gradients": x.grad}


def _measure_layer(case: Case) -> dict[str, Any]:
    make, data = LAYERS[case.model]
    torch.manual_seed(0)
    model, x = nn.Sequential(make()).requires_grad_(False), data()
    stock = _outcome(model, x)
    model.load_state_dict(_fresh(make).state_dict())
    if SAVERS[case.saver].by_paper:
        model = convert_by_paper(case.paper_code, model)
    else:
        memsave.convert(model, (x,))
    ours = _outcome(model, x)
    off = {name: largest_difference({name: ours[name]}, {name: stock[name]}) for name in stock}
    return {"off": off}


def _fresh(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(make())


# The experiment.


def cases(config: Config) -> Iterator[Case]:
    """By model and scenario; the paper's code where it is said where that is."""
    check_paper_code(config.paper_code)
    around = (config.batch, config.layers, config.size, config.repeats)
    for name in config.models:
        with FakeTensorMode():
            step = paper.MODELS[name].step(1)
        for scenario in config.scenarios:
            if paper.apply(scenario, step):
                savers = (name for name in SAVERS if _is_asked_for(name, scenario, config, step))
                for saver in savers:
                    path = config.paper_code if SAVERS[saver].by_paper else ""
                    yield Case(name, scenario, saver, path, *around)
    if config.paper_code:
        for layer in LAYERS:
            yield Case(layer, "", "memsave", "", 0, 0, 0, 0)
            yield Case(layer, "", "paper's code", config.paper_code, 0, 0, 0, 0)


def _is_asked_for(name: str, scenario: str, config: Config, model: nn.Module) -> bool:
    saver = SAVERS[name]
    if saver.by_paper and not config.paper_code:
        return False
    if "compile" in name and scenario not in config.compiled:
        return False
    return any(isinstance(module, saver.needs) for module in model.modules())


def memory(case: Case) -> int:
    """Roughly; ResNet-50 takes 0.1 GiB per image."""
    return 2 * GIB + case.batch * GIB // 4


def measure(case: Case) -> dict[str, Any]:
    """The figures, or the error."""
    try:
        return _measure_model(case) if case.scenario else _measure_layer(case)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0]}


def _measure_model(case: Case) -> dict[str, Any]:
    stock = Subject.of(case.model, case.scenario, case.batch, case.layers, case.size)
    set_in_place(stock.step, inplace=False)
    subject = stock.again()
    SAVERS[case.saver].apply(subject, case)
    subject()
    gradients = subject.gradients()
    kept = kept_bytes(subject.forward, subject.x.device)
    peak = peak_bytes(subject, subject.x.device, subject.forget)
    stock()
    return {
        "kept_bytes": kept,
        "peak_bytes": peak,
        "times": compare({"stock": stock, "saver": subject}, case.repeats),
        "off": largest_difference(gradients, stock.gradients()),
    }


# What it looks like.


def show(records: Sequence[Record[Case]]) -> str:
    """A table per model, and one of the layers."""
    text = []
    models = dict.fromkeys(r.case.model for r in records if r.case.scenario)
    for model in models:
        text.append(_of_model([record for record in records if record.case.model == model]))
    layers = [record for record in records if not record.case.scenario]
    text.append(_of_layers(layers) if layers else HOW_TO_ADD)
    return "\n".join(text)


def _of_model(records: Sequence[Record[Case]]) -> str:
    stock = {r.case.scenario: r.figures for r in records if r.case.saver == "stock"}
    case = records[0].case
    cut = paper.MODELS[case.model].said(case.layers)
    title = f"{case.model}{cut}, batch {case.batch}, stock's kept bytes and peak: "
    sizes = [
        f"{scenario} {mib(of['kept_bytes'])} and {mib(of['peak_bytes'])} MiB"
        for scenario, of in stock.items()
    ]
    header = ("gradients wanted", "saver", "kept", "peak", "time", "quartiles", "gradients off by")
    lines = [[*_line(record, stock.get(record.case.scenario))] for record in records]
    return f"{title}{', '.join(sizes)}.\n\n{table(header, lines)}"


def _line(record: Record[Case], stock: dict[str, Any] | None) -> Iterator[str]:
    figures = record.figures
    yield record.case.scenario
    yield record.case.saver
    if "error" in figures:
        yield from ("", "", "", "", _shortened(figures["error"]))
        return
    for name in ("kept_bytes", "peak_bytes"):
        yield f"{figures[name] / stock[name]:.3f}" if stock else f"{mib(figures[name])} MiB"
    yield f"{figures['times']['saver']['ratio']:.2f}"
    yield quartiles(figures["times"]["saver"])
    yield f"{figures['off']:.1e}"


def _shortened(error: str) -> str:
    return error if len(error) < 90 else f"{error[:87]}..."


def _of_layers(records: Sequence[Record[Case]]) -> str:
    found: dict[str, dict[str, str]] = {}
    for record in records:
        off = record.figures.get("off", {})
        said = " and ".join(f"{value:.1e}" for value in off.values())
        error = _shortened(record.figures.get("error", ""))
        found.setdefault(record.case.model, {})[record.case.saver] = said or error
    savers = ("memsave", "paper's code")
    header = ("layer", *(f"{saver}: outputs and gradients off by" for saver in savers))
    return table(
        header, [[layer, *(of.get(saver, "") for saver in savers)] for layer, of in found.items()]
    )


def summary(records: Sequence[Record[Case]]) -> str:
    """By saver, models and scenarios: kept bytes, peak and time."""
    lines = {}
    for record in records:
        case = record.case
        if case.scenario:
            stock = next(r for r in records if _place(r) == _place(record)).figures
            kept, peak, time, *_ = [*_line(record, stock)][2:]
            cell = ", ".join((kept, peak, time)) if kept else "error"
            cut = paper.MODELS[case.model].said(case.layers)
            lines[case.saver, f"{case.model}{cut}, {case.scenario}"] = cell
    return matrix("kept, peak, time", lines)


def _place(record: Record[Case]) -> tuple[str, str]:
    """Its model and scenario, of which stock comes first."""
    return record.case.model, record.case.scenario


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Where memsave has other gradients, or keeps more than those that compute nothing again."""
    for record in records:
        case, figures = record.case, record.figures
        if case.saver != "memsave":
            continue
        what = f"{case.model}, {case.scenario}" if case.scenario else case.model
        if "error" in figures:
            yield f"{what}: {figures['error']}"
            continue
        off = figures["off"] if case.scenario else max(figures["off"].values())
        if not off <= TOLERANCE:
            yield f"{what}: off by {off:.1e}"
        for other in records:
            if _keeps_less(other, record):
                yield f"{what}: keeps more than {other.case.saver}"


def _keeps_less(other: Record[Case], record: Record[Case]) -> bool:
    if _place(other) != _place(record) or "kept_bytes" not in other.figures:
        return False
    if SAVERS[other.case.saver].computes_again:
        return False
    return other.figures["kept_bytes"] < record.figures["kept_bytes"]


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(*(("ResNet-18",), ("Input (BN eval)",)), batch=2, size=64, repeats=1),
        "quick": Config(
            *(("ResNet-18",), ("All", "Input (BN eval)")), batch=4, size=128, repeats=1
        ),
        "default": Config(),
        "paper": Config(("ResNet-50", "ViT"), batch=64, layers=0, repeats=9),
    },
    choices=paper.CHOICES | {"compiled": paper.SCENARIOS},
    libraries=("torchvision",),
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    summary=summary,
    memory=memory,
)
