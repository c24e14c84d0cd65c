"""What stock refuses is refused by the same type of error, at forward; what it takes is taken."""

import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memsave
import memsave.nn

BATCH = torch.randn(2, 3, 8, 8)


ERRORS = {
    "wrong channels": (lambda m: m.Conv2d(4, 2, 3), BATCH),
    "wrong channels, transposed": (lambda m: m.ConvTranspose2d(4, 2, 3), BATCH),
    "wrong features": (lambda m: m.Linear(5, 2), BATCH),
    "wrong channels of statistics": (lambda m: m.BatchNorm2d(4), BATCH),
    "wrong channels of statistics, eval": (lambda m: m.BatchNorm2d(4).eval(), BATCH),
    "too few dimensions": (lambda m: m.Conv2d(3, 2, 3), BATCH[0, 0]),
    "too many dimensions": (lambda m: m.Conv2d(3, 2, 3), BATCH[None]),
    "too many dimensions, transposed": (lambda m: m.ConvTranspose2d(3, 2, 3), BATCH[None]),
    "dimensions of BatchNorm1d": (lambda m: m.BatchNorm1d(3), BATCH),
    "dimensions of BatchNorm2d": (lambda m: m.BatchNorm2d(3), BATCH[0]),
    "dimensions of MaxPool2d": (lambda m: m.MaxPool2d(2), BATCH[0, 0]),
    "wrong dtype": (lambda m: m.Conv2d(3, 2, 3), BATCH.double()),
    "wrong dtype, transposed": (lambda m: m.ConvTranspose2d(3, 2, 3), BATCH.double()),
    "wrong dtype of statistics": (lambda m: m.BatchNorm2d(3).double(), BATCH),
    "integers": (lambda m: m.Conv2d(3, 2, 3), BATCH.long()),
    "kernel larger than the input": (lambda m: m.Conv2d(3, 2, 9), BATCH),
    "window larger than the input": (lambda m: m.MaxPool2d(9), BATCH),
    "padding of more than half a window": (lambda m: m.MaxPool2d(2, padding=2), BATCH),
    "reflection beyond the input": (
        lambda m: m.Conv2d(3, 2, 3, padding=8, padding_mode="reflect"),
        BATCH,
    ),
    "one value per channel": (lambda m: m.BatchNorm2d(3), BATCH[:1, :, :1, :1]),
    "negative p": (lambda m: m.Dropout(-0.1), BATCH),
    "p above 1": (lambda m: m.Dropout(1.1), BATCH),
    "string for p": (lambda m: m.Dropout("half"), BATCH),
    "same padding with stride": (lambda m: m.Conv2d(3, 2, 3, stride=2, padding="same"), BATCH),
    "unknown padding mode": (lambda m: m.Conv2d(3, 2, 3, padding_mode="mirror"), BATCH),
    "groups that do not divide": (lambda m: m.Conv2d(3, 2, 3, groups=2), BATCH),
    "a window of one axis too many": (lambda m: m.Conv1d(3, 2, (3, 3)), BATCH),
    "a window of one axis too few": (lambda m: m.Conv2d(3, 2, (3,), padding="same"), BATCH),
    "a window of no axes": (lambda m: m.Conv2d(3, 2, ()), BATCH),
    "a window of no axes, transposed": (lambda m: m.ConvTranspose2d(3, 2, ()), BATCH),
    "padding of no axes": (
        lambda m: m.Conv2d(3, 2, 1, padding=(), padding_mode="circular"),
        BATCH,
    ),
    "zero stride": (lambda m: m.Conv2d(3, 2, 3, stride=0), BATCH),
    "zero stride of MaxPool2d": (lambda m: m.MaxPool2d(2, stride=0), BATCH),
    "zero stride of AvgPool2d": (lambda m: m.AvgPool2d(2, stride=0), BATCH),
    "negative lambda": (lambda m: m.Softshrink(-0.5), torch.ones(64)),
    "one size of two": (lambda m: m.AdaptiveAvgPool2d((7,)), BATCH),
    "no size": (lambda m: m.AdaptiveAvgPool2d(None), BATCH),
    "dropout of integers": (lambda m: m.Dropout(), BATCH.long()),
    "no eps": (lambda m: m.BatchNorm2d(3, eps=0.0, affine=False), BATCH),
    "no eps, with parameters": (lambda m: m.BatchNorm2d(3, eps=0.0), BATCH),
    "a negative eps": (lambda m: m.BatchNorm2d(3, eps=-1.0).eval(), BATCH),
    "an empty batch for running statistics": (
        lambda m: m.InstanceNorm2d(3, affine=True, track_running_stats=True).eval(),
        torch.zeros(0, 3, 4, 4),
    ),
    "not a tensor": (lambda m: m.ReLU(), [1.0]),
    "not a tensor for a convolution": (lambda m: m.Conv2d(3, 2, 3), "image"),
    "not a tensor for a norm": (lambda m: m.BatchNorm2d(3), None),
}


