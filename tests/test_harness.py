"""The harness of the experiments: nothing that was measured is lost, nothing is measured twice,
results say how they came about, and what cannot work is refused before work starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import toy_experiment

from experiments import __main__ as command_line, harness, render, results


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line knows one experiment."""
    # For the process that cases are forks of, which is to have imported the experiment (and torch).
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(command_line, "EXPERIMENTS", ("toy_experiment",))
    monkeypatch.setattr(command_line, "load", lambda name: toy_experiment.EXPERIMENT)


def run(folder: Path, *options: str, verb: str = "run") -> int:
    """The exit status."""
    name = [] if verb in ("all", "plot") else ["toy_experiment"]
    return command_line.main([verb, *name, "--results", str(folder), *options])


def squares(folder: Path) -> dict[int, int]:
    records = results.read(folder, "toy_experiment")
    return {r.case["number"]: r.figures["square"] for r in records}


def processes(folder: Path) -> dict[int, int]:
    records = results.read(folder, "toy_experiment")
    return {r.case["number"]: r.figures["process"] for r in records}


def test_every_case_is_measured_in_a_process_of_its_own(tmp_path, capsys):
    assert run(tmp_path) == 0
    assert squares(tmp_path) == {1: 1, 2: 4, 3: 9}
    assert len(set(processes(tmp_path).values())) == 3
    assert "| 3      | 9      |" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["", "raises", "dies"])
def test_one_process_for_all_cases(tmp_path, how):
    """Until it dies."""
    failed = bool(how)
    if failed:
        (tmp_path / f"2 {how}").touch()
    assert run(tmp_path, "--one-process", "--folder", str(tmp_path)) == failed
    found = processes(tmp_path)
    assert found.keys() == {1, 3} if failed else {1, 2, 3}
    assert len({*found.values()}) == (2 if how == "dies" else 1)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_stopped_run_goes_on_where_it_was(tmp_path, capsys, how):
    (tmp_path / f"2 {how}").touch()
    assert run(tmp_path, "--folder", str(tmp_path)) == 1
    assert "failed: Case(number=2" in capsys.readouterr().out
    before = processes(tmp_path)
    assert before.keys() == {1, 3}
    (tmp_path / f"2 {how}").unlink()
    assert run(tmp_path, "--folder", str(tmp_path)) == 0
    assert "going on with a run that was stopped" in capsys.readouterr().out
    after = processes(tmp_path)
    assert after.keys() == {1, 2, 3}
    assert before.items() <= after.items()


def test_a_finished_run_is_measured_anew(tmp_path):
    run(tmp_path)
    before = processes(tmp_path)
    run(tmp_path)
    assert not before.items() & processes(tmp_path).items()


def test_again_does_not_go_on(tmp_path):
    (tmp_path / "2 raises").touch()
    run(tmp_path, "--folder", str(tmp_path))
    before = processes(tmp_path)
    run(tmp_path, "--folder", str(tmp_path), "--again")
    assert before[1] != processes(tmp_path)[1]


def test_what_another_state_of_the_library_measured_is_measured_anew(tmp_path, monkeypatch):
    (tmp_path / "2 raises").touch()
    run(tmp_path, "--folder", str(tmp_path))
    path = next((tmp_path / ".parts" / "toy_experiment.default").glob("*.json"))
    part = json.loads(path.read_text())
    part["settings"]["source"] = "another"
    part["figures"]["square"] = -1
    path.write_text(json.dumps(part))
    (tmp_path / "2 raises").unlink()
    run(tmp_path, "--folder", str(tmp_path))
    assert squares(tmp_path) == {1: 1, 2: 4, 3: 9}


def test_results_of_other_sizes_and_devices_stay(tmp_path):
    run(tmp_path)
    path = tmp_path / "toy_experiment.jsonl"
    lines = path.read_text()
    elsewhere = lines.replace('"device": "', '"device": "another ')
    path.write_text(lines + elsewhere)
    assert run(tmp_path, "--quick") == 0
    assert run(tmp_path, "--numbers", "1", "5") == 0
    found = [
        (r.settings["size"], r.settings["device"].startswith("another"), r.case["number"])
        for r in results.read(tmp_path, "toy_experiment")
    ]
    assert sorted(found) == [
        *(("default", False, number) for number in (1, 2, 3, 5)),
        *(("default", True, 1), ("default", True, 2), ("default", True, 3)),
        ("quick", False, 4),
    ]


