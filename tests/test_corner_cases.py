"""Corner cases of single layers, which the properties do not draw; a section for each kind."""

import itertools
from collections.abc import Callable
from typing import Any

import helpers
import numpy as np
import pytest
import torch
from helpers import outcome, same
from torch import Tensor, nn

import memsave
import memsave.nn
from memsave import function
from memsave.layers import batch_norm, invertible
from memsave.spec import TABLE

HALVES = [torch.bfloat16, torch.float16]


# Activations.


def test_softsign_of_large_numbers() -> None:
    """Of which a square may be too large for the dtype."""
    x = torch.tensor([0.5, 300, -60000], dtype=torch.float16, requires_grad=True)
    memsave.functional.softsign(x).backward(torch.full_like(x, 60000))
    exact = 60000 / (x.detach().double().abs() + 1).square()
    same(x.grad.double(), exact, rtol=2e-3, atol=1e-7)


@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_a_view_overwritten() -> None:
    """What it is a view of has the gradients, and the graph, of what has been written."""

    def run(relu: Callable[..., Tensor]) -> list[Tensor]:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
        y = x * 2
        version = y._version
        z = relu(y[1:3], True)
        assert y._version > version
        loss = (y * torch.arange(6)).sum() + z.square().sum()
        return [y, z, *torch.autograd.grad(loss, x)]

    same(run(memsave.functional.relu), run(nn.functional.relu))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("layer", ["InstanceNorm", "ReLU", "LeakyReLU"])
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_large_gradients_that_are_stored_otherwise(layer: str, dims: int, dtype) -> None:
    """Than the input: each with channels first or last."""
    name = f"{layer}{dims}d" if layer == "InstanceNorm" else layer
    arguments = (5,) if layer == "InstanceNorm" else ()
    stock, ours = (getattr(of, name)(*arguments) for of in (nn, memsave.nn))
    drawn = torch.randn(2, 2, 5, *[92, 91] if dims == 2 else [21, 20, 19], dtype=dtype)
    last = torch.channels_last if dims == 2 else torch.channels_last_3d
    for formats in itertools.product((torch.contiguous_format, last), repeat=2):
        x, g = (t.clone(memory_format=own) for t, own in zip(drawn, formats, strict=True))
        x.requires_grad_()
        made = [(y := module(x), *torch.autograd.grad(y, x, g)) for module in (stock, ours)]
        for expected, actual in zip(*made, strict=True):
            same(actual, expected, **({"rtol": 2e-2, "atol": 2e-2} if dtype.itemsize == 2 else {}))
        assert made[0][0].stride() == made[1][0].stride()


@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_the_gradient_of_one_channel_is_not_overwritten() -> None:
    """It is contiguous, with other strides of axes of one place than the bits."""
    x = torch.randn(1, 1, 200, 200, requires_grad=True)
    g = torch.randn(200, 200).as_strided((1, 1, 200, 200), (1, 1, 200, 1))
    before = g.clone()
    (dx,) = torch.autograd.grad(memsave.nn.ReLU()(x), x, g)
    assert g.equal(before)
    assert dx.equal(torch.where(x > 0, g, 0))


@pytest.mark.parametrize(
    ("shape", "dtype", "node"),
    [
        ((3, 4), torch.float32, "MemsaveSwigluBackward"),
        ((4,), torch.bfloat16, "MulBackward0"),
        ((1, 3, 4), torch.bfloat16, "MulBackward0"),
    ],
    ids=str,
)
def test_gated_products_of_unlike_tensors(
    shape: tuple[int, ...], dtype: torch.dtype, node: str
) -> None:
    """In two dtypes by the rule, to the bit; of two shapes as stock."""
    gate = torch.randn(3, 4).bfloat16().requires_grad_()
    up = torch.randn(shape).to(dtype).requires_grad_()
    y, expected = memsave.functional.swiglu(gate, up), nn.functional.silu(gate) * up
    assert y.grad_fn is not None
    assert y.grad_fn.name() == node
    g = torch.randn_like(expected)
    results = [(out, *torch.autograd.grad(out, (gate, up), g)) for out in (y, expected)]
    for actual, of_stock in zip(*results, strict=True):
        same(actual, of_stock, rtol=0, atol=0)


