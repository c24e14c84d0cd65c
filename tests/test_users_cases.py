"""Cases in which an earlier implementation of the idea was wrong or crashed, each by name.

Every test compares with the stock layer on the same values: output, gradients and, for layers that
have them, buffers. The properties draw most of these options too; these are the reports of users,
kept one by one so that a name says which one is back.
"""

import copy
import math
import warnings
from typing import Any

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import same
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import memsave
import memsave.functional
import memsave.nn

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: str(d).removeprefix("torch."))
LOOSE = {torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def agree(make, *shape: int, x: Tensor | None = None, frozen: bool = False) -> nn.Module:
    """``make(nn)`` and ``make(memsave.nn)``, and the first one converted, do the same twice."""
    results = []
    if x is None:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for namespace, change in ((nn, None), (memsave.nn, None), (nn, memsave.convert)):
        torch.manual_seed(0)
        layer = make(namespace)
        layer = change(layer) if change else layer
        layer.requires_grad_(not frozen)
        x = x.detach().to(next(layer.parameters(), x).dtype).requires_grad_()
        steps = [helpers.step(layer, x), helpers.step(layer, x)]
        results.append((steps, dict(layer.named_buffers())))
    tolerance = LOOSE[x.dtype]
    same(results[1], results[0], rtol=tolerance, atol=tolerance)
    same(results[2], results[0], rtol=tolerance, atol=tolerance)
    return layer


either = pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])


# Wrong values.


@either
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_padding_mode(dims: int, mode: str, frozen: bool) -> None:
    """Was ignored: zeros instead."""

    def make(m):
        return getattr(m, f"Conv{dims}d")(2, 3, 3, padding=2, padding_mode=mode).double()

    agree(make, 2, 2, *[5] * dims, frozen=frozen)


@either
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_what_a_padding_mode_keeps(dims: int, mode: str, frozen: bool) -> None:
    """The input, if the weight is trained, and never a padded copy."""
    layer = getattr(memsave.nn, f"Conv{dims}d")(2, 3, 3, padding=2, padding_mode=mode).double()
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(2, 2, *[5] * dims, dtype=torch.float64, requires_grad=True)
    assert helpers.kept(lambda: layer(x), [*layer.parameters()]) == (0 if frozen else x.nbytes)


@either
def test_padding_mode_with_a_pad_per_axis(frozen: bool) -> None:
    agree(
        lambda m: m.Conv2d(2, 3, 3, 2, padding=(0, 3), padding_mode="reflect").double(),
        2, 2, 6, 5, frozen=frozen,
    )  # fmt: skip


PADDED = {"padding": 1, "padding_mode": "circular"}


def _with_own_convolution(conv: nn.Module) -> None:
    """As for images that tile seamlessly."""

    def around(self: nn.Module, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 0, 0), mode="circular"), weight, bias, padding=(1, 0))

    conv._conv_forward = around.__get__(conv)


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("is_converted_before", [False, True])
@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"padding": 1}, _with_own_convolution),
        (PADDED, lambda m: setattr(m, "_reversed_padding_repeated_twice", [1, 1, 0, 0])),
        (PADDED, lambda m: setattr(m, "padding", (0, 0))),
        (PADDED, lambda m: setattr(m, "padding_mode", "zeros")),
    ],
    ids=["_conv_forward", "_reversed_padding_repeated_twice", "padding", "padding_mode"],
)
def test_what_is_changed_of_a_convolution(options, change, is_converted_before, wanted) -> None:
    """Was ignored, where the stock layer goes by it."""
    results = []
    for convert in (None, memsave.convert):
        torch.manual_seed(0)
        conv = nn.Conv2d(2, 3, 3, **options).double().requires_grad_(wanted)
        steps = [change, convert or (lambda m: m)]
        for step in reversed(steps) if is_converted_before else steps:
            step(conv)
        x = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
        results.append(helpers.step(conv, x))
    same(*results)


