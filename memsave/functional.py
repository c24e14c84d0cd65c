"""The layers as functions, named and signed like those of :mod:`torch.nn.functional`.

Shapes, dtypes, results and errors are those of the function that each of them names: activations
and curves take any shape and real floating dtype, and return the same. Where it cannot follow (see
the README), a function runs stock's.
"""

from .layers.activation import (
    hardshrink,
    hardsigmoid,
    hardtanh,
    leaky_relu,
    prelu,
    relu,
    relu6,
    softshrink,
    threshold,
)
from .layers.avg_pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    avg_pool1d,
    avg_pool2d,
    avg_pool3d,
)
from .layers.batch_norm import batch_norm
from .layers.conv import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from .layers.curve import logsigmoid, softsign, tanhshrink
from .layers.dropout import alpha_dropout, dropout, dropout1d, dropout2d, dropout3d
from .layers.embedding import embedding
from .layers.gated import geglu, swiglu
from .layers.group_norm import group_norm, instance_norm
from .layers.linear import linear
from .layers.loss import cross_entropy
from .layers.norm import layer_norm, rms_norm
from .layers.padding import pad
from .layers.pooling import (
    adaptive_max_pool1d,
    adaptive_max_pool2d,
    adaptive_max_pool3d,
    max_pool1d,
    max_pool2d,
    max_pool3d,
)

__all__ = [
    "adaptive_avg_pool1d",
    "adaptive_avg_pool2d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool1d",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "alpha_dropout",
    "avg_pool1d",
    "avg_pool2d",
    "avg_pool3d",
    "batch_norm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross_entropy",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "embedding",
    "geglu",
    "group_norm",
    "hardshrink",
    "hardsigmoid",
    "hardtanh",
    "instance_norm",
    "layer_norm",
    "leaky_relu",
    "linear",
    "logsigmoid",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "pad",
    "prelu",
    "relu",
    "relu6",
    "rms_norm",
    "softshrink",
    "softsign",
    "swiglu",
    "tanhshrink",
    "threshold",
]
