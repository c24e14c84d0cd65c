"""Drop-ins for timm.

Its norms, convolutions and pooling call torch's functions. A drop-in runs timm's own ``forward``,
whatever the version has in it, with memsave's functions in their place. Submodules (the activation
of a norm, say) are modules, which convert by themselves.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial, wraps
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .. import functional, spec
from ..layers import group_norm, norm
from ..layers.curve import define_curve
from ..layers.gated import PRODUCTS, gated, quick_gelu_gradient, silu_gradient
from ..layers.module import Class, as_stock, drop_in
from ..spec import Layer


def _classes(names: str) -> Iterator[Class]:
    """Of ``module.Class ...`` in ``timm.layers``, those that this version has."""
    for name in names.split():
        with suppress(ImportError, AttributeError):
            yield pkgutil.resolve_name("timm.layers.{}:{}".format(*name.split(".")))


def _register(stock: Class, name: str, ours: Callable[..., Any], *rows: Layer) -> None:
    @wraps(stock.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.fx looks into timm's modules, and traces what these call, not what memsave asks.
        traced = any(isinstance(arg, fx.Proxy) for arg in (*args, *kwargs.values()))
        return (stock.forward if traced else ours)(self, *args, **kwargs)

    doc = f"As :class:`{stock.__module__}.{stock.__name__}`."
    body = {"__module__": __name__, "__doc__": doc, "forward": forward}
    globals()[name] = drop_in(*rows)(type(name, (stock,), body))


# timm's code with memsave's functions.

Functions = dict[Any, Any]


def _functions(names: str) -> Functions:
    """Torch's functions of these names, and torch.nn.functional, to what stands for each."""
    ours = {name: getattr(functional, name) for name in names.split()}
    module = ModuleType(F.__name__)
    vars(module).update({**vars(F), **ours})
    return {F: module, **{getattr(F, name): function for name, function in ours.items()}}


