"""The layers as modules, named and signed like those of :mod:`torch.nn`.

``ReLUFromOutput`` and ``DropoutFromRng`` run other rows of the same op (see ``convert(policy=)``).
"""

from .layers.activation import ReLU, ReLUFromOutput
from .layers.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from .layers.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from .layers.dropout import Dropout, DropoutFromRng
from .layers.linear import Linear
from .layers.pooling import MaxPool1d, MaxPool2d, MaxPool3d

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "DropoutFromRng",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "ReLU",
    "ReLUFromOutput",
]
