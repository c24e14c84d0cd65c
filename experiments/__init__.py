"""What the library is measured on: a module per experiment, run by ``python -m experiments``."""
