"""Layers on CUDA: on real tensors where there is a device; where torch is only built for it, on
fake ones, which have shapes, dtypes and devices. (Elsewhere all is skipped.) Kernels run by the
interpreter of Triton, if ``TRITON_INTERPRET=0`` does not say otherwise (see conftest.py).
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import every_row, first, inputs, options, ours, outcome, same, stock
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memsave
from memsave import function
from memsave.kernels.reference import Like
from memsave.spec import Layer

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
needs_build = pytest.mark.skipif(torch.version.cuda is None, reason="torch is not built for CUDA")


@pytest.fixture(autouse=True, scope="module")
def has_begun() -> None:
    """Before anything is put in the place of what this makes."""
    if torch.cuda.is_available():
        torch.cuda.init()


def moved(row: Layer, wrt: frozenset[str], dtype: torch.dtype) -> list[Any]:
    """Arguments of this dtype on the device, of which some want gradients."""
    args = inputs(row, wrt, dtype=torch.float32).values()
    return [
        arg.detach()
        .to("cuda", dtype if arg.is_floating_point() else arg.dtype)
        .requires_grad_(arg.requires_grad)
        for arg in args
    ]


#: Rows of which torch, on CUDA, does not keep the channels last (or, of rms_norm, ours do not).
OTHERWISE = {
    *("batch_norm_eval", "group_norm_from_output", "pad", "rms_norm", "rms_norm_from_output"),
    *("BatchNorm2d, eval", "ReflectionPad2d", "RMSNorm", "RMSNormFromOutput"),
}


def last(args: list[Tensor]) -> list[Tensor]:
    """The first of them with its channels last, if it is an image."""
    x, *others = args
    if x.ndim != 4:
        return args
    x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_(x.requires_grad)
    return [x, *others]


@needs_device
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
@every_row
@pytest.mark.parametrize("by", [list, last], ids=["contiguous", "channels last"])
def test_gradients_equal_stock(row: Layer, by: Any) -> None:
    for wrt in row.masks()[1:]:
        actual, expected = (
            outcome(call, by(moved(row, wrt, torch.float32)), **options(row))
            for call in (ours(row), stock(row))
        )
        same(actual, expected, layout=by is list or row.name not in OTHERWISE, rtol=1e-4, atol=1e-5)


LAYERS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    **{
        name: lambda name=name: (getattr(nn, name)(), getattr(memsave.nn, name)())
        for name in (
            "ReLU",
            "LeakyReLU",
            "ReLU6",
            "Hardtanh",
            "Hardshrink",
            "Softshrink",
            "Hardsigmoid",
        )
    },
    "threshold": lambda: (nn.Threshold(0.5, 2.0), memsave.nn.Threshold(0.5, 2.0)),
    "Dropout": lambda: (nn.Dropout(0.3), memsave.nn.Dropout(0.3)),
    "Dropout in place": lambda: (nn.Dropout(0.3, True), memsave.nn.Dropout(0.3, True)),
    "Dropout2d": lambda: (nn.Dropout2d(0.3), memsave.nn.Dropout2d(0.3)),
    "MaxPool2d": lambda: (nn.MaxPool2d(3, 2, 1), memsave.nn.MaxPool2d(3, 2, 1)),
    "MaxPool2d, over each other": lambda: (nn.MaxPool2d(5, 1, 2), memsave.nn.MaxPool2d(5, 1, 2)),
    "MaxPool2d, dilated": lambda: (
        nn.MaxPool2d(3, (5, 2), 1, 2),
        memsave.nn.MaxPool2d(3, (5, 2), 1, 2),
    ),
    "MaxPool3d": lambda: (nn.MaxPool3d(3, 2, 1), memsave.nn.MaxPool3d(3, 2, 1)),
    "MaxPool2d, apart": lambda: (nn.MaxPool2d(2, 3), memsave.nn.MaxPool2d(2, 3)),
    "Hardsigmoid in place": lambda: (nn.Hardsigmoid(True), memsave.nn.Hardsigmoid(True)),
    "AvgPool2d": lambda: (nn.AvgPool2d(2), memsave.nn.AvgPool2d(2)),
    "AvgPool2d, over each other": lambda: (nn.AvgPool2d(3, 2, 1), memsave.nn.AvgPool2d(3, 2, 1)),
    "AdaptiveAvgPool2d": lambda: (nn.AdaptiveAvgPool2d(3), memsave.nn.AdaptiveAvgPool2d(3)),
    "AdaptiveAvgPool2d, uneven": lambda: (nn.AdaptiveAvgPool2d(5), memsave.nn.AdaptiveAvgPool2d(5)),
    "ReflectionPad2d": lambda: (nn.ReflectionPad2d(1), memsave.nn.ReflectionPad2d(1)),
    "PReLU": lambda: alike(nn.PReLU),
    "PReLU of channels": lambda: alike(nn.PReLU, 16),
    "Conv2d": lambda: alike(nn.Conv2d, 16, 8, 3, 2, 1),
    "Conv2d of channels": lambda: alike(nn.Conv2d, 16, 16, 3, padding=1, groups=16),
    "ConvTranspose2d": lambda: alike(nn.ConvTranspose2d, 16, 8, 3, 2),
    "BatchNorm2d": lambda: alike(nn.BatchNorm2d, 16),
    "BatchNorm2d, eval": lambda: tuple(m.eval() for m in alike(nn.BatchNorm2d, 16)),  # type: ignore[misc, return-value]
    "RMSNorm": lambda: alike(nn.RMSNorm, 24),
    "LayerNormFromOutput": lambda: alike(nn.LayerNorm, 24, ours="LayerNormFromOutput"),
    "RMSNormFromOutput": lambda: alike(nn.RMSNorm, 24, ours="RMSNormFromOutput"),
}


def alike(cls: Any, *args: Any, ours: str = "", **options: Any) -> tuple[nn.Module, nn.Module]:
    """A frozen layer, and that of memsave with the same parameters."""
    stock = cls(*args, **options).requires_grad_(False)
    for tensor in stock.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
    other = getattr(memsave.nn, ours or cls.__name__)(*args, **options).requires_grad_(False)
    other.load_state_dict(stock.state_dict())
    return stock, other


@needs_device
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_layers_equal_stock(
    name: str, dtype: torch.dtype, is_autocast: bool, format: torch.memory_format
) -> None:
    """Frozen, of an activation; the output to the bit, with the signs of zeros."""
    layers = [layer.cuda() for layer in LAYERS[name]()]
    if not is_autocast:
        layers = [layer.to(dtype) for layer in layers]
    generator = torch.Generator("cuda").manual_seed(0)
    given = torch.randn(5, 16, 12, 24, generator=generator, device="cuda").mul_(4).round_()
    given = given.to(dtype, memory_format=format)
    given[0, 0, 0, :2] = torch.tensor([-0.0, torch.nan if name == "ReLU" else 0.0])
    results = []
    for layer in layers:
        torch.manual_seed(0)
        x = given.clone().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=is_autocast):
            y = layer(x * 1)
        g = torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape)
        g = torch.empty_like(y).copy_(g)  # in its layout
        second = None
        # (Torch has none of the one, and of the other that of the other side of the kink.)
        if "Hardsigmoid" not in name and "PReLU" not in name:
            again = (torch.autograd.grad((y * y).sum(), x, create_graph=True)[0] * 2).sum()
            second = torch.autograd.grad(again, x, allow_unused=True)[0]
        torch.manual_seed(0)
        with torch.autocast("cuda", torch.bfloat16, enabled=is_autocast):
            y = layer(x * 1)
        results.append((y, *torch.autograd.grad(y, x, g), second))
    (y, dx, second), (our_y, our_dx, our_second) = results
    assert torch.equal(y.signbit(), our_y.signbit())
    rtol = 1e-4 if dtype is torch.float32 and not is_autocast else 2e-2
    layout = format is torch.contiguous_format or name not in OTHERWISE
    same((our_y, our_dx), (y, dx), layout=layout, rtol=rtol, atol=rtol / 10)
    if second is not None:
        same(our_second, second, rtol=10 * rtol, atol=rtol)


@needs_device
@pytest.mark.parametrize("name", ["ReLU", "LeakyReLU", "Dropout", "MaxPool2d", "BatchNorm2d, eval"])
def test_gradients_that_begin_anywhere(name: str) -> None:
    """Contiguous, but at an address that 16 does not divide."""
    layers = [layer.cuda() for layer in LAYERS[name]()]
    generator = torch.Generator("cuda").manual_seed(0)
    given = torch.randn(1, 16, 7, 7, generator=generator, device="cuda")
    results = []
    for layer in layers:
        torch.manual_seed(0)
        x = given.clone().requires_grad_()
        y = layer(x * 1)
        g = torch.linspace(-1, 1, y.numel() + 1, device="cuda")[1:].view(y.shape)
        assert g.data_ptr() % 16
        results.append((y, *torch.autograd.grad(y, x, g)))
    same(results[1], results[0], rtol=1e-4, atol=1e-5)


@needs_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 1 - 2**-24])
def test_dropout_draws_the_numbers_of_stock(dtype: torch.dtype, p: float) -> None:
    """Whoever draws, a loop of ours or torch: of sizes that torch takes by vectors or not, that one
    turn of its threads has or several; and it leaves the generator where stock does.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    ours = partial(memsave.functional.dropout, p=p)
    for size in (1, 4, 12, 1000, 4099, 1 << 20, 3 << 20, (5 << 20) + 4, (9 << 20) + 8):
        for start in (0, 1, 2, 4):
            given = torch.randn(size + start, device="cuda").to(dtype)
            given[-1] = torch.inf
            made = []
            for dropout in (partial(F.dropout, p=p), ours):
                torch.manual_seed(size)
                x = given.clone()[start:].requires_grad_()
                ys = [dropout(x * 1) for _ in range(2)]
                grads = torch.autograd.grad(ys[1], x, torch.ones_like(x))
                made.append((*ys, *grads, generator.get_state()))
            for expected, actual in zip(*made, strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@needs_device
def test_dropout_draws_while_a_graph_is_captured() -> None:
    """By torch, which has other numbers each time that it is replayed."""
    x = torch.ones(1 << 12, device="cuda", requires_grad=True)
    layer = memsave.nn.Dropout(0.5).cuda()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (dx,) = torch.autograd.grad(layer(x).sum(), x)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(dx.clone())
        assert {*dx.unique().tolist()} == {0.0, 2.0}
    assert not seen[0].equal(seen[1])
    assert not seen[1].equal(seen[2])


@needs_device
def test_hardsigmoid_is_that_of_torch() -> None:
    """To the bit, also beside its kinks."""
    x = torch.linspace(-4, 4, 1 << 20, device="cuda")
    x = torch.cat([x, torch.tensor([-3.0, 3.0, -0.0, torch.inf, -torch.inf], device="cuda")])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for inplace in (False, True):
            leaf = x.to(dtype, copy=True).requires_grad_()
            ours = memsave.functional.hardsigmoid(leaf * 1, inplace)
            assert ours.equal(nn.functional.hardsigmoid(leaf * 1, inplace))


@needs_device
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "shape", [(700, 5), (6, 1), (300, 10000), (3, 5, 70), (2, 21, 16, 9)], ids=str
)
@pytest.mark.parametrize("options", [{}, {"weight": True}, {"label_smoothing": 0.2}], ids=str)
def test_cross_entropy(shape: tuple[int, ...], options: dict[str, Any], reduction: str) -> None:
    """In every dtype, and of logits that autocast has in 32 bits. (The gradient that torch makes in
    16 bits is off by some percent where that of a smoothed class is below what they can say.)
    """
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(shape, generator=generator, device="cuda").mul_(3)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator, device="cuda")
    target.view(-1)[1::3] = -100
    weight = torch.rand(shape[1], generator=generator, device="cuda") + 0.5
    for dtype, is_autocast in (
        *((dtype, False) for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        *((dtype, is_autocast) for dtype in (torch.float16,) for is_autocast in (False, True)),
    ):
        passed = dict(options)
        if "weight" in passed:
            passed["weight"] = weight if is_autocast else weight.to(dtype)
        x = logits.to(dtype).requires_grad_()
        results = []
        for functions in (memsave.functional, nn.functional):
            with torch.autocast("cuda", torch.float16, enabled=is_autocast):
                results.append(
                    functions.cross_entropy(x * 1, target, **passed, reduction=reduction)
                )
        ours, stock = results
        bound = 1e-6 if dtype in (torch.float32, torch.float64) else 1e-2
        same(ours, stock, rtol=bound, atol=bound)
        g = torch.linspace(0.5, 1.5, ours.numel(), device="cuda", dtype=ours.dtype).view(ours.shape)
        (dx,) = torch.autograd.grad(ours, x, g)
        wide = x.detach().double().requires_grad_()
        if "weight" in passed:
            passed["weight"] = passed["weight"].double()
        exact = nn.functional.cross_entropy(wide, target, **passed, reduction=reduction)
        (expected,) = torch.autograd.grad(exact, wide, g.double())
        rtol = {torch.float32: 1e-4, torch.float64: 1e-6}.get(dtype, 2e-2)
        scale = expected.abs().max().item() + 1e-3
        same(dx, expected.to(dtype), rtol=rtol, atol=rtol / 10 * scale)


@needs_device
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("momentum", [0.3, None])
def test_batch_norm_has_the_statistics_of_stock(is_frozen: bool, momentum: float | None) -> None:
    made = []
    for layer in alike(nn.BatchNorm2d, 16):
        layer.cuda().requires_grad_(not is_frozen).momentum = momentum  # type: ignore[assignment]
        x = torch.linspace(-2, 3, 4 * 16 * 25, device="cuda").view(4, 16, 5, 5).requires_grad_()
        for _ in range(3):
            layer(x.sin()).cos().sum().backward()
        made.append((x.grad, dict(layer.state_dict())))
    same(made[1], made[0], rtol=1e-4, atol=1e-5)


@needs_device
def test_convolutions_without_cudnn() -> None:
    stock, ours = (m.cuda() for m in alike(nn.Conv2d, 8, 8, 3, 2, 1, groups=2))
    given = torch.randn(4, 8, 32, 32, device="cuda")
    results = []
    for layer in (stock, ours):
        x = given.clone().requires_grad_()
        with torch.backends.cudnn.flags(enabled=False):
            y = layer(x * 1)
            results.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
    same(results[1], results[0], rtol=1e-4, atol=1e-5)


@needs_device
@pytest.mark.parametrize("dims", [1, 2])
def test_grouped_convolutions_copy_no_input(dims: int) -> None:
    _, layer = alike((nn.Conv1d, nn.Conv2d)[dims - 1], 64, 64, 3, padding=1, groups=64)
    x = torch.randn(8, 64, *[1 << 14 // dims] * dims, device="cuda", requires_grad=True)  # 32 MiB
    y = layer.cuda()(x)
    g = torch.ones_like(y)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(y, x, g)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * x.nbytes


@needs_device
@pytest.mark.parametrize("name", ["max_pool3d", "adaptive_max_pool3d"])
def test_nodes_where_autocast_leaves_a_layer_alone(name: str) -> None:
    x = torch.randn(2, 3, 8, 8, 8, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        y = getattr(memsave.functional, name)(x, 2)
    assert type(y.grad_fn).__name__ == "MemsaveLayerBackward"


FIRST = """
import threading, torch, memsave
x = torch.randn(64, device="cuda", requires_grad=True)
torch.autograd.grad(memsave.functional.relu(x).sum(), x)  # compiles

def forward():
    results.append(memsave.functional.relu(x).detach())

results = []
for _ in range(3):
    thread = threading.Thread(target=forward)
    thread.start()
    thread.join()
assert all(result.equal(x.detach().relu()) for result in results) and len(results) == 3
"""
BACKWARD = """
import torch, memsave
memsave.functional.relu(torch.randn(64, device="cuda", requires_grad=True))
x, g = torch.randn(64, device="cuda", requires_grad=True), torch.ones(64, device="cuda")
assert torch.autograd.grad(memsave.functional.relu(x), x, g)[0].equal((x > 0).float())
"""


@needs_device
@pytest.mark.parametrize("code", [FIRST, BACKWARD], ids=["of forward", "of backward"])
def test_a_kernel_may_be_the_first_call_of_a_thread(code: str) -> None:
    """Of CUDA, which torch's own calls have begin to work there, but not those of its driver."""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@needs_build
@every_row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_autocast", [False, True])
def test_outputs_are_like_those_of_stock(
    row: Layer, is_autocast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In shape, layout, dtype and device."""
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
    for wrt in row.masks()[1:]:
        made = []
        for call in (ours(row), stock(row)):
            with FakeTensorMode():
                args = moved(row, wrt, dtype)
                # (torch.autocast does nothing where there is no device.)
                torch.set_autocast_dtype("cuda", torch.bfloat16)
                torch.set_autocast_enabled("cuda", is_autocast)
                try:
                    y = first(call(*args, **options(row)))
                finally:
                    torch.set_autocast_enabled("cuda", False)
                    torch.clear_autocast_cache()
            made.append((y.shape, y.stride(), y.dtype, y.device))
        assert made[0] == made[1]


@needs_build
@every_row
@pytest.mark.parametrize("by", [list, last], ids=["contiguous", "channels last"])
def test_rules_stay_on_the_device(row: Layer, by: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients have the shapes and the device of their arguments; nothing comes from elsewhere."""
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
    rule = function.RULES[row.name]
    if rule.bwd is None:
        return  # that is stock
    for wrt in row.masks()[1:]:
        with FakeTensorMode(), torch.no_grad():
            args = by(moved(row, wrt, torch.float32))
            result, extras = rule.fwd(wrt, *args, **options(row))
            y = first(result)
            arrays = {**dict(zip(row.args, args, strict=True)), "y": y, **extras}
            saved = {name: arrays[name] if name in row.saves(wrt) else None for name in arrays}
            shapes = {name: Like.of(arrays[name]) for name in rule.shapes}
            g = torch.empty_like(y)
            grads = rule.bwd({"y": g} if rule.smooth else g, wrt, saved, shapes, **options(row))
            for name in wrt:
                assert grads[name].shape == arrays[name].shape
                assert grads[name].device == arrays[name].device