@pytest.mark.parametrize("padding", [0, 1, "same", "valid"])
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_layout_of_padded_convolutions(mode: str, padding: str | int) -> None:
    """Padding by nothing makes another layout, too, and with it other last digits."""
    results = []
    for m in (nn, memsave.nn):
        torch.manual_seed(0)
        conv = m.Conv2d(3, 6, 3, padding=padding, padding_mode=mode, bias=False)
        x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
        results.append(conv(x.requires_grad_()))
    same(*results, layout=True, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_padded_convolutions_under_autocast(mode: str) -> None:
    """Gradients of what was copied were added in 16 bits."""
    results = []
    for m in (nn, memsave.nn):
        torch.manual_seed(0)
        conv = m.Conv2d(4, 6, 3, padding=1, padding_mode=mode)
        x = torch.randn(2, 4, 9, 9, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = conv(x)
        y.float().square().sum().backward()
        results.append((y, x.grad, conv.weight.grad))
    same(*results, rtol=0, atol=1e-4)


def test_padding_to_the_same_size_under_autocast_keeps_no_more() -> None:
    """Autocast casts a weight once, for all calls of a layer; casts of ours would be kept each."""

    def twice(conv: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return conv(conv(x))

    x = torch.randn(1, 64, 8, 8, requires_grad=True)
    stock = nn.Conv2d(64, 64, 3, padding="same")
    ours = memsave.nn.Conv2d(64, 64, 3, padding="same")
    sizes = [helpers.kept(lambda conv=conv: twice(conv)) for conv in (stock, ours)]
    assert sizes[0] == sizes[1]
    same(ours.requires_grad_(False)(x), F.conv2d(x, ours.weight, ours.bias, padding="same"))


def test_relu_of_infinities() -> None:
    """Was nan: a mask of 0 times inf."""
    x = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf, math.nan], requires_grad=True)
    for name in ("ReLU", "ReLUFromOutput"):
        y, g = helpers.step(getattr(memsave.nn, name)(), x)
        expected_y, expected_g = helpers.step(nn.ReLU(), x)
        same(y, expected_y)
        same(g, expected_g)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_relu_with_an_infinite_gradient(value: float) -> None:
    """What comes in where the input is negative does not come out: 0, not 0 times inf."""
    results = []
    for layer in (nn.ReLU(), memsave.nn.ReLU(), memsave.nn.ReLUFromOutput()):
        x = torch.tensor([-1.0, 0.0, 1.0], requires_grad=True)
        layer(x).backward(torch.full((3,), value))
        results.append(x.grad)
    same(results[0], torch.tensor([0.0, 0.0, value]))
    same(results[1], results[0])
    same(results[2], results[0])


@pytest.mark.parametrize("name", ["Dropout", "DropoutFromRng"])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("inplace", [True, False])
def test_dropout(name: str, p: float, train: bool, inplace: bool) -> None:
    """Its mask was drawn with p = 0.5 whatever p, and applied in eval; or it crashed."""
    results = []
    for layer in (nn.Dropout(p, inplace), getattr(memsave.nn, name)(p, inplace)):
        layer.train(train)
        x = torch.randn(50, 50, generator=torch.Generator().manual_seed(1)).requires_grad_()
        results.append(helpers.step(lambda x, f=layer: f(x * 1), x))
    same(results[1], results[0])


def test_dropout_scales_gradients_by_what_it_kept() -> None:
    """The same fact without the stock layer: y and its gradient have one mask."""
    x = torch.ones(10_000, requires_grad=True)
    y = memsave.nn.Dropout(0.9)(x)
    y.sum().backward()
    same(x.grad, y.detach())
    assert 0.05 < (y != 0).double().mean() < 0.15


def test_changed_running_statistics() -> None:
    """Went unnoticed: a change between forward and backward is an error, as with stock."""
    for module in (nn, memsave.nn):
        layer = module.BatchNorm2d(3).eval()
        y = layer(torch.randn(2, 3, 4, 4, requires_grad=True))
        layer.running_var.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0, None])
def test_num_batches_tracked(dims: int, momentum: float | None) -> None:
    """Was not updated, which ``momentum=None`` (a cumulative average) needs, or crashed."""

    def make(m):
        return getattr(m, f"BatchNorm{dims}d")(3, momentum=momentum).double()

    assert agree(make, 4, 3, *[5] * dims).num_batches_tracked == 2


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_num_batches_tracked_set_to_none(train: bool) -> None:
    """Old checkpoints have none."""

    def make(m):
        layer = m.BatchNorm2d(3).train(train)
        layer.num_batches_tracked = None
        return layer

    agree(make, 4, 3, 5, 5)


def test_subclasses_keep_their_forward() -> None:
    """Were replaced, so that weight standardization and activations disappeared."""

    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight / self.weight.std((1, 2, 3), keepdim=True)
            return self._conv_forward(x, weight, self.bias)

    class NormAct(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(super().forward(x))

    agree(lambda m: nn.Sequential(Standardized(3, 4, 3), NormAct(4), m.ReLU()), 2, 3, 8, 8)


# Crashes.


@either
@every_float
def test_convolution_dtypes(dtype: torch.dtype, frozen: bool) -> None:
    """Frozen convolutions crashed in float64."""
    agree(lambda m: m.Conv2d(3, 4, 3).to(dtype), 2, 3, 8, 8, frozen=frozen)
    agree(lambda m: m.ConvTranspose2d(3, 4, 3).to(dtype), 2, 3, 8, 8, frozen=frozen)


@either
@every_float
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_batch_norm_dtypes(dtype: torch.dtype, train: bool, frozen: bool) -> None:
    """Frozen in eval mode it crashed in all but float32."""

    def make(m):
        layer = m.BatchNorm2d(3).to(dtype)
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2)
        return layer.train(train)

    agree(make, 4, 3, 5, 5, frozen=frozen)


