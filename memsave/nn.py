"""The layers as modules, named and signed like those of :mod:`torch.nn`; without those of which
torch keeps no more than the table says.

Those named ``...FromOutput``, ``DropoutFromRng`` and ``EmbeddingCompact`` run other rows of the
same op (see ``convert(policy=)``).
"""

from .layers.activation import (
    Hardshrink,
    Hardsigmoid,
    Hardtanh,
    LeakyReLU,
    PReLU,
    ReLU,
    ReLU6,
    ReLUFromOutput,
    Softshrink,
    Threshold,
)
from .layers.avg_pooling import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
)
from .layers.batch_norm import BatchNorm1d, BatchNorm2d, BatchNorm3d
from .layers.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from .layers.curve import (
    CELUFromOutput,
    ELUFromOutput,
    LogSigmoid,
    LogSigmoidFromOutput,
    SELUFromOutput,
    SoftplusFromOutput,
    Softsign,
    Tanhshrink,
)
from .layers.dropout import (
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropoutFromRng,
)
from .layers.embedding import EmbeddingCompact
from .layers.group_norm import (
    GroupNorm,
    GroupNormFromOutput,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
)
from .layers.linear import Linear
from .layers.loss import CrossEntropyLoss
from .layers.norm import LayerNorm, LayerNormFromOutput, RMSNorm, RMSNormFromOutput
from .layers.padding import (
    ReflectionPad1d,
    ReflectionPad2d,
    ReflectionPad3d,
    ReplicationPad1d,
    ReplicationPad2d,
    ReplicationPad3d,
)
from .layers.pooling import (
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)

__all__ = [
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AlphaDropout",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CELUFromOutput",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "DropoutFromRng",
    "ELUFromOutput",
    "EmbeddingCompact",
    "GroupNorm",
    "GroupNormFromOutput",
    "Hardshrink",
    "Hardsigmoid",
    "Hardtanh",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LayerNormFromOutput",
    "LeakyReLU",
    "Linear",
    "LogSigmoid",
    "LogSigmoidFromOutput",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "PReLU",
    "RMSNorm",
    "RMSNormFromOutput",
    "ReLU",
    "ReLU6",
    "ReLUFromOutput",
    "ReflectionPad1d",
    "ReflectionPad2d",
    "ReflectionPad3d",
    "ReplicationPad1d",
    "ReplicationPad2d",
    "ReplicationPad3d",
    "SELUFromOutput",
    "SoftplusFromOutput",
    "Softshrink",
    "Softsign",
    "Tanhshrink",
    "Threshold",
]
