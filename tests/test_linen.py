"""``memsave_jax.linen``: drop-ins and conversion change what Flax keeps for backward, nothing else.

The oracle is stock Flax with the same variables: the same trees, initial values, outputs and
statistics to the bit (of a whole model: to rounding), and the same gradients up to rounding. What
is kept is what a ``jax.vjp`` holds. Conversion must reach every layer under every transform, and
nothing outside the model.
"""

from __future__ import annotations

import copy
import functools
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from memsave_jax import linen as mnn

KEYS = {"params": jax.random.key(1), "dropout": jax.random.key(2), "noise": jax.random.key(3)}


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly() -> Any:
    """Nearly all of the time is spent on compiling what then runs for microseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def image(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return (3 * jax.random.normal(jax.random.key(0), shape or (2, 6, 6, 4))).astype(dtype)


def same(actual: Any, expected: Any) -> None:
    """Equal trees, dtypes and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if isinstance(a, jax.ShapeDtypeStruct):
            assert a.shape == b.shape
            continue
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def close(actual: Any, expected: Any, *dtypes: Any) -> None:
    """Equal up to rounding in these dtypes, relative to the largest element."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if a.size and a.dtype != jax.dtypes.float0:
            inexact = [d for d in (a.dtype, *dtypes) if jnp.issubdtype(d, jnp.inexact)]
            rtol = 16 * max(float(jnp.finfo(dtype).eps) for dtype in inexact)
            wide = complex if jnp.iscomplexobj(a) else float
            a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
            np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), 1))


def split(variables: Any) -> tuple[Any, Any]:
    return variables.get("params", {}), {k: v for k, v in variables.items() if k != "params"}


def vjp(module: nn.Module, variables: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """``y``, what the forward mutates, and the pull-back to parameters and input."""
    params, rest = split(variables)

    def forward(params: Any, x: Any) -> Any:
        variables = {"params": params, **rest}
        return module.apply(
            variables, x, *args, rngs=KEYS, mutable=["batch_stats", "intermediates"], **kwargs
        )

    return jax.vjp(forward, params, x, has_aux=True)


def step(module: nn.Module, variables: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Exact results and gradients."""
    y, pull, mutated = vjp(module, variables, x, *args, **kwargs)
    weights = jnp.arange(y.size).reshape(y.shape) % 7 - 3
    return (y, mutated), pull(weights.astype(y.dtype))


def agree(
    actual: nn.Module,
    expected: nn.Module,
    x: Any,
    *args: Any,
    results: Callable[[Any, Any], None] = same,
    **kwargs: Any,
) -> Any:
    """Trees, initial values, results and gradients."""
    variables = expected.init(KEYS, x, *args, **kwargs)
    same(actual.init(KEYS, x, *args, **kwargs), variables)
    ours, stock = (step(m, variables, x, *args, **kwargs) for m in (actual, expected))
    results(ours[0], stock[0])
    close(ours[1], stock[1], x.dtype, stock[0][0].dtype)
    return variables


def held(pull: Any, *but: Any) -> int:
    """Bytes of the arrays that a pull-back holds, without these."""
    ids = {id(leaf) for leaf in jax.tree.leaves(but)}
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes")}
    return sum(array.nbytes for key, array in arrays.items() if key not in ids)


def kept(module: nn.Module, variables: Any, x: Any, *args: Any, **kwargs: Any) -> int:
    return held(vjp(module, variables, x, *args, **kwargs)[1], variables, x)


# The layers.


def case(name: str, *args: Any, x: Any = None, call: Any = None, **fields: Any) -> Any:
    label = ", ".join(f"{k}={v!r:.24}" for k, v in {**fields, **(call or {})}.items())
    shape = "" if x is None else f" on {x.dtype}{x.shape}"
    x = image() if x is None else x
    label = re.sub(r"<(\w+ )*(\w+) at [^,]*", r"\2", label)  # no address: each process has its own
    return pytest.param(name, args, fields, x, call or {}, id=f"{name}({label}){shape}")


line, key = image(2, 8, 4), jax.random.key(5)
train, frozen = {"use_running_average": False}, {"use_running_average": True}
circular = functools.partial(case, "Conv", 4, (3, 2), padding="CIRCULAR")
flipped = functools.partial(case, "ConvTranspose", 4, (3, 2), transpose_kernel=True)
norm = functools.partial(case, "BatchNorm")
half = functools.partial(case, "Dropout", 0.5)


def own_convolution(*args: Any, **kwargs: Any) -> Any:
    return 2 * lax.conv_general_dilated(*args, **kwargs)


