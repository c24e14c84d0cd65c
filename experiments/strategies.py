"""Memory strategies side by side on a fine-tuning task, each alone and together with memsave.

The task is to train the normalization layers (``--scenario`` chooses others) by SGD: a ResNet on
images in train mode, GPT-2 on embeddings without dropout. Stock is the loop of tutorials with
none of the strategies: logits and loss live until the next ones take their names, and the ReLUs
are not in place (torchvision has them so). Setting gradients to ``None`` is torch's default.

- Peak: of the allocator over two iterations, above what was there before (parameters and data), in
  a process that has built nothing else. As a ratio to stock's.
- Time: of an iteration, in turn with stock in one process; the median ratio. That of stock
  itself shows the noise.
- Gradients off by: the largest difference from stock's, relative to stock's largest gradient, of
  the parameters that both train. Rounding can grow in deep networks, as it decides here and there
  on which side of ReLU's kink an activation lies. What is far more is another computation:
  autocast's precision, BatchNorm over parts of the batch.

``no_grad`` is for the layers before the first one trained, all frozen by ``requires_grad=False``
already. Preallocation (a pass over the largest batch before the first) is against fragmentation of
a caching allocator where sizes vary, which a peak of allocated bytes does not show. On a CPU
``save_on_cpu`` has nowhere to move tensors to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import memsave

from . import paper
from .harness import GIB, Experiment
from .measure import best_device, compare, difference, peak_bytes
from .render import mib, quartiles, table
from .results import Record
from .subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Where the configuration does not say: of images 8, of sequences fewer.
BATCH = {"GPT-2": 2}
#: Where memsave's gradients are further from those without it, they are not the same.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Case:
    """A strategy with or without memsave, on a task.

    ``layers`` 0 and ``size`` 0 are as published; ``parts`` are those of gradient accumulation.
    """

    model: str
    strategy: str
    memsave: bool
    scenario: str
    batch: int
    layers: int
    size: int
    parts: int
    repeats: int


class Task(Subject):
    """A subject that is trained.

    Attributes:
        optimizer: Of the parameters that are trained.
        parts: In how many passes gradient accumulation takes the batch.
    """

    optimizer: torch.optim.Optimizer
    parts: int

    @classmethod
    def under(cls, case: Case) -> Self:
        """One that a strategy has changed."""
        task = cls.of(case.model, case.scenario, case.batch, case.layers, case.size)
        set_in_place(task.step, inplace=False)
        strategy = STRATEGIES[case.strategy]
        strategy.before(task.step)
        if case.memsave:
            memsave.convert(task.step, (task.x, task.labels))
        strategy.after(task)
        trained = [p for p in task.step.parameters() if p.requires_grad]
        # At a rate of zero every measurement has the same weights.
        task.optimizer, task.parts = torch.optim.SGD(trained, lr=0.0), case.parts
        return task

    def outputs(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and loss."""
        with self.around():
            logits = self.step.logits(x)
            return logits, self.step.loss(logits.flatten(0, -2), labels.flatten())

    def warm_up(self, n: int | None) -> None:
        """A pass over ``n`` examples of the batch, which leaves no gradients."""
        self.outputs(self.x[:n], self.labels[:n])[1].backward()
        self.forget()


# Loops of training.


def tutorial_loop(task: Task, iterations: int) -> None:
    """Outputs live until the next ones take their name."""
    for _ in range(iterations):
        task.forget()
        outputs = task.outputs(task.x, task.labels)
        outputs[1].backward()
        task.optimizer.step()


def releasing_loop(task: Task, iterations: int) -> None:
    """Nothing but the parameters outlives what needs it."""
    for _ in range(iterations):
        task.forget()
        task.outputs(task.x, task.labels)[1].backward()
        task.optimizer.step()


