"""What an installation promises: the wheel is complete and works alone, it needs nothing but an
extra, a missing framework is named, and the public names are those that are listed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email import message_from_bytes
from itertools import chain
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from memsave import kernels

ROOT = Path(__file__).parents[1]


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def python(code: str) -> str:
    """Standard output of ``code`` in a fresh interpreter that sees the checkout."""
    return run(sys.executable, "-W", "error", "-c", code, cwd=ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: building leaves files behind.

    What the checkout has compiled is not compiled again, unless a source is newer.
    """
    folder, sources = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("sources")
    for name in ("memsave", "memsave_jax"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    platform = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    compiled = sources / "build" / platform / "memsave" / "kernels"
    compiled.mkdir(parents=True)
    for name, module in [*sys.modules.items()]:
        if name.startswith(f"{kernels.__name__}._"):
            shutil.copy2(str(module.__file__), compiled)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, "."]
    run(*build, cwd=sources)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = re.compile(r"memsave/kernels/_(native|nodes_\w+)\..*")
    compiled = {name for name in packed if modules.fullmatch(name)}
    assert len(compiled) in (0, 2), "(none where there is no compiler)"
    assert "-abi3-" not in wheel.name, "what is compiled against torch is for one version of Python"
    sources = [*ROOT.glob("memsave*/**/*.py"), *ROOT.glob("memsave*/py.typed")]
    assert packed - compiled == {path.relative_to(ROOT).as_posix() for path in sources}


def test_the_wheel_needs_nothing_without_an_extra(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]

    def needed(extra: str) -> list[str]:
        return [n.name for n in needs if n.marker is None or n.marker.evaluate({"extra": extra})]

    assert needed("") == []
    assert needed("torch") == ["torch"]
    assert sorted(needed("jax")) == ["flax", "jax"]


USE = """
from pathlib import Path
import sys
import torch
from torch import nn
import memsave

assert Path(memsave.__file__).is_relative_to(sys.prefix), memsave.__file__
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
model.eval().requires_grad_(False)
x = torch.randn(2, 3, 8, 8, requires_grad=True)
(expected,) = torch.autograd.grad(model(x).sum(), x)
memsave.convert(model)
(actual,) = torch.autograd.grad(model(x).sum(), x)
torch.testing.assert_close(actual, expected)
report = memsave.report(model, x)
assert 0 < report.now == report.converted < report.stock
print(report)

import jax
from memsave_jax import functional, report

x = jax.numpy.ones((2, 3, 8))
measured = report(functional.relu, x)
assert measured.now == 2 * 3 < measured.stock
"""


def test_the_wheel_works_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    interpreter = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", interpreter]
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # PyTorch itself is borrowed; the environment's own packages come first.
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]))
    printed = run(interpreter, "-I", "-W", "error", "-c", USE, cwd=tmp_path)
    assert "ReLU" in printed


@pytest.mark.parametrize(
    ("missing", "statement"),
    [
        ("jax", "memsave_jax.report"),
        ("jax", "from memsave_jax import *"),
        ("jax", "import memsave_jax.functional"),
        ("flax", "memsave_jax.nnx"),
        ("flax", "import memsave_jax.linen"),
        ("flax", "from memsave_jax import interop"),
    ],
)
def test_without_jax_or_flax_the_error_names_the_extra(missing: str, statement: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None  # as if it were not installed
import memsave_jax
try:
    exec({statement!r})
except ImportError as error:
    print(error)
"""
    assert "pip install 'memsave[jax]'" in python(code)


@pytest.mark.parametrize(
    "statement",
    [
        "memsave.convert",
        "memsave.nn",
        "from memsave import report",
        "from memsave import *",
        "import memsave.nn",
        "import memsave.functional",
    ],
)
def test_without_torch_the_error_names_the_extra(statement: str) -> None:
    code = f"""
import sys
sys.modules["torch"] = None  # as if it were not installed
import memsave
assert memsave.spec.TABLE
try:
    exec({statement!r})
except ImportError as error:
    print(error)
"""
    assert "pip install 'memsave[torch]'" in python(code)


@pytest.mark.parametrize(
    ("package", "modules"),
    [
        ("memsave", ("functional", "nn", "spec")),
        ("memsave_jax", ("functional", "interop", "linen", "nnx")),
    ],
)
def test_public_names_are_those_listed(package: str, modules: tuple[str, ...]) -> None:
    """Whatever was imported before: a submodule may not hide a function of its name."""
    python(f"""
import importlib, inspect, pkgutil
import {package} as package

listed = set(package.__all__)
assert listed <= set(dir(package))
first = {{name: getattr(package, name) for name in listed}}
for module in pkgutil.iter_modules(package.__path__, "{package}."):
    importlib.import_module(module.name)
star = {{}}
exec("from {package} import *", star)
for name, value in first.items():
    assert getattr(package, name) is star[name] is value, name
    assert inspect.ismodule(value) == (name in {modules}), name
assert set(star) - {{"__builtins__"}} == listed
""")


def test_an_unknown_name_is_an_attribute_error() -> None:
    python("""
import memsave
assert not hasattr(memsave, "no_such_name")
try:
    from memsave import no_such_name
except ImportError as error:
    assert "no_such_name" in str(error)
else:
    raise AssertionError
""")


def test_the_pins_serve_every_extra() -> None:
    """Whatever pyproject.toml asks for, requirements-dev.txt pins, in a version that it allows."""
    pins = {}
    for line in (ROOT / "requirements-dev.txt").read_text().splitlines():
        if line and not line.startswith(("#", "--")):
            name, version = line.partition(";")[0].split("==")
            pins[_normal(name)] = version.strip()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    for line in chain(project["build-system"]["requires"], *extras):
        need = Requirement(line)
        if need.name != "memsave":
            assert need.specifier.contains(pins[_normal(need.name)]), need


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
