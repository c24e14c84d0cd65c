"""Weights move between PyTorch and Flax in both directions, and then the two models are one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

import memsave
from experiments.flax_resnet import ResNet
from experiments.resnet import resnet
from memsave_jax import interop, nnx as mnnx

PAIRS: dict[str, tuple[Any, Any]] = {
    "linear": (lambda: nn.Linear(4, 6), lambda r: nnx.Linear(4, 6, rngs=r)),
    **{
        f"conv{dims}d groups {groups}": (
            lambda cls=cls, groups=groups: cls(4, 6, 3, 2, 1, groups=groups),
            lambda r, dims=dims, groups=groups: nnx.Conv(
                4, 6, (3,) * dims, 2, padding=1, feature_group_count=groups, rngs=r
            ),
        )
        for dims, cls in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d))
        for groups in (1, 2)
    },
    **{
        f"conv_transpose{dims}d {'transposed' if transposed else 'direct'} kernel": (
            lambda cls=cls: cls(4, 6, (3, 2, 3)[: int(cls.__name__[-2])], 2),
            lambda r, dims=dims, transposed=transposed: nnx.ConvTranspose(
                4,
                6,
                (3, 2, 3)[:dims],
                strides=2,
                padding="VALID",
                transpose_kernel=transposed,
                rngs=r,
            ),
        )
        for dims, cls in (
            (1, nn.ConvTranspose1d),
            (2, nn.ConvTranspose2d),
            (3, nn.ConvTranspose3d),
        )
        for transposed in (False, True)
    },
    "batch_norm": (lambda: nn.BatchNorm2d(4), lambda r: nnx.BatchNorm(4, epsilon=1e-5, rngs=r)),
    "group_norm": (
        lambda: nn.GroupNorm(2, 4),
        lambda r: nnx.GroupNorm(4, 2, epsilon=1e-5, use_fast_variance=False, rngs=r),
    ),
    "instance_norm": (
        lambda: nn.InstanceNorm2d(4, affine=True),
        lambda r: nnx.InstanceNorm(4, epsilon=1e-5, use_fast_variance=False, rngs=r),
    ),
    "without bias": (
        lambda: nn.Conv2d(4, 6, 1, bias=False),
        lambda r: nnx.Conv(4, 6, (1, 1), use_bias=False, rngs=r),
    ),
}


class Holder(nnx.Module):
    """A layer under a name."""

    def __init__(self, layer: nnx.Module) -> None:
        self.layer = layer


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("converted", [False, True], ids=["stock", "converted"])
def test_layer(pair: tuple[Any, Any], converted: bool) -> None:
    torch.manual_seed(0)
    ours, its = pair[0](), Holder(pair[1](nnx.Rngs(0)))
    if isinstance(ours, nn.BatchNorm2d):
        ours.running_mean.uniform_()
        ours.running_var.uniform_(1, 2)
        ours.eval()
        its.layer.eval()
    if converted:
        memsave.convert(ours)
        mnnx.convert(its)
    rename = {"layer": ""}.__getitem__
    interop.load_state_dict(its, ours.state_dict(), rename=rename)
    dims = 0 if isinstance(ours, nn.Linear) else ours.weight.ndim - 2 if ours.weight.ndim > 2 else 2
    x = torch.rand(2, 4, *(6, 5, 4)[:dims], requires_grad=True)
    y = ours(x)
    z, pull = jax.vjp(its.layer, jnp.asarray(np.moveaxis(x.detach().numpy(), 1, -1)))
    np.testing.assert_allclose(np.moveaxis(z, -1, 1), y.detach().numpy(), atol=1e-5)
    y.sin().sum().backward()
    assert x.grad is not None
    np.testing.assert_allclose(np.moveaxis(pull(jnp.cos(z))[0], -1, 1), x.grad.numpy(), atol=1e-5)
    back = interop.state_dict(its, rename=rename)
    expected = {n: t.numpy() for n, t in ours.state_dict().items() if "num_batches" not in n}
    assert back.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(back[name], array)


def test_layers_of_the_last_axis() -> None:
    """And embeddings; of bfloat16, which PyTorch and NumPy do not share."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.tokens = nnx.Embed(8, 4, rngs=rngs)
            self.norm = nnx.LayerNorm(4, epsilon=1e-5, rngs=rngs)
            self.scale = nnx.RMSNorm(4, epsilon=1e-5, rngs=rngs)

        def __call__(self, ids: jax.Array) -> jax.Array:
            return self.scale(self.norm(self.tokens(ids)))

    twin = nn.ModuleDict(
        {"tokens": nn.Embedding(8, 4), "norm": nn.LayerNorm(4), "scale": nn.RMSNorm(4, eps=1e-5)}
    )
    torch.manual_seed(0)
    for parameter in twin.parameters():
        nn.init.normal_(parameter)
    ids = torch.tensor([[1, 7], [0, 3]])
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.1)):
        model = Model(nnx.Rngs(0))
        interop.load_state_dict(model, twin.to(dtype).state_dict())
        y = twin["scale"](twin["norm"](twin["tokens"](ids))).float().detach()
        np.testing.assert_allclose(model(ids.numpy()), y, atol=tolerance, rtol=tolerance)
    graph, state = nnx.split(model)
    narrow = nnx.merge(graph, jax.tree.map(lambda array: array.astype(jnp.bfloat16), state))
    back = {name: torch.from_numpy(array) for name, array in interop.state_dict(narrow).items()}
    expected = {name: tensor.clone() for name, tensor in twin.state_dict().items()}
    nn.init.zeros_(twin["norm"].weight)
    twin.load_state_dict(back)
    for name, tensor in twin.state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_what_has_no_place_in_pytorch_is_not_left_out() -> None:
    layer = Holder(nnx.LoRALinear(4, 6, lora_rank=2, rngs=nnx.Rngs(0)))
    with pytest.raises(KeyError, match=r"'layer\.lora\.lora_[ab]' is of no layer"):
        interop.state_dict(layer)
    interop.load_state_dict(layer, nn.ModuleDict({"layer": nn.Linear(4, 6)}).state_dict())