def to_half(*arrays: Any, dtype: Any, inexact: bool = True) -> Any:
    return [array.astype(jnp.float16) for array in arrays]


CASES = [
    case("Dense", 3),
    case("Dense", 3, dtype=jnp.bfloat16, use_bias=False),
    case("Dense", 3, dot_general=lambda *args, **kwargs: 2 * lax.dot_general(*args, **kwargs)),
    case("Dense", 3, dot_general_cls=lambda: lambda *args, **kw: 2 * lax.dot_general(*args, **kw)),
    case("Dense", 3, promote_dtype=to_half, precision="highest"),
    case("Conv", 4, (3, 3), strides=2, kernel_dilation=2),
    case("Conv", 4, (3, 3), x=image(2, 1, 6, 6, 4)),
    case("Conv", 4, (3, 1), padding=(1, (0, 1)), input_dilation=2, x=image(6, 6, 4)),
    case("Conv", 4, (3, 1), padding="SAME_LOWER", strides=2),
    case("Conv", 2, (1, 1, 1, 2), x=image(1, 2, 2, 2, 2, 2)),
    circular(strides=2, kernel_dilation=(2, 1), feature_group_count=2),
    circular(input_dilation=(1, 1), use_bias=False, kernel_init=nn.initializers.ones),
    circular(strides=None, kernel_dilation=None, input_dilation=None, precision="highest"),
    circular(x=image(dtype=jnp.bfloat16), param_dtype=jnp.float16),
    circular(mask=jnp.tril(jnp.ones((3, 2, 4, 4)))),
    circular(conv_general_dilated=own_convolution),
    circular(conv_general_dilated_cls=lambda: own_convolution),
    circular(promote_dtype=to_half),
    case("Conv", 4, 3, padding="CAUSAL", kernel_dilation=2, x=line),
    case("Conv", 4, (2, 2, 2), padding="REFLECT", x=image(1, 3, 3, 3, 2)),
    *(case(name, 4, (), bias_init=nn.initializers.normal()) for name in ("Conv", "ConvTranspose")),
    case("ConvTranspose", 4, (3, 2), strides=(2, 2)),
    flipped(strides=(2, 2), padding="VALID"),
    flipped(padding=1, use_bias=False, preferred_element_type=jnp.float32),
    flipped(padding=((1, 0), 2), dtype=jnp.bfloat16, x=image(6, 6, 4)),
    flipped(mask=jnp.tril(jnp.ones((3, 2, 4, 4)))),
    case("ConvTranspose", 4, 3, transpose_kernel=True, strides=(2,), padding="CIRCULAR", x=line),
    norm(call=train),
    norm(call=frozen),
    norm(axis=(1, -1), call=train),
    norm(axis=np.int64(1), call=train),
    norm(axis=(-1, 1), call=frozen),
    norm(axis=1, use_scale=False, momentum=0.5, epsilon=1e-2, call=train),
    norm(use_bias=False, use_running_average=True),
    norm(dtype=jnp.bfloat16, call=train),
    norm(dtype=np.float32, call=train),
    norm(call=train, x=image(dtype=jnp.bfloat16)),
    norm(call=frozen, x=image(dtype=jnp.float16), param_dtype=jnp.float16),
    norm(use_fast_variance=False, bias_init=nn.initializers.normal(), call=train),
    norm(force_float32_reductions=False, call=train),
    norm(call={**train, "mask": jnp.arange(2 * 36).reshape(2, 6, 6, 1) % 3}),
    norm(use_scale=False, use_bias=False, call=frozen, x=jnp.arange(12).reshape(3, 4)),
    norm(call=train, x=image(3, 4) + 1j * image(3, 4)),
    norm(epsilon=np.float32(1e-2), call=train),
    *(case(f"{name}Norm") for name in ("Layer", "Instance", "RMS")),
    case("LayerNorm", use_scale=False, use_fast_variance=False, epsilon=1e-2),
    case("LayerNorm", use_bias=False, dtype=jnp.bfloat16),
    case("LayerNorm", x=image(dtype=jnp.bfloat16), scale_init=nn.initializers.normal()),
    case("LayerNorm", reduction_axes=(1, 2)),
    case("LayerNorm", reduction_axes=(3,), feature_axes=[-1]),
    case("InstanceNorm", feature_axes=(3,)),
    case("LayerNorm", force_float32_reductions=False),
    case("LayerNorm", x=image(3, 4) + 1j * image(3, 4)),
    case("LayerNorm", call={"mask": jnp.arange(4).reshape(1, 1, 1, 4) > 0}),
    case("LayerNorm", epsilon=np.float32(1e-2)),
    *(
        case(f"{name}Norm", **{axes: ()})
        for name in ("Layer", "RMS")
        for axes in ("reduction_axes", "feature_axes")
    ),
    case("GroupNorm", 2),
    case("GroupNorm", None, 1, bias_init=nn.initializers.normal(), x=image(3, 6, 4)),
    case("GroupNorm", 2, reduction_axes=(1, 2, 3)),
    case("GroupNorm", 4, use_scale=False, x=image(dtype=jnp.float16)),
    case("InstanceNorm", feature_axes=(1, 3)),
    case("InstanceNorm", param_dtype=jnp.bfloat16, x=line),
    case("RMSNorm", use_scale=False),
    case("RMSNorm", dtype=jnp.bfloat16, scale_init=nn.initializers.normal()),
    case("RMSNorm", call={"mask": jnp.arange(4).reshape(1, 1, 1, 4) > 0}),
    case("PReLU"),
    case("PReLU", negative_slope_init=-0.5, x=image(dtype=jnp.bfloat16)),
    case("Embed", 9, 3, x=jnp.array([[4, 0, -2], [0, 8, 0]])),
    case("Embed", 9, 3, dtype=jnp.bfloat16, x=jnp.arange(9, dtype=jnp.uint8)),
    case("Embed", 1, 3, x=jnp.arange(2)),
    case("Embed", 9, 3, promote_dtype=to_half, x=jnp.arange(9)),
    half(deterministic=False),
    half(deterministic=True),
    half(call={"deterministic": False}),
    half(broadcast_dims=(1, -1), deterministic=False),
    half(rng_collection="noise", deterministic=False),
    half(deterministic=False, call={"rng": jax.random.key_data(key)}),
    half(deterministic=False, x=image(dtype=jnp.bfloat16)),
    case("Dropout", 0.0, deterministic=False),
    case("Dropout", 1.0, deterministic=False),
    case("Dropout", np.float64(0.3), deterministic=False),
]


