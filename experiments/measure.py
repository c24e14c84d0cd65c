"""Measuring: allocator peaks and paired times of one step, and the settings they were taken in."""

from __future__ import annotations

import gc
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

T = TypeVar("T")
RESULTS = Path(__file__).parent / "results"


def peak_bytes(step: Callable[[], Any], device: torch.device | None = None) -> int:
    """Allocator peak of one step in bytes, above what was allocated before it.

    On CPU the running sum over the allocator's own events, as the profiler records them.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    # Not public: the events of the profiler's public list leave out the order of frees.
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def paired_times(
    steps: dict[str, Callable[[], Any]], repeats: int, progress: str = "timing"
) -> dict[str, list[float]]:
    """Seconds of each step, taken in turn ``repeats`` times after one warm-up each."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in tqdm(range(repeats), progress, leave=False):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(times: Iterable[float], to: Iterable[float]) -> float:
    """Median of the paired ratios."""
    return statistics.median(a / b for a, b in zip(times, to, strict=True))


def in_fresh_process(function: Callable[..., T], *args: Any) -> T:
    """Call a function of a module in a new process, so that no number inherits another's state."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def settings() -> dict[str, Any]:
    """Versions and device that a result was taken with."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    versions = {name: version(name) for name in ("torch", "jax", "flax")}
    return {
        "python": platform.python_version(),
        **versions,
        "device": device,
        "threads": torch.get_num_threads(),
    }


def write_results(name: str, command: str, rows: list[dict[str, Any]]) -> Path:
    """Write one JSON line per row, after a line with the settings and the command."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    lines = [{"command": command, **settings()}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def print_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a Markdown table."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for k, line in enumerate(lines):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("| " + " | ".join(cells) + " |")
        if k == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")
