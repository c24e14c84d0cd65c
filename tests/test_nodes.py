"""What nodes of C++ promise beyond the properties, which hold for them as for the rules they stand
for: that they are there and used, and keep the same bits.
"""

from __future__ import annotations

import copy
import gc
import math
import shutil
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from typing import Any

import helpers
import pytest
import torch
from helpers import same
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import memsave.functional
import memsave.nn
from experiments.measure import peak_bytes
from memsave import function, kernels
from memsave.kernels import memory, reference
from memsave.kernels.reference import Like
from memsave.layers import conv, group_norm
from memsave.layers.invertible import LARGEST_RATIO, is_invertible
from memsave.spec import TABLE, Layer

F = memsave.functional
ROWS = [rule.row for rule in function.RULES.values() if rule.node and rule.row.name in TABLE]
HALVES = (torch.bfloat16, torch.float16)
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


needs_nodes = pytest.mark.skipif(kernels.nodes is None, reason="not compiled for this torch")


def test_they_are_compiled() -> None:
    """Where there is a compiler; otherwise these tests would test nothing."""
    assert (kernels.nodes is not None and ROWS) or not shutil.which("c++")


@needs_nodes
def test_bounds_that_rules_have_too() -> None:
    """Each is written twice, as neither language reads the other's."""
    compiled = kernels.nodes._nodes
    assert compiled.FEW_ELEMENTS == conv.FEW_ELEMENTS
    assert compiled.LARGEST_WINDOW == memory.LARGEST_WINDOW
    assert compiled.MANY_PLACES == group_norm.MANY_PLACES


def by_rule(row: Layer) -> Callable[..., Any]:
    """The layer of a row by its rule in Python."""
    return function.differentiable(function.RULES[row.name]._replace(node=None))


#: Arguments for which there is a node, by row, where it is only for some.
TAKES: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "prelu": lambda args: {"weight": args["weight"][:1].clone()},
    "instance_norm": lambda args: {"running_mean": None, "running_var": None},
    "cross_entropy": lambda args: {
        "x": args["x"].detach()[:, :, 0, 0].clone().requires_grad_(),
        "target": args["target"][:, 0, 0].clone(),
        "weight": None,
    },
    "cross_entropy_of_probabilities": lambda args: {
        "x": args["x"].detach()[:, :, 0, 0].clone().requires_grad_(),
        "target": args["target"][:, :, 0, 0].clone(),
        "weight": None,
    },
}


def not_stock(row: Layer) -> dict[str, Any]:
    """Options for which stock keeps more, if only some of them are."""
    rule, wrt = function.RULES[row.name], frozenset({"x"})
    if rule.unless is None or rule.stock_keeps is None or rule.stock_keeps(wrt) != row.saves(wrt):
        return helpers.options(row)
    combinations = product(*row.options.values())
    every = (dict(zip(row.options, values, strict=True)) for values in combinations)
    return next(options for options in every if rule.unless(**options))


@every_row
def test_they_are_used_and_keep_the_same_bits(row: Layer) -> None:
    results = []
    for layer in (helpers.ours(row), by_rule(row)):
        kept: list[Tensor] = []
        wrt = frozenset({next(iter(row.reads))})
        args = helpers.inputs(row, wrt, dtype=torch.float32)
        torch.manual_seed(0)
        with saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            args |= TAKES.get(row.name, lambda args: {})(args)
            y = layer(*args.values(), **not_stock(row))
        results.append((type(y.grad_fn).__name__, y, kept, y.grad_fn.name()))
    (used, y, kept, name), (other, expected, also_kept, also_named) = results
    assert used == "MemsaveLayerBackward" != other
    assert isinstance(y.grad_fn, torch.autograd.graph.Node)
    assert name == also_named
    same(y, expected, rtol=0, atol=0)
    same(kept, also_kept, rtol=0, atol=0)


SETTINGS = [
    (memsave.nn.ReLU(), (3, 77, 1003)),
    (memsave.nn.ReLU(inplace=True), (8, 33, 20, 20)),
    (memsave.nn.LeakyReLU(0.3), (3, 77, 1003)),
    (memsave.nn.Hardsigmoid(), (8, 33, 20, 20)),
]


