"""The layers as functions, signed like those of :mod:`jax.nn` and the layers of Flax."""

from .layers.activation import relu, relu_from_output
from .layers.batch_norm import batch_norm
from .layers.conv import conv, conv_transpose
from .layers.dropout import dropout, dropout_from_rng
from .layers.linear import linear
from .layers.pooling import max_pool

__all__ = [
    "batch_norm",
    "conv",
    "conv_transpose",
    "dropout",
    "dropout_from_rng",
    "linear",
    "max_pool",
    "relu",
    "relu_from_output",
]