class Calls(nn.Module):
    """Does what ``call`` does."""

    call: Callable[..., Any]

    @nn.compact
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


@pytest.mark.parametrize(("name", "args", "fields", "x", "call"), CASES)
def test_layers_equal_stock(name: str, args: Any, fields: Any, x: Any, call: Any) -> None:
    """Built as a drop-in; and a stock layer in a converted model runs the same program."""
    stock, ours = (
        functools.partial(getattr(package, name), *args, **fields) for package in (nn, mnn)
    )
    assert isinstance(ours(), nn.Module)
    assert repr(ours()) == repr(stock())
    agree(ours(), stock(), x, **call)
    built = Calls(lambda *args, **kwargs: ours()(*args, **kwargs))
    converted = mnn.convert(Calls(lambda *args, **kwargs: stock()(*args, **kwargs)))
    assert program(converted, x, **call) == program(built, x, **call)


def program(module: nn.Module, x: Any, **call: Any) -> str:
    """All that is computed, backward too, for any variables."""
    variables = jax.eval_shape(functools.partial(module.init, **call), KEYS, x)

    def backward(variables: Any, x: Any) -> Any:
        y, pull, mutated = vjp(module, variables, x, **call)
        return mutated, pull(y)

    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(backward)(variables, x)))


@pytest.mark.parametrize("name", ["BatchNorm", "LayerNorm"])
def test_the_gradient_of_a_scale_far_from_zero(name: str) -> None:
    """With the variance that is not fast, it is as stable as forward."""
    x = 1e4 + jax.random.normal(jax.random.key(0), (64, 32))
    g, grads = jax.random.normal(jax.random.key(1), x.shape), []
    for package in (nn, mnn):
        layer = getattr(package, name)(use_fast_variance=False)
        call = {"use_running_average": False} if name == "BatchNorm" else {}
        variables = layer.init(KEYS, x, **call)
        _, pull, _ = vjp(layer, variables, x, **call)
        grads.append(pull(g)[0]["scale"])
    np.testing.assert_allclose(grads[1], grads[0], rtol=0, atol=2e-4)


def test_batch_norm_over_a_named_axis() -> None:
    x = image(4, 2, 3)

    def run(cls: Any) -> Any:
        module = cls(use_running_average=False, axis_name="batch")
        variables = module.init(KEYS, x[0])
        return variables, jax.vmap(functools.partial(step, module, variables), axis_name="batch")(x)

    close(run(mnn.BatchNorm), run(nn.BatchNorm))


