"""What a program that XLA compiled does, by its text; and how to compile one for a GPU that is not
there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies

#: Data sheets, as XLA reads them.
GPUS = {
    "h100": """
        platform_name: "CUDA"
        device_description_str: "NVIDIA H100 80GB HBM3"
        dnn_version_info { major: 9 minor: 7 }
        gpu_device_info {
          cuda_compute_capability { major: 9 }
          core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
          threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_core: 233472 shared_memory_per_block: 49152
          shared_memory_per_block_optin: 232448
          l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 84929347584
        }
    """
}
TARGETS = ("cpu", *GPUS)
#: Instructions that do nothing when the program runs.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        kernels: Instructions of the entry computation, which on a GPU are a kernel each, or a call
            of a library.
        moved_bytes: What these read and write, each array once.
        temp_bytes: Memory for what is neither an argument nor a result.
    """

    kernels: int
    moved_bytes: int
    temp_bytes: int


def instructions(text: str) -> Iterator[tuple[str, int]]:
    """Of the entry computation, those that do something, and the bytes that they move."""
    entry = text[text.index("\nENTRY ") :]
    sizes: dict[str, int] = {}
    for name, of, opcode, arguments in _INSTRUCTION.findall(entry):
        sizes[name] = _bytes(of)
        if opcode not in FREE:
            operands = set(re.findall(r"%([\w.\-]+)", arguments))
            yield opcode, sizes[name] + sum(sizes[operand] for operand in operands)


def _bytes(of: str) -> int:
    """Of an array, or of a tuple of them, by its type."""
    return sum(
        math.prod(map(int, filter(None, shape.split(",")))) * int(bits or 8) // 8
        for _, bits, shape in _ARRAY.findall(of)
    )


def compiled(function: Callable[..., Any], *arguments: Any, target: str = "cpu") -> Program:
    """A function of arrays as a program for a target, which need not be there.

    Args:
        function: To be traced as where that target is.
        arguments: Trees of arrays or of their types.
        target: One of :data:`TARGETS`. For a GPU it takes JAX's plug-in for CUDA.
    """
    if target == "cpu":
        program = jax.jit(function).lower(*arguments).compile()
    else:
        sharding = jax.sharding.SingleDeviceSharding(_gpu(target))
        types = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
            arguments,
        )
        with _as_on("gpu"):
            lowered = jax.jit(function).trace(*types).lower(lowering_platforms=("cuda",))
        # (Which of several kernels is the fastest, only a GPU can tell.)
        program = lowered.compile({"xla_gpu_autotune_level": "0"})
    analysis = program.memory_analysis()
    text = program.as_text()
    assert analysis is not None
    assert text is not None
    moved = [count for _, count in instructions(text)]
    return Program(len(moved), sum(moved), analysis.temp_size_in_bytes)


def _as_on(platform: str) -> Any:
    """What is traced asks on what it will run."""
    return mock.patch.object(jax, "default_backend", return_value=platform)


def _gpu(target: str) -> Any:
    try:
        topology = topologies.get_topology_desc(
            target, "cuda", target_config=GPUS[target], topology="1x1x1"
        )
    except Exception as error:
        raise RuntimeError(
            f"to compile for {target} takes JAX's plug-in for CUDA (pip install 'jax[cuda12]', in "
            "an environment of its own) and, where there is no GPU, JAX_PLATFORMS=cpu"
        ) from error
    return topology.devices[0]