@pytest.mark.parametrize("wanted", [True, False], ids=["input wants a gradient", "it does not"])
@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_errors_are_stock_errors(case: str, wanted: bool) -> None:
    """Same type, raised at forward. (The properties draw valid calls only.)"""
    make, x = ERRORS[case]
    if isinstance(x, Tensor):
        x = x.detach().clone()
        x.requires_grad_(wanted and x.is_floating_point())
    expected, actual = (helpers.attempt(lambda m=m: make(m)(x)) for m in (nn, memsave.nn))
    assert isinstance(expected, type)
    assert actual is expected


@pytest.mark.parametrize(
    "wrong", [None, "image", [1.0], np.ones((2, 4))], ids=lambda v: type(v).__name__
)
@helpers.every_class
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_what_is_no_tensor_is_refused_as_stock_refuses_it(cls: type[nn.Module], wrong: Any) -> None:
    modes = [{}]
    if cls.__name__ in ("Conv1d", "Conv2d", "Conv3d"):
        modes += [{"padding": 1, "padding_mode": "circular"}, {"padding": "same"}]
    for options, frozen in itertools.product(modes, [False, True]):
        expected, *found = (
            helpers.attempt(helpers.build(each, **options).requires_grad_(not frozen), wrong)
            for each in (cls, *helpers.drop_ins(cls))
        )
        assert isinstance(expected, type)
        assert {*found} == {expected}


#: Functions of which the stock ones refuse what their modules cannot be given.
WRONG_CALLS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "axes of conv1d": lambda f, x: f.conv1d(x, torch.ones(4, 3, 3, 3)),
    "axes of conv2d": lambda f, x: f.conv2d(x[..., 0], torch.ones(4, 3, 3)),
    "axes of conv_transpose1d": lambda f, x: f.conv_transpose1d(x, torch.ones(3, 4, 3, 3)),
    "bounds of hardtanh": lambda f, x: f.hardtanh(x, 2.0, 1.0),
    "slope beyond float32": lambda f, x: f.leaky_relu(x, 1e39),
    "bounds beyond float32": lambda f, x: f.hardtanh(x, -1e39, 1e39),
    "value beyond float32": lambda f, x: f.threshold(x, 0.0, 1e39),
    "value of reflected padding": lambda f, x: f.pad(x, [1, 1], "reflect", 3.0),
    "weight of prelu": lambda f, x: f.prelu(x, 0.2),
    "axes of the weight of prelu": lambda f, x: f.prelu(x, torch.full((1, 1), 0.2)),
    "no input of alpha_dropout": lambda f, x: f.alpha_dropout(None, training=True),
    "no input of cross_entropy": lambda f, x: f.cross_entropy(None, torch.tensor([1])),
    "axes of adaptive_avg_pool2d": lambda f, x: f.adaptive_avg_pool2d(x.flatten(1), (4, 4)),
    "momentum of batch_norm in eval mode": lambda f, x: f.batch_norm(
        x, torch.zeros(3), torch.ones(3), momentum=None
    ),
    "targets of one example": lambda f, x: f.cross_entropy(x.flatten(), torch.tensor([1, 2])),
}


@pytest.mark.parametrize("call", WRONG_CALLS.values(), ids=WRONG_CALLS)
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_errors_of_functions_are_stock_errors(call: Callable[[Any, Tensor], Tensor]) -> None:
    x = BATCH.clone().requires_grad_()
    expected, actual = (helpers.attempt(call, f, x) for f in (nn.functional, memsave.functional))
    assert isinstance(expected, type)
    assert actual is expected