def accumulating_loop(task: Task, iterations: int) -> None:
    """Gradients of parts of the batch add up."""
    for _ in range(iterations):
        task.forget()
        parts = (task.x.chunk(task.parts), task.labels.chunk(task.parts))
        for x, labels in zip(*parts, strict=True):
            outputs = task.outputs(x, labels)
            (outputs[1] * (len(x) / len(task.x))).backward()
        task.optimizer.step()


# Changes of the model or of its forward pass.


def set_in_place(model: nn.Module, inplace: bool = True) -> None:
    """Of all its ReLUs."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = inplace


def _train_last_quarter(model: nn.Module) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained[: -(len(trained) // 4)]:
        parameter.requires_grad_(False)


def _no_grad_before_trained(task: Task) -> None:
    for module in task.step.model.modules():
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            return
        if not any(p.requires_grad for p in module.parameters()):
            module.forward = torch.no_grad()(module.forward)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that are parts of a sequence and have parts of their own."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            for part in module:
                if part not in inside and any(True for _ in part.children()):
                    inside.update(part.modules())
                    yield part


def checkpoint_blocks(model: nn.Module) -> None:
    """Compute every block again in the backward pass instead of keeping what is inside."""
    for block in [*blocks(model)]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_with_budget(model: nn.Module, budget: float) -> Callable[[], Any]:
    """Compile a model in place.

    Args:
        budget: The part that may be kept of what the compiler would keep; it computes the rest
            again. At 1.0 it computes again only what is cheap.

    Returns:
        Makes the context of a forward pass. The first compiles, with the budget that is set then.
    """
    model.compile()
    return lambda: functorch_config.patch(activation_memory_budget=budget)


def moving_to_cpu() -> save_on_cpu:
    """The context of a forward pass whose tensors for the backward pass are in main memory."""
    return save_on_cpu(pin_memory=best_device().type == "cuda")


def _checkpoint(task: Task) -> None:
    checkpoint_blocks(task.step.model)


def _autocast(task: Task) -> None:
    task.around = partial(torch.autocast, task.x.device.type, torch.bfloat16)


def _save_on_cpu(task: Task) -> None:
    task.around = moving_to_cpu


def _compile(task: Task, budget: float) -> None:
    task.around = compile_with_budget(task.step.model, budget)


@dataclass(frozen=True)
class Strategy:
    """What somebody does to save memory.

    Attributes:
        trades: What it costs.
        before, after: Changes of the model before, of the task after ``memsave.convert``.
        loop: Trains.
        warms_up: With the whole batch, before the first iteration; others with a small one.
        exact: Whether gradients are stock's but for rounding.
        needs: A layer that the model must have.
    """

    trades: str
    before: Callable[[nn.Module], Any] = lambda model: None
    after: Callable[[Task], Any] = lambda task: None
    loop: Callable[[Task, int], None] = tutorial_loop
    warms_up: bool = False
    exact: bool = True
    needs: type[nn.Module] = nn.Module


STRATEGIES = {
    "stock": Strategy(""),
    "no_grad before what is trained": Strategy("nothing", after=_no_grad_before_trained),
    "releasing references": Strategy("nothing", loop=releasing_loop),
    "in-place ReLU": Strategy("nothing", before=set_in_place, needs=nn.ReLU),
    "preallocation": Strategy("a pass at the start", warms_up=True),
    "fewer parameters: the last quarter": Strategy("what is learnt", before=_train_last_quarter),
    "gradient accumulation": Strategy(
        "schedule: smaller passes (BatchNorm, if any, over parts)",
        loop=accumulating_loop,
        exact=False,
    ),
    "mixed precision (bfloat16)": Strategy("precision", after=_autocast, exact=False),
    "save_on_cpu": Strategy("transfer", after=_save_on_cpu),
    "checkpointing of blocks": Strategy(
        "compute: blocks twice (and running statistics, if any)", after=_checkpoint
    ),
    "torch.compile": Strategy(
        "time to compile", after=partial(_compile, budget=1.0), warms_up=True
    ),
    "torch.compile, memory budget 0.5": Strategy(
        "time to compile; compute", after=partial(_compile, budget=0.5), warms_up=True
    ),
}
EAGER = tuple(name for name in STRATEGIES if "compile" not in name)


# The experiment.


@dataclass(frozen=True)
class Config:
    """Which strategies on which tasks.

    ``batch`` 0 is small; ``layers`` are those of a transformer, 0 as published; ``size`` is that of
    images in pixels and of sequences in tokens, 0 as published; ``parts`` are those of gradient
    accumulation.
    """

    models: tuple[str, ...] = ("ResNet-50", "GPT-2")
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    scenario: str = "Norm"
    batch: int = 0
    layers: int = 2
    size: int = 0
    parts: int = 2
    repeats: int = 9


def cases(config: Config) -> Iterator[Case]:
    """By model; without strategies that are about layers which it does not have."""
    for name in config.models:
        with FakeTensorMode():
            parts = [*paper.MODELS[name].step(1).modules()]
        for strategy in config.strategies:
            if any(isinstance(part, STRATEGIES[strategy].needs) for part in parts):
                for converted in (False, True):
                    yield Case(
                        *(name, strategy, converted, config.scenario),
                        *(config.batch or BATCH.get(name, 8), config.layers),
                        *(config.size, config.parts, config.repeats),
                    )


def memory(case: Case) -> int:
    """Roughly; ResNet-50 takes 0.1 GiB per image, GPT-2 0.5 GiB per sequence."""
    return 2 * GIB + case.batch * GIB // 2


def measure(case: Case) -> dict[str, Any]:
    """Peak, ratio of times, and difference of gradients; or why it could not be compiled."""
    try:
        return _measure(case)
    except TorchDynamoException as error:
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0]}


def _measure(case: Case) -> dict[str, Any]:
    strategy, task = STRATEGIES[case.strategy], Task.under(case)
    task.warm_up(None if strategy.warms_up else 2)
    peak = peak_bytes(lambda: strategy.loop(task, 2), task.x.device, task.forget)
    gradients = task.gradients()

    stock = Task.under(replace(case, strategy="stock", memsave=False))
    tutorial_loop(stock, 1)
    off = largest_difference(gradients, stock.gradients())
    times = compare(
        {
            "stock": lambda: tutorial_loop(stock, 1),
            "strategy": lambda: strategy.loop(task, 1),
        },
        case.repeats,
    )
    return {"peak_bytes": peak, "off": off, "times": times}


def largest_difference(gradients: dict[str, Tensor], stock: dict[str, Tensor]) -> float:
    """Of any element, relative to the largest one of stock's; of the gradients that both have."""
    both = stock.keys() & gradients.keys()
    return difference((stock[n] for n in both), (gradients[n] for n in both), least=1)


