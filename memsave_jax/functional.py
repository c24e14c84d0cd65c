"""The layers as functions, signed like those of :mod:`jax.nn` and the layers of Flax.

Shapes, dtypes, results and errors are those of what each of them names: activations and curves take
any shape and real floating dtype, and return the same. A function ``*_from_output`` takes what that
without the ending does. (Layers of Flax cast their parameters and inputs to one dtype. The
functions do not: :func:`linear` promotes them, :func:`conv` and :func:`conv_transpose` refuse to.)
"""

from .layers.activation import (
    hard_shrink,
    hard_sigmoid,
    hard_tanh,
    leaky_relu,
    prelu,
    prelu_from_input,
    relu,
    relu6,
    relu_from_output,
    soft_shrink,
    threshold,
)
from .layers.avg_pooling import adaptive_avg_pool, avg_pool
from .layers.batch_norm import batch_norm
from .layers.conv import conv, conv_transpose
from .layers.curve import (
    celu,
    celu_from_output,
    elu,
    elu_from_output,
    gelu,
    glu,
    hard_silu,
    hard_swish,
    log_sigmoid,
    log_sigmoid_from_output,
    log_softmax,
    mish,
    selu,
    selu_from_output,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    softplus_from_output,
    swish,
    tanh,
    tanh_shrink,
)
from .layers.dropout import alpha_dropout, dropout, dropout_from_rng, feature_dropout
from .layers.embedding import embedding, embedding_compact
from .layers.gated import geglu, swiglu
from .layers.linear import linear
from .layers.loss import cross_entropy
from .layers.norm import (
    group_norm,
    group_norm_from_output,
    instance_norm,
    instance_norm_from_output,
    layer_norm,
    layer_norm_from_output,
    rms_norm,
    rms_norm_from_output,
)
from .layers.padding import pad
from .layers.pooling import adaptive_max_pool, max_pool

__all__ = [
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "alpha_dropout",
    "avg_pool",
    "batch_norm",
    "celu",
    "celu_from_output",
    "conv",
    "conv_transpose",
    "cross_entropy",
    "dropout",
    "dropout_from_rng",
    "elu",
    "elu_from_output",
    "embedding",
    "embedding_compact",
    "feature_dropout",
    "geglu",
    "gelu",
    "glu",
    "group_norm",
    "group_norm_from_output",
    "hard_shrink",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "instance_norm",
    "instance_norm_from_output",
    "layer_norm",
    "layer_norm_from_output",
    "leaky_relu",
    "linear",
    "log_sigmoid",
    "log_sigmoid_from_output",
    "log_softmax",
    "max_pool",
    "mish",
    "pad",
    "prelu",
    "prelu_from_input",
    "relu",
    "relu6",
    "relu_from_output",
    "rms_norm",
    "rms_norm_from_output",
    "selu",
    "selu_from_output",
    "sigmoid",
    "silu",
    "soft_shrink",
    "soft_sign",
    "softmax",
    "softplus",
    "softplus_from_output",
    "swiglu",
    "swish",
    "tanh",
    "tanh_shrink",
    "threshold",
]
