"""What the library is measured on: a module per experiment, run by ``python -m experiments``."""

from .torchvision_stub import declare_missing_ops

declare_missing_ops()