@either
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_batch_norm_of_half_input_with_float_parameters(dtype, train: bool, frozen: bool) -> None:
    """What ``model.half()`` with float32 norms gives."""
    results = []
    for module in (nn, memsave.nn):
        torch.manual_seed(0)
        layer = module.BatchNorm2d(3).train(train).requires_grad_(not frozen)
        x = torch.randn(4, 3, 5, 5).to(dtype).requires_grad_()
        results.append(helpers.step(layer, x))
    same(results[1], results[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"momentum": None},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
        {"eps": 0.1},
    ],
    ids=str,
)
def test_batch_norm_options(options: dict, train: bool) -> None:
    """Crashed; without running statistics in eval by a segmentation fault."""
    for dims in (1, 2, 3):

        def make(m, dims=dims):
            layer = getattr(m, f"BatchNorm{dims}d")(3, **options)
            return layer.double().train(train)

        x = torch.randn(4, 3, *[5] * dims).double()
        agree(make, x=x)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm_of_one_example_with_a_channels_last_gradient(
    affine: bool, create_graph: bool
) -> None:
    """Where stock is wrong (torch 2.13), so that the properties cannot compare with it."""
    layer = memsave.convert(nn.InstanceNorm2d(3, affine=affine).double())
    x = torch.randn(1, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(1, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    y, wanted = layer(x), [x, *layer.parameters()]
    ours = torch.autograd.grad(y, wanted, g, create_graph=create_graph, retain_graph=True)
    same(ours, torch.autograd.grad(y, wanted, g.contiguous()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("train", [True, False])
def test_instance_norm_with_running_statistics_of_another_dtype(
    train: bool, dtype: torch.dtype
) -> None:
    """Stock casts them, where batch norm raises or computes in a wider one."""

    def make(m):
        layer = m.InstanceNorm2d(3, track_running_stats=True).to(dtype).train(train)
        layer.running_mean.data = torch.tensor([0.3, -1.7, 0.03])
        layer.running_var.data = torch.tensor([1.3, 0.7, 2.9])
        return layer

    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    agree(make, x=x)
    assert make(memsave.nn)(x).equal(make(nn)(x))


def test_batch_norm_1d_takes_features() -> None:
    """Input of shape (n, c)."""
    for train in (True, False):
        agree(lambda m, t=train: m.BatchNorm1d(3).double().train(t), 5, 3)


@every_float
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ceil_mode": True},
        {"stride": 1, "padding": 1},
        {"dilation": 2},
        {"stride": 3, "padding": 1, "dilation": 2, "ceil_mode": True},
    ],
    ids=str,
)
def test_max_pool(dims: int, dtype: torch.dtype, options: dict) -> None:
    """Crashed with ``ceil_mode`` and in all dtypes but float32."""
    x = torch.randn(2, 3, *[7] * dims).to(dtype)
    agree(lambda m: getattr(m, f"MaxPool{dims}d")(3, **options), x=x)
    agree(lambda m: getattr(m, f"MaxPool{dims}d")(3, **options), x=x[0])


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_max_pool_returns_indices(dims: int) -> None:
    """Crashed; MaxUnpool needs them."""
    results = []
    for module in (nn, memsave.nn):
        pool = getattr(module, f"MaxPool{dims}d")(2, return_indices=True)
        x = torch.randn(2, 3, *[6] * dims, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        y, places = pool(x)
        assert not places.requires_grad
        back = getattr(nn, f"MaxUnpool{dims}d")(2)(y, places)
        results.append((y, places, back, *torch.autograd.grad(back.square().sum(), x)))
    same(results[1], results[0])


def test_max_pool_of_ties_nan_and_infinities() -> None:
    """The gradient goes where stock sends it."""
    for fill in (0.0, math.nan, -math.inf, math.inf):
        x = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(1))
        x[..., ::2, :] = fill
        agree(lambda m: m.MaxPool2d(3, 2, 1), x=x)


@either
@pytest.mark.parametrize("kernel", [3, 2, 4])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_padding_by_name(padding: str, kernel: int, dilation: int, frozen: bool) -> None:
    """``padding="same"`` crashed; an even kernel pads one more on the right."""
    for dims in (1, 2, 3):

        def make(m, dims=dims):
            conv = getattr(m, f"Conv{dims}d")
            return conv(2, 3, kernel, padding=padding, dilation=dilation).double()

        agree(make, 2, 2, *[8] * dims, frozen=frozen)


@either
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unbatched_input(dims: int, frozen: bool) -> None:
    """Crashed."""
    for name in ("Conv", "ConvTranspose"):

        def make(m, name=name):
            return getattr(m, f"{name}{dims}d")(2, 3, 3, 2, 1).double()

        agree(make, 2, *[6] * dims, frozen=frozen)
    agree(lambda m: getattr(m, f"MaxPool{dims}d")(2), 2, *[6] * dims)


@either
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_output_size_of_a_transposed_convolution(dims: int, frozen: bool) -> None:
    """Crashed."""
    for size in (9, 10):
        results = []
        for module in (nn, memsave.nn):
            torch.manual_seed(0)
            layer = getattr(module, f"ConvTranspose{dims}d")(2, 3, 3, stride=2, padding=1)
            layer.double().requires_grad_(not frozen)
            x = torch.randn(2, 2, *[5] * dims).double().requires_grad_()
            run = lambda x, f=layer, s=size: f(x, output_size=[s] * dims)  # noqa: E731
            results.append(helpers.step(run, x, model=layer))
        assert results[0][0].shape[2:] == (size,) * dims
        same(results[1], results[0])


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_bias_of_a_transposed_convolution_with_other_channels(dims: int) -> None:
    """The gradient of the bias had the shape of the input's channels."""

    agree(lambda m: getattr(m, f"ConvTranspose{dims}d")(5, 3, 2).double(), 2, 5, *[4] * dims)
    results = []
    for module in (nn, memsave.nn):
        torch.manual_seed(0)
        layer = getattr(module, f"ConvTranspose{dims}d")(5, 3, 2)
        layer.weight.requires_grad_(False)
        results.append(helpers.step(layer, torch.ones(2, 5, *[4] * dims)))
    assert results[0][1].shape == (3,)
    same(results[1], results[0])


@either
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups(groups: int, frozen: bool) -> None:
    """Depthwise convolutions included."""
    agree(lambda m: m.Conv2d(4, 4, 3, groups=groups).double(), 2, 4, 6, 6, frozen=frozen)
    agree(lambda m: m.ConvTranspose2d(4, 4, 3, groups=groups).double(), 2, 4, 6, 6, frozen=frozen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """Crashed."""
    results = []
    for model in helpers.pair(helpers.ConvNet, torch.float32):
        model.features[0].requires_grad_(False)
        with torch.autocast("cpu", dtype=dtype):
            results.append(helpers.step(model, helpers.image(dtype=torch.float32)))
    same(results[1], results[0], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_parametrized_layers(name: str) -> None:
    """Crashed."""
    change = getattr(parametrizations, name)
    agree(lambda m: nn.Sequential(change(m.Conv2d(3, 4, 3)), m.ReLU()).double(), 2, 3, 6, 6)
    agree(lambda m: nn.Sequential(change(m.Linear(3, 4)), m.ReLU()).double(), 2, 3)


class Changing(nn.Module):
    """Another weight whenever it is read, as by spectral normalization while training."""

    reads = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.reads += 1
        return weight * self.reads


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", memsave.nn.__all__)
def test_weights_are_read_as_often_as_by_stock(name: str, training: bool) -> None:
    cls = getattr(memsave.nn, name)
    (stock,), reads = cls.__bases__, []
    for one in (cls, stock):
        layer = helpers.build(one).train(training)
        if not isinstance(getattr(layer, "weight", None), nn.Parameter):
            return
        parametrize.register_parametrization(layer, "weight", Changing())
        for wanted in (True, False):
            layer.requires_grad_(wanted)
            layer(helpers.module_input(stock))
        reads.append(layer.parametrizations["weight"][0].reads)
    assert reads[0] == reads[1]


def test_pruned_layers() -> None:
    """Crashed."""

    def make(m):
        layer = prune.l1_unstructured(m.Conv2d(3, 4, 3).double(), "weight", 0.5)
        return nn.Sequential(layer, m.ReLU())

    agree(make, 2, 3, 6, 6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks(reentrant: bool) -> None:
    """Non-reentrant checkpointing crashed."""
    results = []
    for model in helpers.pair(lambda: helpers.ConvNet().eval()):

        def run(x, model=model):
            y = checkpoint(model.features, x, use_reentrant=reentrant)
            return model.head(y.mean((2, 3)))

        results.append(helpers.step(run, helpers.image(), model=model))
    same(results[1], results[0])


def test_per_sample_gradients() -> None:
    """``torch.func`` crashed."""
    results = []
    for model in helpers.pair(lambda: helpers.ConvNet().eval()):
        state = {name: p.detach() for name, p in model.named_parameters()}

        def loss(state, x, model=model):
            return torch.func.functional_call(model, state, (x[None],)).square().sum()

        results.append(torch.func.vmap(torch.func.grad(loss), (None, 0))(state, helpers.image(4)))
    same(results[1], results[0])


# Memory.


def test_nothing_of_the_input_survives_a_frozen_layer() -> None:
    """Masks lay on ``ctx``, where hooks do not see them; and backward made float32 zeros."""
    for make, shape in (
        (lambda: memsave.nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
        (lambda: memsave.nn.BatchNorm2d(3).eval(), (2, 3, 8, 8)),
        (lambda: memsave.nn.MaxPool2d(2), (2, 3, 8, 8)),
        (lambda: memsave.nn.ReLU(), (2, 3, 8, 8)),
        (lambda: memsave.nn.Dropout(), (2, 3, 8, 8)),
    ):
        layer = make().requires_grad_(False)
        x = torch.randn(shape, requires_grad=True)
        free = [*layer.parameters(), *layer.buffers()]
        size = helpers.kept(lambda f=layer, x=x: f(x), free)
        assert size <= x.nbytes / 16
        on_node = getattr(layer(x).grad_fn, "__dict__", {})
        assert not any(isinstance(value, Tensor) for value in on_node.values())


# Options that are no numbers of Python's, which torch takes for such.


@either
@pytest.mark.parametrize("number", [np.int64, torch.tensor], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "option",
    [
        *("MaxPool2d.kernel_size", "MaxPool2d.stride", "MaxPool2d.padding", "MaxPool2d.dilation"),
        *("MaxPool1d.stride", "AvgPool2d.kernel_size", "AvgPool2d.stride"),
    ],
)
def test_integers_of_other_libraries(option: str, number, frozen: bool) -> None:
    """Raised: a truth value of an empty array, or something that is not iterable."""
    cls, name = option.split(".")
    options = {"kernel_size": 3, name: number(1 if name in ("padding", "dilation") else 2)}
    agree(lambda m: getattr(m, cls)(**options).double(), 2, 2, *[7] * int(cls[-2]), frozen=frozen)


def test_integers_of_numpy_in_a_transposed_convolution() -> None:
    x, weight = torch.randn(2, 3, 5, 5, requires_grad=True), torch.randn(3, 2, 3, 3)
    results = []
    for functional in (F, memsave.functional):
        y = functional.conv_transpose2d(x, weight, stride=np.int64(2))
        results.append((y, torch.autograd.grad(y.sum(), x)))
    same(*results)


@pytest.mark.parametrize("alpha", [np.float32(0.5), torch.tensor(0.5)], ids=["numpy", "tensor"])
@pytest.mark.parametrize("cls", ["ELU", "CELU"])
def test_another_librarys_alpha(cls: str, alpha: object) -> None:
    """Failed in backward, by rows that ``convert`` chooses with example inputs."""
    stock = nn.Sequential(nn.Linear(3, 3), getattr(nn, cls)(), nn.Linear(3, 3))
    stock[1].alpha = alpha
    x = torch.randn(4, 3)
    ours = memsave.convert(copy.deepcopy(stock), x)
    assert type(ours[1]).__name__ == f"{cls}FromOutput"
    same(helpers.step(ours, x), helpers.step(stock, x))


@pytest.mark.parametrize("cls", ["Dropout", "AlphaDropout", "Dropout2d"])
@pytest.mark.parametrize("p", [np.float32(0.4), torch.tensor(0.4)], ids=["numpy", "tensor"])
def test_another_librarys_probability(cls: str, p: object) -> None:
    """Drew other numbers, as 1 - p was rounded to 32 bits."""
    results = []
    for namespace in (nn, memsave.nn):
        layer = getattr(namespace, cls)()
        layer.p = p
        x = torch.randn(4, 50, 5, 5, generator=torch.Generator().manual_seed(0))
        results.append(helpers.step(layer, x.requires_grad_()))
    same(*results, rtol=0, atol=0)


def test_a_list_that_is_changed_before_backward() -> None:
    """It was read again there."""
    arrays = [torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)]
    for wanted in arrays:  # alone: with both, stock keeps as much
        wanted.requires_grad_()
        results = []
        for functional in (F, memsave.functional):
            padding = [1, 2]
            y = functional.conv2d(*arrays, padding=padding)
            padding[:] = [0, 0]
            results.append(torch.autograd.grad(y.sum(), wanted))
        wanted.requires_grad_(False)
        same(*results)


def test_dilation_as_a_number_with_padding_to_the_same_size() -> None:
    """Raised: an int is not iterable."""
    conv = nn.Conv2d(2, 3, 3, padding="same").double()
    conv.dilation = 2
    x = torch.randn(2, 2, 9, 9, dtype=torch.float64, requires_grad=True)
    expected = helpers.step(conv, x)
    same(helpers.step(memsave.convert(conv), x), expected)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_dilation_of_too_many_axes_with_padding_to_the_same_size(mode: str) -> None:
    """Raised another error than stock."""
    conv = nn.Conv1d(2, 3, 3, padding="same", padding_mode=mode)
    conv.dilation = (1, 2)
    for layer in (conv, memsave.convert(copy.deepcopy(conv))):
        with pytest.raises(RuntimeError, match="dilation"):
            layer(torch.randn(2, 2, 9))


def test_padding_by_name_of_a_transposed_convolution() -> None:
    conv = nn.ConvTranspose2d(2, 3, 3)
    conv.padding = "same"
    for layer in (conv, memsave.convert(copy.deepcopy(conv))):
        with pytest.raises(AssertionError):
            layer(torch.randn(2, 2, 9, 9))


@either
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kernel", [2, (2, 3), (3, 4), 4])
def test_the_gradient_with_uneven_padding_is_stored_as_stocks(kernel, format, frozen) -> None:
    """It was a view of a padded one: ``g.view(-1)`` raised."""
    x = torch.randn(3, 4, 9, 8).to(memory_format=format).requires_grad_()
    results = []
    for change in (lambda m: m, memsave.convert):
        torch.manual_seed(0)
        conv = change(nn.Conv2d(4, 6, kernel, padding="same")).requires_grad_(not frozen)
        results += torch.autograd.grad(conv(x).sum(), x)
    same(*results, layout=True, rtol=1e-5, atol=1e-5)
    assert results[1].untyped_storage().nbytes() == x.untyped_storage().nbytes()


def test_a_threshold_below_which_everything_is_curved() -> None:
    """Overflowed, in :func:`math.exp`."""
    model, x = nn.Sequential(nn.Softplus(1, -1000.0), nn.Linear(3, 3)), torch.randn(2, 3)
    expected = helpers.step(model, x)
    same(helpers.step(memsave.convert(model, x), x), expected)


# Sums over many rows.

ROWS = 1 << 17


@pytest.mark.parametrize(
    ("cls", "dtype"),
    [
        *((f"{cls}FromOutput", torch.float32) for cls in ("RMSNorm", "LayerNorm")),
        *(("RMSNorm", dtype) for dtype in (torch.float32, torch.bfloat16)),
    ],
)
def test_the_gradient_of_parameters_over_many_rows(cls: str, dtype: torch.dtype) -> None:
    """Lost a digit with every tenfold, where stock's (of RMSNorm) does not."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(ROWS, 4, generator=generator) + 1).to(dtype)
    grads = {}
    for wide in (dtype, torch.float64):
        layer = getattr(memsave.nn, cls)(4).to(wide)
        layer(x.to(wide)).backward(torch.ones(ROWS, 4, dtype=wide))
        grads[wide] = [p.grad.double() for p in layer.parameters()]
    # (The normalized inputs are rounded, each in its own way.)
    loose = 1e-6 if dtype is torch.float32 else 1e-2
    for found, exact in zip(grads[dtype], grads[torch.float64], strict=True):
        torch.testing.assert_close(found, exact, rtol=loose, atol=loose * ROWS**0.5)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        *(("RMSNormFromOutput", {"elementwise_affine": affine}) for affine in (True, False)),
        ("RMSNorm", {"elementwise_affine": False}),
        ("LayerNormFromOutput", {"bias": False}),
        ("LayerNormFromOutput", {"elementwise_affine": False}),
    ],
)
def test_the_gradient_of_an_input_where_parameters_are_missing(cls: str, options: Any) -> None:
    """Sums along a row were of one element after the other: with fewer digits, and slow."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(64, 2048, generator=generator) + 1 for _ in range(2))

    def gradient(library: Any, name: str, dtype: torch.dtype) -> Tensor:
        layer = getattr(library, name)(2048, eps=1e-5, **options).to(dtype).requires_grad_(False)
        inputs = x.to(dtype).requires_grad_()
        return torch.autograd.grad(layer(inputs), inputs, g.to(dtype))[0].double()

    stock = cls.removesuffix("FromOutput")
    exact = gradient(nn, stock, torch.float64)
    off = (gradient(nn, stock, torch.float32) - exact).norm()
    assert (gradient(memsave.nn, cls, torch.float32) - exact).norm() < 1.5 * off


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_softplus_in_16_bits_where_its_output_is_small(dtype: torch.dtype) -> None:
    """In float16 it has few digits, or none."""
    x = torch.tensor([-18.0, -16.0, -15.0, 1.0], dtype=dtype, requires_grad=True)
    layers = (nn.Softplus(), memsave.nn.SoftplusFromOutput())
    found = [torch.autograd.grad(layer(x), x, torch.full_like(x, 4096))[0] for layer in layers]
    same(*found, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("weight", [None, torch.tensor([0.1, 0.1])], ids=["alike", "weighted"])
@pytest.mark.parametrize("shape", [(1 << 20, 2), (4, 2, 512, 512)], ids=["rows", "images"])
def test_the_mean_of_many_losses(shape: tuple[int, ...], weight: Tensor | None) -> None:
    """The sum of the weights was rounded with each: a percent of a million."""
    target = torch.zeros(shape[0], *shape[2:], dtype=torch.long)
    results = []
    for functional in (F, memsave.functional):
        x = torch.zeros(shape, requires_grad=True)
        results += torch.autograd.grad(functional.cross_entropy(x, target, weight), x)
    same(*results, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1e30, 1e-30])
def test_large_and_small_weights_of_a_norm_from_its_output(size: float) -> None:
    """Sums over rows were of what is not normalized yet: infinite, or zero."""
    torch.manual_seed(0)
    x, g = torch.randn(64, 8), torch.randn(64, 8) * size**0.5
    results = []
    for dtype in (torch.float32, torch.float64):
        layer = memsave.nn.LayerNormFromOutput(8, dtype=dtype)
        torch.manual_seed(1)
        for parameter in layer.parameters():
            parameter.data = (torch.rand(8) + 0.5).to(dtype) * size
        results.append(torch.autograd.grad(layer(x.to(dtype)), [*layer.parameters()], g.to(dtype)))
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(
            found.double() / exact, torch.ones(8).double(), rtol=1e-4, atol=0
        )


def test_calls_of_one_convolution_under_autocast_share_its_narrow_weight() -> None:
    """Also where the padding is uneven, and the rule would make a copy at each call."""
    x = torch.randn(1, 16, 4, 4, requires_grad=True)
    stock = nn.Conv2d(16, 16, 4, padding="same")
    results = []
    for conv in (stock, memsave.convert(copy.deepcopy(stock))):

        def run(conv: nn.Module = conv) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return conv(conv(conv(x)))

        size = helpers.kept(run, [*conv.parameters()])
        results.append((size, [*torch.autograd.grad(run().sum(), [x, *conv.parameters()])]))
    (most, expected), (size, grads) = results
    assert size <= most
    same(grads, expected, rtol=2**-6, atol=0.05)


def test_no_eps_over_many_elements() -> None:
    """So many that a kernel of memsave's may run."""
    x = torch.randn(8, 3, 64, 64, requires_grad=True)
    for m in (nn, memsave.nn):
        with pytest.raises(ValueError, match="eps must be positive"):
            m.BatchNorm2d(3, eps=0.0)(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_output_padding_of_a_stride(frozen: bool) -> None:
    """Which a larger dilation allows."""
    results = []
    for m in (nn, memsave.nn):
        torch.manual_seed(0)
        layer = m.ConvTranspose2d(2, 2, 3, stride=2, dilation=3, output_padding=2)
        x = torch.randn(1, 2, 5, 5, requires_grad=True)
        results.append(helpers.step(layer.requires_grad_(not frozen), x))
    same(*results)


def test_a_frozen_convolution_to_the_same_size_under_autocast_keeps_its_weight() -> None:
    layer = memsave.nn.Conv2d(3, 4, 2, padding="same").requires_grad_(False)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with torch.autocast("cpu"):
        size = helpers.kept(lambda: layer(x), [x, *layer.parameters()])
    assert size <= 2 * layer.weight.numel()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("dropout1d", (4, 6)), ("dropout3d", (4, 5, 6, 2))),  # one example
        *(("dropout2d", (4, 5, 6)), ("dropout2d", (2, 4, 5, 6, 2))),  # of which stock warns
    ],
)
def test_dropout_of_channels_of_other_axes(name: str, shape: tuple[int, ...]) -> None:
    results, told = [], []
    for f in (nn.functional, memsave.functional):
        x = torch.ones(shape, requires_grad=True)
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = getattr(f, name)(x, 0.5, True)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
        told.append([str(warning.message) for warning in caught])
    same(results[1], results[0], rtol=0, atol=0)
    assert told[1] == told[0]


def test_dropout_of_nothing_draws_nothing() -> None:
    drawn = []
    for f in (nn.functional, memsave.functional):
        torch.manual_seed(0)
        f.dropout1d(torch.ones(2, 3, 0, requires_grad=True), 0.5, True)
        drawn.append(torch.rand(3))
    same(*drawn, rtol=0, atol=0)


@pytest.mark.parametrize("stride", [[], ()], ids=str)
@pytest.mark.parametrize("size", [(6, 6), (7, 6)], ids=str)
def test_an_empty_stride_of_pooling_is_the_size_of_the_window(stride, size) -> None:
    results = []
    for f in (nn.functional, memsave.functional):
        x = torch.randn(1, 2, *size, generator=torch.Generator().manual_seed(0)).requires_grad_()
        results.append(helpers.step(lambda x, f=f: f.max_pool2d(x, 2, stride), x))
    same(*results)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        ("ELU", {"alpha": -1.0}),
        ("CELU", {"alpha": -1.0}),
        ("CELU", {"alpha": 0.0}),
        ("Softplus", {"beta": 0.0}),
    ],
)
def test_curves_that_their_output_does_not_tell(cls: str, options: dict[str, float]) -> None:
    x = torch.randn(50, requires_grad=True)
    layers = getattr(nn, cls)(**options), getattr(memsave.nn, f"{cls}FromOutput")(**options)
    expected, actual = (helpers.attempt(helpers.step, layer, x) for layer in layers)
    if isinstance(expected, type):
        assert actual is expected
    else:
        same(actual, expected)


@pytest.mark.parametrize("axes", [(), (5,)], ids=["rows", "places"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_targets_that_are_ignored(weighted: bool, label_smoothing: float, axes) -> None:
    """By an index that no class has: by default -100."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, *axes, generator=generator, requires_grad=True)
    target = torch.randint(3, (4, *axes), generator=generator)
    target[1] = -100
    weight = torch.tensor([0.5, 1.0, 2.0]) if weighted else None
    options = {"label_smoothing": label_smoothing, "weight": weight}
    losses = (m.CrossEntropyLoss(**options) for m in (nn, memsave.nn))
    same(*(helpers.step(lambda x, f=loss: f(x, target), x) for loss in losses))


def test_meta_tensors_under_autocast_of_the_cpu() -> None:
    """For which torch has no autocast, and says so where it is asked."""
    x = torch.randn(2, 3, device="meta", requires_grad=True)
    weight = torch.ones(1, device="meta")
    with torch.autocast("cpu"):
        results = [f.prelu(x, weight) for f in (nn.functional, memsave.functional)]
    assert results[0].dtype == results[1].dtype == torch.float32


@pytest.mark.parametrize("shape", [(), (6,)], ids=str)
def test_a_slope_of_a_single_example(shape: tuple[int, ...]) -> None:
    """Which has no axis of channels, as the row has."""
    stock, x = nn.Sequential(nn.PReLU(), nn.ReLU()), torch.randn(shape, requires_grad=True)
    assert memsave.report(stock, x).rows
    same(helpers.step(memsave.convert(copy.deepcopy(stock), x), x), helpers.step(stock, x))


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_max_pool_of_minus_infinity_with_the_channels_last(dtype: torch.dtype, padding) -> None:
    """Stock's index along three axes is one outside of the window, then; ours may not be."""
    x = torch.full((1, 2, 5, 5, 5), -math.inf, dtype=dtype)
    x = x.to(memory_format=torch.channels_last_3d).requires_grad_()
    y, _ = memsave.functional.max_pool3d(x, 2, 2, padding, 2, return_indices=True)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx.sum() == y.numel()


@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("of_parameters", [True, False])
def test_group_norm_with_vectors_that_are_not_contiguous(of_x: bool, of_parameters: bool) -> None:
    x, vectors, results = torch.randn(2, 4, 5), torch.randn(2, 8), []
    for function in (F.group_norm, memsave.functional.group_norm):
        args = [x.clone().requires_grad_(of_x), vectors.clone().requires_grad_(of_parameters)]
        y = function(args[0], 2, *args[1][:, ::2])
        wanted = [t for t in args if t.requires_grad]
        results.append([y, *(torch.autograd.grad(y.square().sum(), wanted) if wanted else ())])
    same(*results)


@pytest.mark.parametrize("train", [True, False])
def test_instance_norm_without_momentum(train: bool) -> None:
    """It is 0 then (of batch normalization, a cumulative average)."""
    stock = nn.InstanceNorm1d(3, momentum=None, affine=True, track_running_stats=True).train(train)
    ours, x, results = memsave.convert(copy.deepcopy(stock)), torch.randn(2, 3, 5), []
    for module in (stock, ours):
        results.append(
            [helpers.step(module, x.clone().requires_grad_()), dict(module.state_dict())]
        )
    same(*results)
