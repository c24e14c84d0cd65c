"""timm: its classes get drop-ins that compute what timm computes and keep no more; others are left.

The classes are found among what the extension registers, so that one without a case here fails.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import helpers
import pytest
import torch
import torch.nn.functional as F
from helpers import same
from torch import Tensor, nn

import memsave
from memsave import extensions, spec
from memsave.layers.module import ROWS, STOCK

timm = pytest.importorskip("timm")

from timm import layers  # noqa: E402
from timm.layers import set_fast_norm  # noqa: E402
from timm.models import create_model  # noqa: E402
from timm.models.resnetv2 import ResNetV2  # noqa: E402

extensions.load()

DROP_INS = {
    cls.__name__: cls for cls in STOCK if cls.__module__ == memsave.extensions.timm.__name__
}
IMAGE, TOKENS = (2, 4, 5, 6), (2, 3, 4)
#: How to build the class of each name: arguments, keywords, and the shape of an input.
CASES: dict[str, tuple[tuple, dict, tuple[int, ...]]] = {
    **dict.fromkeys(["BatchNormAct2d", "GroupNorm1", "GroupNorm1Act"], ((4,), {}, IMAGE)),
    **dict.fromkeys(["GroupNorm", "GroupNormAct"], ((4, 2), {}, IMAGE)),
    **dict.fromkeys(
        ["LayerNorm2d", "LayerNorm2dFp32", "LayerNormExp2d", "LayerNormAct2d"], ((4,), {}, IMAGE)
    ),
    "LayerNormAct2dFp32": ((4,), {}, IMAGE),
    **dict.fromkeys(
        ["LayerNorm", "LayerNormFp32", "LayerNormAct", "LayerNormActFp32"], ((4,), {}, TOKENS)
    ),
    **dict.fromkeys(
        ["RmsNorm", "RmsNormFp32", "RmsNormAct", "RmsNormActFp32"], ((4,), {}, TOKENS)
    ),
    "BlurPool2d": ((4,), {}, IMAGE),
    **dict.fromkeys(["Conv2dSame", "StdConv2dSame", "ScaledStdConv2dSame"],
                    ((4, 6, 3), {"stride": 2, "bias": True}, IMAGE)),
    **dict.fromkeys(["StdConv2d", "ScaledStdConv2d"], ((4, 6, 3), {"bias": True}, IMAGE)),
    **dict.fromkeys(["AvgPool2dSame", "MaxPool2dSame"], ((3, 2), {}, IMAGE)),
    **dict.fromkeys(["PReLU", "HardSigmoid", "Swish", "QuickGELU", "Mish"], ((), {}, TOKENS)),
    **dict.fromkeys(["HardSwish", "HardMish"], ((), {}, TOKENS)),
    "GluMlp": ((4, 8), {"act_layer": nn.SiLU, "gate_last": False, "drop": 0.3}, TOKENS),
    "SwiGLU": ((4, 6), {"act_layer": layers.GELU, "norm_layer": layers.LayerNorm}, TOKENS),
}  # fmt: skip
every_drop_in = pytest.mark.parametrize("drop_in", DROP_INS.values(), ids=list(DROP_INS))


def build(drop_in: type[nn.Module], **overrides) -> tuple[nn.Module, Tensor]:
    """A small stock module, in a dtype that it does not narrow, and an input."""
    stock = STOCK[drop_in]
    args, kwargs, shape = CASES[stock.__name__]
    dtype = torch.float32 if "Fp32" in stock.__name__ else torch.float64
    torch.manual_seed(0)
    module = stock(*args, **{**kwargs, **overrides}).to(dtype)
    for parameter in module.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    # So that all pieces of the activations are seen.
    return module, 3 * torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)


def converted(module: nn.Module, drop_in: type[nn.Module]) -> nn.Module:
    """A copy with this drop-in."""
    row = ROWS[drop_in][0]

    def policy(module, name, rows):
        return row if row in rows else rows[0]

    copied = memsave.convert(copy.deepcopy(module), policy=policy)
    assert type(copied) is drop_in
    return copied


def masks(module: nn.Module) -> Iterator[set[str]]:
    """Which of input and parameters want a gradient: all that do, or the largest few."""
    names = ["input", *[name for name, _ in module.named_parameters()]]
    sizes = range(1, len(names) + 1) if len(names) < 5 else (1, len(names) - 1, len(names))
    for size in sizes:
        yield from map(set, combinations(names, size))


def want(module: nn.Module, x: Tensor, mask: set[str]) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in mask)
    x.requires_grad_("input" in mask)


def kept(module: nn.Module, x: Tensor) -> int:
    """Without parameters and buffers, with the input, which is another layer's output."""
    torch.manual_seed(2)
    return helpers.kept(lambda: module(x), [*module.parameters(), *module.buffers()])


