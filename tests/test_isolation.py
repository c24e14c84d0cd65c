"""What importing imports: the table nothing, memsave torch and not JAX, memsave_jax the reverse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Notes whatever is looked for, found or not: so JAX need not be installed to be missed, and an
# import inside try/except counts too. (The standard library itself asks for Jython's "org".)
PROBE = """
import sys

class Noted:
    names = set()

    def find_spec(self, name, path=None, target=None):
        self.names.add(name.partition(".")[0])

sys.meta_path.insert(0, Noted())
{code}
print(*Noted.names - sys.stdlib_module_names - {{"memsave", "memsave_jax", "org"}})
"""

EVERYTHING = """
from memsave import *
from memsave.nn import *
from memsave.functional import *
"""


JAX_WITHOUT_FLAX = """
from memsave_jax import report
from memsave_jax.functional import *
"""


def looked_for(code: str) -> set[str]:
    """The packages outside the standard library that a fresh interpreter wants for ``code``."""
    command = [sys.executable, "-c", PROBE.format(code=code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    ["import memsave", "import memsave.spec", "import memsave; memsave.spec; dir(memsave)"],
)
def test_the_table_needs_the_standard_library_only(code: str) -> None:
    assert looked_for(code) == set()


def test_no_public_name_imports_jax() -> None:
    seen = looked_for(EVERYTHING)
    assert "torch" in seen
    assert "jax" not in seen


def test_other_libraries_are_left_to_their_users() -> None:
    """The extensions for them are imported if they have been."""
    seen = looked_for("import memsave\nfrom torch import nn\nmemsave.convert(nn.ReLU())")
    assert not seen & {"transformers", "peft", "timm", "torchvision"}


def test_importing_memsave_jax_needs_nothing_until_it_is_used() -> None:
    assert looked_for("import memsave_jax; dir(memsave_jax)") == set()


def test_functions_in_jax_need_neither_flax_nor_torch() -> None:
    seen = looked_for(JAX_WITHOUT_FLAX)
    assert "jax" in seen
    assert not seen & {"flax", "torch"}


@pytest.mark.parametrize("name", ["nnx", "linen", "interop"])
def test_layers_in_flax_do_not_need_torch(name: str) -> None:
    # (Of memsave, only the table: the rest would look for torch.)
    seen = looked_for(f"from memsave_jax import {name}\nfrom memsave_jax.{name} import *")
    assert "flax" in seen
    assert "torch" not in seen


@pytest.mark.parametrize("name", ["torch", "jax", "flax", "numpy"])
def test_these_checks_can_fail(name: str) -> None:
    hidden = f"try:\n    import {name}.some_submodule\nexcept ImportError:\n    pass"
    assert name in looked_for(f"import memsave.spec\n{hidden}")
