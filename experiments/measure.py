"""Measuring on real tensors: the allocator's peak of a step, and paired times."""

from __future__ import annotations

import copy
import ctypes
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

Layer = TypeVar("Layer", bound=nn.Module)

#: That an accelerator is timed by at once.
CALLS_OF_JAX = 10


def best_device() -> torch.device:
    """The accelerator, if there is one.

    (To be asked by a case, not while a module is imported: a process that has looked for CUDA can
    have no forks that use it, and cases are forks of one that has imported the experiment.)
    """
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def kept_bytes(forward: Callable[[], Any], device: torch.device | None = None) -> int:
    """What the allocator has not got back when a forward pass is done, whose result is alive."""
    gc.collect()
    if device is not None and device.type == "cuda":
        forward()  # libraries keep memory of their own, from their first call on
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        result = forward()
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
        del result
        return kept
    return sum(_allocations(forward))


def peak_bytes(
    step: Callable[[], Any],
    device: torch.device | None = None,
    forget: Callable[[], Any] = lambda: None,
) -> int:
    """Allocator peak of one step in bytes, above what was allocated before it.

    On CPU the running sum over the allocator's own events, as the profiler records them. ``forget``
    frees what a step leaves (gradients): on CUDA one is taken before the one that counts.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        step()  # (as above)
        forget()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    return max(accumulate(_allocations(step), initial=0))


def _allocations(function: Callable[[], Any]) -> list[int]:
    """Bytes that the CPU's allocator hands out in a call, and (negative) gets back, in order."""
    cpu = [ProfilerActivity.CPU]
    with profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        result = function()
    del result
    # Not public: the events of the profiler's public list leave out the order of frees.
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def keep_freed_memory() -> None:
    """Have the C library keep what this process frees (where it is glibc).

    Otherwise it gives large blocks back to the system, and takes a page fault for every 4 KiB of
    the next one, or does not, as it happens: more time than that of a layer.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: never
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for large requests
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads, as others give back what is free


def again(module: Layer) -> Layer:
    """A copy that has its own buffers, and the same parameters: where these lie in memory makes
    differences of some percent.
    """
    return copy.deepcopy(module, {id(p): p for p in module.parameters()})


def _wait(result: Any) -> None:
    """Until torch's accelerator is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _last(step: Callable[[], Any], calls: int) -> Any:
    """The result of the last of so many."""
    for _ in range(calls - 1):
        step()
    return step()


def paired_times(
    steps: dict[str, Callable[[], Any]],
    repeats: int,
    calls: int = 1,
    wait: Callable[[Any], Any] = _wait,
) -> dict[str, list[float]]:
    """Seconds of each step, taken in turn ``repeats`` times after one warm-up each.

    Every turn in another order, as a step pays for the state that the one before it leaves.

    Args:
        calls: How many are timed at once, as an accelerator runs behind them.
        wait: Until the result of the last is there.
    """
    for step in steps.values():
        wait(step())
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in tqdm(range(repeats), "timing", leave=False):
        for name, step in order.sample([*steps.items()], len(steps)):
            start = time.perf_counter()
            wait(_last(step, calls))
            times[name].append((time.perf_counter() - start) / calls)
    return times


def compare(
    steps: dict[str, Callable[[], Any]],
    repeats: int,
    to: str = "stock",
    calls: int = 1,
    wait: Callable[[Any], Any] = _wait,
) -> dict[str, dict[str, Any]]:
    """Time steps in turn (:func:`paired_times`): of each the median seconds, and ratios to one of
    them in pairs.

    Returns:
        ``{name: {"seconds": median, "ratio": median, "quartiles": [low, high]}}``
    """
    times = paired_times(steps, repeats, calls, wait)
    figures = {}
    for name, own in times.items():
        ratios = [a / b for a, b in zip(own, times[to], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if repeats > 1 else ratios * 3
        seconds = statistics.median(own)
        figures[name] = {"seconds": seconds, "ratio": middle, "quartiles": [low, high]}
    return figures


def compare_in_jax(steps: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, Any]]:
    """The same of functions of JAX. Those of an accelerator are timed several at once, which wait
    in its queue as the steps of a training do.
    """
    import jax

    calls = 1 if jax.default_backend() == "cpu" else CALLS_OF_JAX
    return compare(steps, repeats, calls=calls, wait=jax.block_until_ready)


def difference(stock: Iterable[Any], ours: Iterable[Any], *, least: float = 1e-3) -> float:
    """The largest difference of gradients, of any framework, to the largest element of each.

    (Some are nothing but rounding: of a bias before BatchNorm, of the bias of attention's keys. So
    a gradient counts as at least a part of the largest of all: a thousandth, or ``least``.)
    """
    pairs = [*zip(stock, ours, strict=True)]
    sizes = [float(abs(one).max()) for one, _ in pairs]
    off = [float(abs(one - other).max()) for one, other in pairs]
    bound = max(sizes) * least
    return max(by / max(size, bound) if by else 0.0 for by, size in zip(off, sizes, strict=True))