def test_what_is_measured_by_other_options_stands_apart(tmp_path):
    run(tmp_path)
    assert run(tmp_path, "--numbers", "4", "--gib", "0.5") == 0
    assert run(tmp_path, "--numbers", "5") == 0

    def found() -> list[tuple[int, float]]:
        records = results.read(tmp_path, "toy_experiment")
        return sorted((record.case["number"], record.case["gib"]) for record in records)

    assert found() == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.5), (5, 0.0)]
    assert run(tmp_path) == 0
    assert found() == [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.5)]
    assert run(tmp_path, "--gib", "0.5") == 0
    assert found() == [(number, gib) for number in (1, 2, 3) for gib in (0.0, 0.5)]
    usual, other = (tmp_path / render.PAGE).read_text().split("### toy_experiment, default")
    assert other.startswith(" --gib 0.5, on ")
    for part in (usual, other):
        assert [part.count(f"| {number}      |") for number in (1, 2, 3)] == [1, 1, 1]
    assert (tmp_path / "toy_experiment-gib-0.5.png").exists()
    before = [record.case for record in results.read(tmp_path, "toy_experiment")]
    assert run(tmp_path) == 0  # in the place where they were
    assert [record.case for record in results.read(tmp_path, "toy_experiment")] == before


def test_a_run_does_not_go_on_with_one_by_other_options(tmp_path, capsys):
    """Even where a case is the same."""
    (tmp_path / "2 raises").touch()
    assert run(tmp_path, "--folder", str(tmp_path)) == 1
    (tmp_path / "2 raises").unlink()
    assert run(tmp_path, "--folder", str(tmp_path), "--unused", "1") == 0
    assert "going on" not in capsys.readouterr().out
    options = [record.settings["options"] for record in results.read(tmp_path, "toy_experiment")]
    assert sorted(map(len, options)) == 2 * [len(options[0])] + 3 * [len(options[-1])]
    assert "--unused 1" in options[-1]
    assert "--unused 1" not in options[0]


def test_some_cases_replace_only_themselves(tmp_path):
    run(tmp_path)
    before = processes(tmp_path)
    assert run(tmp_path, "--only", "number=2") == 0
    after = processes(tmp_path)
    assert list(before) == list(after) == [1, 2, 3]
    assert [number for number in before if before[number] != after[number]] == [2]


def test_results_carry_versions_device_and_command(tmp_path):
    run(tmp_path, "--quick")
    (record,) = results.read(tmp_path, "toy_experiment")
    assert record.settings.keys() >= {
        *("python", "torch", "tyro", "device", "threads", "kernels", "source", "date", "commit")
    }
    assert record.settings["size"] == "quick"
    expected = f"python -m experiments run toy_experiment --results {tmp_path} --quick"
    assert record.settings["command"] == expected


def test_the_page_shows_tables_plots_and_commands(tmp_path, capsys):
    run(tmp_path)
    page = (tmp_path / render.PAGE).read_text()
    assert "## toy_experiment\n\nSquares, as an experiment" in page
    assert f"    python -m experiments run toy_experiment --results {tmp_path}" in page
    assert "| 3      | 9      |" in page
    assert "![toy_experiment](toy_experiment.png)" in page
    (tmp_path / render.PAGE).unlink()
    (tmp_path / "toy_experiment.png").unlink()
    assert run(tmp_path, verb="plot") == 0
    assert (tmp_path / render.PAGE).read_text() == page
    assert (tmp_path / "toy_experiment.png").exists()


def test_a_text_is_filled_with_summaries(tmp_path):
    run(tmp_path)
    run(tmp_path, "--quick")
    block = "<!-- results of toy_experiment{} -->\nold\n<!-- end -->"
    text = f"Before\n\n{block.format('')}\n\n{block.format(', quick')}\n\nafter"
    filled = render.fill(text, command_line.load, tmp_path)
    default, quick = filled.split(", quick -->")
    command = f"`.venv/bin/python -m experiments run toy_experiment --results {tmp_path}"
    assert f"| 3      | 9      |\n\n({command}`, on " in default
    assert "| 4      | 16     |" not in default
    assert f"| 4      | 16     |\n\n({command} --quick`, on " in quick
    assert filled.startswith("Before\n\n<!--")
    assert filled.endswith("<!-- end -->\n\nafter")
    assert "old" not in filled
    assert render.fill(filled, command_line.load, tmp_path) == filled


def test_targets_are_judged(tmp_path, capsys):
    assert run(tmp_path, "--numbers", "10") == 0
    assert run(tmp_path, "--numbers", "10", "11") == 1
    assert "missed: 11" in capsys.readouterr().out


def test_all_goes_on_after_a_failure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command_line, "EXPERIMENTS", ("toy_experiment", "toy_experiment"))
    assert run(tmp_path, "--quick", verb="all") == 0
    assert "toy_experiment: done" in capsys.readouterr().out