# What it looks like.

Pair = dict[bool, Record[Case]]


def _tasks(records: Sequence[Record[Case]]) -> dict[str, dict[str, Pair]]:
    """By task and strategy, the records without and with memsave."""
    tasks: dict[str, dict[str, Pair]] = {}
    for record in records:
        case = record.case
        cut = paper.MODELS[case.model].said(case.layers)
        title = f"{case.model}{cut}, batch {case.batch}, {case.scenario}"
        tasks.setdefault(title, {}).setdefault(case.strategy, {})[case.memsave] = record
    return tasks


def show(records: Sequence[Record[Case]]) -> str:
    """A table per task."""
    header = (
        *("strategy", "peak alone", "with memsave"),
        *("time alone", "quartiles", "with memsave", "quartiles"),
        *("gradients off by, alone", "with memsave", "trades"),
    )
    text = []
    for title, pairs in _tasks(records).items():
        unit = _stock_peak(pairs)
        said = f"stock's peak is {mib(unit)} MiB" if unit else "peaks in bytes"
        text.append(f"{title}: {said}.\n")
        text.append(
            table(header, [[*_line(name, pair, unit or 1)] for name, pair in pairs.items()])
        )
        text.extend(_errors(pairs))
    return "\n".join(text)


def _stock_peak(pairs: dict[str, Pair]) -> int:
    stock = pairs.get("stock", {}).get(False)
    return stock.figures["peak_bytes"] if stock else 0