def test_resnet() -> None:
    """Converted on both sides: equal outputs, equal gradients, of the input and of all weights."""
    torch.manual_seed(0)
    twin = memsave.convert(resnet(50)).double().train()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64, requires_grad=True)
    with jax.enable_x64(True):
        model = mnnx.convert(nnx.eval_shape(lambda: ResNet(50, nnx.Rngs(0))))
        for _, variable in nnx.to_flat_state(nnx.state(model)):
            variable.set_value(jax.ShapeDtypeStruct(variable.shape, jnp.float64))
        interop.load_state_dict(model, twin.state_dict())
        graph, parameters, rest = nnx.split(model, nnx.Param, ...)

        @jax.jit
        def run(parameters: Any, x: jax.Array) -> Any:
            def loss(parameters: Any, x: jax.Array) -> Any:
                logits = nnx.merge(graph, parameters, rest, copy=True)(x)
                return jnp.sin(logits).sum(), logits

            return jax.grad(loss, (0, 1), has_aux=True)(parameters, x)

        images = jnp.asarray(np.moveaxis(x.detach().numpy(), 1, -1))
        (of_parameters, of_x), logits = run(parameters, images)
        gradients = nnx.merge(graph, of_parameters, rest, copy=True)
        its = interop.state_dict(gradients)
    y = twin(x).logits
    y.sin().sum().backward()
    np.testing.assert_allclose(logits, y.detach().numpy(), rtol=1e-8, atol=1e-8)
    assert x.grad is not None
    np.testing.assert_allclose(np.moveaxis(of_x, -1, 1), x.grad.numpy(), rtol=1e-6, atol=1e-9)
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        np.testing.assert_allclose(its[name], parameter.grad.numpy(), atol=1e-8 * scale)


def test_no_memory_is_shared() -> None:
    """What one framework overwrites later is not the other's."""
    ours, its = (
        nn.ModuleDict({"layer": nn.Linear(4, 6)}),
        Holder(nnx.Linear(4, 6, rngs=nnx.Rngs(0))),
    )
    interop.load_state_dict(its, ours.state_dict())
    back = interop.state_dict(its)
    before = {name: array.copy() for name, array in back.items()}
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(1)
    for array in back.values():
        array += 1
    for name, array in interop.state_dict(its).items():
        np.testing.assert_array_equal(array, before[name])


def test_shared_layers() -> None:
    """PyTorch lists them by each of their names."""
    ours, its = (
        nn.ModuleDict({"layer": nn.Linear(4, 4)}),
        Holder(nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
    )
    ours["again"] = ours["layer"]
    ours["head"] = nn.Linear(4, 4, bias=False)
    ours["head"].weight = ours["layer"].weight
    its.again = its.layer
    interop.load_state_dict(its, ours.state_dict())
    np.testing.assert_array_equal(its.again.kernel[...].T, ours["head"].weight.detach())
    ours["head"].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(KeyError, match=r"no layer of the model takes head\.weight"):
        interop.load_state_dict(its, ours.state_dict())


def test_nothing_is_written_unless_all_fits() -> None:
    layer = Holder(nnx.Linear(4, 6, rngs=nnx.Rngs(0)))
    before = np.asarray(layer.layer.kernel[...])
    weight, bias = np.ones((6, 4)), np.ones(6)
    with pytest.raises(KeyError, match=r"no 'layer\.bias'"):
        interop.load_state_dict(layer, {"layer.weight": weight})
    with pytest.raises(KeyError, match="no layer of the model takes other"):
        interop.load_state_dict(
            layer, {"layer.weight": weight, "layer.bias": bias, "other": weight}
        )
    with pytest.raises(ValueError, match=r"layer.weight has shape \(6, 4\)"):
        interop.load_state_dict(layer, {"layer.weight": weight.T, "layer.bias": bias})
    np.testing.assert_array_equal(layer.layer.kernel[...], before)