def _rebind(
    function: FunctionType, ours: Functions, callers: tuple[FunctionType, ...] = ()
) -> FunctionType:
    """The same code, to which torch's functions mean ours; itself where it calls none."""
    names, callers = function.__globals__, (*callers, function)
    changed = {}
    for name in {*function.__code__.co_names} & {*names}:
        value = names[name]
        if isinstance(value, FunctionType) and value.__module__.startswith("timm."):
            rebound = value if value in callers else _rebind(value, ours, callers)
        else:
            rebound = ours.get(value, value) if isinstance(value, Hashable) else value
        if rebound is not value:
            changed[name] = rebound
    if not changed:
        return function
    # Without the name of a module: torch.compile would look these names up there.
    names = {name: value for name, value in names.items() if name != "__name__"} | changed
    body = (function.__code__, names, function.__name__, function.__defaults__)
    same = FunctionType(*body, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__
    return same


for _names, _rows, _stock in (
    ("batch_norm", (spec.BATCH_NORM_EVAL, spec.BATCH_NORM_TRAIN), "norm_act.BatchNormAct2d"),
    (
        "group_norm",
        (spec.GROUP_NORM,),
        "norm.GroupNorm norm.GroupNorm1 norm_act.GroupNormAct norm_act.GroupNorm1Act",
    ),
    (
        "layer_norm",
        (spec.LAYER_NORM,),
        "norm.LayerNorm norm.LayerNorm2d norm.LayerNormFp32 norm.LayerNorm2dFp32 "
        "norm.LayerNormExp2d norm_act.LayerNormAct norm_act.LayerNormAct2d "
        "norm_act.LayerNormActFp32 norm_act.LayerNormAct2dFp32",
    ),
    (
        "rms_norm",
        (spec.RMS_NORM,),
        "norm.RmsNorm norm.RmsNormFp32 norm_act.RmsNormAct norm_act.RmsNormActFp32",
    ),
    # (Weights are standardized by torch's batch_norm, as ever.)
    (
        "conv2d pad",
        (spec.CONV2D,),
        "conv2d_same.Conv2dSame std_conv.StdConv2d std_conv.StdConv2dSame "
        "std_conv.ScaledStdConv2d std_conv.ScaledStdConv2dSame blur_pool.BlurPool2d",
    ),
    ("avg_pool2d", (spec.AVG_POOL2D,), "pool2d_same.AvgPool2dSame"),
    ("max_pool2d", (spec.MAX_POOL2D,), "pool2d_same.MaxPool2dSame"),
    ("relu6", (spec.RELU6,), "activations.HardSigmoid"),
    ("prelu", (spec.PRELU, spec.PRELU_FROM_INPUT), "activations.PReLU"),
):
    _ours = _functions(_names)
    for _cls in _classes(_stock):
        _register(_cls, _cls.__name__, _rebind(_cls.forward, _ours), *_rows)


# The rows from the output, for norms that are torch's but for the order of their arguments.


def _from_output(stock: Class, ours: Class) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (stock if self._fast_norm else ours).forward(self, x)

    return forward


for _ours, _row, _names in (
    (norm.LayerNormFromOutput, spec.LAYER_NORM_FROM_OUTPUT, "norm.LayerNorm"),
    (group_norm.GroupNormFromOutput, spec.GROUP_NORM_FROM_OUTPUT, "norm.GroupNorm norm.GroupNorm1"),
    (norm.RMSNormFromOutput, spec.RMS_NORM_FROM_OUTPUT, "norm.RmsNorm"),
):
    for _cls in _classes(_names):
        _register(_cls, f"{_cls.__name__}FromOutput", _from_output(_cls, _ours), _row)


# What is torch's but for its signature, or keeps one array by itself, stays as it is.

for _row, _names in {
    spec.GELU: "activations.GELU activations.GELUTanh",
    spec.SIGMOID: "activations.Sigmoid",
    spec.TANH: "activations.Tanh",
    spec.SILU: "activations_me.SwishMe",
    spec.MISH: "activations_me.MishMe",
    spec.HARDSWISH: "activations_me.HardSwishMe",
    spec.LINEAR: "linear.Linear",
}.items():
    for _cls in _classes(_names):
        as_stock(_cls, _row)


# Of the others torch keeps each step. Their gradients read the input alone.


def _mish_gradient(g: Tensor, x: Tensor) -> Tensor:
    gate = F.softplus(x).tanh()
    return g * (gate + x * torch.sigmoid(x) * (1 - gate.square()))


def _hard_swish_gradient(g: Tensor, x: Tensor) -> Tensor:
    shifted = x + 3.0
    return g * (F.relu6(shifted) + torch.where((shifted > 0) & (shifted < 6), x, 0.0)) / 6.0


#: Whether the gradient of clamp passes where its input is a bound.
CLAMP_PASSES_AT_BOUNDS = torch.__version__ < "2.14"


def _hard_mish_gradient(g: Tensor, x: Tensor) -> Tensor:
    shifted = x + 2
    if CLAMP_PASSES_AT_BOUNDS:
        inside = (shifted >= 0) & (shifted <= 2)
    else:
        inside = (shifted > 0) & (shifted < 2)
    return g * 0.5 * (shifted.clamp(0, 2) + torch.where(inside, x, 0.0))


def _of_input(stock: Class, gradient: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Register a drop-in for an activation that is not in place."""
    row = replace(spec.SILU, name=f"timm.{stock.__name__.lower()}", op="")
    plain = stock()

    activation = define_curve(row, plain.forward, gradient)

    def forward(self: Any, x: Tensor) -> Tensor:
        return stock.forward(self, x) if getattr(self, "inplace", False) else activation(x)

    _register(stock, stock.__name__, forward, row)


for _name, _gradient in {
    "Swish": silu_gradient,
    "QuickGELU": quick_gelu_gradient,
    "Mish": _mish_gradient,
    "HardSwish": _hard_swish_gradient,
    "HardMish": _hard_mish_gradient,
}.items():
    for _cls in _classes(f"activations.{_name}"):
        _of_input(_cls, _gradient)


# Gated feed-forward layers.


for _cls in _classes("activations.GELU"):
    PRODUCTS[_cls] = lambda act: functional.geglu
for _cls in _classes("activations.GELUTanh"):
    PRODUCTS[_cls] = lambda act: partial(functional.geglu, approximate="tanh")


def _glu_mlp(self: Any, x: Tensor) -> Tensor:
    first, second = self.fc1(x).chunk(2, dim=self.chunk_dim)
    gate, up = (second, first) if self.gate_last else (first, second)
    return _down(self, gated(self.act, gate, up))


def _swiglu(self: Any, x: Tensor) -> Tensor:
    return _down(self, gated(self.act, self.fc1_g(x), self.fc1_x(x)))


def _down(self: Any, y: Tensor) -> Tensor:
    return self.drop2(self.fc2(self.norm(self.drop1(y))))


def _has_parts(stock: Class, ours: FunctionType) -> bool:
    """Whether this version's forward is made of what ours is made of, and of nothing else."""
    names = {*ours.__code__.co_names, *_down.__code__.co_names} - {"_down", "gated"}
    return {*stock.forward.__code__.co_names} == names


for _name, _forward in {"GluMlp": _glu_mlp, "SwiGLU": _swiglu}.items():
    for _cls in _classes(f"mlp.{_name}"):
        if _has_parts(_cls, _forward):
            _register(_cls, _name, _forward, spec.SWIGLU, spec.GEGLU)