@pytest.mark.parametrize(
    ("cls", "fields", "call", "message"),
    [
        ("BatchNorm", {}, {}, "use_running_average"),
        ("BatchNorm", {"axis": 7}, train, "out of range"),
        ("Dropout", {"rate": 0.5}, {}, "deterministic"),
        ("GroupNorm", {"num_groups": 3}, {}, "does not divide"),
        ("GroupNorm", {"num_groups": 0}, {}, "does not divide"),
        ("GroupNorm", {"num_groups": 2, "group_size": 2}, {}, "Either"),
        ("InstanceNorm", {"feature_axes": 0}, {}, "leading dimension"),
        ("Conv", {"features": 4, "kernel_size": (3, 3), "padding": "CAUSAL"}, {}, "Causal padding"),
        (
            "Conv",
            {"features": 4, "kernel_size": (3, 3), "padding": "REFLECT", "feature_group_count": 3},
            {},
            "",
        ),
        (
            "Conv",
            {"features": 4, "kernel_size": 3, "padding": "CAUSAL", "input_dilation": 2},
            {},
            "String padding",
        ),
    ],
)
def test_errors_are_those_of_stock(cls: str, fields: Any, call: Any, message: str) -> None:
    raised = []
    for package in (nn, mnn):
        with pytest.raises(Exception) as info:
            getattr(package, cls)(**fields).init(KEYS, image(), **call)
        assert message in str(info.value)
        raised.append((info.type, str(info.value).partition("-----")[0].strip()))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("x", [[1.0, 2.0], 2.0, None], ids=repr)
@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        *(("Dense", {"features": 2}), ("Conv", {"features": 2, "kernel_size": 2})),
        *(("BatchNorm", {"use_running_average": True}), ("LayerNorm", {}), ("RMSNorm", {})),
        *(("GroupNorm", {"num_groups": 1}), ("InstanceNorm", {}), ("PReLU", {})),
        *(
            ("Dropout", {"rate": 0.5, "deterministic": False}),
            ("Embed", {"num_embeddings": 2, "features": 2}),
        ),
    ],
)
def test_what_is_no_array(cls: str, fields: Any, x: Any) -> None:
    def outcome(package: Any) -> type:
        try:
            return type(getattr(package, cls)(**fields).init(KEYS, x))
        except Exception as error:
            return type(error)

    assert outcome(mnn) is outcome(nn)


def test_statistics_that_may_not_change() -> None:
    x = image()
    variables = mnn.BatchNorm().init(KEYS, x, **train)
    for package in (nn, mnn):
        with pytest.raises(Exception, match="Cannot update variable"):
            package.BatchNorm().apply(variables, x, **train)


def test_what_the_layers_keep() -> None:
    """Besides parameters and input: not the copies that stock makes, and fewer bits."""
    x = image(2, 6, 6, 4, dtype=jnp.bfloat16)

    def extra(cls: Any, *args: Any, call: Any = None, x: Any = x, **fields: Any) -> int:
        module = cls(*args, **fields)
        return kept(module, module.init(KEYS, x, **(call or {})), x, **(call or {}))

    wide = 4 * x.size
    assert extra(nn.BatchNorm, call=train) >= wide
    assert extra(mnn.BatchNorm, call=train) <= 2 * 4 * 4  # two vectors
    assert extra(mnn.BatchNorm, call=frozen) == 0
    assert extra(nn.LayerNorm) >= wide
    assert extra(mnn.LayerNorm) == 2 * 4 * x.size // 4  # two numbers per example
    assert extra(mnn.GroupNorm, 2) == 2 * 4 * 2 * 2
    assert extra(mnn.InstanceNorm) == 2 * 4 * 2 * 4
    assert extra(mnn.RMSNorm) == 4 * x.size // 4
    assert extra(nn.Dropout, 0.5, deterministic=False) >= x.size
    assert extra(mnn.Dropout, 0.5, deterministic=False) == x.size // 4  # a byte per 4 channels
    assert extra(mnn.Dropout, 0.5, (1, 2), deterministic=False) <= 16  # a key
    x = image()
    for name, fields in (
        ("Dense", {}),
        ("Conv", {"kernel_size": (3, 3)}),
        ("Conv", {"kernel_size": (3, 3), "padding": "CIRCULAR"}),
        ("ConvTranspose", {"kernel_size": (3, 3)}),
        ("ConvTranspose", {"kernel_size": (3, 3), "transpose_kernel": True}),
    ):
        assert extra(getattr(nn, name), 4, x=x, **fields) >= x.nbytes
        assert extra(getattr(mnn, name), 4, x=x, **fields) == 0


# Whole models.