@pytest.mark.parametrize(("layer", "shape"), SETTINGS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_loops_of_several_threads(
    layer: nn.Module, shape: tuple[int, ...], layout: torch.memory_format
) -> None:
    stock = copy.copy(layer)
    (stock.__class__,) = type(layer).__bases__

    def run(module: nn.Module) -> list[Tensor]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        x = x.contiguous(memory_format=layout if x.ndim == 4 else torch.contiguous_format)
        y = module(x.requires_grad_().mul(1))
        return [y.detach(), *torch.autograd.grad(y, x, helpers.cotangent(y))]

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        same(run(layer), run(stock), layout=True, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


OF_IMAGES = [
    *(nn.LeakyReLU(0.1), nn.ReLU6(), nn.Hardsigmoid(), nn.Threshold(0.1, 2.0), nn.Hardshrink()),
    *(nn.Softshrink(), nn.Tanhshrink(), nn.Dropout(0.3), nn.Dropout2d(0.3)),
    *(nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AvgPool2d(3, 1, 1), nn.ReflectionPad2d(1)),
    *(nn.ReplicationPad2d(2), nn.BatchNorm2d(6).eval(), nn.Conv2d(6, 8, 3)),
    *(nn.Conv2d(6, 6, 3, padding=1, groups=3), nn.Conv2d(6, 6, 3, 2, 1, groups=6)),
    *(nn.Conv2d(6, 4, 3, 2), nn.ConvTranspose2d(6, 4, 3, 2)),
    *(nn.AdaptiveAvgPool2d(3), nn.AdaptiveAvgPool2d((4, 5))),
]


@needs_nodes
@pytest.mark.parametrize("layer", OF_IMAGES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("size", [9, 64], ids=["few", "many"])
def test_images(layer: nn.Module, dtype: torch.dtype, layout: Any, size: int) -> None:
    """In either format and in 16 bits, nodes, too, whatever the incoming gradient's is."""
    stock = copy.deepcopy(layer).to(dtype).requires_grad_(False)
    ours = memsave.convert(nn.Sequential(copy.deepcopy(stock)))
    random = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, size, size, generator=random).to(dtype).contiguous(memory_format=layout)
    for other in (layout, torch.contiguous_format):
        results = []
        for module in (ours, stock):
            given = x.detach().requires_grad_()
            torch.manual_seed(1)
            y = module(given)
            g = helpers.cotangent(y.float()).to(dtype).contiguous(memory_format=other)
            results.append((y, *torch.autograd.grad(y, given, g)))
        (y, dx), (expected, gradient) = results
        assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"
        same(y, expected, layout=True, rtol=0, atol=0)
        assert dx.dtype is dtype
        assert other is not layout or dx.stride() == gradient.stride()
        largest = gradient.abs().max().item()
        bound = largest * (2 * torch.finfo(dtype).eps if dtype in HALVES else 1e-5)
        torch.testing.assert_close(dx, gradient, rtol=0, atol=bound)


OF_VOLUMES = [
    *(nn.Conv3d(6, 4, 3), nn.Conv3d(6, 4, 3, padding=1, padding_mode="reflect")),
    *(nn.ConvTranspose3d(6, 4, 3), nn.MaxPool3d(2), nn.AvgPool3d(2), nn.AdaptiveAvgPool3d(3)),
    *(nn.ReplicationPad3d(1), nn.BatchNorm3d(6).eval(), nn.Dropout3d(0.3), nn.AdaptiveMaxPool3d(2)),
]
CIRCULAR = nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular")


@needs_nodes
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("layer", [*OF_IMAGES, CIRCULAR, *OF_VOLUMES], ids=str)
def test_batched_gradients_of_channels_that_are_last(layer: nn.Module, frozen: bool) -> None:
    """Was an error of frozen convolutions: vmap does not know that format."""
    dims = 3 if layer in OF_VOLUMES else 2
    layout: Any = torch.channels_last if dims == 2 else torch.channels_last_3d
    random = torch.Generator().manual_seed(0)
    image = torch.randn(2, 6, *[6] * dims, generator=random).to(memory_format=layout)
    results = []
    for module in (layer, memsave.convert(nn.Sequential(copy.deepcopy(layer)))):
        module.requires_grad_(not frozen)
        x = image.clone().requires_grad_()
        torch.manual_seed(1)
        y = module(x * 1)
        leaves = [x, *(p for p in module.parameters() if not frozen)]
        gs = torch.randn(3, *y.shape, generator=random.manual_seed(2))
        results.append(torch.autograd.grad(y, leaves, gs, is_grads_batched=True))
    same(*results, rtol=1e-4, atol=1e-5)


#: Options of a convolution that has to pad by itself, of one axis of the kernel.
PADDED: dict[str, dict[str, Any]] = {
    **{
        mode: {"kernel_size": 3, "padding": 2, "padding_mode": mode}
        for mode in ("reflect", "replicate", "circular")
    },
    "dilated": {"kernel_size": 3, "stride": 2, "dilation": 2, "padding": 1}
    | {"padding_mode": "circular", "bias": False},
    "grouped": {"kernel_size": 2, "groups": 2, "padding": "same", "padding_mode": "reflect"},
    "evenly same": {"kernel_size": 4, "padding": "same", "padding_mode": "zeros"},
}
WANTED = [
    {name for name, is_wanted in zip(("x", "weight", "bias"), each, strict=True) if is_wanted}
    for each in product((True, False), repeat=3)
    if any(each)
]


@needs_nodes
@pytest.mark.filterwarnings("ignore:.*padding='same'")
@pytest.mark.parametrize("layout", ["first", "last"])
@pytest.mark.parametrize(
    "places",
    [((30,), (6, 5), (6, 5, 4)), ((4200,), (60, 70), (12, 14, 25))],
    ids=["few", "many"],
)
@pytest.mark.parametrize("options", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_that_pad(
    dims: int, options: dict[str, Any], places: tuple[Any, ...], layout: str
) -> None:
    """In either format, by either order of the padded copies; and the gradients of gradients."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, *places[dims - 1], generator=random, dtype=torch.float64)
    if layout == "last" and dims > 1:
        x = x.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    stock = getattr(nn, f"Conv{dims}d")(4, 6, **options).double()
    layers = stock, memsave.convert(copy.deepcopy(stock))
    for wanted in WANTED:
        results = []
        for layer in layers:
            given = x.detach().requires_grad_("x" in wanted)
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(name in wanted)
            leaves = [leaf for leaf in (given, *layer.parameters()) if leaf.requires_grad]
            if not leaves:
                continue
            y = layer(given * 1)
            if layer is not stock:
                assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"
            g = helpers.cotangent(y).requires_grad_()
            grads = torch.autograd.grad(y, leaves, g, create_graph=True)
            loss = sum((grad.sin().sum() for grad in grads), torch.zeros(()))
            again = torch.autograd.grad(loss, [g, *leaves], materialize_grads=True)
            y = layer(given * 1)
            at_last = torch.autograd.grad(y, leaves, g.detach())
            results.append([y, *grads, *again, *at_last])
            if "x" in wanted and layer is not stock:
                assert at_last[0].stride() == x.stride()
        if results:
            same(results[1][0], results[0][0], layout=True, rtol=1e-9, atol=1e-9)
            same(results[1], results[0], rtol=1e-9, atol=1e-9)


#: Images of which one axis has one place, whose stride may be anything.
ONE_PLACE: dict[str, Callable[[], Tensor]] = {
    "a batch of one": lambda: torch.randn(12, 20, 6).permute(2, 0, 1)[None],
    "one channel": lambda: torch.randn(3, 1, 9, 9).to(memory_format=torch.channels_last),
    "one place": lambda: torch.randn(2 * 6).as_strided((2, 6, 1, 1), (6, 1, 6, 6)),
    "rows": lambda: torch.randn(2, 7, 6).mT.unsqueeze(-1),
    "odd": lambda: torch.randn(36 * 4).as_strided((1, 4, 6, 6), (7, 36, 6, 1)),
}
OF_ANY_IMAGE = [
    *(nn.ReLU(), nn.LeakyReLU(0.1), nn.ReLU6(), nn.Hardtanh(), nn.Hardsigmoid(), nn.Hardshrink()),
    *(nn.Softshrink(), nn.Threshold(0.1, 2.0), nn.Dropout(0.4), nn.AlphaDropout(0.4)),
    *(nn.Tanhshrink(), nn.LogSigmoid(), nn.Softsign(), nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1)),
    *(nn.AdaptiveMaxPool2d(1), nn.AdaptiveMaxPool2d((3, 5)), nn.AvgPool2d(2)),
    *(nn.AdaptiveAvgPool2d((3, 5)), nn.ReflectionPad2d(1)),
]


@pytest.mark.parametrize("image", ONE_PLACE.values(), ids=ONE_PLACE)
@pytest.mark.parametrize("layer", OF_ANY_IMAGE, ids=str)
@pytest.mark.parametrize("has_nodes", [True, False])
def test_strides_of_axes_of_one_place(
    layer: nn.Module, image: Any, has_nodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which the next layer chooses a kernel, or whether it can be viewed."""
    if not has_nodes:
        monkeypatch.setattr(function, "nodes", None)
    x = image().requires_grad_()
    results = []
    for module in (layer, memsave.convert(nn.Sequential(copy.deepcopy(layer)))):
        torch.manual_seed(0)
        results.append(helpers.attempt(module, x))
    expected, y = results
    same(y, expected, layout=True, rtol=0, atol=0)
    if isinstance(expected, Tensor):
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        same(dx, torch.autograd.grad(expected, x, torch.ones_like(y))[0])


@pytest.mark.parametrize("has_nodes", [True, False])
def test_a_sparse_gradient_of_dropout(has_nodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_nodes:
        monkeypatch.setattr(function, "nodes", None)
    gradients = []
    for layer in (nn.Dropout(0.4), memsave.nn.Dropout(0.4)):
        weight = torch.ones(10, 4, requires_grad=True)
        torch.manual_seed(0)
        rows = nn.functional.embedding(torch.tensor([1, 2, 1]), layer(weight * 2), sparse=True)
        (gradient,) = torch.autograd.grad(rows.sum(), weight)
        assert gradient.is_sparse
        gradients.append(gradient.to_dense())
    same(*gradients, rtol=0, atol=0)


@needs_nodes
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_norm_in_16_bits(weight_dtype: torch.dtype) -> None:
    """Its parameters may have 32."""
    layer = nn.BatchNorm2d(6).eval().to(weight_dtype).requires_grad_(False)
    torch.nn.init.uniform_(layer.running_var, 0.5, 2)
    torch.nn.init.uniform_(layer.weight, -2, 2)
    x = torch.randn(3, 6, 9, 9, dtype=torch.bfloat16, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    y = memsave.convert(layer)(x)
    assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"
    same(torch.autograd.grad(y.sum(), x)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("size", [64, 65, 1000, 32768, 65536, 98304, 98305, 98304 + 128])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_zeros_of_softshrink_have_the_signs_of_torch(
    dtype: torch.dtype, size: int, threads: int
) -> None:
    """Those of ``x`` where torch fills no vectors, + elsewhere."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y, expected = F.softshrink(x), nn.functional.softshrink(x)
    finally:
        torch.set_num_threads(before)
    assert y.grad_fn.name() == "MemsaveSoftshrinkBackward"  # type: ignore[union-attr]
    assert y.view(torch.uint8).equal(expected.view(torch.uint8))


@pytest.mark.usefixtures("by_nodes_and_by_rules")
@pytest.mark.parametrize("lambd", [0.0, 1e-6, 0.3, 2.7])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_softshrink_of_every_number_of_16_bits(dtype: torch.dtype, lambd: float) -> None:
    """Torch rounds ``lambd`` for the gradient, but not for the output."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).requires_grad_()
    y, expected = F.softshrink(x, lambd), nn.functional.softshrink(x, lambd)
    finite = ~x.isnan()  # (Of nan, torch's gradient depends on where it lies.)
    assert y.isnan().equal(expected.isnan())
    assert y[finite].view(torch.int16).equal(expected[finite].view(torch.int16))
    dx, wanted = (torch.autograd.grad(out, x, x.detach())[0][finite] for out in (y, expected))
    same(dx, wanted, rtol=0, atol=0)


INVERTIBLE = [
    (True, torch.ones(6), None),
    (True, torch.ones(6), torch.full((6,), -16.0)),
    (False, torch.full((6,), torch.nan), torch.ones(6)),
    (False, torch.full((6,), torch.inf), None),
    (False, torch.full((6,), 1e-310, dtype=torch.float64), None),
    (False, torch.ones(6), torch.full((6,), torch.nan)),
    (True, None, None),
    (False, None, torch.ones(6)),
    (False, torch.tensor([1.0, 1, 1, 1, 1, 0]), None),
    (False, torch.tensor([1.0, -1, 1, 1, 0, 1]), torch.zeros(6)),
    (False, torch.ones(6), torch.tensor([0.0, 0, -16.1, 0, 0, 0])),
    (False, torch.tensor([3, 3, -2.0, 3, 3, 3]), torch.full((6,), 40.0)),
]


@needs_nodes
@pytest.mark.parametrize(("expected", "weight", "bias"), INVERTIBLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_what_is_invertible_at_a_look(
    expected: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the rule says."""
    weight, bias = (None if t is None else t.to(dtype) for t in (weight, bias))
    x = torch.randn(2, 6, dtype=dtype)

    def look(x: Tensor) -> bool | None:
        return kernels.nodes.is_invertible(x, weight, bias, LARGEST_RATIO)

    def is_over_last(x: Tensor, shape: Any = (6,)) -> bool:
        return kernels.nodes.is_over_last(x, shape, weight, bias)

    assert is_invertible(x, weight, bias) == look(x) == expected
    monkeypatch.setattr(kernels, "nodes", None)
    assert is_invertible(x, weight, bias) == expected
    monkeypatch.undo()
    if weight is not None:
        others = (x.half(), x.to("meta"), nn.Parameter(x))
        assert [look(other) for other in others] == [None, None, expected]
        others = (x.half(), x.to("meta"), nn.Parameter(x), x[:, :5], x.reshape(2, 2, 3))
        assert [is_over_last(other) for other in others] == [False, False, True, False, False]
    for shape in ((5,), (2, 6), (), [6]):
        assert not is_over_last(x, shape)
    assert is_over_last(x)
    with torch.no_grad():
        assert not is_invertible(x, weight, bias)
    with torch.autocast("cpu"):
        assert look(x) is None
        assert is_over_last(x)


@pytest.mark.parametrize("value", [0.0, 1e-40, torch.nan])
def test_weights_that_a_user_overwrites_unseen(value: float) -> None:
    """By ``.data``, of which torch counts no versions."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    pairs = (
        (memsave.nn.GroupNormFromOutput(2, 4), nn.GroupNorm(2, 4)),
        (memsave.nn.LayerNormFromOutput(4), nn.LayerNorm(4)),
        (memsave.nn.RMSNormFromOutput(4), nn.RMSNorm(4)),
    )
    for pair in pairs:
        results = []
        for layer in pair:
            layer(x.requires_grad_())
            assert layer.weight is not None
            layer.weight.data[0] = value
            y = layer(x)
            results.append(torch.autograd.grad(y, [x, layer.weight], torch.ones_like(y)))
        same(*results)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("variant", ["", "FromOutput"])
@pytest.mark.parametrize("affine", [True, False])
def test_norms_of_other_shapes(kind: str, variant: str, affine: bool) -> None:
    """Of several axes as stock; of a shape that the input does not end with, stock's error."""
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for shape, fits in (((2, 3), True), ((4, 2, 3), True), ((2,), False), ((4, 3), False)):
        results = []
        for cls in (getattr(memsave.nn, kind + variant), getattr(nn, kind)):
            layer = cls(shape, elementwise_affine=affine)
            if fits:
                y = layer(x)
                results.append((y, *torch.autograd.grad(y, [x, *layer.parameters()], torch.cos(x))))
            else:
                with pytest.raises(RuntimeError, match="normalized_shape"):
                    layer(x)
        if fits:
            same(*results)


SMOOTHED = {"label_smoothing": 0.25}
WEIGHTED = {"weight": torch.tensor([0.5, 3.0, 0.0, 2.0])}
#: Options of cross-entropy of four classes; its target is indices, or probabilities of them.
OF_CLASSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothed": SMOOTHED,
    "weighted": WEIGHTED,
    "weighted and smoothed": WEIGHTED | SMOOTHED,
}
of_classes = pytest.mark.parametrize("options", OF_CLASSES.values(), ids=OF_CLASSES)
by_probabilities = pytest.mark.parametrize("by_probabilities", [False, True])


def _in_dtype(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {key: v.to(dtype) if isinstance(v, Tensor) else v for key, v in options.items()}


def _probabilities(target: Tensor, classes: int) -> Tensor:
    """The most of which is that of the target."""
    one = nn.functional.one_hot(target, classes).movedim(-1, 1)
    noise = torch.randn(one.shape, generator=torch.Generator().manual_seed(1))
    return (2 * one + noise).softmax(1)


def _has_node_of_loss(y: Tensor, is_target_dense: bool, options: dict[str, Any]) -> bool:
    """Whether it has the one that it is to have: in 64 bits not every loss has one of C++."""
    needs_rule = y.dtype is torch.float64 and (
        is_target_dense or len({*options} & {"weight", "label_smoothing"}) == 2
    )
    return (type(y.grad_fn).__name__ == "MemsaveLayerBackward") is not needs_rule


@needs_nodes
@of_classes
@by_probabilities
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_of_logits(
    reduction: str, dtype: torch.dtype, by_probabilities: bool, options: dict[str, Any]
) -> None:
    """(The properties seldom draw logits without spatial axes, in storage order.)"""
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=dtype)
    target = torch.tensor([3, 1, 0, 2, 1])
    options = {"reduction": reduction, **_in_dtype(options, dtype)}
    if by_probabilities:
        target = _probabilities(target, 4).to(dtype)
    else:
        options["ignore_index"] = 1
    x.requires_grad_()

    def run(loss: Callable[..., Tensor]) -> list[Tensor]:
        y = loss(x, target, **options)
        g = helpers.cotangent(y).requires_grad_()
        dx = torch.autograd.grad(y, x, g)
        first = torch.autograd.grad(loss(x, target, **options), x, g, create_graph=True)
        return [y, *dx, *first, *torch.autograd.grad(first[0].pow(3).sum(), [x, g])]

    y = memsave.functional.cross_entropy(x, target, **options)
    assert _has_node_of_loss(y, by_probabilities, options)
    expected = run(nn.functional.cross_entropy)
    same(run(memsave.functional.cross_entropy), expected)
    same(y, expected[0], rtol=0, atol=0)


@needs_nodes
@of_classes
@by_probabilities
def test_losses_of_rows_that_are_summed(by_probabilities: bool, options: dict[str, Any]) -> None:
    """Their gradient is one number, expanded: the loop takes it, too."""
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    index = torch.arange(40) % 4
    target = _probabilities(index, 4) if by_probabilities else index
    results = []
    for loss in (memsave.functional.cross_entropy, nn.functional.cross_entropy):
        with torch.profiler.profile(acc_events=True) as profile:
            results.append(
                torch.autograd.grad(loss(x, target, reduction="none", **options).mean(), x)
            )
        assert "aten::_softmax" not in {event.name for event in profile.events()}
    same(*results)


#: Curves, their slopes by input and output, and to how many roundings.
CURVES: dict[str, tuple[nn.Module, Callable[[Tensor, Tensor], Tensor], int]] = {
    "softplus": (memsave.nn.SoftplusFromOutput(threshold=40), lambda x, y: -(-y).expm1(), 2),
    "logsigmoid, y": (memsave.nn.LogSigmoidFromOutput(), lambda x, y: -y.expm1(), 2),
    "logsigmoid": (memsave.nn.LogSigmoid(), lambda x, y: torch.sigmoid(-x), 4),
    "tanhshrink": (memsave.nn.Tanhshrink(), lambda x, y: x.tanh().square(), 4),
}


@needs_nodes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("layer", "slope", "roundings"), CURVES.values(), ids=CURVES)
def test_slopes_of_curves(
    layer: nn.Module, slope: Any, roundings: int, is_transposed: bool, dtype: torch.dtype
) -> None:
    """To rounding, relative to the slope: from where it is its exponential to where it is 1."""
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([torch.linspace(-100, 85, 65529), special, torch.zeros(2)]).to(dtype)
    x = x.view(256, 256).requires_grad_()
    y, g = layer(x), torch.randn(256, 256, generator=torch.Generator().manual_seed(0), dtype=dtype)
    assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"
    (dx,) = torch.autograd.grad(y, x, g.T if is_transposed else g)
    exact = (g.T if is_transposed else g).double() * slope(x.detach().double(), y.double())
    torch.testing.assert_close(
        dx.double(), exact, rtol=roundings * torch.finfo(dtype).eps, atol=1e-37, equal_nan=True
    )


@needs_nodes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["logsigmoid", "tanhshrink"])
def test_slopes_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """Of every number, rounded once: hardly further off than by half of the last bit."""
    layer, slope, _ = CURVES[name]
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).requires_grad_()
    y, g = layer(x), torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"
    (dx,) = torch.autograd.grad(y, x, g)
    exact = g.double() * slope(x.detach().double(), y.double())
    half = torch.finfo(dtype).eps / 2
    least = torch.finfo(dtype).smallest_normal
    same(dx.double(), exact, rtol=1.1 * half, atol=1.1 * half * least)


@needs_nodes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_log_sigmoid_in_pieces(memory_format: torch.memory_format, dtype: torch.dtype) -> None:
    """Of what is large: torch's to the bit, and laid out as torch's."""
    images = 2**24 // (3 * 1001 * 999 * dtype.itemsize) + 2
    generator = torch.Generator().manual_seed(0)
    x = (10 * torch.randn(images, 3, 1001, 999, generator=generator)).to(dtype)
    x = x.to(memory_format=memory_format)[1:].requires_grad_()  # from within its memory
    y, expected = F.logsigmoid(x), nn.functional.logsigmoid(x)
    assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"
    assert y.stride() == expected.stride()
    assert torch.equal(y, expected)


@needs_nodes
@pytest.mark.parametrize("g", [1e10, torch.inf])
def test_slopes_below_the_normal_numbers(g: float) -> None:
    """Of which large gradients make normal ones."""
    x = torch.linspace(80, 103, 300).requires_grad_()
    y = memsave.functional.logsigmoid(x)
    assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, g))
    same(dx.double(), g * torch.sigmoid(-x.detach().double()), rtol=1e-4, atol=0)


@needs_nodes
@pytest.mark.parametrize("classes", [1, 7, 300])
def test_softmax_of_cross_entropy(classes: int) -> None:
    """To rounding, relative to each probability, the smallest too; nothing of classes at -inf."""
    generator = torch.Generator().manual_seed(0)
    eighths = torch.randint(-400, 400, (300, classes), generator=generator)  # whose sums are exact
    x, target = eighths / 8.0, torch.zeros(300, dtype=torch.int64)
    x[:, 2::5] = -torch.inf
    x[0], x[1], x[2, -1], x[3, -1] = -torch.inf, torch.inf, torch.nan, torch.inf
    x.requires_grad_()
    loss = memsave.functional.cross_entropy(x, target, reduction="sum")
    assert type(loss.grad_fn).__name__ == "MemsaveLayerBackward"
    (dx,) = torch.autograd.grad(loss, x)
    p = x.detach().double().softmax(1)
    dx[:, 0] += 1
    eps = torch.finfo(torch.float32).eps
    same(dx[:, 1:].double(), p[:, 1:], rtol=6 * eps, atol=1e-37)
    same(dx[:, 0].double(), p[:, 0], rtol=0, atol=2 * eps)
    assert (dx[4:, 2::5] == 0).all()


@needs_nodes
@of_classes
@by_probabilities
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(3, 4, 43), (2, 4, 17, 19), (1, 4, 2, 4, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_logits_of_images(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    reduction: str,
    by_probabilities: bool,
    options: dict[str, Any],
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    places = x.view(*shape[:2], -1)
    places[0, 0, 1], places[0, :, 3], places[0, 1, 4] = -torch.inf, torch.nan, torch.inf
    target = torch.randint(4, (shape[0], *shape[2:]), generator=generator)
    q = _probabilities(target, 4).to(dtype)
    x.requires_grad_()

    def run(x: Tensor, loss: Callable[..., Tensor]) -> list[Tensor]:
        own = {"reduction": reduction, **_in_dtype(options, x.dtype)}
        if by_probabilities:
            y = loss(x, q.to(x.dtype), **own)
        else:
            y = loss(x, target, ignore_index=1, **own)
        if loss is memsave.functional.cross_entropy:
            assert _has_node_of_loss(y, by_probabilities, own)
        g = torch.linspace(1, 2, y.numel()).to(dtype).view(y.shape)
        return [y, *torch.autograd.grad(y, x, g.to(x.dtype))]

    y, dx = run(x, memsave.functional.cross_entropy)
    same(y, run(x, nn.functional.cross_entropy)[0], rtol=0, atol=0)
    (_, exact) = run(x.detach().double().requires_grad_(), nn.functional.cross_entropy)
    # Rounded once, and where two terms nearly cancel, to rounding of the larger.
    roundings = 1 if dtype in HALVES else 8
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    largest = exact.nan_to_num(0).abs().max().item()
    rtol = roundings * torch.finfo(dtype).eps
    same(dx.double(), exact, rtol=rtol, atol=(2**8 if roundings == 1 else 4) * eps * largest)


@needs_nodes
@of_classes
@by_probabilities
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(300, 50), (9, 5000), (3, 100, 129), (9, 30, 256)], ids=str)
def test_cross_entropy_in_16_bits(
    shape: tuple[int, ...], dtype: torch.dtype, by_probabilities: bool, options: dict[str, Any]
) -> None:
    """Rounded once, also where a probability is near 1, which has few digits itself."""
    classes, options = shape[1], _in_dtype(options, dtype)
    if "weight" in options:
        options["weight"] = options["weight"].repeat(classes)[:classes]
    x = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    target = torch.arange(x[:, 0].numel()).view(x[:, 0].shape) % classes
    near = nn.functional.one_hot(target, classes).movedim(-1, 1).bool()
    near[shape[0] // 3 :] = False
    x[near] = 12
    if by_probabilities:
        target = _probabilities(target, classes).to(dtype)
    else:
        target.view(-1)[-1] = -100
    loss = memsave.functional.cross_entropy(x.requires_grad_(), target, **options)
    assert _has_node_of_loss(loss, by_probabilities, options)
    (dx,) = torch.autograd.grad(loss, x)
    wide, options = x.detach().double().requires_grad_(), _in_dtype(options, torch.float64)
    target = target.double() if by_probabilities else target
    (expected,) = torch.autograd.grad(nn.functional.cross_entropy(wide, target, **options), wide)
    # (Where what is wanted and a probability nearly cancel, their difference has fewer digits.)
    cancels = by_probabilities or "label_smoothing" in options
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # of float16, 6e-8
    atol = 1e-8 if cancels else 1e-12
    same(dx.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=max(atol, least))


@needs_nodes
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1_050_000), (1, 8200, 40)], ids=str)
def test_more_classes_than_are_put_aside(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    target = torch.arange(x[:, 0].numel()).view(x[:, 0].shape)
    loss = memsave.functional.cross_entropy(x.requires_grad_(), target, reduction="sum")
    assert type(loss.grad_fn).__name__ == "MemsaveLayerBackward"
    (dx,) = torch.autograd.grad(loss, x)
    expected = x.detach().double().softmax(1)
    expected.scatter_add_(1, target.unsqueeze(1), -torch.ones(target.shape).double().unsqueeze(1))
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    same(dx.double(), expected, rtol=torch.finfo(dtype).eps / 2, atol=max(1e-12, least))


@needs_nodes
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shape", [(1000, 4000), (16, 250, 1000)], ids=str)
def test_cross_entropy_by_several_threads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Each has memory of its own. (They need some time to be seen in that of another.)"""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    target, gradients = torch.zeros_like(x[:, 0], dtype=torch.int64), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 3, 3, 3):
            torch.set_num_threads(threads)
            loss = memsave.functional.cross_entropy(x, target)
            gradients += torch.autograd.grad(loss, x)
    finally:
        torch.set_num_threads(before)
    for dx in gradients[1:]:
        same(dx, gradients[0], rtol=0, atol=0)


@needs_nodes
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_softmax_of_special_numbers_in_16_bits(dtype: torch.dtype) -> None:
    """Also where all logits are negative, or far apart."""
    x = torch.linspace(-1, -99, 40).to(dtype).repeat(6, 1)
    x[:, 3] = -torch.inf
    x[1], x[2], x[3, 7], x[4, 7], x[5, 7] = -torch.inf, torch.inf, torch.nan, torch.inf, -torch.nan
    target = torch.zeros(6, dtype=torch.int64)
    loss = memsave.functional.cross_entropy(x.requires_grad_(), target, reduction="sum")
    assert type(loss.grad_fn).__name__ == "MemsaveLayerBackward"
    (dx,) = torch.autograd.grad(loss, x)
    p = x.detach().double().softmax(1)
    p[:, 0] -= 1
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    same(dx.double(), p, rtol=torch.finfo(dtype).eps / 2, atol=max(1e-37, least))
    assert dx[0, 3] == 0


@needs_nodes
def test_softshrink_overwrites_nothing_that_torch_computes() -> None:
    x = torch.randn(7)
    assert kernels.nodes.bits("softshrink", x, False, "softshrink", -0.5, 0.5) is not None
    assert kernels.nodes.bits("softshrink", x, True, "softshrink", -0.5, 0.5) is None


#: Functions whose sizes may be one number, a tuple or a list.
SIZED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "conv2d": lambda x, size: F.conv2d(x, torch.ones(6, 6, 3, 3), padding=size),
    "conv_transpose2d": lambda x, size: F.conv_transpose2d(x, torch.ones(6, 6, 3, 3), stride=size),
    "avg_pool2d": lambda x, size: F.avg_pool2d(x, size),
    "adaptive_avg_pool2d": lambda x, size: F.adaptive_avg_pool2d(x, size),
    "pad": lambda x, size: F.pad(x, 2 * size, mode="reflect"),
}


@needs_nodes
@pytest.mark.parametrize(
    "sizes", [(2, 2), [2, 2], torch.Size([2, 2])], ids=["tuple", "list", "Size"]
)
@pytest.mark.parametrize("layer", SIZED.values(), ids=SIZED)
def test_sizes_in_sequences(layer: Callable[[Tensor, Any], Tensor], sizes: Any) -> None:
    x = torch.randn(2, 6, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y, expected = layer(x, sizes), layer(x, (2, 2))
    assert type(y.grad_fn).__name__ == type(expected.grad_fn).__name__ == "MemsaveLayerBackward"
    same(y, expected, rtol=0, atol=0)


ADAPTIVE = [
    ((2, 3, 4096), 3),
    ((3, 7), (7,)),
    ((2, 3, 19, 300), (4, 7)),
    ((3, 19, 40), (None, 1)),
    ((2, 8, 5, 9, 33), (2, None, 4)),
]


@needs_nodes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("special", [None, torch.nan, -torch.inf, 0.0])
@pytest.mark.parametrize(("shape", "sizes"), ADAPTIVE, ids=str)
def test_adaptive_max_pooling(
    shape: tuple[int, ...], sizes: Any, special: float | None, dtype: torch.dtype
) -> None:
    """Of windows that differ or are large, with ties (of zeros, too), nan, and nothing but -inf."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=dtype).mul(4).round()
    if special == 0:
        x = torch.where(x.abs() < 5, -1.0, torch.where(x < 0, -0.0, special)).to(dtype)
    elif special is not None:
        x[torch.rand(shape, generator=generator) < (0.02 if special != special else 0.5)] = special
        x[0].fill_(special)
    name = f"adaptive_max_pool{len(sizes) if isinstance(sizes, tuple) else 1}d"

    def run(package: Any) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = getattr(package, name)(leaf, sizes)
        assert package is not F or type(y.grad_fn).__name__ == "MemsaveLayerBackward"
        return [y.detach(), y.signbit(), *torch.autograd.grad(y, leaf, helpers.cotangent(y))]

    same(run(F), run(nn.functional), rtol=0, atol=0, layout=True)


@pytest.mark.parametrize("sizes", [4.0, (2, 4.0), (2, True), (1, 2, 3), (0, 4), (-1, 2), "2"])
def test_sizes_that_stock_may_refuse(sizes: Any) -> None:
    x = torch.randn(2, 3, 40, 52, requires_grad=True)
    for taken in (4, (2, 4), (2, 1)):  # of which some are equal
        F.adaptive_max_pool2d(x, taken)
    expected = helpers.attempt(nn.functional.adaptive_max_pool2d, x, sizes)
    same(helpers.attempt(F.adaptive_max_pool2d, x, sizes), expected)


def of_other_memory(array: Any) -> Any:
    """A function whose gradient is in memory that others may read, with no reference to it."""

    class Given(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
            return torch.from_numpy(array)

    return Given.apply


def given(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    y.backward(g)
    return g


def hooked(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    held: list[Tensor] = []
    y.register_hook(held.append)
    (y * 1).backward(g)
    return held[0]


def retained(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    y.retain_grad()
    (y * 1).backward(g)
    assert y.grad is not None
    return y.grad


def asked_for(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    held, x.grad = torch.autograd.grad(y * 1, [y, x], g)
    return held


def of_another_too(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    other = torch.zeros_like(g, requires_grad=True)
    ((y + other) * 1).backward(g)
    assert other.grad is not None
    return other.grad


def of_a_part(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    both = torch.stack([g, g])
    torch.stack([y, torch.zeros_like(y)]).backward(both)
    return both[0]


def of_numpy(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    of_other_memory(g.numpy())(y).sum().backward()
    return g


def alike(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    (y.sum() * 0.5).backward()
    return g


def normed(cls: type[nn.Module]) -> nn.Module:
    """(Whose weights are no powers of two.)"""
    layer = cls(16)
    nn.init.uniform_(layer.weight, 0.5, 1.5)  # type: ignore[arg-type]
    return layer


TAKE_MEMORY = [
    memsave.nn.ReLU(),
    memsave.nn.LeakyReLU(0.3),
    memsave.nn.Dropout(0.3),
    memsave.nn.Dropout2d(0.3),
    memsave.nn.SoftplusFromOutput(),
    normed(memsave.nn.BatchNorm2d).eval(),
    normed(memsave.nn.LayerNormFromOutput),
    normed(memsave.nn.RMSNorm),
]


@needs_nodes
@pytest.mark.parametrize("layer", TAKE_MEMORY, ids=str)
def test_a_gradient_takes_the_memory_of_one_that_nobody_has(layer: nn.Module) -> None:
    layer.requires_grad_(isinstance(layer, memsave.nn.RMSNorm))
    x = torch.randn(64, 16, 16, 16, requires_grad=True)
    y, g = layer(x) * 2, torch.randn(64, 16, 16, 16)
    size = g.nbytes
    assert size <= peak_bytes(lambda: torch.autograd.grad(y, x, g)) < 1.1 * size


@needs_nodes
@pytest.mark.parametrize("layer", TAKE_MEMORY, ids=str)
@pytest.mark.parametrize(
    "backward",
    [given, hooked, retained, asked_for, of_another_too, of_a_part, of_numpy, alike],
)
def test_a_gradient_that_somebody_has_stays_as_it_is(
    layer: nn.Module, backward: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    layer.requires_grad_(isinstance(layer, memsave.nn.RMSNorm))
    g = torch.randn(2, 16, 4, 16, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 16, 4, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    torch.manual_seed(2)
    same(backward(x, layer(x), g.clone()), g, rtol=0, atol=0)
    dx = x.grad

    stock = copy.copy(layer)
    (stock.__class__,) = type(layer).__bases__
    x.grad = None
    torch.manual_seed(2)
    backward(x, stock(x), g.clone())
    same(dx, x.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_peak_of_backward_of_a_padding_mode(mode: str) -> None:
    """The padded copies of the input and of its gradient are there one after the other."""

    def peak(cls: type[nn.Module]) -> int:
        layer = cls(8, 8, 3, padding=1, padding_mode=mode)
        x = torch.randn(2, 8, 64, 64, requires_grad=True)
        y = layer(x)
        g = torch.randn_like(y)
        return peak_bytes(lambda: torch.autograd.grad(y, [x, *layer.parameters()], g))

    assert peak(memsave.nn.Conv2d) < 1.01 * peak(nn.Conv2d)


def test_threads_at_once() -> None:
    xs = [torch.randn(1 << 16, generator=torch.Generator().manual_seed(k)) for k in range(8)]
    with ThreadPoolExecutor(4) as threads:
        grads = list(threads.map(gradient, xs * 4))
    for x, grad in zip(xs * 4, grads, strict=True):
        assert grad.equal((x > 0).float())


@needs_nodes
def test_another_thread_may_replace_the_parameters_of_a_module() -> None:
    """While nodes compute, and other threads run. (What a thread reads is what it has read at
    first: in a process of its own, as one that has been freed ends it.)
    """
    code = """
import sys, threading, time, torch
from memsave import nn

def race(layer, x):
    def replace():
        while not done.is_set():
            for name, tensor in {**layer._parameters, **layer._buffers}.items():
                new = tensor.detach().clone()
                if isinstance(tensor, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, tensor.requires_grad)
                setattr(layer, name, new)

    done = threading.Event()
    other = threading.Thread(target=replace)
    other.start()
    end = time.monotonic() + 0.5
    try:
        while time.monotonic() < end:
            layer(x)
    finally:
        done.set()
        other.join()

torch.set_num_threads(1)
sys.setswitchinterval(1e-6)
x = torch.randn(1, 3, 5, 5)
race(nn.Conv2d(3, 3, 3), x)
race(nn.Conv2d(3, 3, 3).requires_grad_(False), x.clone().requires_grad_())
race(nn.BatchNorm2d(3), x)
race(nn.BatchNorm2d(3).eval(), x)
race(nn.LayerNorm(5), x)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def gradient(x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(memsave.functional.relu(x).sum(), x)[0]


def seen(arg: Any) -> list[int | None]:
    """What :func:`memsave.kernels.nodes.wanted` says of arguments like this one."""
    return [
        kernels.nodes.wanted((0, 2), args, True)
        for args in ((arg, None), (None, torch.ones(2), arg))
    ]


@needs_nodes
def test_what_is_wanted_of_plain_tensors() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.ones(2)
    for arg in (x, nn.Parameter(y), x * 2, torch.ones(3, 2)[:, 0].requires_grad_()):
        assert seen(arg) == [1, 2]
        with torch.no_grad():
            assert seen(arg) == [0, 0]
    assert seen(y) == seen(None) == seen(torch.arange(3)) == [0, 0]
    assert kernels.nodes.wanted((0, 2), (x, x, x), True) == 3
    assert kernels.nodes.wanted((1,), (x, y, x), False) == 0


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


@needs_nodes
@pytest.mark.parametrize(
    "mode",
    [FunctionMode, DispatchMode, forward_ad.dual_level, lambda: torch.autocast("cpu")],
    ids=["function mode", "dispatch mode", "forward AD", "autocast"],
)
def test_what_is_not_for_nodes_while_it_is_on(mode: Callable[[], Any]) -> None:
    x = torch.ones(2, requires_grad=True)
    with mode():
        assert seen(x) == [None, None]
    assert seen(x) == [1, 2]


#: Layers by whether autocast casts what they take: of which one node does so itself.
UNDER_AUTOCAST = {
    "ReLU": (lambda: memsave.nn.ReLU(), torch.float32),
    "MaxPool2d": (lambda: memsave.nn.MaxPool2d(2), torch.float32),
    "Conv2d": (lambda: memsave.nn.Conv2d(3, 4, 3, 2), torch.bfloat16),
    "ConvTranspose2d": (lambda: memsave.nn.ConvTranspose2d(3, 4, 3, 2), torch.bfloat16),
}


@needs_nodes
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
@pytest.mark.parametrize("cache", [True, False])
def test_nodes_under_autocast(name: str, cache: bool) -> None:
    """They are used, keep what they have cast, and give stock's gradients, in the dtype of x."""
    make, dtype = UNDER_AUTOCAST[name]
    layer = make().requires_grad_(False)
    stock = copy.copy(layer)
    (stock.__class__,) = type(layer).__bases__
    results, kept = [], []
    for module in (layer, stock):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16, cache_enabled=cache),
            saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        ):
            y = module(x * 1)
        if module is layer:
            assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"
            assert [t.dtype for t in kept if t.dtype.is_floating_point] == [dtype] * (
                dtype is torch.bfloat16
            )
        results.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
    (y, dx), (expected, dx_of_stock) = results
    assert y.dtype is expected.dtype is dtype
    same((y, dx), (expected, dx_of_stock), rtol=1e-2, atol=1e-2)


@needs_nodes
def test_what_is_not_for_nodes_inside_of() -> None:
    x, found = torch.ones(2, requires_grad=True), []

    def layer(_: Tensor) -> Tensor:
        found.append(seen(x))
        return _.sum()

    torch.func.grad(layer)(torch.ones(2))
    torch.vmap(layer)(torch.ones(2))
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        torch.jit.trace(layer, torch.ones(2), check_trace=False)
    assert found == [[None, None]] * 3


STRANGE: dict[str, Callable[[], Any]] = {
    "number": lambda: 1.0,
    "subclass": lambda: torch.ones(2).as_subclass(Subclass),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "negated": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "meta": lambda: torch.ones(2, device="meta"),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(2)),
    "of inference": lambda: torch.inference_mode()(torch.ones)(2),
}


@needs_nodes
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_what_is_not_for_nodes(make: Callable[[], Any]) -> None:
    assert seen(make()) == [None, None]


def without(name: str) -> nn.Module:
    """A layer whose parameter has been replaced by what is computed from others."""
    layer = nn.LayerNorm(2)
    parameter = layer._parameters.pop(name)
    layer.__dict__[name] = parameter * 2
    return layer


def computed() -> nn.Module:
    """As within :func:`torch.func.functional_call`."""
    layer = nn.LayerNorm(2)
    layer._parameters["weight"] = layer.weight * 2
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "both": lambda: nn.LayerNorm(2),
    "none": lambda: nn.LayerNorm(2, elementwise_affine=False),
    "no bias": lambda: nn.LayerNorm(2, bias=False),
    "frozen": lambda: nn.LayerNorm(2).requires_grad_(False),
    "frozen weight": lambda: nn.LayerNorm(2).apply(lambda m: m.weight.requires_grad_(False)),
    "no parameter": lambda: without("weight"),
    "no parameter, bias": lambda: without("bias"),
    "computed": computed,
    "complex": lambda: nn.LayerNorm(2, dtype=torch.complex64),
    "meta": lambda: nn.LayerNorm(2, device="meta"),
}
INPUTS: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.ones(2),
    "wanted": lambda: torch.ones(2, requires_grad=True),
    "computed": lambda: torch.ones(2, requires_grad=True) * 2,
    "number": lambda: 1.0,
    "subclass": lambda: torch.ones(2, requires_grad=True).as_subclass(Subclass),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(2, requires_grad=True)),
}
MODES: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "no grad": torch.no_grad,
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "forward AD": forward_ad.dual_level,
    "autocast": lambda: torch.autocast("cpu"),
}


def look(layer: nn.Module, x: Any) -> list[list[int] | None]:
    """What :func:`memsave.function.for_stock` says, for every choice of gradients and flags."""
    choices = product(range(8), (False, True), (False, True))
    found = [function.for_stock(layer, wanted, x, *flags) for wanted, *flags in choices]
    return [None if own is None else [*map(id, own)] for own in found]


@needs_nodes
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_what_stock_may_take_at_once(layer: Any, mode: Any, monkeypatch) -> None:
    """By a look of C++, as in Python."""
    module = layer()
    for make in INPUTS.values():
        x = make()
        with mode():
            found = look(module, x)
            with monkeypatch.context() as patch:
                patch.setattr(function, "nodes", None)
                assert look(module, x) == found
            with function.observe(lambda call: None):
                assert not any(look(module, x))


@needs_nodes
def test_what_stock_takes_at_once() -> None:
    layer, x = nn.LayerNorm(2), torch.ones(2, requires_grad=True)
    own, other = (layer.weight, layer.bias), function.INPUT | function.WEIGHT
    assert function.for_stock(layer, other, x) == own
    assert function.for_stock(layer, other, x.detach()) == own
    layer.weight.requires_grad_(False)
    assert function.for_stock(layer, other, x) == own
    assert function.for_stock(layer, other, x.detach()) is None  # that of the bias alone
    assert function.for_stock(layer, function.WEIGHT, x) is None
    with torch.no_grad():
        assert function.for_stock(layer, function.WEIGHT, x) == own
    with torch.autocast("cpu"):
        assert function.for_stock(layer, other, x, True) is None
        assert function.for_stock(layer, other, x) == own


def changed(layer: nn.Module, **attributes: Any) -> nn.Module:
    """With other attributes, where they are found first."""
    layer.__dict__.update(attributes)
    return layer


#: Layers of which a node finds the parameters and options itself; and some of which it does not.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "Conv1d": lambda: nn.Conv1d(4, 6, 3, 2, 1, groups=2),
    "Conv2d": lambda: nn.Conv2d(4, 6, (3, 2), (1, 2), (1, 0), dilation=2, bias=False),
    "Conv3d": lambda: nn.Conv3d(4, 6, 2),
    "Conv2d, valid": lambda: nn.Conv2d(4, 6, 3, padding="valid"),
    "Conv2d, same": lambda: nn.Conv2d(4, 6, 3, padding="same"),
    "Conv2d, evenly same": lambda: nn.Conv2d(4, 6, 2, padding="same"),
    "Conv2d, reflect": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "Conv2d, circular": lambda: nn.Conv2d(4, 6, 3, 2, (0, 1), padding_mode="circular"),
    "Conv2d, no such mode": lambda: changed(nn.Conv2d(4, 6, 3), padding_mode="mirror"),
    "Conv2d, another weight": lambda: changed(nn.Conv2d(4, 6, 3), weight=torch.ones(6, 4, 3, 3)),
    "Conv2d, another stride": lambda: changed(nn.Conv2d(4, 6, 3), stride=2),
    "Conv2d, a bad stride": lambda: changed(nn.Conv2d(4, 6, 3), stride=(1, 2, 3)),
    "BatchNorm1d": lambda: nn.BatchNorm1d(4),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4, eps=0.1, momentum=0.3),
    "BatchNorm3d": lambda: nn.BatchNorm3d(4, affine=False),
    "BatchNorm2d, of batches": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "BatchNorm2d, averaging": lambda: nn.BatchNorm2d(4, momentum=None),
    "BatchNorm2d, tracking no more": lambda: changed(nn.BatchNorm2d(4), track_running_stats=False),
    "BatchNorm2d, another mean": lambda: changed(nn.BatchNorm2d(4), running_mean=torch.ones(4)),
    "BatchNorm2d, in 64 bits": lambda: nn.BatchNorm2d(4, dtype=torch.float64),
    "LayerNorm": lambda: nn.LayerNorm(5),
    "LayerNorm of two axes": lambda: nn.LayerNorm((7, 5), eps=0.1),
    "LayerNorm of nothing": lambda: changed(nn.LayerNorm(5), normalized_shape=()),
    "LayerNorm, no bias": lambda: nn.LayerNorm([7], bias=False),
    "LayerNorm, no parameters": lambda: nn.LayerNorm(7, elementwise_affine=False),
    "LayerNorm, a bad eps": lambda: changed(nn.LayerNorm(5), eps=None),
    "RMSNorm": lambda: nn.RMSNorm(5),
    "RMSNorm, an eps": lambda: nn.RMSNorm((7, 5), eps=0.1),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "GroupNorm, no parameters": lambda: nn.GroupNorm(4, 4, affine=False),
    "GroupNorm, bad groups": lambda: changed(nn.GroupNorm(2, 4), num_groups=3),
    "GroupNorm, no groups": lambda: changed(nn.GroupNorm(2, 4), num_groups=0),
    "ReLU": nn.ReLU,
    "ReLU, in place": lambda: nn.ReLU(True),
    "ReLU, in place by a number": lambda: changed(nn.ReLU(), inplace=1),
    "LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "LeakyReLU, another slope": lambda: changed(nn.LeakyReLU(), negative_slope=2),
    "LeakyReLU, a slope in a tensor": lambda: changed(
        nn.LeakyReLU(), negative_slope=torch.tensor(0.3)
    ),
    "LeakyReLU, no slope": lambda: changed(nn.LeakyReLU(), negative_slope=None),
    "ReLU6": nn.ReLU6,
    "Hardtanh": lambda: nn.Hardtanh(-1, 0.5, inplace=True),
    "Hardtanh, a bad one": lambda: changed(nn.Hardtanh(), min_val=2.0),
    "Hardsigmoid": nn.Hardsigmoid,
    "Threshold": lambda: nn.Threshold(0.1, -2),
    "Threshold, no value": lambda: changed(nn.Threshold(0.1, 0.0), value=None),
    "Hardshrink": lambda: nn.Hardshrink(0.3),
    "Hardshrink, negative": lambda: nn.Hardshrink(-1),
    "Hardshrink, in a tensor": lambda: nn.Hardshrink(torch.tensor(0.3)),  # type: ignore[arg-type]
    "Hardshrink, a flag": lambda: nn.Hardshrink(True),
    "Softshrink": lambda: nn.Softshrink(0.3),
    "Softshrink, an integer": lambda: nn.Softshrink(1),
    "Softshrink, negative": lambda: nn.Softshrink(-0.3),
    "Softshrink, infinite": lambda: nn.Softshrink(math.inf),
    "Softshrink, no number": lambda: nn.Softshrink(None),  # type: ignore[arg-type]
    "Dropout": lambda: nn.Dropout(0.3),
    "Dropout, in place": lambda: nn.Dropout(0.3, inplace=True),
    "Dropout, none": lambda: nn.Dropout(0),
    "Dropout, all": lambda: nn.Dropout(1.0),
    "Dropout, a bad one": lambda: changed(nn.Dropout(), p=1.5),
    "Dropout, training by a number": lambda: changed(nn.Dropout(), training=1),
    "MaxPool1d": lambda: nn.MaxPool1d(3, padding=1),
    "MaxPool2d": lambda: nn.MaxPool2d((3, 2), 2, (1, 0), ceil_mode=True),
    "MaxPool2d, dilated": lambda: nn.MaxPool2d(2, dilation=2),
    "MaxPool2d, beyond the input": lambda: nn.MaxPool2d(2, dilation=9),
    "MaxPool2d, of one place": lambda: nn.MaxPool2d(1, dilation=9, stride=2**40),
    "MaxPool2d, no stride": lambda: changed(nn.MaxPool2d((3, 2)), stride=None),
    "MaxPool2d, an empty stride": lambda: changed(nn.MaxPool2d(2), stride=()),
    "MaxPool2d, stride 0": lambda: nn.MaxPool2d(2, [0, 1]),
    "MaxPool2d, too much padding": lambda: nn.MaxPool2d(3, padding=2),
    "MaxPool2d, a bad size": lambda: nn.MaxPool2d((2, 2, 2)),
    "MaxPool2d, a size of floats": lambda: nn.MaxPool2d(2.0),
    "MaxPool3d": lambda: nn.MaxPool3d(2, 1),
    "AvgPool1d": lambda: nn.AvgPool1d(2, padding=1),
    "AvgPool2d": lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "AvgPool2d, another divisor": lambda: nn.AvgPool2d(2, divisor_override=3),
    "AvgPool2d, divisor 0": lambda: nn.AvgPool2d(2, divisor_override=0),
    "AvgPool3d": lambda: nn.AvgPool3d(2, 1),
}
#: Of those the ones whose nodes are looked for by the names of attributes.
BY_ATTRIBUTES = (
    *("ReLU", "LeakyReLU", "ReLU6", "Hardtanh", "Hardsigmoid", "Threshold", "Hardshrink"),
    *("Softshrink", "Dropout", "MaxPool1d", "MaxPool2d", "MaxPool3d"),
    *("AvgPool1d", "AvgPool2d", "AvgPool3d"),
)
SHAPES = (
    (4,),
    (2, 4),
    (4, 7),
    (2, 4, 7),
    (2, 4, 7, 5),
    (1, 4, 1, 1),
    (2, 4, 3, 4, 5),
    (2, 3, 4, 5),
)


@needs_nodes
@pytest.mark.parametrize("mode", ["none", "no grad", "function mode", "autocast"])
@pytest.mark.parametrize("trains", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_whose_attributes_a_node_finds(name: str, trains: bool, mode: str) -> None:
    """Values, gradients, buffers and errors are those of stock."""
    has_parameters = any(True for _ in MODULES[name]().parameters())
    for names in ((), ("weight",), ("bias", "weight"))[: 3 if has_parameters else 1]:
        for shape, wants_x in product(SHAPES, (False, True)):
            made = []
            for converts in (False, True):
                helpers.seed(0)
                module = MODULES[name]().train(trains)
                for parameter, tensor in module.named_parameters():
                    tensor.requires_grad_(parameter in names)
                if converts:
                    memsave.convert(module)
                x = torch.randn(shape, requires_grad=wants_x)
                try:
                    with warnings.catch_warnings(), MODES[mode]():
                        warnings.simplefilter("ignore")
                        y = module(x * 1)
                    leaves = [t for t in (x, *module.parameters()) if t.requires_grad]
                    grads = []
                    if y.requires_grad:
                        grads = torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True)
                    result = y.detach(), *grads
                except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    result = (type(error),)
                made.append((*result, *module.buffers()))
            assert len(made[0]) == len(made[1])
            for expected, actual in zip(*made, strict=True):
                same(actual, expected, rtol=1e-5, atol=1e-6)


@needs_nodes
@pytest.mark.parametrize("value", [None, 1.0, [1.0], "x"], ids=str)
@pytest.mark.parametrize("name", ["Conv2d", "BatchNorm2d"])
def test_modules_of_no_tensor(name: str, value: Any) -> None:
    for module in (MODULES[name](), memsave.convert(MODULES[name]())):
        for layer in (module, module.eval(), module.requires_grad_(False)):
            with pytest.raises((TypeError, AttributeError)):
                layer(value)


@needs_nodes
@pytest.mark.parametrize("places", [8, 64])
def test_group_norm_of_channels_that_are_stored_last(places: int) -> None:
    """By torch itself, but where its kernel crashes (in 2.13): see ``is_taken_as_it_is``."""
    module = memsave.nn.GroupNorm(2, 4)
    x = torch.randn(2, 4, places, places).to(memory_format=torch.channels_last)
    for wants_x in (True, False):
        x.requires_grad_(wants_x)
        y = kernels.nodes.group_norm_of("group_norm", module.__dict__, x)
        assert (y is not None) == (wants_x or places == 64)
        y = module(x)
        same(y, nn.functional.group_norm(x, 2), layout=True, rtol=1e-5, atol=1e-6)
        torch.autograd.grad(y.sum(), [module.weight, *([x] if wants_x else [])])


@needs_nodes
@pytest.mark.parametrize("name", BY_ATTRIBUTES)
def test_what_a_node_finds_by_the_names_of_attributes(name: str, monkeypatch) -> None:
    """Nothing of the engine runs, but where something is on that it has to see."""
    layer = memsave.convert(MODULES[name]())
    dims = int(name[-2]) if "Pool" in name else 2
    x = torch.randn(2, 4, *[5] * dims, requires_grad=True)
    y = x * 1
    calls = []

    def by_attributes(*args: Any) -> Any:
        calls.append(of_nodes(*args))
        return calls[-1]

    of_nodes = kernels.nodes.by_attributes
    monkeypatch.setattr(kernels.nodes, "by_attributes", by_attributes)
    assert layer(y.clone()).grad_fn.name().startswith("Memsave")
    assert calls.pop() is not None
    with torch.no_grad():
        layer(y.clone())
        assert calls.pop() is False
    layer(y.detach().clone())
    assert calls.pop() is False
    with memsave.functional_mode():
        layer(y.clone())
        assert calls.pop() is None
    with FunctionMode():  # which sees stock's function, in whose place it then runs
        layer(y.clone())
        assert calls.pop() is not None
    with function.observe(lambda call: None):
        layer(y.clone())
        assert not calls
    with torch.autocast("cpu"):
        layer(y.clone())
        assert (calls.pop() is None) == (name == "MaxPool3d")


@needs_nodes
def test_an_attribute_that_is_computed() -> None:
    class Steep(memsave.nn.LeakyReLU):
        negative_slope = property(lambda self: 0.5, lambda self, slope: None)

    x = torch.tensor([-4.0, 4.0], requires_grad=True)
    assert Steep()(x).tolist() == [-2.0, 4.0]


@needs_nodes
def test_what_a_node_finds_in_a_module() -> None:
    """So the search of nn.Module is spared in all of these."""
    conv, norm = memsave.nn.Conv2d(4, 6, 3, padding=1), memsave.nn.BatchNorm2d(4).eval()
    x = torch.randn(2, 4, 5, 5, requires_grad=True)

    def name(module: nn.Module) -> str:
        found = {
            memsave.nn.Conv2d: lambda: kernels.nodes.convolution_of("conv2d", vars(module), x),
            memsave.nn.BatchNorm2d: lambda: kernels.nodes.batch_norm_of("b", vars(module), x, 4, 4),
        }[type(module)]()
        return "" if found is None else type(found.grad_fn).__name__

    assert name(conv) == "ConvolutionBackward0"
    assert name(norm) == "NativeBatchNormBackward0"
    conv.weight.requires_grad_(False), norm.weight.requires_grad_(False)
    assert name(conv) == name(norm) == ""  # of the bias and x
    conv.requires_grad_(False), norm.requires_grad_(False)
    assert name(conv) == name(norm) == "MemsaveLayerBackward"
    with torch.autocast("cpu"):
        assert name(conv) == "MemsaveLayerBackward"
        conv.requires_grad_()
        assert name(conv) == ""
    for module in (conv, norm.requires_grad_()):  # as torch.func.functional_call has it
        weight = module._parameters["weight"]
        module._parameters["weight"] = weight * 2
        assert name(module) == ""  # Stock would keep what is computed here.
        module._parameters["weight"] = weight
        assert name(module)
    with FunctionMode():
        assert name(conv) == name(norm) == ""
    assert name(norm.train()) == "NativeBatchNormBackward0"
    x = torch.randn(2, 4, 100, 100)
    assert name(norm) == ""  # for which there is a loop
    x = x.to(memory_format=torch.channels_last)
    assert name(norm) == "NativeBatchNormBackward0"
    x = x.contiguous().bfloat16()
    assert name(norm) == "NativeBatchNormBackward0"
    conv._conv_forward = None
    assert name(conv) == ""


P_OF_KEPT = (0.5, 0.1, 1 - 0.1, 2**-53, 1 - 2**-53, 5e-324)


@pytest.mark.parametrize("p", P_OF_KEPT)
@pytest.mark.parametrize("others", [0, 1])
def test_random_numbers_are_those_of_torch(p: float, others: int) -> None:
    """Also of a generator that has given single words, between which a number begins."""
    x = torch.empty(9000, dtype=torch.float64)

    def draw(bernoulli: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(0)
        drawn = []
        for elements in (1, 7, 8, 311, 312, 313, 1024, 1033, 9000):
            torch.rand(others)
            drawn.append(bernoulli(x[:elements]))
        return drawn, torch.get_rng_state()

    ours = draw(lambda x: kernels.bernoulli(x, Like.of(x), p))
    stock = draw(lambda x: reference.pack(torch.empty_like(x).bernoulli_(p).bool(), Like.of(x)))
    same(ours, stock, rtol=0, atol=0)


@needs_nodes
def test_random_numbers_are_by_the_loop_where_torch_has_such() -> None:
    x = torch.empty(999, dtype=torch.float64)
    torch.manual_seed(0)
    by_twister = torch.rand_like(x) < 0.3
    torch.manual_seed(0)
    is_so = by_twister.equal(x.bernoulli_(0.3).bool())
    assert (kernels.nodes.bernoulli(x, 0.3) is not None) == is_so


def test_random_numbers_of_threads_at_once() -> None:
    """No number is drawn twice, and none is left out."""
    x = torch.empty(31200)
    torch.manual_seed(0)
    with ThreadPoolExecutor(4) as threads:
        drawn = list(threads.map(lambda _: kernels.bernoulli(x, Like.of(x), 0.5), range(64)))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    expected = [kernels.bernoulli(x, Like.of(x), 0.5) for _ in range(64)]
    assert state.equal(torch.get_rng_state())
    assert {bytes(b.tolist()) for b in drawn} == {bytes(b.tolist()) for b in expected}


def test_hooks_of_saved_tensors_and_freed_graphs() -> None:
    """What stock says of its own nodes."""
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = memsave.functional.relu(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.equal(2 * (x > 0).float())
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "dropout": F.dropout,
    "dropout_from_rng": memsave.nn.DropoutFromRng(),
    "dropout2d": F.dropout2d,
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 3),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "cross_entropy": lambda x: F.cross_entropy(x[0, 0], torch.zeros(8, dtype=torch.int64)),
}


@needs_nodes
@pytest.mark.parametrize(
    "part",
    [lambda t: t.flatten()[:1], lambda t: t[:1], lambda t: t[:0]],
    ids=["one", "less", "none"],
)
@pytest.mark.parametrize("layer", OTHERS.values(), ids=OTHERS)
def test_hooks_that_give_back_something_else(
    layer: Callable[[Tensor], Tensor], part: Callable[[Tensor], Tensor]
) -> None:
    """An error, not what lies behind the memory."""
    x = torch.randn((4, 8, 8, 8), requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor, part):
        y = layer(x)
    assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"
    with pytest.raises((RuntimeError, IndexError)):
        y.sum().backward()


@pytest.mark.parametrize("layer", OTHERS.values(), ids=OTHERS)
def test_hooks_that_give_back_the_same_in_other_strides(layer: Callable[[Tensor], Tensor]) -> None:
    x, gradients = torch.randn((4, 8, 8, 8), requires_grad=True), []
    for unpack in (lambda tensor: tensor, lambda tensor: torch.stack((tensor, tensor), -1)[..., 0]):
        torch.manual_seed(0)
        with saved_tensors_hooks(lambda tensor: tensor, unpack):
            gradients += torch.autograd.grad(layer(x).square().sum(), x)
    same(*gradients)


@pytest.mark.parametrize("shape", [(4096, 64), (4096,)], ids=["input", "statistic"])
def test_hooks_that_give_back_something_else_to_a_rule(shape: tuple[int, ...]) -> None:
    """Which a kernel does not read then."""
    x = torch.randn(4096, 64, dtype=torch.bfloat16, requires_grad=True)

    def part(tensor: Tensor) -> Tensor:
        return tensor[:1].clone() if tensor.shape == shape else tensor

    with saved_tensors_hooks(lambda tensor: tensor, part):
        y = F.rms_norm(x, (64,))
    assert type(y.grad_fn).__name__ != "MemsaveLayerBackward"
    (dx,) = torch.autograd.grad(y.sum(), x)  # of what is broadcast
    assert dx.isfinite().all()


class Token:
    """Lives as long as the graph that holds it."""


@every_row
def test_a_hook_that_raises_leaves_no_graph(row: Layer) -> None:
    """As in recomputing a checkpoint, which stops at the last tensor that is kept."""
    wrt = frozenset({next(iter(row.reads))})
    for last in range(1, 9):
        args = helpers.inputs(row, wrt, dtype=torch.float32)
        args |= TAKES.get(row.name, lambda args: {})(args)
        (name,) = wrt
        args[name] = args[name] * 1
        token = Token()
        args[name].grad_fn.register_hook(lambda *_, token=token: None)
        alive, count = weakref.ref(token), 0

        def pack(tensor: Tensor, last: int = last) -> Tensor:
            nonlocal count
            count += 1
            if count == last:
                raise KeyError
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            raised = helpers.attempt(helpers.ours(row), *args.values(), **not_stock(row))
        del args, token
        if raised is not KeyError:
            return  # Less is kept than that.
        gc.collect()
        assert alive() is None


@needs_nodes
def test_places_are_of_whole_planes() -> None:
    """Said before anything is written: some heaps bear what is written behind them."""
    x = torch.randn((4, 8, 8, 8), requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor.flatten()[:1]):
        y = F.max_pool2d(x, 2)
    with pytest.raises(RuntimeError, match="another shape"):
        y.sum().backward()


def test_errors_name_the_layer() -> None:
    """As those of stock; not the template that all share."""
    y = memsave.functional.relu(torch.ones(3, requires_grad=True))
    with (
        warnings.catch_warnings(action="ignore"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="MemsaveReluBackward' returned nan"),
    ):
        y.backward(torch.full((3,), torch.nan))
    y = memsave.nn.LayerNormFromOutput(3)(torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="output 0 of MemsaveLayerNormFromOutput"):
        y.mul_(2).sum().backward()


def test_a_fork_has_no_threads_of_its_parent() -> None:
    """Backward included. (torch has none of its own there, either, so the child uses one.)"""
    code = """
import os, torch
from memsave import functional

def run():
    x = torch.randn(1 << 20, requires_grad=True)
    y = functional.relu(x)
    assert y.grad_fn.name() == "MemsaveReluBackward"
    return torch.autograd.grad(y, x, torch.ones_like(x))[0].equal((x > 0).float())

assert run()
child = os.fork()
if not child:
    torch.set_num_threads(1)
    os._exit(not run())
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@needs_nodes
def test_a_transform_around_the_first_layer() -> None:
    """What is learnt there of plain tensors holds for all that follow."""
    code = """
import torch
from memsave import functional, nn

torch.func.grad(lambda x: nn.RMSNorm(4)(x).sum())(torch.randn(2, 4))
x = torch.randn(4, requires_grad=True)
assert type(functional.relu(x).grad_fn).__name__ == "MemsaveLayerBackward"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize("name", ["_native", *([kernels.nodes.NAME] if kernels.nodes else [])])
def test_those_of_other_sources_are_not_loaded(name: str) -> None:
    """As after a change of the sources, before they are compiled anew."""
    code = f"""
import sys, types, warnings
import torch
sys.modules["memsave.kernels.{name}"] = types.ModuleType("{name}")
with warnings.catch_warnings(record=True) as caught:
    from memsave import functional, kernels
assert "install memsave again" in str(caught[0].message)
assert kernels.nodes is None
x = torch.randn(4, requires_grad=True)
assert type(functional.relu(x).grad_fn).__name__ == "MemsaveReluBackward"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_those_of_another_torch_are_not_loaded() -> None:
    """They have other addresses of everything. What is left are the rules."""
    code = """
import torch
torch.__version__ = "2.12.999"
from memsave import functional, kernels

assert kernels.nodes is None
x = torch.randn(4, requires_grad=True)
assert type(functional.relu(x).grad_fn).__name__ == "MemsaveReluBackward"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
