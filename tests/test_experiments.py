"""The experiments measure right, their counts meet the targets, and their errors are clear."""

import argparse
import subprocess
import sys

import pytest
import torch

import memsave
from experiments import __main__ as command_line, flax_scenarios, input_gradient, measure
from experiments.scenarios import SCENARIOS, apply, resnet


@pytest.mark.filterwarnings("ignore:.*profiler")
def test_peak_counts_what_lives_at_once():
    def step() -> None:
        a = torch.empty(1000, dtype=torch.uint8)
        del a
        b = torch.empty(3000, dtype=torch.uint8)
        c = torch.empty(2000, dtype=torch.uint8)
        del b
        d = torch.empty(2500, dtype=torch.uint8)
        del c, d

    assert measure.peak_bytes(step) == 5000


def test_ratio_is_the_median_of_pairs():
    assert measure.ratio([2.0, 9.0, 4.0], to=[1.0, 1.0, 4.0]) == 2.0


def test_times_come_in_turn():
    order: list[str] = []
    steps = {name: lambda name=name: order.append(name) for name in "ab"}
    times = measure.paired_times(steps, 2)
    assert order == list("ababab")
    assert [len(t) for t in times.values()] == [2, 2]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_resnet101_at_paper_scale(scenario):
    """Kept bytes relative to stock, by measurement and by the table."""
    model = resnet(101, device="meta")
    apply(scenario, model)
    x = torch.empty(64, 3, 224, 224, device="meta", requires_grad=scenario.input)
    report = memsave.report(model, x)
    assert report.stock / 2**30 == pytest.approx(7.525, abs=1e-3)
    assert report.converted / report.stock <= scenario.target
    assert report.table + sum(report.rest.values()) == report.converted


@pytest.mark.parametrize("scenario", flax_scenarios.SCENARIOS, ids=lambda scenario: scenario.name)
def test_resnet_in_flax_keeps_less_than_stock(scenario):
    """Eagerly, in every scenario; and nothing that grows with the batch where the table says so."""
    kept = {}
    for batch in (2, 4):
        args = argparse.Namespace(batch=batch, size=32, depth=20)
        steps = flax_scenarios.prepare(args, scenario)
        kept[batch] = {name: steps[name].kept() for name in ("stock", "memsave_jax")}
    assert kept[4]["memsave_jax"] < kept[4]["stock"]
    grows = {name: kept[4][name] - kept[2][name] for name in kept[2]}
    if scenario.batch_norm_eval:  # bits of 19 activations, and the classifier's
        assert grows["memsave_jax"] < grows["stock"] / 20


def test_surgical_is_the_first_quarter_of_the_layers():
    model = resnet(101, device="meta")
    apply(next(s for s in SCENARIOS if s.name == "Surgical"), model)
    owners = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert len(owners) == 53
    every = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert len(every) == 209


def test_photographs_are_real_and_differ():
    x = input_gradient.photographs(2)
    assert x.shape == (4, 3, 224, 224)
    assert not any(torch.equal(x[0], other) for other in x[1:])
    assert x.std() > 0.1


def test_list_names_every_experiment(capsys):
    assert command_line.main(["list"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == list(command_line.EXPERIMENTS)


def test_unknown_experiment_is_an_error_that_names_the_known():
    run = subprocess.run(
        [sys.executable, "-m", "experiments", "run", "nonsense"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "input_gradient" in run.stderr


def test_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "NEEDS", ("torch", "no_such_package"))
    assert command_line.main(["list"]) == 2
    assert "no_such_package" in capsys.readouterr().err


def test_every_experiment_declares_options():
    for name in command_line.EXPERIMENTS:
        module = __import__(f"experiments.{name}", fromlist=["options"])
        parser = argparse.ArgumentParser()
        module.options(parser)
        assert module.__doc__
        parser.parse_args([])
