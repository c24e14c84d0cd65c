"""Command line of the experiments.

    python -m experiments list
    python -m experiments run NAME [--quick | --paper] [options; --help names them]
    python -m experiments all [--quick | --paper]
    python -m experiments plot [NAME ...]
    python -m experiments submit NAME [--quick | --paper]   (to a cluster)

Results are written to experiments/results/: NAME.jsonl, plots, and a page with all tables. A run
that was stopped goes on where it was when it is started again.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXPERIMENTS = (
    "input_gradient",
    "figure1",
    "ablation",
    "scenarios",
    "scenario_times",
    "zoo",
    "strategies",
    "fine_tuning",
    "other_savers",
    "lora",
    "functional_mode",
    "dropout_rows",
    "layer_times",
    "kernel_times",
    "flax_scenarios",
    "flax_layers",
    "flax_rows",
    "flax_programs",
    "flax_freezing",
)
#: The README of the repository, and that of this folder: texts with tables of results.
TEXTS = tuple(folder / "README.md" for folder in (Path(__file__).parents[1], Path(__file__).parent))
PROG = "python -m experiments"
NEEDS = (
    *("torch", "torchvision", "jax", "flax", "transformers", "peft", "timm", "optax"),
    *("sklearn", "matplotlib", "psutil", "tqdm", "tyro"),
)


def load(name: str) -> Any:
    """The experiment of a name."""
    return importlib.import_module(f".{name}", __package__).EXPERIMENT


def _summary(name: str) -> str:
    """The first line of its docstring. (Importing all of them takes a while.)"""
    source = (Path(__file__).parent / f"{name}.py").read_text()
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _missing() -> list[str]:
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        PROG,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="name the experiments")
    run = verbs.add_parser("run", help="run one", add_help=False)
    every = verbs.add_parser("all", help="run all, one after the other")
    plot = verbs.add_parser("plot", help="render tables and plots from the results again")
    submit = verbs.add_parser("submit", help="run one on a cluster", add_help=False)
    for verb in (run, submit):
        verb.add_argument("name", choices=EXPERIMENTS, metavar="NAME")
        verb.add_argument("--only", default="", metavar="TEXT", help="cases that contain this")
        verb.add_argument("--help", action="store_true", help="show all options")
    plot.add_argument("names", nargs="*", metavar="NAME", default=EXPERIMENTS)
    for verb in (run, submit, every):
        sizes = verb.add_mutually_exclusive_group()
        for size, what in (
            ("tiny", "as CI does: to see that it works"),
            ("quick", "minutes for all of them, on two cores"),
            ("paper", "the sizes of the paper"),
        ):
            sizes.add_argument(
                f"--{size}", dest="size", action="store_const", const=size, help=what
            )
        verb.set_defaults(size="default")
        verb.add_argument("--again", action="store_true", help="do not go on with a stopped run")
        verb.add_argument(
            *("--workers",), type=int, default=os.cpu_count() or 1, help="for exact counts"
        )
    run.add_argument("--one-process", action="store_true", help="not one for each case")
    submit.add_argument("--executor", default="slurm", help="slurm, or local")
    submit.add_argument("--parameter", action="append", default=[], metavar="KEY=VALUE")
    for verb in (run, submit, every, plot):
        verb.add_argument("--results", type=Path, help="another folder")
    parser.set_defaults(run=run, submit=submit)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; the exit status is 1 if a target is missed."""
    argv = sys.argv[1:] if argv is None else list(argv)
    missing = _missing()
    if missing:
        return _fail(
            f"the experiments need {', '.join(missing)}: pip install -r requirements-dev.txt"
        )
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.verb == "list":
        for name in EXPERIMENTS:
            print(f"{name:16} {_summary(name)}")
        return 0
    if args.verb in ("all", "plot") and rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.verb == "plot":
        return _plot(args)
    if args.verb == "all":
        ends = {name: _run(name, args, [], argv) for name in EXPERIMENTS}
        print("\n".join(f"{name}: {_ENDS[end]}" for name, end in ends.items()))
        return max(ends.values())
    if args.help:
        getattr(args, args.verb).print_help()
        rest = ["--help"]
    return _run(args.name, args, rest, argv)


