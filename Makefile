# Short names for the commands of README.md and CONTRIBUTING.md, which work without make.

.PHONY: setup demo test check format

setup: .venv/installed

.venv/installed: requirements-dev.txt pyproject.toml setup.py $(shell find memsave/kernels/csrc -type f)
	python3 -m venv .venv
	.venv/bin/pip install -r requirements-dev.txt
	.venv/bin/pip install --no-build-isolation --no-deps -e .
	touch $@

demo: setup
	.venv/bin/python -m experiments run input_gradient

test: setup
	.venv/bin/python -m pytest

check: setup
	.ci/check

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
