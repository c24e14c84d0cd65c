"""Adds to pyproject.toml what is compiled: kernels for the CPU, and layers as nodes of C++.

Where there is no compiler, the package installs without, and is slower. The nodes are compiled
against torch, if it is there already, as with ``pip install --no-build-isolation`` after torch, and
bear the name of its version: no other can load them.
"""

import platform
import re
import runpy
import sys
from glob import glob
from importlib import util
from pathlib import Path

from setuptools import Extension, setup

SOURCES = "memsave/kernels/csrc"
HEADERS = glob(f"{SOURCES}/**/*.h", recursive=True)


def _nodes() -> list[Extension]:
    found = util.find_spec("torch")
    if found is None or found.origin is None:
        return []
    torch = Path(found.origin).parent
    version = runpy.run_path(str(torch / "version.py"))["__version__"]  # with that of CUDA, too
    name = "_nodes_" + re.sub(r"\W", "_", version)
    return [
        Extension(
            f"memsave.kernels.{name}",
            [f"{SOURCES}/nodes.cpp"],
            include_dirs=[
                str(torch / "include"),
                str(torch / "include" / "torch" / "csrc" / "api" / "include"),
            ],
            define_macros=[("MEMSAVE_NODES", name)],
            library_dirs=[str(torch / "lib")],
            libraries=["torch_python", "torch_cpu", "torch", "c10"],
            # (What debuggers read of the templates of torch would be twenty times the module.)
            extra_compile_args=["-O3", "-g0", "-std=c++20", "-fvisibility=hidden"],
            depends=HEADERS,
            language="c++",
            optional=True,
        )
    ]


# While vectors of 512 bits are in use, and for a while after, processors run all else more slowly,
# which around a small layer costs more than they give. (What else comes with AVX-512 is used.)
HAS_CLONES = sys.platform == "linux" and platform.machine() == "x86_64"  # see vectors.h
NARROW = ["-mprefer-vector-width=256"] if HAS_CLONES else []
native = Extension(
    "memsave.kernels._native",
    [f"{SOURCES}/native.c"],
    # (-fno-trapping-math lets it compute what only some elements need for all of them at once.)
    extra_compile_args=["-O3", "-g0", "-fopenmp-simd", "-fno-trapping-math", *NARROW],
    depends=HEADERS,
    py_limited_api=True,
    optional=True,
)
nodes = _nodes()
# What is compiled against torch is for one version of Python, the rest for all from 3.11 on.
options = {} if nodes else {"bdist_wheel": {"py_limited_api": "cp311"}}
setup(ext_modules=[native, *nodes], options=options)