NUMBERS: dict[str, Callable[[Any, Tensor, float], Tensor]] = {
    "hardshrink": lambda f, x, number: f.hardshrink(x, number),
    "hardtanh, max_val": lambda f, x, number: f.hardtanh(x, -1.0, number),
    "hardtanh, min_val": lambda f, x, number: f.hardtanh(x, -number, 1.0),
    "leaky_relu": lambda f, x, number: f.leaky_relu(x, number),
    "softshrink": lambda f, x, number: f.softshrink(x, number),
    "threshold": lambda f, x, number: f.threshold(x, number, 0.0),
    "threshold, value": lambda f, x, number: f.threshold(x, 0.0, number),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("call", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_numbers_that_a_dtype_has_not(
    call: Callable[[Any, Tensor, float], Tensor], dtype: torch.dtype
) -> None:
    """Which stock refuses, or not, as it reads them."""
    x = BATCH.to(dtype).requires_grad_()
    for number in (1.002 * torch.finfo(dtype).max, torch.inf):
        expected, actual = (
            helpers.attempt(call, f, x, number) for f in (nn.functional, memsave.functional)
        )
        helpers.same(actual, expected, rtol=0, atol=0)


OF_OTHER_TYPES = [
    *(None, 0, 1, 1.5, "sum", [1], (2,), (6.0,), [[2]], {}, object(), math.inf),
    *(torch.tensor([2]), torch.tensor(0.5, requires_grad=True)),
]


#: Which Python takes for true or false, in stock too; or which nothing reads (in eval mode).
LENIENT = {"inplace", "return_indices", "size_average", "reduce", ("batch_norm", "momentum")}


def _arguments(name: str) -> dict[str, Any]:
    """Enough to call a function of torch's."""
    dims = next((int(letter) for letter in name if letter.isdigit()), 2)
    x = torch.randn(2, 4, *[6] * dims, requires_grad=True)
    special: dict[str, dict[str, Any]] = {
        "linear": {"weight": torch.randn(3, 6)},
        "prelu": {"weight": torch.tensor([0.25])},
        "layer_norm": {"normalized_shape": (6,)},
        "rms_norm": {"normalized_shape": (6,)},
        "group_norm": {"num_groups": 2},
        "batch_norm": {"running_mean": torch.zeros(4), "running_var": torch.ones(4)},
        "threshold": {"threshold": 0.1, "value": 0.2},
        "pad": {"pad": (1, 1, 1, 1), "mode": "reflect"},
        "cross_entropy": {"target": torch.randint(4, (2, 6, 6))},
        "embedding": {"input": torch.tensor([1, 3]), "weight": torch.randn(4, 2).requires_grad_()},
    }
    required = special.get(name, {})
    if name.startswith("conv"):
        required = {"weight": torch.randn(4, 4, *[2] * dims)}
    elif "pool" in name:
        required = {"output_size" if name.startswith("adaptive") else "kernel_size": 2}
    return {"input": x, **required}


@pytest.mark.parametrize(
    "name", [name for name in memsave.functional.__all__ if hasattr(nn.functional, name)]
)
def test_what_is_of_another_type_is_refused_as_stock_refuses_it(name: str) -> None:
    functions = [getattr(module, name) for module in (nn.functional, memsave.functional)]
    given = _arguments(name)
    assert isinstance(functions[0](**given), Tensor)
    for option in inspect.signature(functions[1]).parameters.keys() - {"input"}:
        if option in LENIENT or (name, option) in LENIENT:
            continue
        for value in OF_OTHER_TYPES:
            wrong = {**given, option: value}
            expected, actual = (helpers.attempt(function, **wrong) for function in functions)
            is_refused = isinstance(expected, type)
            assert (actual is expected) if is_refused else isinstance(actual, Tensor), wrong


@pytest.mark.parametrize(
    ("taken", "refused"),
    [((2,), (2.0,)), (((2, 2),), ((2, 2.0),)), (((2, 2), 2), ((2, 2), 2.0))],
)
def test_sizes_that_only_equal_integers(taken, refused) -> None:
    """Stock refuses them, whatever has been computed before."""
    for max_pool in (nn.functional.max_pool2d, memsave.functional.max_pool2d):
        assert max_pool(helpers.image(), *taken).requires_grad
        with pytest.raises(TypeError):
            max_pool(helpers.image(), *refused)


#: What may not be overwritten, and what it shares its memory with.
NOT_WRITABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "a leaf": lambda x: x,
    "a view of a leaf": lambda x: x[:2],
    "one of several views": lambda x: (x * 1).unbind()[0],
    "a view from where no graph is made": lambda x: _without_graph(x),
}


def _without_graph(x: Tensor) -> Tensor:
    x = x * 1
    with torch.no_grad():
        return x[:2]


@pytest.mark.parametrize("cls", ["ReLU", "Dropout", "DropoutFromRng"])
@pytest.mark.parametrize("make", NOT_WRITABLE.values(), ids=NOT_WRITABLE)
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_inplace_raises_as_stock(make: Callable[[Tensor], Tensor], cls: str) -> None:
    """Before anything is overwritten. (Only rows with the option ``inplace`` have this case.)"""
    messages = []
    for module in (getattr(nn, cls.removesuffix("FromRng")), getattr(memsave.nn, cls)):
        x = make(torch.randn(3, 4, requires_grad=True))
        before = x.detach().clone()
        with pytest.raises(RuntimeError) as error:
            module(inplace=True)(x)
        messages.append(str(error.value))
        assert x.detach().equal(before)
    assert messages[0] == messages[1]