SUBMIT = """
import sys, toy_experiment
from experiments import __main__ as command_line
command_line.EXPERIMENTS = ("toy_experiment",)
command_line.load = lambda name: toy_experiment.EXPERIMENT
sys.exit(command_line.main(["submit", "toy_experiment", "--executor", "local", *sys.argv[1:]]))
"""


def submit(folder: Path) -> subprocess.CompletedProcess[str]:
    """In another process: submitit configures logging, which closes what pytest captures."""
    tests = Path(__file__).parent
    options = ("--results", str(folder), "--folder", str(folder), "--parameter", "timeout_min=5")
    options += ("--numbers", "1", "2")
    return subprocess.run(
        [sys.executable, "-c", SUBMIT, *options],
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_independent_jobs_by_the_local_executor(tmp_path):
    """As on a cluster, where :mod:`experiments.cluster` is used with Slurm."""
    (tmp_path / "2 raises").touch()
    first = submit(tmp_path)
    assert first.returncode == 1
    assert "no square of 2" in first.stdout
    assert squares(tmp_path) == {1: 1}
    before = processes(tmp_path)
    (tmp_path / "2 raises").unlink()
    assert submit(tmp_path).returncode == 0
    assert squares(tmp_path) == {1: 1, 2: 4}
    assert before.items() <= processes(tmp_path).items()


# Errors, before work starts.


def fails(*argv: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        command_line.main(argv)
    assert stopped.value.code == 2


def test_unknown_names_and_options(tmp_path, capsys):
    fails("run", "nonsense")
    assert "toy_experiment" in capsys.readouterr().err
    fails("run", "toy_experiment", "--results", str(tmp_path), "--nonsense", "1")
    assert "--nonsense" in "".join(capsys.readouterr())
    fails("run", "toy_experiment", "--results", str(tmp_path), "--numbers", "one")
    fails("all", "--nonsense")
    assert command_line.main(["plot", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert run(tmp_path, "--only", "number=7") == 2
    assert "number=1" in capsys.readouterr().err
    assert run(tmp_path, "--numbers", "1001") == 2
    assert "toy_experiment has no numbers 1001" in capsys.readouterr().err
    assert run(tmp_path, "--numbers") == 2
    assert "toy_experiment has no case of these options" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_for_results_is_made(tmp_path):
    (tmp_path / "1 raises").touch()
    folder = tmp_path / "new"
    assert run(folder, "--folder", str(tmp_path), "--numbers", "1") == 1
    assert (folder / render.PAGE).exists()
    assert run(tmp_path / "another", verb="plot") == 0


def test_too_little_memory(tmp_path, capsys):
    assert run(tmp_path, "--gib", "100000") == 2
    assert "need up to 100000.0 GiB of memory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_missing_package(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "NEEDS", ("torch", "no_such_package"))
    assert command_line.main(["list"]) == 2
    assert "no_such_package" in capsys.readouterr().err


def test_help_shows_the_options_of_an_experiment(capsys):
    with pytest.raises(SystemExit) as stopped:
        command_line.main(["run", "toy_experiment", "--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "--paper" in printed
    assert "--numbers" in printed


def test_what_an_older_source_left_is_no_result_of_a_run_that_fails(tmp_path, monkeypatch):
    experiment: Any = toy_experiment.EXPERIMENT
    cases = list(experiment.cases(experiment.config("default")))
    one = harness.Run(experiment, cases, "default", "command", folder=tmp_path)
    assert one.measure(cases[0]) is None
    old = one.parts.read(harness.plain(cases[0]))
    assert old is not None
    old.settings["source"] = "older"
    one.parts.write(old)
    monkeypatch.setattr(one, "measure", lambda case: ValueError("no more"))
    assert one.run() == []
    assert one.failed.keys() == {*cases}


def test_interruption_keeps_what_is_finished(tmp_path, monkeypatch):
    experiment: Any = toy_experiment.EXPERIMENT
    cases = list(experiment.cases(experiment.config("default")))
    one = harness.Run(experiment, cases, "default", "command", folder=tmp_path)
    measured = one.measure

    def stopped(case: Any) -> Any:
        if case.number == 2:
            raise KeyboardInterrupt
        return measured(case)

    monkeypatch.setattr(one, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    other = harness.Run(experiment, cases, "default", "command", folder=tmp_path)
    assert 1 not in {case.number for case in other.left()}
    assert not (tmp_path / "toy_experiment.jsonl").exists()
    # Nor does a run of other cases forget it.
    assert run(tmp_path, "--only", "number=3") == 0
    assert run(tmp_path, "--only", "number=3", "--again") == 0
    assert 1 not in {case.number for case in other.left()}
    assert run(tmp_path, "--only", "number=1", "--again") == 0
    assert not other.parts.path.exists()