# Convolutions.


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("name", ["Conv1d", "ConvTranspose1d"])
@pytest.mark.parametrize("shape", [(3, 0, 4), (0, 4), (0, 2, 4)], ids=str)
def test_convolutions_of_nothing(name: str, shape: tuple[int, ...]) -> None:
    """Of no channels torch makes no channels, but a gradient for each bias."""
    results = []
    for package in (nn, memsave.nn):
        module = getattr(package, name)(shape[-2], 2, 2)
        module.weight.requires_grad_(False)
        y = helpers.attempt(module, torch.ones(shape))
        results.append(y if isinstance(y, type) else torch.autograd.grad(y.sum(), module.bias))
    same(results[1], results[0])


# Dropout.


@pytest.mark.parametrize("cls", [memsave.nn.Dropout, memsave.nn.DropoutFromRng])
def test_dropout_of_nothing_is_its_input(cls: type[nn.Module]) -> None:
    """As of stock."""
    x = torch.zeros(0, 3, requires_grad=True)
    assert nn.Dropout()(x) is x
    assert cls()(x) is x


def test_channels_of_nothing_of_one_axis() -> None:
    """Stock's dropout of channels takes it. (The public functions leave it to stock.)"""
    rule = function.RULES["feature_dropout"]._replace(node=None)
    x = torch.empty(0, requires_grad=True)
    y = function.differentiable(rule)(x, p=0.5, inplace=False)
    assert torch.autograd.grad(y.sum(), x)[0].shape == y.shape == x.shape