_ENDS = {0: "done", 1: "a target is missed, or a case failed", 2: "not run"}


def _run(name: str, args: argparse.Namespace, rest: list[str], argv: Sequence[str]) -> int:
    import tyro

    from . import cluster, harness, results

    experiment = load(name)
    config = experiment.config(args.size)
    chosen = tyro.cli(type(config), default=config, args=rest, prog=f"{PROG} run {name}")
    if unknown := experiment.unknown(chosen):
        return _fail(unknown)
    try:
        cases = list(experiment.cases(chosen))
    except ValueError as error:
        return _fail(f"{name}: {error}")
    only = [case for case in cases if getattr(args, "only", "") in str(case)]
    command = f"{PROG} {shlex.join(argv)}"
    run = harness.Run(
        experiment,
        only,
        args.size,
        command,
        options=_options(chosen, config),
        whole=only == cases and _selection(chosen) == _selection(config),
        folder=args.results or results.FOLDER,
        workers=args.workers,
        one_process=getattr(args, "one_process", False),
    )
    if not cases:
        return _fail(f"{name} has no case of these options")
    if not only:
        return _fail(f"no case of {name} contains {args.only!r}; the first of them: {cases[0]}")
    large = run.too_large()
    if large and args.verb != "submit":
        return _fail(_too_large(experiment, large))
    if args.again:
        run.parts.forget(map(harness.plain, only))
    elif len(run.left()) < len(only):
        print(f"{name}: going on with a run that was stopped; --again starts anew")
    try:
        records = run.run() if args.verb != "submit" else cluster.run(run, args)
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return _show(experiment, run, records)


def _selection(config: Any) -> dict[str, Any]:
    """The options that say which cases there are."""
    return {name: value for name, value in vars(config).items() if isinstance(value, tuple)}


def _options(chosen: Any, usual: Any) -> str:
    """The options that say how cases are measured, where they are not those of the size."""
    said = []
    for name, value in vars(chosen).items():
        if value != vars(usual)[name] and not isinstance(value, tuple):
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                said.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                said.append(f"--{flag} {shlex.quote(str(value))}")
    return " ".join(said)


def _too_large(experiment: Any, large: list[Any]) -> str:
    from .results import free_memory

    needs = max(map(experiment.memory, large)) / 2**30
    free = free_memory(experiment.accelerator) / 2**30
    return (
        f"{experiment.name}: {len(large)} cases need up to {needs:.1f} GiB of memory, "
        f"{free:.1f} GiB are free; --quick takes less, --only leaves some out. "
        f"The first: {large[0]}"
    )


def _show(experiment: Any, run: Any, records: list[Any]) -> int:
    from . import render

    if records:
        print(experiment.table(records))
    for path in render.plot(experiment, run.folder):
        print(f"plot: {path}")
    print(f"results: {run.folder / experiment.name}.jsonl")
    print(f"page: {_page(run.folder)}")
    for case, error in run.failed.items():
        print(f"failed: {case}: {error}")
    missed = list(experiment.misses(records))
    judged = run.size != "tiny"  # which is too small to show what a target is about
    for miss in missed:
        print(f"missed: {miss}" + ("" if judged else " (not judged at this size)"))
    return 1 if (missed and judged) or run.failed else 0


def _plot(args: argparse.Namespace) -> int:
    from . import render, results

    folder = args.results or results.FOLDER
    unknown = [name for name in args.names if name not in EXPERIMENTS]
    if unknown:
        return _fail(f"no such experiment: {', '.join(unknown)}; list names them")
    for name in args.names:
        for path in render.plot(load(name), folder):
            print(path)
    print(_page(folder))
    return 0


def _page(folder: Path) -> Path:
    """The page of results, rendered anew; and the tables in texts, if they are of these."""
    from . import render, results

    page = render.page(map(load, EXPERIMENTS), folder)
    if folder.resolve() == results.FOLDER.resolve():
        for text in TEXTS:
            text.write_text(render.fill(text.read_text(), load, folder))
    return page


if __name__ == "__main__":
    sys.exit(main())