def agree(ours: nn.Module, stock: nn.Module, x: Tensor) -> None:
    """Outputs and buffers to the bit, gradients to rounding."""
    actual, expected = helpers.step(ours, x), helpers.step(stock, x)
    same(actual[0], expected[0], rtol=0, atol=0)
    same(actual[1:], expected[1:])
    same(dict(ours.named_buffers()), dict(stock.named_buffers()), rtol=0, atol=0)


def test_every_drop_in_has_a_case() -> None:
    assert {STOCK[drop_in].__name__ for drop_in in DROP_INS.values()} == set(CASES)
    assert all(type(build(drop_in)[0]) is STOCK[drop_in] for drop_in in DROP_INS.values())


@every_drop_in
@pytest.mark.parametrize("training", [True, False])
def test_equals_stock_and_keeps_no_more(drop_in: type[nn.Module], training: bool) -> None:
    """For every mask. (But for the weight of RMS norm alone torch on CPU keeps what it normalized,
    and the row keeps the input and a number per group.)
    """
    stock, x = build(drop_in)
    stock.train(training)
    ours = converted(stock, drop_in)
    rstd = x[..., 0].numel() * x.itemsize if spec.RMS_NORM in ROWS[drop_in] else 0
    smallest = 1.0
    for mask in masks(stock):
        for module in (stock, ours):
            want(module, x, mask)
        agree(ours, stock, x)
        now, before = kept(ours, x), kept(stock, x)
        assert now <= before + rstd * (mask == {"weight"}), mask
        smallest = min(smallest, now / before if before else 1)
    assert smallest < 1, "nothing is saved for any mask"


@every_drop_in
def test_survives(drop_in: type[nn.Module]) -> None:
    """Reverting, pickling, copying, and no gradients at all."""
    stock, x = build(drop_in)
    ours = converted(stock, drop_in)
    state = dict(vars(ours))
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(copied) is drop_in
        same(copied.eval()(x), stock.eval()(x), rtol=0, atol=0)
    with torch.no_grad():
        same(ours.eval()(x), stock(x), rtol=0, atol=0)
    assert repr(ours).startswith("memsave.")
    assert type(memsave.revert(ours)) is type(stock)
    assert vars(ours).keys() == state.keys()


@every_drop_in
def test_in_bfloat16_and_under_autocast(drop_in: type[nn.Module]) -> None:
    """The output has stock's dtype and bits; with timm's fast norms, which autocast differently."""
    for fast in (False, True):
        set_fast_norm(fast)
        try:
            stock, x = build(drop_in)
        finally:
            set_fast_norm(False)
        for dtype in (torch.float32, torch.bfloat16):
            modules = [converted(stock, drop_in).to(dtype), copy.deepcopy(stock).to(dtype)]
            inputs = [x.to(dtype, copy=True).requires_grad_() for _ in modules]
            for enabled in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    torch.manual_seed(2)
                    actual = helpers.attempt(modules[0], inputs[0])
                    torch.manual_seed(2)
                    expected = helpers.attempt(modules[1], inputs[1])
                same(actual, expected, rtol=0, atol=0)
                if isinstance(actual, type):
                    continue
                grads = [
                    torch.autograd.grad(y, [x, *m.parameters()], helpers.cotangent(y))
                    for y, x, m in zip((actual, expected), inputs, modules, strict=True)
                ]
                same(*grads, rtol=0.05, atol=0.05)


@every_drop_in
def test_is_traced_as_stock_is(drop_in: type[nn.Module]) -> None:
    """By torch.fx, where that can trace stock, and by torch.jit.script."""
    stock, x = build(drop_in)
    stock.eval()
    ours = converted(stock, drop_in)
    expected = helpers.attempt(torch.fx.symbolic_trace, stock)
    if isinstance(expected, type):
        assert helpers.attempt(torch.fx.symbolic_trace, ours) is expected
    else:
        same(torch.fx.symbolic_trace(ours)(x), stock(x), rtol=0, atol=0)