class Block(nn.Module):
    """Made in a compact method. (Without kernels, whose initialization takes long to compile.)"""

    train: bool = True
    package: str = "nn"

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = globals()[self.package].BatchNorm(not self.train, bias_init=nn.initializers.ones)(x)
        return mnn.relu(x + globals()[self.package].Dropout(0.3, deterministic=not self.train)(y))


class Carry(nn.Module):
    package: str = "nn"

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return Block(package=self.package)(x), None


class Method(nn.Module):
    """Lifts its own method."""

    package: str = "nn"

    @nn.remat
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Block(package=self.package)(x)


class Net(nn.Module):
    """Of a residual network, made in setup: layers, a list, a module that is passed in."""

    block: Any
    train: bool = True

    def setup(self) -> None:
        self.stem = nn.Sequential([nn.Conv(4, (3, 3), padding="REFLECT"), mnn.relu])
        self.norm = nn.BatchNorm(not self.train)
        self.blocks = [self.block, Block(self.train)]
        self.head = nn.Dense(3)

    def __call__(self, x: Any) -> Any:
        return self.head(self.features(x).mean((1, 2)))

    def features(self, x: Any) -> Any:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return x


def net() -> Net:
    return Net(Block())


lifted_axes = {"params": 0, "batch_stats": 0}
scan = functools.partial(
    nn.scan, variable_axes=lifted_axes, split_rngs={"params": True, "dropout": True}, length=2
)
vmap = functools.partial(
    nn.vmap, variable_axes=lifted_axes, split_rngs={"params": True, "dropout": True}
)


def call(block: nn.Module, x: Any) -> Any:
    return block(x)


#: With the layers of a package, by its name.
BODIES: dict[str, Callable[[str, Any], Any]] = {
    "nothing": lambda p, x: Block(package=p)(x),
    "remat": lambda p, x: nn.remat(Block)(package=p)(x),
    "remat of a layer": lambda p, x: nn.remat(globals()[p].BatchNorm)(False)(x),
    "remat of a method": lambda p, x: Method(p)(x),
    "remat of a function": lambda p, x: nn.remat(call)(Block(package=p), x),
    "jit": lambda p, x: nn.jit(Block)(package=p)(x),
    "jit, made earlier": lambda p, x: JITTED(package=p)(x),
    "jit of a layer": lambda p, x: nn.jit(globals()[p].BatchNorm)(False)(x),
    "scan": lambda p, x: scan(Carry)(p)(x, None)[0],
    "scan of remat": lambda p, x: scan(nn.remat(Carry, prevent_cse=False))(p)(x, None)[0],
    "vmap": lambda p, x: vmap(Block)(package=p)(x),
    "cond": lambda p, x: nn.cond(x.sum() > -1e9, call, call, Block(package=p), x),
    "sequential": lambda p, x: nn.Sequential(
        [Block(package=p), globals()[p].BatchNorm(False), mnn.relu]
    )(x),
    "twice": lambda p, x: (lambda block: block(block(x)))(Block(package=p)),
    "names": lambda p, x: Block(package=p, name="one")(
        globals()[p].BatchNorm(False, name="two")(x)
    ),
}
JITTED = nn.jit(Block)


def replaced(module: nn.Module, x: Any) -> int:
    """How many residuals of ours the program has."""
    text = program(module, x)
    return text.count("name=batch_norm_train.rstd") + text.count("name=dropout.kept")


@pytest.mark.parametrize("name", BODIES)
def test_transforms(name: str) -> None:
    """Lifted, inside: the program is that of the drop-ins; lifted, around; converted where made."""
    model, drop_ins = (Calls(functools.partial(BODIES[name], package)) for package in ("nn", "mnn"))
    ours, x = mnn.convert(model), image(4, 3)
    assert replaced(model, x) == 0
    expected = replaced(drop_ins, x)
    assert expected > 0
    assert program(ours, x) == program(drop_ins, x)
    same(*(jax.eval_shape(m.init, KEYS, x) for m in (ours, model)))
    for around in (
        lambda x: nn.remat(call)(mnn.convert(Calls(model.call)), x),
        lambda x: nn.jit(type(ours))(model.call)(x),
        lambda x: mnn.convert(Calls(model.call))(x),
    ):
        assert replaced(Calls(around), x) >= expected


def test_a_model_made_in_setup() -> None:
    x = image()
    model = net()
    # (A compiler that sees a layer whole may add up its statistics in another order.)
    variables = agree(mnn.convert(model), model, x, results=close)
    assert kept(mnn.convert(model), variables, x) < kept(model, variables, x)


