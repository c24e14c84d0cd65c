"""How every test runs: which Hypothesis profile, how many threads, which warnings are expected."""

import os
import platform
from importlib.metadata import version

# Many small programs are compiled and run once, some on eight devices. (To be said before jax is
# imported.) In one piece a program is compiled faster; LLVM would contract its products and sums
# then, but has no instruction for both among those of AVX. The last halves the time of a
# compilation; later versions of jaxlib do not know it.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_max_isa=AVX"
    * (platform.machine() == "x86_64")
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)

# Programs that another process, or an earlier run, compiled need not be compiled again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", ".pytest_cache/jax")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Other processes that compile for inductor would each import torch, and the cores are busy anyway.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Kernels of Triton are tested on the CPU. (To be said before triton is imported.)
os.environ.setdefault("TRITON_INTERPRET", "1")

import functools
import gc
import itertools
from collections.abc import Iterator

import jax
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from jax._src.interpreters import mlir
from torch._dynamo import guards
from torch._inductor import config as inductor

from experiments.torchvision_stub import declare_missing_ops
from memsave import function

declare_missing_ops()  # before anything imports torchvision

# A case that stock refuses is dropped, so some rows drop many. What is explained of a failure is
# found by many more runs, and says no more than what the checks say themselves.
COMMON = {
    "phases": [phase for phase in Phase if phase is not Phase.explain],
    "deadline": None,
    "suppress_health_check": [HealthCheck.filter_too_much, HealthCheck.too_slow],
}
settings.register_profile("dev", max_examples=5, **COMMON)
settings.register_profile("ci", max_examples=12, derandomize=True, database=None, **COMMON)
settings.register_profile("thorough", max_examples=500, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# For a log, torch times the guards of a program, with caches that it has flushed.
guards.profile_guard_manager = lambda *_: 0.0

# What inductor vectorizes, it computes by headers that take a second to compile.
inductor.cpp.simdlen = 1
# A context to write a program in takes as long as the writing.
mlir.make_ir_context = functools.cache(mlir.make_ir_context)

torch.set_num_threads(1)  # pytest-xdist has a process per core already

_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def forget_compiled_programs() -> Iterator[None]:
    """Now and then: all that the tests compile would take gigabytes."""
    yield
    if next(_tests) % 100 == 0:
        jax.clear_caches()
        mlir.make_ir_context.cache_clear()
        set_aside()


def set_aside() -> None:
    """What stays need not be looked at by each collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["nodes", "rules"])
def by_nodes_and_by_rules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers as functions of C++, where those are compiled, and by their rules in Python."""
    if request.param == "rules":
        monkeypatch.setattr(function, "nodes", None)


def pytest_collection_finish() -> None:
    set_aside()
    gc.set_threshold(50_000, 20, 100)  # what is traced is many objects, few of them in cycles


def pytest_configure(config: pytest.Config) -> None:
    # torch warns that "same" pads a copy of x where the two sides differ. Stock and ours alike.
    config.addinivalue_line(
        "filterwarnings", "ignore:Using padding='same' with even kernel lengths:UserWarning"
    )
    # JAX, that it compiles anew what another process is writing to the cache just now.
    config.addinivalue_line(
        "filterwarnings", "ignore:Error reading persistent compilation cache entry:UserWarning"
    )
    # And that rms_norm takes the slow path for a float32 weight and a half input.
    config.addinivalue_line("filterwarnings", "ignore:Mismatch dtype between input and:UserWarning")