COMPILED = ("BatchNormAct2d", "LayerNorm2d", "RmsNorm", "StdConv2dSame", "QuickGELU", "GluMlp")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_and_exports(name: str) -> None:
    """One of each kind."""
    stock, x = build(DROP_INS[name])
    stock.eval()
    want(stock, x, {"input"})
    ours = converted(stock, DROP_INS[name])
    modules = []
    for module in (ours, stock):
        torch._dynamo.reset()
        modules.append(torch.compile(module, fullgraph=True, backend="aot_eager"))
        same(helpers.step(modules[-1], x), helpers.step(stock, x))
    assert kept(modules[0], x) <= kept(modules[1], x)
    torch._dynamo.reset()
    same(torch.export.export(ours, (x,)).module()(x), stock(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@every_drop_in
def test_two_in_one_graph_of_any_sizes(drop_in: type[nn.Module]) -> None:
    """As of layers of the table: see ``helpers.check_two_in_one_graph``."""
    stock, x = build(drop_in)
    stock.eval()
    want(stock, x, {"input"})
    one, other = (converted(stock, drop_in) for _ in range(2))
    torch._dynamo.reset()
    both = torch.compile(lambda x: one(x) + other(x), fullgraph=True, backend="eager", dynamic=True)
    same(helpers.step(both, x), helpers.step(lambda x: stock(x) + stock(x), x))


SMOOTH = ("Swish", "QuickGELU", "Mish", "HardSwish", "HardMish", "HardSigmoid")


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_of_activations(name: str) -> None:
    """These have rules of their own: first and second derivatives, and the kinks as stock's."""
    stock = STOCK[DROP_INS[name]]()
    ours = converted(stock, DROP_INS[name])
    x = torch.linspace(-5, 5, 24, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(ours, x)
    torch.autograd.gradgradcheck(ours, x)
    edges = torch.tensor([-3.0, -2, -1, 0, 1, 3, 1e4, -1e4], dtype=torch.float64).requires_grad_()
    agree(ours, stock, edges)


def test_activations_in_place() -> None:
    """Are timm's own: their input is overwritten."""
    for name in ("Swish", "HardSwish", "HardMish", "HardSigmoid"):
        stock = STOCK[DROP_INS[name]](inplace=True)
        ours = converted(stock, DROP_INS[name])
        x = torch.randn(3, 4).requires_grad_()
        results = []
        for module in (ours, stock):
            inner = x * 1
            y = module(inner)
            assert y is inner
            results.append([y, *torch.autograd.grad(y.sum(), x)])
        same(*results)


@pytest.mark.parametrize("act", [nn.SiLU, nn.GELU, layers.GELU, layers.GELUTanh, nn.Sigmoid])
@pytest.mark.parametrize("cls", [layers.GluMlp, layers.SwiGLU])
def test_gated_products(cls: type[nn.Module], act: type[nn.Module]) -> None:
    """Of any activation; a hook of the activation is called."""
    stock, x = cls(4, 8, act_layer=act).double(), torch.randn(2, 3, 4).double().requires_grad_()
    ours = memsave.convert(copy.deepcopy(stock))
    agree(ours, stock, x)
    assert kept(ours, x) <= kept(stock, x) - (act is not nn.Sigmoid) * 8 * 2 * 3 * 4
    for module in (ours, stock):
        module.act.register_forward_hook(lambda module, args, y: 2 * y)
    agree(ours, stock, x)


@pytest.mark.parametrize("act", [nn.SiLU, layers.GELUTanh])
@pytest.mark.parametrize("what", ["forward", "__call__"])
def test_an_activation_replaced_in_its_class(
    act: type[nn.Module], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a profiler does, after the layer that multiplies by it is converted: it is called."""
    stock, x = layers.SwiGLU(4, 8, act_layer=act), torch.randn(2, 3, 4, requires_grad=True)
    ours, own = memsave.convert(copy.deepcopy(stock)), getattr(act, what)
    owner = act if what == "forward" else nn.Module
    seen = []

    def replaced(self: nn.Module, *args: Any) -> Any:
        if isinstance(self, act):
            seen.append(self)
        return 2 * own(self, *args)

    monkeypatch.setattr(owner, what, replaced)
    results = [torch.autograd.grad(model(x).sum(), x) for model in (stock, ours)]
    assert seen == [stock.act, ours.act]
    same(*results)


def test_others_are_left_alone_and_listed() -> None:
    class Shifted(layers.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = nn.Sequential(Shifted(4), layers.DropPath(0.5), layers.GELU(), layers.LayerNorm(4))
    memsave.convert(model)
    assert [type(module) for module in model][:3] == [Shifted, layers.DropPath, layers.GELU]
    reasons = [entry.reason for entry in memsave.coverage(model)]
    assert reasons == [
        "subclass of LayerNorm with a forward of its own",
        "not in the table",
        "keeps what the table says as it is",
        "rows: layer_norm",
    ]


def test_classes_that_a_version_lacks_are_skipped() -> None:
    names = "norm.NoSuchNorm no_such_module.LayerNorm norm.LayerNorm"
    assert [*extensions.timm._classes(names)] == [layers.LayerNorm]


def test_other_versions_of_a_feed_forward_layer_are_left_alone() -> None:
    class WithoutNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gate, x = self.fc1_g(x), self.fc1_x(x)
            return self.drop2(self.fc2(self.drop1(self.act(gate) * x)))

    assert extensions.timm._has_parts(layers.SwiGLU, extensions.timm._swiglu)
    assert not extensions.timm._has_parts(WithoutNorm, extensions.timm._swiglu)


# Models.


def bit() -> nn.Module:
    norm = partial(layers.GroupNormAct, num_groups=4)
    return ResNetV2(
        layers=(1, 1, 1, 1),
        channels=(16, 32, 64, 128),
        num_classes=5,
        stem_type="same",
        norm_layer=norm,
        conv_layer=layers.StdConv2dSame,
    )


def named(name: str, **options) -> Callable[[], nn.Module]:
    return partial(create_model, name, num_classes=5, **options)


#: How to build each, and the size of an image.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "bit": (bit, 32),
    "clip": (
        named("vit_base_patch16_clip_quickgelu_224", img_size=32, depth=2, embed_dim=24,
              num_heads=3), 32,
    ),
    "convnext": (named("convnext_atto", depths=(1, 1, 1, 1)), 32),
    "efficientnet": (named("tf_efficientnet_b0"), 32),
    "eva02": (named("eva02_tiny_patch14_224", img_size=28, depth=2), 28),
    "mobilenetv3": (named("mobilenetv3_small_050"), 32),
    "nf_regnet": (named("nf_regnet_b0"), 32),
    "regnet": (named("regnetx_002"), 32),
    "resnet": (named("resnet18"), 32),
    "resnetblur": (named("resnetblur50", layers=(1, 1, 1, 1)), 32),
    "resnetv2": (named("resnetv2_50", layers=(1, 1, 1, 1)), 32),
    "vit": (named("vit_tiny_patch16_224", img_size=32, depth=2), 32),
}  # fmt: skip


def scenarios(model: nn.Module) -> Iterator[tuple[str, set[str]]]:
    """Which of input and parameters want a gradient."""
    names = [name for name, _ in model.named_parameters()]
    norms = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if "Norm" in type(module).__name__
        for name, _ in module.named_parameters(recurse=False)
    }
    yield "all", {"input", *names}
    yield "input", {"input"}
    if norms:
        yield "norms", norms
    yield "the last half", {*names[len(names) // 2 :]}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_models(name: str, training: bool) -> None:
    """Where all is trainable, the next layer keeps what relu puts out, and its bits come on top;
    converting by example inputs finds that out.
    """
    make, size = MODELS[name]
    torch.manual_seed(0)
    stock = make().double().train(training)
    for parameter in stock.parameters():
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    ours = memsave.convert(copy.deepcopy(stock))
    for scenario, mask in scenarios(stock):
        for model in (stock, ours):
            want(model, x, mask)
        agree(ours, stock, x)
        before = kept(stock, x)
        if kept(ours, x) > before:
            assert scenario == "all"
            assert kept(memsave.convert(copy.deepcopy(ours), x), x) <= before


def test_layer_norm_from_the_output_in_a_transformer() -> None:
    """The linear layers keep their input, which is the output of the norm."""
    make, size = MODELS["vit"]
    x = torch.randn(2, 3, size, size)
    stock = make()
    ours = memsave.convert(copy.deepcopy(stock), x)
    assert type(ours.blocks[0].norm1) is DROP_INS["LayerNormFromOutput"]
    assert kept(ours, x) < 0.9 * kept(stock, x)
    same(helpers.step(ours, x), helpers.step(stock, x))


def test_code_of_timm_keeps_its_defaults() -> None:
    def forward(x: Tensor, *, inplace: bool = True) -> Tensor:
        return F.relu(x, inplace)

    ours = extensions.timm._rebind(forward, extensions.timm._functions("relu"))
    x = torch.randn(3, requires_grad=True) * 1
    assert ours(x) is x