def test_dropout_from_rng_while_another_thread_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule of Python, which cannot lock the generator as a node does."""

    class Busy:
        """Somebody draws right after a look at the state."""

        def get_state(self) -> Tensor:
            state = torch.get_rng_state()
            torch.rand(3)
            return state

        def set_state(self, state: Tensor) -> None:
            torch.set_rng_state(state)

    monkeypatch.setattr(memsave.layers.dropout, "_generator", lambda device: Busy())
    x = torch.ones(9, 8).t()[::2].requires_grad_()
    y = memsave.nn.DropoutFromRng()(x)
    before = torch.get_rng_state()
    (dx,) = torch.autograd.grad(y.sum(), x)
    same(dx, y, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), before)


# Embeddings.


@pytest.mark.parametrize("padding_idx", [7, -6, 4, -5, 2])
def test_padding_idx_that_is_set_later(padding_idx: int) -> None:
    results = []
    for cls in (nn.Embedding, memsave.nn.EmbeddingCompact):
        torch.manual_seed(0)
        module, indices = cls(5, 3), torch.tensor([2, 4, 0])
        module.padding_idx = padding_idx
        y = helpers.attempt(module, indices)
        results.append(y if isinstance(y, type) else torch.autograd.grad(y.sum(), module.weight))
    same(results[1], results[0])


@pytest.mark.parametrize(
    "options",
    [
        {"padding_idx": 1},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"sparse": True},
        {"max_norm": 0.5, "norm_type": 1.0},
    ],
    ids=str,
)
def test_options_of_embeddings(options) -> None:
    """With these, the gradient is no derivative, so the table does not have them."""
    indices = torch.tensor([[0, 1, 3], [3, 3, 2]])

    def run(cls: type[nn.Module]):
        layer = helpers.build(cls, **options)
        return helpers.step(layer, indices), layer.weight

    same(run(memsave.nn.EmbeddingCompact), run(nn.Embedding))

    def call(lookup):
        weight = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
        return outcome(lambda weight: lookup(indices, weight, **options), [weight])

    same(call(memsave.functional.embedding), call(nn.functional.embedding))


# Losses.


@pytest.mark.usefixtures("by_nodes_and_by_rules")
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("probabilities", [False, True])
def test_axes_of_the_weight_of_one_class(axes: int, probabilities: bool) -> None:
    """Stock takes any."""
    target = torch.full((6, 1, 2), 0.5) if probabilities else torch.zeros(6, 2).long()
    args = [torch.randn(6, 1, 2, requires_grad=True), target, torch.full((1,) * axes, 0.5)]
    expected = helpers.attempt(outcome, nn.functional.cross_entropy, args)
    same(helpers.attempt(outcome, memsave.functional.cross_entropy, args), expected)


@pytest.mark.parametrize("is_index", [True, False], ids=["indices", "probabilities"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=str)
def test_a_loss_of_no_classes(options: dict[str, float], is_index: bool) -> None:
    target = torch.full((3,), -100) if is_index else torch.zeros(3, 0)
    results = []
    for functional in (nn.functional, memsave.functional):
        x = torch.zeros(3, 0, requires_grad=True)
        loss = functional.cross_entropy(x, target, **options)
        results.append((loss, torch.autograd.grad(loss, x)))
    same(*results)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("of", ["one position", "probabilities", "one of probabilities"])
def test_targets_of_cross_entropy(of: str, reduction: str) -> None:
    """The function finds the row of a target; rows have the axis of positions."""
    x, target = helpers.loss_inputs()
    if "probabilities" in of:
        target = x.detach().flip(0).exp()  # (of its own the gradient is zero)
    if "one" in of:
        x, target = x[0, :, 0, 0].detach().requires_grad_(), target[0, ..., 0, 0]

    def run(loss):
        return outcome(lambda x: loss(x, target, reduction=reduction), [x])

    rows = []
    with function.observe(lambda call: rows.append(call.row.name)):
        actual = run(memsave.functional.cross_entropy)
    same(actual, run(nn.functional.cross_entropy))
    assert rows == ["cross_entropy" + "_of_probabilities" * ("probabilities" in of)]


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.filterwarnings("ignore:reduction='elementwise_mean':UserWarning")
@pytest.mark.parametrize(
    "options", [{"size_average": False}, {"reduce": False}, {"reduction": "elementwise_mean"}]
)
@pytest.mark.parametrize("of", ["positions", "rows", "probabilities"])
def test_old_options_of_cross_entropy(options, of: str) -> None:
    x, target = helpers.loss_inputs()
    if of == "rows":
        x, target = x[:, :, 0, 0].detach().clone().requires_grad_(), target[:, 0, 0].clone()
    if of == "probabilities":
        target = x.detach().flip(0).exp()  # (of its own the gradient is zero)
    same(
        outcome(lambda x: memsave.functional.cross_entropy(x, target, **options), [x]),
        outcome(lambda x: nn.functional.cross_entropy(x, target, **options), [x]),
    )


@pytest.mark.parametrize("of", ["positions", "probabilities"])
@pytest.mark.parametrize("smoothing", [-0.1, float("nan")])
def test_cross_entropy_that_is_smoothed_by_less_than_nothing(smoothing: float, of: str) -> None:
    """Stock does not smooth then."""
    x, target = helpers.loss_inputs()
    if of == "probabilities":
        target = x.detach().flip(0).exp()
    for weight in (None, torch.rand(x.shape[1], dtype=x.dtype)):
        options = {"weight": weight, "label_smoothing": smoothing}
        same(
            outcome(lambda x, o=options: memsave.functional.cross_entropy(x, target, **o), [x]),
            outcome(lambda x, o=options: nn.functional.cross_entropy(x, target, **o), [x]),
        )


def test_cross_entropy_of_targets_that_want_a_gradient() -> None:
    """It is stock's: the table has none."""
    x, q, weight = helpers.image(), helpers.image().detach().exp(), torch.rand(3).double()
    args = [x, q.requires_grad_(), weight.requires_grad_()]
    same(
        outcome(memsave.functional.cross_entropy, args),
        outcome(nn.functional.cross_entropy, args),
    )


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none"},
        {"label_smoothing": 0.1},
        {"weight": True},
        {"weight": True, "label_smoothing": 0.1},
    ],
    ids=str,
)
def test_cross_entropy_under_autocast_keeps_narrow_logits(half, of_rows, options) -> None:
    """Stock keeps float32 log-probabilities. (The rows are not tested in two dtypes at once.)"""
    x, target = helpers.loss_inputs()
    if of_rows:
        x, target = x.movedim(1, -1).flatten(0, -2).contiguous(), target.flatten()
    x = x.detach().to(half).requires_grad_()
    if "weight" in options:
        options = options | {"weight": torch.rand(x.shape[1]).to(half)}

    def run(loss):
        with torch.autocast("cpu", dtype=half):
            y = loss(x, target, **options)
        assert y.dtype is torch.float32
        return y.square().sum()  # whose gradient is of each its own

    losses = memsave.functional.cross_entropy, nn.functional.cross_entropy
    own = [target, *filter(torch.is_tensor, options.values())]
    actual, expected = (helpers.kept(lambda f=f: run(f), own) for f in losses)
    of_loss = 4 * target.numel() if "reduction" in options else 4
    assert actual == 2 * x.numel() + of_loss
    assert expected >= 4 * x.numel()
    actual, expected = (torch.autograd.grad(run(f), x) for f in losses)
    same(actual, expected)


