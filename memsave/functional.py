"""The layers as functions, named and signed like those of :mod:`torch.nn.functional`."""

from .layers.activation import relu
from .layers.batch_norm import batch_norm
from .layers.conv import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from .layers.dropout import dropout
from .layers.linear import linear
from .layers.pooling import max_pool1d, max_pool2d, max_pool3d

__all__ = [
    "batch_norm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "dropout",
    "linear",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "relu",
]
