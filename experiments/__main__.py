"""Command line: ``python -m experiments list`` and ``python -m experiments run NAME [options]``.

An experiment is a module of this package with a docstring, ``options(parser)`` and ``main(args)``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys

EXPERIMENTS = (
    "input_gradient",
    "kept_bytes",
    "language_models",
    "lora",
    "zoo",
    "step_time",
    "dropout_rows",
    "functional_mode",
    "flax_scenarios",
    "flax_layers",
    "flax_rows",
    "flax_freezing",
)
NEEDS = (
    *("torch", "jax", "flax", "transformers", "peft", "timm", "optax", "sklearn"),
    *("matplotlib", "tqdm"),
)


def _missing() -> list[str]:
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def _summary(name: str) -> str:
    doc = importlib.import_module(f".{name}", __package__).__doc__ or ""
    return doc.partition("\n")[0]


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; the exit status is the experiment's."""
    missing = _missing()
    if missing:
        print(
            f"the experiments need {', '.join(missing)}: pip install -r requirements-dev.txt",
            file=sys.stderr,
        )
        return 2
    parser = argparse.ArgumentParser("python -m experiments", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="name the experiments")
    run = verbs.add_parser("run", help="run one experiment").add_subparsers(
        dest="name", required=True, metavar="NAME"
    )
    for name in EXPERIMENTS:
        module = importlib.import_module(f".{name}", __package__)
        module.options(run.add_parser(name, help=_summary(name), description=module.__doc__))
    args = parser.parse_args(argv)
    if args.verb == "list":
        for name in EXPERIMENTS:
            print(f"{name:16} {_summary(name)}")
        return 0
    return importlib.import_module(f".{args.name}", __package__).main(args) or 0


if __name__ == "__main__":
    sys.exit(main())