# Norms.


@pytest.mark.parametrize("few", [0, 2**17])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (4, 3)])
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_batch_norm_in_eval_mode_of_few_elements_and_of_many(few, shape, monkeypatch) -> None:
    """Of few, its gradient is one operation."""
    monkeypatch.setattr(batch_norm, "FEW_AT_ONCE", few)
    x, mean, bias = torch.randn(shape), torch.randn(3), torch.randn(3)
    for weight in (torch.randn(3), None):
        args = [x.requires_grad_(), mean, torch.rand(3) + 0.5, weight, bias]
        expected = outcome(nn.functional.batch_norm, args)
        same(outcome(memsave.functional.batch_norm, args), expected)


@pytest.mark.parametrize("strided", [2, 3], ids=["variance", "weight"])
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_batch_norm_in_eval_mode_with_vectors_that_are_not_contiguous(strided) -> None:
    """Stock's backward reads them as if they were, of rows."""
    args = [torch.randn(4, 3).requires_grad_(), *(torch.rand(3) + 0.5 for _ in range(4))]
    expected = outcome(nn.functional.batch_norm, args)
    args[strided] = args[strided].repeat_interleave(2)[::2]
    assert not args[strided].is_contiguous()
    same(outcome(memsave.functional.batch_norm, args), expected)


