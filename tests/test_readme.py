"""The code in the README runs, and does what the text says."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import memsave.nn
from experiments import __main__ as command_line, render, results
from memsave.spec import TABLE

README = command_line.TEXTS[0].read_text()
FIRST = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
JAX = README[README.index("## Use it from JAX") : README.index("## The table")]
BLOCKS = re.findall(r"```python\n(.*?)```", JAX, re.DOTALL)


def test_tables_are_those_of_the_results() -> None:
    """If not: ``python -m experiments plot``. And each experiment has one."""
    shown: list[str] = []
    for text in map(Path.read_text, command_line.TEXTS):
        assert render.fill(text, command_line.load, results.FOLDER) == text
        shown += re.findall(r"<!-- results of (\w+) -->", text)
    assert sorted(shown) == sorted(command_line.EXPERIMENTS)


def test_links_lead_somewhere() -> None:
    """To files that are there, and to headings, as GitHub names them."""
    for path in [*command_line.TEXTS, command_line.TEXTS[0].with_name("CONTRIBUTING.md")]:
        for file, heading in re.findall(r"\]\(((?!\w+:)[^)#]*)(?:#([^)]*))?\)", path.read_text()):
            target = path.parent / file if file else path
            assert target.exists(), (path, file)
            if heading:
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                names = [
                    re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles
                ]
                assert heading in names, (path, heading)


def test_what_it_says_in_short() -> None:
    """Is in the tables: bytes by model and scenario, times by model (and batch) and scenario; and
    the range of times of the accelerator.
    """
    trained = {"the input": "Input (BN eval)", "the norms": "Norm", "everything": "All"}
    short = README[README.index("**In short**") : README.index("## Two commands")]
    lines = [line for line in short.strip().split("\n") if line.startswith("|")]
    rows = [line.split(" | ") for line in lines[2:]]
    assert len(rows) >= 5
    for what, model, kept, peak, time in rows:
        scenario = trained[what.strip("| ").split(" alone")[0]]
        found = {
            name: dict(zip(header, values, strict=True))[scenario]
            for name in ("scenarios", "scenario_times")
            for header, values in _rows(name, model)
        }
        assert found == {"scenarios": f"{kept}, {peak}", "scenario_times": time.strip("| ")}
    tables = README[README.index("<!-- results of scenario_times -->") :].split("<!-- end -->")[0]
    by_size = [part for part in tables.split("\nSize ") if "NVIDIA" in part.partition("\n")[0]]
    (large,), (small,) = ([p for p in by_size if f"--batch {n} " in p] for n in (64, 8))
    full = [float(time) for time in _ratios(large)]
    assert re.findall(r"\d[.]\d\d", short.split("On one H100")[1]) == [
        f"{time:.2f}" for time in (min(full), max(full), max(map(float, _ratios(small))))
    ]


def _ratios(text: str) -> list[str]:
    """Of the lines of models, but for stock's to itself."""
    lines = [line.rpartition(" | ")[0] for line in text.split("\n") if re.match(r"\|.* \(", line)]
    return [ratio for line in lines for ratio in re.findall(r"\d[.]\d\d", line)]


def _rows(name: str, model: str) -> Iterator[tuple[list[str], list[str]]]:
    """Those of a model in the tables of an experiment on CPU, with their headers."""
    start = README.index(f"<!-- results of {name} -->")
    header: list[str] = []
    before: list[str] = []
    for line in README[start : README.index("<!-- end -->", start)].split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("Size ") and "NVIDIA" in line:
            return
        if line.startswith("| ---"):
            header = before
        elif re.sub(r" \(.*\)$", "", cells[0]) == model:
            yield header, cells
        before = cells


@pytest.mark.parametrize("name", TABLE)
def test_the_table_names_every_layer(name: str) -> None:
    """Up to the number of axes, and what it is computed from."""
    table = README[README.index("## The table") : README.index("The layer runs as stock")]
    stem = re.sub(r"(_from_.*|_eval|_train|_compact|_of_.*|[123]d.*)$", "", name)
    names = "|".join({stem, stem.replace("_", " ")})
    assert re.search(rf"(?<![a-z_])({names})(?![a-z_])", table)


def test_whoever_writes_results_fills_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the main job leaves a README that the test above refuses."""
    for file in results.FOLDER.glob("*.jsonl"):
        shutil.copy(file, tmp_path)
    copies = [tmp_path / f"text {k}.md" for k, _ in enumerate(command_line.TEXTS)]
    for copy, path in zip(copies, command_line.TEXTS, strict=True):
        copy.write_text(re.sub(r"(?<=-->\n\n)\|.*\n", "", path.read_text()))
        assert copy.read_text() != path.read_text()
    texts = [path.read_text() for path in command_line.TEXTS]
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(command_line, "TEXTS", copies)
    command_line._page(tmp_path)
    assert [copy.read_text() for copy in copies] == texts


def test_the_first_example(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(FIRST, "README.md", "exec"), names)
    assert type(names["model"][2]) is memsave.nn.ReLU
    assert "stock keeps 1.21 MiB, now 42.19 KiB" in capsys.readouterr().out


def test_a_policy() -> None:
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "policy=" in b)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
    exec(compile(block, "README.md", "exec"), {"memsave": memsave, "model": model})
    assert type(model[1]) is memsave.nn.ReLUFromOutput


@pytest.mark.parametrize("block", BLOCKS, ids=["nnx", "linen"])
def test_use_it_from_jax(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    # (As a file, for the report to name its lines.)
    exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "BatchNorm - rows: batch_norm_train, batch_norm_eval" in printed
    if "memsave_jax.report" in block:
        assert "relu.positive" in printed
        # Of 2 convolutions and 2 norms, the biases and nothing else.
        assert len(jax.tree.leaves(names["gradients"])) == 4
    else:
        assert float(abs(names["gradient"]).max()) > 0
