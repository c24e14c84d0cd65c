"""Makes torchvision importable beside a torch that it was not built for (a CUDA build on CPU).

transformers and timm import torchvision where it is installed. Its compiled ops are missing then,
and two of them it asks for while it is imported; nothing here calls them.
"""

from __future__ import annotations

import importlib.util
import sys

import torch

_library: torch.library.Library | None = None  # the ops live as long as it does


def declare_missing_ops() -> None:
    """Declare the ops that torchvision asks for, if it cannot be imported without."""
    global _library
    if _library is not None or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
