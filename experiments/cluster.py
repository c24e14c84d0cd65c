"""The cases of an experiment as independent jobs of a cluster, by submitit (Slurm, or local).

    python -m experiments submit scenario_times --paper --parameter slurm_partition=gpu \
        --parameter slurm_gpus_per_node=1

Every job measures one case with the same code as ``run`` and writes its part of the results; this
process waits for all and puts them together. Stopped, it goes on where it was like ``run``. The
folder of the results must be one that the jobs see.
"""

from __future__ import annotations

import argparse
from typing import Any

from .harness import Case, Run
from .results import Record


def run(run: Run[Case], args: argparse.Namespace) -> list[Record[Case]]:
    """Submit what is left, wait, and collect.

    Args:
        args: ``executor`` is submitit's name for one; ``parameter`` are ``KEY=VALUE`` for
            its ``update_parameters``.
    """
    import submitit

    executor = submitit.AutoExecutor(run.folder / ".parts" / "log", cluster=args.executor)
    executor.update_parameters(name=run.experiment.name, **_parameters(args.parameter))
    cases = run.left(anywhere=True)
    jobs = executor.map_array(run.measure, cases)
    for case, job in zip(cases, jobs, strict=True):
        try:
            error = job.result()
        except Exception as failure:  # the job's, or the cluster's
            error = failure
        if error is not None:
            run.failed[case] = f"{type(error).__name__}: {error}"
    return run.collect()


def _parameters(given: list[str]) -> dict[str, Any]:
    pairs = [item.partition("=") for item in given]
    return {key: int(value) if value.isdigit() else value for key, _, value in pairs}