def test_masks_prune() -> None:
    """Gradients of the input only, of some parameters only: less is kept than for all."""
    x, model = image(), mnn.convert(net())
    variables = model.init(KEYS, x)
    params, rest = split(variables)

    def loss(some: Any, x: Any, module: nn.Module = model) -> Any:
        every = {"params": {**params, **some}, **rest}
        return module.apply(every, x, rngs=KEYS, mutable=["batch_stats"])[0].sum()

    def both(some: Any) -> tuple[int, int]:
        """Of these parameters, and of these and the input; checked against stock."""
        grads = jax.grad(loss, (0, 1))
        close(grads(some, x), grads(some, x, net()))
        close(jax.grad(loss)(some, x), jax.grad(loss)(some, x, net()))
        alone = jax.vjp(lambda some: loss(some, x), some)[1]
        return held(alone, variables, x), held(jax.vjp(loss, some, x)[1], variables, x)

    assert both({"head": params["head"]})[0] < 2 * 3 * 4 * 4 + 100
    biases = {"norm": {"bias": params["norm"]["bias"], "scale": params["norm"]["scale"]}}
    head, norms, every = (both(some) for some in ({"head": params["head"]}, biases, params))
    assert head[0] < norms[0] <= every[0]
    assert max(head[1], norms[1]) <= every[1]
    assert jax.vjp(lambda x: loss({}, x), x)[1](1.0)[0].shape == x.shape


# Programs that were traced earlier, and others.


def test_nothing_traced_with_the_stock_model_is_reused() -> None:
    """As a static argument (under ``nn.jit`` inside: test_transforms)."""
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def apply(module: nn.Module, variables: Any, x: Any) -> Any:
        traced.append(type(module))
        return module.apply(variables, x, rngs=KEYS, mutable=["batch_stats"])

    model, x = Block(), image(4, 3)
    variables = model.init(KEYS, x)
    for module in (model, mnn.convert(model), Block(), mnn.convert(Block())):
        apply(module, variables, x)
    assert traced == [Block, type(mnn.convert(model))]


def test_other_threads_and_models_are_left_alone() -> None:
    stock, x = Calls(lambda x: Block()(x)), image(4, 3)
    inside, counts = threading.Event(), []
    done = threading.Event()

    def wait(x: Any) -> Any:
        inside.set()
        assert done.wait(60)
        return Block()(x)

    thread = threading.Thread(target=lambda: mnn.convert(Calls(wait)).init(KEYS, x))
    thread.start()
    assert inside.wait(60)
    counts.append(replaced(stock, x))
    done.set()
    thread.join()
    counts.append(replaced(stock, x))
    assert counts == [0, 0]


def test_a_model_that_raised_leaves_nothing_behind() -> None:
    def fail(x: Any) -> Any:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        mnn.convert(Calls(fail)).init(KEYS, image(4, 3))
    assert replaced(Block(), image(4, 3)) == 0


# What a converted module is.


def test_it_is_a_module_like_the_original() -> None:
    model, x = net(), image()
    ours = mnn.convert(model)
    variables = ours.init(KEYS, x)
    assert isinstance(ours, Net)
    assert type(ours).__name__ == "Net"
    assert repr(ours) == repr(model)
    options = {"rngs": KEYS, "mutable": ["batch_stats", "intermediates"]}
    for kwargs in (
        {"method": "features"},
        {"method": Net.features},
        {"method": lambda module, x: module.head(module.norm(x))},
        {"capture_intermediates": True},
        {"capture_intermediates": lambda module, name: name == "features"},
    ):
        same(*(m.apply(variables, x, **options, **kwargs) for m in (ours, model)))
    table = {"console_kwargs": {"force_terminal": False, "width": 200}, "compute_vjp_flops": False}
    assert ours.tabulate(KEYS, x, **table) == model.tabulate(KEYS, x, **table)
    same(
        *(
            nn.apply(lambda m, x: m.features(x), m, **only(options, "mutable"))(
                variables, x, rngs=KEYS
            )
            for m in (ours, model)
        )
    )


def only(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names}


def test_bound_and_its_parts() -> None:
    """A part that is called by itself is converted, too."""
    model, x = Net(Block(False), train=False), image()
    variables = model.init(KEYS, x)

    def held_by(module: Net) -> int:
        bound = module.bind(variables)
        same(bound(x), model.apply(variables, x))
        same(bound.blocks[0](x), model.bind(variables).blocks[0](x))
        return held(jax.vjp(lambda x: bound.norm(x), x)[1], variables, x)

    assert held_by(mnn.convert(model)) == 0 < held_by(model)
    module, same_variables = mnn.convert(model).bind(variables).unbind()
    same(same_variables, variables)
    assert mnn.convert(module) is module
    assert mnn.revert(module) == model
    bound = mnn.convert(model.bind(variables))
    assert type(bound) is type(mnn.convert(model))
    assert held(jax.vjp(bound, x)[1], variables, x) < held(
        jax.vjp(model.bind(variables), x)[1], variables, x
    )
    assert type(mnn.revert(bound).norm) is nn.BatchNorm


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_stay_bound(copied: Callable[[Any], Any]) -> None:
    model, x = Net(Block(False), train=False), image()
    variables = model.init(KEYS, x)
    bound = mnn.convert(model).bind(variables)
    copy = copied(bound)
    assert type(copy) is type(bound)
    same(copy(x), model.apply(variables, x))