@pytest.mark.parametrize("grad", [True, False])
def test_layout_of_instance_norm_by_running_statistics(grad: bool) -> None:
    """Contiguous, as stock's: of what is channels_last, too."""
    x = torch.randn(2, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_(grad)
    expected, actual = (
        cls(4, affine=True, track_running_stats=True).eval()(x)
        for cls in (nn.InstanceNorm2d, memsave.nn.InstanceNorm2d)
    )
    same(actual, expected, layout=True)


@pytest.mark.parametrize("name", ["GroupNorm", "GroupNormFromOutput", "LayerNormFromOutput"])
def test_an_ensemble(name: str) -> None:
    """``vmap`` over the parameters of several models, of which neither layout nor values tell."""

    def ensemble(cls: type[nn.Module]) -> Any:
        torch.manual_seed(0)
        models = [cls(4) if "Layer" in name else cls(2, 4) for _ in range(3)]
        state = torch.func.stack_module_state(models)
        for parameter in state[0].values():
            parameter.data.normal_()

        def run(parameters, buffers, x):
            return torch.func.functional_call(models[0], (parameters, buffers), x.mT)

        x = torch.randn(3, 2, 4, 4, 4)
        y = torch.vmap(run)(*state, x)
        return y, torch.autograd.grad(y.square().sum(), [*state[0].values()])

    cls = getattr(memsave.nn, name)
    same(ensemble(cls), ensemble(cls.__base__))


@pytest.mark.parametrize("cls", [memsave.nn.GroupNorm, memsave.nn.GroupNormFromOutput])
@pytest.mark.parametrize("axes", [(1, 2, 0), (1, 0, 2)])
@pytest.mark.parametrize("spatial", [(4, 4), (2, 2, 4)])
def test_group_norm_of_a_batch_of_one_that_is_a_view(cls, axes, spatial) -> None:
    """Sequences, as images, whose strides say both of whether the channels are last."""
    x = torch.randn(16, 1, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for frozen in ([], ["weight"], ["weight", "bias"]):
        results = []
        for module in (nn.GroupNorm(2, 8), cls(2, 8)):
            module.requires_grad_(True)
            for name in frozen:
                getattr(module, name).requires_grad_(False)
            y = module(x.permute(axes).reshape(1, -1, *spatial))
            wanted = [x, *(p for p in module.parameters() if p.requires_grad)]
            results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
        same(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_norms_over_several_axes_of_another_layout_are_stock(cls) -> None:
    """In what they keep, in layout and to the bit."""
    x = torch.randn(2, 6, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    for drop_in in helpers.drop_ins(cls):
        results = []
        for layer in (cls((6, 4, 4)), drop_in((6, 4, 4))):
            layer.requires_grad_(False)
            y = layer(x)
            (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            results.append((helpers.kept(lambda layer=layer: layer(x), [x]), y, dx))
        assert results[1][0] == results[0][0]
        same(results[1][1:], results[0][1:], layout=True, rtol=0, atol=0)


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_norms_over_several_axes_of_another_layout_without_gradients(cls) -> None:
    x = torch.randn(8, 20, 7).permute(0, 2, 1).unflatten(2, (4, 5)).permute(0, 3, 2, 1)[None]
    for drop_in in helpers.drop_ins(cls):
        expected = cls((4, 7)).requires_grad_(False)(x)
        same(drop_in((4, 7)).requires_grad_(False)(x), expected, layout=True, rtol=0, atol=0)


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_norms_over_no_elements(cls) -> None:
    for drop_in in (cls, *helpers.drop_ins(cls)):
        layer = cls((0, 3))
        layer.__class__ = drop_in
        x, g = (torch.randn(2, 0, 3, requires_grad=True) for _ in range(2))
        (dx,) = torch.autograd.grad(layer(x), x, g, create_graph=True)
        assert dx.shape == x.shape


@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_norms_over_several_axes_return_no_views(cls) -> None:
    """So that what works of stock's outputs does."""
    for layer in (cls((3, 6)), helpers.drop_ins(cls)[0]((3, 6))):
        layer.weight.requires_grad_(False)
        y = layer(torch.randn(2, 3, 6, requires_grad=True))
        assert not y.detach_().requires_grad


def test_rows_from_the_output_look_at_parameters_of_accelerators_once() -> None:
    """Whether they tell the input: asked again only of another value."""
    weight, bias = nn.Parameter(torch.ones(6)), nn.Parameter(torch.zeros(6))

    def looks() -> int:
        with helpers.Ops() as ops:
            assert invertible.tells_once(weight, bias, invertible.LEAST_WEIGHT[torch.float32])
        return ops.names.count("aten.all.default")

    assert [looks(), looks(), looks()] == [1, 0, 0]
    for changed in (weight, bias):
        with torch.no_grad():
            changed.mul_(2)
        assert [looks(), looks()] == [1, 0]
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(6)))
    assert [looks(), looks()] == [1, 0]


def test_rows_from_the_output_tell_views_of_one_storage_apart() -> None:
    """They have one version, and one that is made anew may get the ``id`` of another."""
    flat = torch.cat([torch.ones(6), torch.zeros(6)])
    least = invertible.LEAST_WEIGHT[torch.float32]

    def tell(*parts: slice) -> list[bool]:
        return [invertible.tells_once(flat[part], None, least) for part in parts]

    with helpers.Ops() as ops:
        for _ in range(3):
            assert tell(slice(6), slice(6, 12)) == [True, False]
    assert ops.names.count("aten.all.default") == 2
    assert tell(slice(6), slice(0, 12, 2)) == [True, False]


# Pooling.


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [((11, 23), (6, 7)), ((40, 40), (2, 1)), ((5, 3), (None, 7)), ((200,), (3,))],
)
def test_windows_of_adaptive_pooling(inputs, outputs) -> None:
    """The properties' sizes are too small for windows to be far from where equal ones would be, or
    to have more places than a byte tells apart.
    """
    name = f"adaptive_max_pool{len(inputs)}d"
    x = torch.randn(2, 3, *inputs, generator=torch.Generator().manual_seed(0)).requires_grad_()
    pool = getattr(memsave.functional, name)
    expected = outcome(getattr(nn.functional, name), [x], output_size=outputs)
    same(outcome(pool, [x], output_size=outputs), expected)
    shapes = {"x": tuple(x.shape), "y": tuple(expected[0].shape)}
    bits = TABLE[name].saved_bits({"x"}, shapes, {})["offsets"]
    assert helpers.kept(lambda: pool(x, outputs)) == bits / 8


@pytest.mark.parametrize("pool", ["max_pool2d", "adaptive_max_pool2d"])
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_layout_of_the_gradient_of_one_window(pool: str) -> None:
    """As the input, though the output and what is kept are in all formats at once."""
    x = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    size = 1 if "adaptive" in pool else 4
    ours, stock = (
        torch.autograd.grad(getattr(f, pool)(x, size).sum(), x)[0]
        for f in (memsave.functional, nn.functional)
    )
    same(ours, stock, layout=True)


@pytest.mark.parametrize("size", [0, (0, 2)])
def test_averages_of_no_places(size: Any) -> None:
    """Stock's error, also where the channels are stored last."""
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = memsave.functional.adaptive_avg_pool2d(x, size)
    with pytest.raises(RuntimeError, match="non-zero size"):
        y.sum().backward()


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("size", [4, 5, 6])
@pytest.mark.usefixtures("by_nodes_and_by_rules")
def test_windows_of_max_pooling(size: int, ceil_mode: bool) -> None:
    """The last one may begin in the padding on the right, and then is none; numbers may be such as
    no index has.
    """
    strides, dilations = (1, 2, 3, 4, 5, 1 << 31, 1 << 33), (1, 2, 1 << 31, 1 << 33)
    x = torch.randn(2, size, requires_grad=True)
    for windows in itertools.product((1, 2, 3), strides, (0, 1), dilations, [ceil_mode]):
        actual, expected = (
            helpers.attempt(outcome, module.max_pool1d, [x, *windows])
            for module in (memsave.functional, nn.functional)
        )
        same(actual, expected)


def test_gradient_of_windows_of_nothing_but_padding() -> None:
    """Dilated ones may be so. It is somewhere in the input: stock's places may lie outside."""
    x = torch.zeros(1, 1, 1, requires_grad=True)
    y = memsave.functional.max_pool1d(x, 2, 1, padding=1, dilation=2)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.isinf().all()
    assert dx.sum() == y.numel()


@pytest.mark.parametrize("pool", ["adaptive_avg_pool1d", "adaptive_max_pool1d"])
@pytest.mark.parametrize("size", [np.int64(2), torch.tensor(2), (np.int64(2),)])
def test_sizes_of_adaptive_pooling_that_are_no_ints(pool: str, size: Any) -> None:
    """As torch takes them."""
    x = torch.randn(2, 3, 8).requires_grad_()
    expected = outcome(getattr(nn.functional, pool), [x], output_size=size)
    same(outcome(getattr(memsave.functional, pool), [x], output_size=size), expected)