def _line(name: str, pair: Pair, unit: int) -> Iterator[str]:
    figures = [pair[with_].figures if with_ in pair else {} for with_ in (False, True)]
    measured = ["peak_bytes" in of for of in figures]
    both = [*zip(figures, measured, strict=True)]
    yield name
    yield from (f"{of['peak_bytes'] / unit:.3f}" if there else "" for of, there in both)
    for of, there in both:
        times = of["times"]["strategy"] if there else None
        yield from (f"{times['ratio']:.2f}", quartiles(times)) if times else ("", "")
    yield from (f"{of['off']:.1e}" if there else "" for of, there in both)
    yield STRATEGIES[name].trades


def _errors(pairs: dict[str, Pair]) -> Iterator[str]:
    for name, pair in pairs.items():
        for converted, record in pair.items():
            if "error" in record.figures:
                what = f"{name}{' with memsave' * converted}"
                yield f"Not measured: {what}: {record.figures['error']}\n"


def misses(records: Sequence[Record[Case]]) -> Iterator[str]:
    """Where memsave makes a peak higher, or gradients other ones."""
    for title, pairs in _tasks(records).items():
        for name, pair in pairs.items():
            if len(pair) < 2 or any("error" in record.figures for record in pair.values()):
                continue
            alone, ours = pair[False].figures, pair[True].figures
            if ours["peak_bytes"] > alone["peak_bytes"]:
                ratio = ours["peak_bytes"] / alone["peak_bytes"]
                yield f"{title}, {name}: memsave makes the peak {ratio:.3f} of that without it"
            if STRATEGIES[name].exact and ours["off"] > alone["off"] + TOLERANCE:
                yield f"{title}, {name}: gradients with memsave are off by {ours['off']:.1e}"


def plot(records: Sequence[Record[Case]]) -> Figure:
    """Peaks: a panel per task, a pair of bars per strategy."""
    import matplotlib.pyplot as plt

    tasks = _tasks(records)
    names = list(dict.fromkeys(record.case.strategy for record in records))
    figure, axes = plt.subplots(
        1,
        len(tasks),
        figsize=(3 + 4 * len(tasks), 1.5 + 0.4 * len(names)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (title, pairs) in zip(axes[0], tasks.items(), strict=True):
        axis.set(title=title, xlabel="peak, MiB", yticks=range(len(names)), yticklabels=names)
        for converted, color in ((False, "tab:gray"), (True, "tab:green")):
            _bars(axis, names, pairs, converted, color)
    axes[0, 0].invert_yaxis()
    axes[0, 0].legend()
    return figure


def _bars(axis: Any, names: list[str], pairs: dict[str, Pair], converted: bool, color: str) -> None:
    peaks = {
        place: pairs[name][converted].figures["peak_bytes"] / 2**20
        for place, name in enumerate(names)
        if name in pairs
        and converted in pairs[name]
        and "error" not in pairs[name][converted].figures
    }
    shift = 0.2 if converted else -0.2
    places = [place + shift for place in peaks]
    label = "with memsave" if converted else "alone"
    axis.barh(places, list(peaks.values()), 0.38, color=color, label=label)


EXPERIMENT = Experiment(
    sizes={
        "tiny": Config(("ResNet-18",), ("stock", EAGER[-1]), size=64, repeats=1),
        "quick": Config(("ResNet-18",), EAGER, size=128, repeats=1),
        "default": Config(),
        "paper": Config(batch=64, layers=0, repeats=9),
    },
    choices={"models": paper.MODELS, "strategies": STRATEGIES, "scenario": paper.SCENARIOS},
    libraries=("torchvision",),
    case=Case,
    cases=cases,
    measure=measure,
    table=show,
    misses=misses,
    plot=plot,
    memory=memory,
)