def test_equality_copies_and_pickles() -> None:
    model = net()
    ours = mnn.convert(model)
    assert ours != model
    assert model != ours
    assert ours == mnn.convert(net())
    assert hash(ours) == hash(mnn.convert(net()))
    assert ours != mnn.convert(Net(Block(), train=False))
    for copied in (ours.clone(), ours.copy(), copy.copy(ours), copy.deepcopy(ours)):
        assert type(copied) is type(ours)
    unpickled = pickle.loads(pickle.dumps(mnn.convert(Block(False))))
    assert unpickled == mnn.convert(Block(False))
    assert ours.clone(train=False) == mnn.convert(Net(Block(), train=False))


def test_convert_and_revert() -> None:
    model = net()
    ours = mnn.convert(model)
    assert type(model) is Net
    assert mnn.convert(ours) is ours
    assert mnn.revert(ours) == model
    assert type(mnn.revert(ours)) is Net
    assert mnn.revert(model) is model
    layer = nn.BatchNorm(name="one")
    assert mnn.convert(layer) == mnn.BatchNorm(name="one")
    assert mnn.revert(mnn.convert(layer)) == layer
    nested = mnn.revert(Net(mnn.convert(Block())))
    assert (type(nested), type(nested.block)) == (Net, Block)
    assert replaced(mnn.revert(mnn.convert(Block())), image(4, 3)) == 0


class Own(nn.Module):
    """Defines what a dataclass defines."""

    table: Any

    def __init__(self, table: Any, **kwargs: Any) -> None:
        self.table, self.parent = np.asarray(table), kwargs.get("parent")
        self.name = kwargs.get("name")
        self.__post_init__()

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Own) and bool((self.table == other.table).all())

    def __hash__(self) -> int:
        return 7

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Block()(x)


class Keywords(nn.Module, kw_only=True):
    train: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return Block(self.train)(x)


def test_classes_that_define_their_own() -> None:
    model, x = Own(np.ones(2)), image(4, 3)
    ours = mnn.convert(model)
    assert ours == mnn.convert(Own(np.ones(2)))
    assert ours != model
    assert model != ours
    assert hash(ours) == 7
    assert isinstance(ours.clone(table=[2, 2]).table, np.ndarray)
    assert replaced(ours, x) == replaced(mnn.convert(Keywords(train=True)), x) > 0


def test_shared_modules_stay_shared() -> None:
    shared = Block()
    x = image(4, 3)
    outer = Calls(lambda x: Pair(shared, mnn.convert(shared))(x))
    expected = Calls(lambda x: Pair(shared, shared)(x))
    assert len(jax.tree.leaves(expected.init(KEYS, x))) == 4
    assert len(jax.tree.leaves(mnn.convert(expected).init(KEYS, x))) == 4
    assert len(jax.tree.leaves(outer.init(KEYS, x))) == 8  # convert returns another module


class Pair(nn.Module):
    one: nn.Module
    two: nn.Module

    def __call__(self, x: Any) -> Any:
        return self.two(self.one(x))


def test_interceptors_of_the_user_see_every_call() -> None:
    seen: list[str] = []

    def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        seen.append(f"{type(context.module).__name__}.{context.method_name}")
        return call(*args, **kwargs)

    def inside(x: Any) -> Any:
        with nn.intercept_methods(note):
            return Block()(x)

    x = image(4, 3)
    for outside, model in ((True, Block()), (False, Calls(inside))):
        for module in (model, mnn.convert(model)):
            variables = jax.eval_shape(module.init, KEYS, x)
            seen.clear()
            with nn.intercept_methods(note) if outside else nullcontext():
                jax.eval_shape(functools.partial(step, module), variables, x)
            assert seen == ["Block.__call__", "BatchNorm.__call__", "Dropout.__call__"]


# Coverage.


class Other(nn.BatchNorm):
    @nn.compact
    def __call__(self, x: Any, **kwargs: Any) -> Any:
        return 2 * super().__call__(x, **kwargs)


class Bare(nn.Dropout):
    pass


