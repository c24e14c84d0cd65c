"""Drop-ins for transformers: RMS norms, activations written in Python, gated feed-forward layers.

Hundreds of its classes are copies of a few under other names, so they are recognised by what they
compute. A class that nobody has listed is tried, once, on small tensors in several dtypes and both
modes; where its outputs are those of a formula here to the bit, it gets a drop-in. A class that
computes anything else, in this or another version of transformers, is left alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import activations
from transformers.pytorch_utils import Conv1D

from .. import spec
from .._context import is_traced
from ..function import Grads, Mask, Saved, Shapes, define
from ..layers.curve import define_curve
from ..layers.gated import (
    PRODUCTS,
    Product,
    define_gated,
    gated,
    geglu,
    gelu_gradient,
    quick_gelu_gradient,
    swiglu,
)
from ..layers.module import Class, as_stock, derive, recogniser
from ..layers.norm_gradients import Gs, from_input
from ..spec import Layer

Act = Callable[[Tensor], Tensor]

as_stock(Conv1D, spec.LINEAR)
as_stock(activations.SiLUActivation, spec.SILU)
as_stock(activations.MishActivation, spec.MISH)

# Activations. Those written in Python keep several tensors; their gradients read the input alone.


class Formula(NamedTuple):
    """An activation: its row, as a function, and as the gate of a product."""

    row: Layer
    alone: Act
    gated: Product


def _renamed(row: Layer, name: str) -> Layer:
    """A row of this extension that keeps what one of the table does, of another op."""
    return replace(row, name=f"transformers.{name}", op=f"transformers.{name}")


def _formula(name: str, act: nn.Module, gradient: Callable[[Tensor, Tensor], Tensor]) -> Formula:
    row, product = _renamed(spec.SILU, name), _renamed(spec.SWIGLU, f"gated_{name}")
    forward = act.forward  # not the module, which hooks may see
    # (Of operations on each element, inductor keeps the input alone by itself.)
    return Formula(
        row,
        define_curve(row, forward, gradient, compiled=False),
        define_gated(product, forward, gradient, compiled=False),
    )


def _fast_gelu_gradient(g: Tensor, x: Tensor) -> Tensor:
    # Its constant is sqrt(2 / pi) to ten digits.
    square = 0.044715 * x * x
    tanh = torch.tanh(x * 0.7978845608 * (1 + square))
    steep = 0.7978845608 * (1 + 3 * square) * (1 - tanh * tanh)
    return g * (0.5 * (1 + tanh + x * steep))


_by_erf = partial(gelu_gradient, approximate="none")
_by_tanh = partial(gelu_gradient, approximate="tanh")

#: The classes whose forward is a formula in Python (two of them have it as an option).
PYTHON: dict[Class, Formula] = {
    type(act): _formula(name, act, gradient)
    for name, act, gradient in (
        ("quick_gelu", activations.QuickGELUActivation(), quick_gelu_gradient),
        ("new_gelu", activations.NewGELUActivation(), _by_tanh),
        ("fast_gelu", activations.FastGELUActivation(), _fast_gelu_gradient),
        ("accurate_gelu", activations.AccurateGELUActivation(), _by_tanh),
        ("python_gelu", activations.GELUActivation(use_gelu_python=True), _by_erf),
        ("python_gelu_tanh", activations.GELUTanh(use_gelu_tanh_python=True), _by_tanh),
    )
}


def _in_python(act: nn.Module) -> bool:
    """Whether it is the formula that runs, and not the op of torch."""
    return isinstance(getattr(act, "act", None), MethodType) or not hasattr(act, "act")


#: What the two classes that have it as an option run otherwise.
OTHERWISE: dict[Class, Product] = {
    activations.GELUActivation: geglu,
    activations.GELUTanh: partial(geglu, approximate="tanh"),
}


def _derive_activation(stock: Class, formula: Formula) -> None:
    def forward(self: nn.Module, input: Tensor) -> Tensor:
        return formula.alone(input) if _in_python(self) else stock.forward(self, input)

    derive(stock, forward, formula.row)
    PRODUCTS[stock] = lambda act: formula.gated if _in_python(act) else OTHERWISE[stock]


for _stock, _python in PYTHON.items():
    _derive_activation(_stock, _python)
PRODUCTS[activations.SiLUActivation] = lambda act: swiglu


# RMS norms. They differ in what is rounded to the dtype of the input, and when.

Norm = Callable[[Tensor, Tensor | None, float], tuple[Tensor, Tensor]]


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return wide * rstd, rstd


def _llama(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    xhat, rstd = _normalized(x, eps)
    xhat = xhat.to(x.dtype)
    return (xhat if weight is None else weight * xhat), rstd


def _t5(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    xhat, rstd = _normalized(x, eps)
    if weight is None:
        return xhat, rstd
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return weight * (xhat.to(weight.dtype) if half else xhat), rstd


def _olmo(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    xhat, rstd = _normalized(x, eps)
    return (xhat if weight is None else weight * xhat).to(x.dtype), rstd


def _gemma(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    xhat, rstd = _normalized(x, eps)
    return (xhat if weight is None else xhat * (1.0 + weight.to(xhat.dtype))).to(x.dtype), rstd


def _norm(name: str, formula: Norm, shift: int = 0) -> tuple[Layer, Callable[..., Tensor]]:
    row = _renamed(spec.RMS_NORM, name)

    def primal(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
        return formula(x, weight, eps)[0]

    def fwd(
        wrt: Mask, x: Tensor, weight: Tensor | None, *, eps: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y, rstd = formula(x, weight, eps)
        return y, {"rstd": rstd.squeeze(-1)}

    def bwd(gs: Gs, wrt: Mask, saved: Saved, shapes: Shapes, *, eps: float) -> Grads:
        return from_input(gs, wrt, saved, shapes, None, centered=False, shift=shift)

    return row, define(row, primal, bwd, fwd, smooth=True)


NORMS = (
    _norm("llama_rms_norm", _llama),
    _norm("t5_layer_norm", _t5),
    _norm("olmo_rms_norm", _olmo),
    _norm("gemma_rms_norm", _gemma, shift=1),
)
NARROW = (torch.float32, torch.bfloat16, torch.float16)


def _norm_forward(stock: Class, eps: str, layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if is_traced(x):
            return stock.forward(self, x)
        weight: Any = getattr(self, "weight", None)
        fits = weight is None or (x.shape[-1:] == weight.shape and weight.dtype in NARROW)
        # (Of float64, stock narrows its inputs too.)
        if not fits or x.dtype not in NARROW:
            return stock.forward(self, x)
        return layer(x, weight, eps=getattr(self, eps))

    return forward


# Gated feed-forward layers: ``down(act(gate(x)) * up(x))``, under the names that they have.


def _separate(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return self.gate_proj(x), self.up_proj(x)


def _together(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
    return gate, up


def _t5_separate(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return self.wi_0(x), self.wi_1(x)


def _down(self: Any, y: Tensor) -> Tensor:
    return self.down_proj(y)


def _dropped_down(self: Any, y: Tensor) -> Tensor:
    return self.down_proj(self.dropout(y))


def _t5_down(self: Any, y: Tensor) -> Tensor:
    y, weight = self.dropout(y), self.wo.weight
    if isinstance(weight, Tensor) and weight.dtype not in (y.dtype, torch.int8):
        y = y.to(weight.dtype)
    return self.wo(y)


class Layout(NamedTuple):
    """Where such a layer has what; ``linear``: features in and out, of 4 and of 6."""

    inside: Callable[[Any, Tensor], tuple[Tensor, Tensor]]
    outside: Callable[[Any, Tensor], Tensor]
    act: str
    linear: dict[str, tuple[int, int]]
    has_dropout: bool = False


_SEPARATE = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
LAYOUTS = (
    *(Layout(_separate, _down, act, _SEPARATE) for act in ("act_fn", "activation_fn", "act")),
    *(
        Layout(_together, _down, act, {"gate_up_proj": (4, 12), "down_proj": (6, 4)})
        for act in ("act_fn", "activation_fn")
    ),
    Layout(_separate, _dropped_down, "act_fn", _SEPARATE, True),
    Layout(_t5_separate, _t5_down, "act", {"wi_0": (4, 6), "wi_1": (4, 6), "wo": (6, 4)}, True),
)


def _mlp_forward(stock: Class, layout: Layout) -> Callable[..., Tensor]:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        gate, up = layout.inside(self, x)
        return layout.outside(self, gated(getattr(self, layout.act), gate, up))

    return forward


# Recognising them.


class Candidate(NamedTuple):
    """What a class may compute: ``forward(stock)`` of a drop-in for it, the rows that this runs,
    and all that a module must have for it, ``attributes(dtype)`` and an input of so many features.
    """

    forward: Callable[[Class], Callable[..., Tensor]]
    rows: tuple[Layer, ...]
    attributes: Callable[[torch.dtype], dict[str, Any]]
    features: int


def _norm_attributes(dtype: torch.dtype, eps: str) -> dict[str, Any]:
    return {"weight": nn.Parameter(torch.randn(33).to(dtype)), eps: 0.05, "with_scale": True}


def _mlp_attributes(dtype: torch.dtype, layout: Layout) -> dict[str, Any]:
    linear = {name: nn.Linear(*sizes, dtype=dtype) for name, sizes in layout.linear.items()}
    # What tells whether it is called, and where; of others there is none to be called.
    dropout = {"dropout": nn.Tanh()} if layout.has_dropout else {}
    return {**linear, **dropout, layout.act: nn.SiLU()}


CANDIDATES = (
    *(
        Candidate(
            partial(_norm_forward, eps=eps, layer=layer),
            (row,),
            partial(_norm_attributes, eps=eps),
            features=33,
        )
        for eps in ("variance_epsilon", "eps")
        for row, layer in NORMS
    ),
    *(
        Candidate(
            partial(_mlp_forward, layout=layout),
            (spec.SWIGLU, spec.GEGLU),
            partial(_mlp_attributes, layout=layout),
            features=4,
        )
        for layout in LAYOUTS
    ),
)
#: Dtypes of input and parameters.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
)


@recogniser
def recognise(cls: Class) -> None:
    """Register a drop-in for a class of transformers that computes what a candidate does."""
    if cls.__module__.partition(".")[0] not in ("transformers", "transformers_modules"):
        return
    if len(inspect.signature(cls.forward).parameters) != 2:
        return
    with unset_fake_temporarily(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for candidate in CANDIDATES:
            if all(_agrees(cls, candidate, *dtypes) for dtypes in DTYPES):
                derive(cls, _renamed_arguments(candidate.forward(cls), cls), *candidate.rows)
                return


def _renamed_arguments(forward: Any, stock: Class) -> Callable[..., Tensor]:
    """The function with the names of arguments that callers of the stock class's may use."""
    code, names = forward.__code__, tuple(inspect.signature(stock.forward).parameters)
    code = code.replace(co_varnames=names + code.co_varnames[len(names) :])
    return FunctionType(code, forward.__globals__, "forward", None, forward.__closure__)


def _agrees(cls: Class, candidate: Candidate, dtype: torch.dtype, parameters: torch.dtype) -> bool:
    """Whether both do the same with a module that has nothing but the attributes.

    What else the class's forward asks for is not there: it fails, and the candidate does not. (Both
    may refuse a mixture of dtypes.)
    """
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    try:
        for name, value in candidate.attributes(parameters).items():
            setattr(module, name, value)
    except Exception:  # of a class that has something else by that name
        return False
    x = 4 * torch.randn(64, candidate.features, dtype=torch.float32).to(dtype)
    ours = candidate.forward(cls)
    return all(
        _same(_outcome(cls.forward, module.train(mode), x), _outcome(ours, module, x))
        for mode in (False, True)
    )


def _same(stock: Tensor | type, ours: Tensor | type) -> bool:
    if isinstance(stock, Tensor) and isinstance(ours, Tensor):
        return stock.dtype == ours.dtype and torch.equal(stock, ours)
    return stock is ours


@torch.no_grad()
def _outcome(forward: Callable[..., Any], module: nn.Module, x: Tensor) -> Any:
    try:
        return forward(module, x)
    except Exception as error:
        return type(error)