class Mixed(nn.Module):
    act: Any = nn.relu

    def setup(self) -> None:
        self.made = nn.remat(nn.BatchNorm)(False)
        self.layers = nn.Sequential([nn.Dense(4), nn.relu, mnn.relu])

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.DenseGeneral(3)(Bare(0.5)(self.made(x), deterministic=True))
        x = mnn.Dropout(0.5, deterministic=True)(mnn.convert(Block(False))(x))
        pooled = [nn.max_pool(x[None], (1,)) for _ in range(1)]
        return JITTED(False)(Other()(self.layers(pooled[0][0]), use_running_average=False))


def test_coverage() -> None:
    x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    first, second = mnn.coverage(Mixed(), x), mnn.coverage(Mixed(), x, rngs=KEYS)
    assert first == second == mnn.coverage(Mixed(), x)
    function = "a function: use memsave_jax.linen."
    assert {tuple(entry) for entry in first} == {
        ("", "relu", "skipped", f"{function}relu"),
        ("", "max_pool", "skipped", f"{function}max_pool"),
        ("made", "BatchNorm", "convertible", ""),
        ("Bare_0", "Bare", "skipped", "subclass of Dropout which may mean more than its base"),
        ("DenseGeneral_0", "DenseGeneral", "skipped", "not in the table"),
        ("Block_0/BatchNorm_0", "BatchNorm", "converted", BATCH_NORM),
        ("Block_0/Dropout_0", "Dropout", "converted", DROPOUT),
        ("Dropout_0", "Dropout", "converted", DROPOUT),
        ("layers", "relu", "skipped", f"{function}relu"),
        ("layers/layers_0", "Dense", "convertible", ""),
        ("Other_0", "Other", "skipped", "subclass of BatchNorm with a __call__ of its own"),
        ("JitBlock_0/BatchNorm_0", "BatchNorm", "convertible", ""),
        ("JitBlock_0/Dropout_0", "Dropout", "convertible", ""),
    }
    after = mnn.coverage(mnn.convert(Mixed()), x)
    assert len(after) == len(first)
    assert {e.name for e in after if e.status == "converted"} == {
        e.name for e in first if e.status != "skipped"
    }
    assert str(after).startswith("converted: 7\n")
    assert "(root)" in str(after)


BATCH_NORM = "rows: batch_norm_train, batch_norm_eval"
DROPOUT = "rows: dropout, dropout_from_rng"


def test_coverage_of_a_layer_and_of_arguments() -> None:
    (entry,) = mnn.coverage(nn.BatchNorm(), image(), use_running_average=True)
    assert entry == ("", "BatchNorm", "convertible", "")
    (entry,) = mnn.coverage(mnn.BatchNorm(), image(), use_running_average=True)
    assert entry.status == "converted"
    assert {e.name for e in mnn.coverage(net(), image(), method="features")} >= {"norm"}


# Errors and imports.


@pytest.mark.parametrize("verb", ["convert", "revert", "coverage"])
@pytest.mark.parametrize(("thing", "name"), [(nn.BatchNorm, "BatchNorm"), ({}, "a dict")])
def test_no_module(verb: str, thing: Any, name: str) -> None:
    with pytest.raises(
        TypeError, match=f"{verb} needs an instance of flax.linen.Module, got {name}"
    ):
        getattr(mnn, verb)(thing)


def test_classes_that_register_their_subclasses() -> None:
    """They hear of the user's classes alone."""
    known = []

    class Base(nn.Module):
        def __init_subclass__(cls, *, key: str) -> None:
            super().__init_subclass__()
            known.append(key)

    class Net(Base, key="net"):
        width: int = 4

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.LayerNorm()(nn.Dense(self.width)(x))

    model, x = mnn.convert(Net(width=3)), jnp.ones((2, 5))
    assert known == ["net"]
    expected, variables = Net(width=3).init_with_output(KEYS["params"], x)
    np.testing.assert_array_equal(model.apply(variables, x), expected)
    assert type(mnn.revert(model)) is Net


def test_names() -> None:
    assert mnn.relu(jnp.ones(2)).shape == (2,)
    aliases = {"swish": "silu", "hard_swish": "hard_silu"}
    for name in mnn.__all__:
        assert getattr(mnn, name).__name__ == aliases.get(name, name)


def test_without_flax() -> None:
    """The error names the extra; the rest works."""
    code = (
        "import sys; sys.modules['flax'] = None\n"
        "import memsave_jax.functional\n"
        "try: import memsave_jax.linen\n"
        "except ImportError as error: assert 'memsave[jax]' in str(error)\n"
        "else: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
