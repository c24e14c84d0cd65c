"""Each row as JAX sees it: under every transformation, what stock gives under the same.

Over rows, masks and both forms of the engine. Where the stock op would do for a row, its rule runs
nevertheless. All transformations of a row are one program, as most of the time goes into compiling.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax_backend
import numpy as np
import optax
import pytest
import torch
from backends import JAX
from flax import linen as nn
from hypothesis import settings
from jax import Array, export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_backend import Call, Jax
from strategies import Case, label, wanted

import memsave_jax.functional as F
from memsave.spec import TABLE, Layer, permutation
from memsave_jax import function
from memsave_jax.function import RULES, differentiable
from memsave_jax.layers import pooling

#: What a transformation does to a row depends on what it keeps and on how its rule is made, so
#: unless there is time these are rows that differ in that.
KINDS = {
    *jax_backend.KINDS,
    *("batch_norm_eval", "dropout", "leaky_relu", "silu", "tanh", "softmax", "swiglu"),
    *("layer_norm", "rms_norm_from_output", "prelu", "avg_pool2d", "adaptive_max_pool2d"),
}
ROWS = [
    row
    for row in TABLE.values()
    if JAX.has_backward(row) and (row.name in KINDS or settings().max_examples > 100)
]
every_row = pytest.mark.parametrize("row", ROWS, ids=repr)
FORMS = ("custom_jvp", "custom_vjp")
every_form = pytest.mark.parametrize("form", FORMS)
every_row_and_form = pytest.mark.parametrize(
    ("row", "form"),
    [(row, form) for row in ROWS for form in FORMS if Jax(form).checks(row)],
    ids=str,
)
SIZES = {"n": 8, "i": 4}
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def case(row: Layer, wrt: frozenset[str]) -> Case:
    """A small call, with eight examples for eight devices."""

    def shape(axes: str) -> tuple[int, ...]:
        names = [token.lstrip("*").split("/")[0] for token in axes.split()]
        return tuple(SIZES.get(name, 2 if name[0] == "k" else 3) for name in names)

    options = {name: values[0] for name, values in row.options.items()}
    shapes: dict[str, Any] = {
        name: (8, 6) if axes == "*n" else shape(axes) for name, axes in row.args.items()
    }
    dtypes = {name: "int64" if name in row.integers else "float64" for name in shapes}
    indices = {name: shape(axis)[0] for name, axis in row.integers.items()}
    return Case(shapes, dtypes, options, wrt, indices, seed=1)


def calls(row: Layer, form: str) -> dict[frozenset[str], Call]:
    """The layer (or ``"stock"``) as a function of what each mask wants."""
    rule = JAX.following(row).rules[row.name]
    layer = rule.primal if form == "stock" else function.differentiable(rule)
    return {wrt: Call(layer, rule, case(row, wrt)) for wrt in wanted(row)}


def loss(call: Call, **others: Any) -> Function:
    """A scalar that depends on all outputs, and not linearly. ``others``: arguments to replace."""

    def total(*args: Any) -> Any:
        outputs = jax.tree.leaves(call.with_inputs(args, {**call.args, **others}, call.key))
        return sum(jnp.sin(y + k).sum() for k, y in enumerate(outputs))

    return total


def every(function: Function) -> Function:
    """The gradient with respect to all arguments."""

    def gradients(*args: Any) -> Any:
        return jax.grad(function, argnums=tuple(range(len(args))))(*args)

    return gradients


# The transformations: functions of a call and its wanted arguments.


def gradient(call: Call, *args: Any) -> Any:
    return every(loss(call))(*args)


def gradient_of_jit(call: Call, *args: Any) -> Any:
    return every(jax.jit(loss(call)))(*args)


def vjp_twice(call: Call, *args: Any) -> Any:
    y, pull = jax.vjp(call, *args)
    return pull(y), pull(jax.tree.map(jnp.cos, y))


def stacked(*args: Any) -> list[Any]:
    return [jnp.stack([arg, 2 * arg, arg - 1]) for arg in args]


def vmap_of_gradient(call: Call, *args: Any) -> Any:
    return jax.vmap(every(loss(call)))(*stacked(*args))


def vmap_of_gradient_over_one(call: Call, *args: Any) -> Any:
    batch = [stacked(args[0])[0], *args[1:]]
    return jax.vmap(every(loss(call)), in_axes=(0, *[None] * (len(args) - 1)))(*batch)


def gradient_of_vmap(call: Call, *args: Any) -> Any:
    return every(lambda *w: jax.vmap(loss(call))(*w).sum())(*stacked(*args))


def gradient_of_scan(call: Call, *args: Any) -> Any:
    def summed(x: Any, *rest: Any) -> Any:
        return lax.scan(lambda c, x: (c + loss(call)(x, *rest), None), 0.0, x)[0]

    return every(summed)(stacked(args[0])[0], *args[1:])


def gradient_of_fori_loop(call: Call, *args: Any) -> Any:
    return every(lambda *w: lax.fori_loop(0, 2, lambda k, c: c + loss(call)(*w), 0.0))(*args)


def gradient_of_cond(call: Call, *args: Any) -> Any:
    def branch(*args: Any) -> Any:
        return lax.cond(args[0].sum() < 1e9, loss(call), lambda *_: 0.0, *args)

    return every(branch)(*args)


def gradient_of_remat(call: Call, *args: Any) -> Any:
    return every(jax.checkpoint(loss(call)))(*args)


def gradient_of_remat_with_policies(call: Call, *args: Any) -> Any:
    policies = jax.checkpoint_policies
    return [
        every(jax.checkpoint(loss(call), policy=policy))(*args)
        for policy in (
            policies.everything_saveable,
            policies.dots_with_no_batch_dims_saveable,
            policies.save_only_these_names("relu.positive", "dropout.kept"),
            policies.save_anything_except_these_names("relu.positive", "dropout.kept"),
        )
    ]


def gradient_of_remat_of_scan(call: Call, *args: Any) -> Any:
    def summed(*args: Any) -> Any:
        body = jax.checkpoint(lambda c, w: (c + loss(call)(*w), None))
        return lax.scan(body, 0.0, tuple(args))[0]

    return every(jax.checkpoint(summed))(*stacked(*args))


def gradient_of_gradient(call: Call, *args: Any) -> Any:
    def norm(*args: Any) -> Any:
        return sum(jnp.vdot(jnp.cos(g), g) for g in every(loss(call))(*args))

    return every(norm)(*args)


def hessian_by_reverse(call: Call, *args: Any) -> Any:
    def of_first(x: Any) -> Any:
        return loss(call)(x.reshape(args[0].shape), *args[1:])

    return jax.jacrev(jax.grad(of_first))(args[0].ravel())


def forward_over_reverse(call: Call, *args: Any) -> Any:
    return jax.jvp(every(loss(call)), args, args)


def gradient_inside_of_custom_vjp(call: Call, *args: Any) -> Any:
    @jax.custom_vjp
    def outer(*args: Any) -> Any:
        return loss(call)(*args)

    outer.defvjp(lambda *args: jax.vjp(loss(call), *args), lambda pull, g: pull(2 * g))
    return every(outer)(*args)


ANY_FORM = (
    gradient,
    gradient_of_jit,
    vjp_twice,
    vmap_of_gradient,
    vmap_of_gradient_over_one,
    gradient_of_vmap,
    gradient_of_scan,
    gradient_of_fori_loop,
    gradient_of_cond,
    gradient_of_remat,
    gradient_of_remat_with_policies,
    gradient_of_remat_of_scan,
    gradient_of_gradient,
    hessian_by_reverse,
    forward_over_reverse,
    gradient_inside_of_custom_vjp,
)


def jvp(call: Call, *args: Any) -> Any:
    return jax.jvp(call, args, tuple(map(jnp.cos, args)))


def linearize(call: Call, *args: Any) -> Any:
    y, push = jax.linearize(call, *args)
    return y, push(*args), push(*map(jnp.sin, args))


def jacobian_forward(call: Call, *args: Any) -> Any:
    return jax.jacfwd(lambda s: loss(call)(*(s * arg for arg in args)))(1.5)


def reverse_over_forward(call: Call, *args: Any) -> Any:
    return every(lambda *w: jax.jvp(loss(call), w, args)[1])(*args)


def jvp_of_while(call: Call, *args: Any) -> Any:
    def repeated(*args: Any) -> Any:
        def body(state: Any) -> Any:
            return state[0] + 1, state[1] + loss(call)(*args)

        return lax.while_loop(lambda state: state[0] < 3, body, (0, 0.0))[1]

    return jax.jvp(repeated, args, args)


FORWARD = (jvp, linearize, jacobian_forward, reverse_over_forward, jvp_of_while)


def masks(row: Layer, place: int) -> list[frozenset[str]]:
    """Under which to check the transformation at this place: all, if there is time; or the largest,
    and of the others one, in turn.
    """
    largest = frozenset(row.reads)
    smaller = [wrt for wrt in wanted(row) if wrt != largest]
    if not smaller or settings().max_examples > 100:
        return wanted(row)
    return [largest, smaller[place % len(smaller)]]


def results(transforms: tuple[Function, ...], row: Layer, form: str) -> dict[str, Any]:
    """Of all transformations, as one program."""
    of_mask = {label(wrt): call for wrt, call in calls(row, form).items()}
    checked = {
        transform: [label(wrt) for wrt in masks(row, place)]
        for place, transform in enumerate(transforms)
    }

    @jax.jit
    def run(args: dict[str, list[Any]]) -> dict[str, Any]:
        return {
            transform.__name__: {wrt: transform(of_mask[wrt], *args[wrt]) for wrt in wrts}
            for transform, wrts in checked.items()
        }

    with function.using("custom_jvp" if form == "stock" else form):
        return run({wrt: call.wanted for wrt, call in of_mask.items()})


@functools.lru_cache
def of_stock(row: Layer) -> dict[str, Any]:
    with jax.enable_x64(True):
        return results((*ANY_FORM, *FORWARD), row, "stock")


def assert_close(ours: Any, stock: Any, what: str = "") -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(stock)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(stock), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9, err_msg=what)


@every_row_and_form
def test_transformations(row: Layer, form: str) -> None:
    transforms = (*ANY_FORM, *FORWARD) if form == "custom_jvp" else ANY_FORM
    stock = of_stock(row)
    for name, ours in results(transforms, row, form).items():
        assert_close(ours, stock[name], name)


@every_row_and_form
@pytest.mark.parametrize("policy", ["save_only_these_names", "everything_saveable"])
def test_a_checkpoint_saves_no_more_than_of_stock(row: Layer, form: str, policy: str) -> None:
    """Of blocks in a loop over layers: the input of a layer, by its name; or all that it finds."""
    saveable = getattr(jax.checkpoint_policies, policy)

    def stacked(form: str) -> int:
        wrt = frozenset([next(iter(row.reads))])
        call = calls(row, form)[wrt]

        named = policy == "save_only_these_names"

        @functools.partial(
            jax.checkpoint, policy=saveable("given") if named else saveable, prevent_cse=False
        )
        def block(scale: Array) -> Array:
            return loss(call)(checkpoint_name(call.wanted[0] * scale, "given"))

        def net(scales: Array) -> Array:
            return lax.scan(lambda total, scale: (total + block(scale), None), 0.0, scales)[0]

        with function.using("custom_jvp" if form == "stock" else form):
            program = jax.make_jaxpr(jax.grad(net))(jnp.ones(3))
        forward = next(eqn for eqn in program.eqns if eqn.primitive.name == "scan")
        return sum(function.bytes_of(out.aval) for out in forward.outvars)

    assert stacked(form) <= stacked("stock")


@every_row
def test_custom_vjp_refuses_forward_mode(row: Layer) -> None:
    """By an error of JAX, not by wrong numbers: the reason why it is not the default."""
    with pytest.raises(TypeError, match="can't apply forward-mode"):
        results((jvp,), row, "custom_vjp")


# Several masks of one traced function: where a structure that depends on the mask goes wrong.


@every_form
def test_one_jitted_layer_under_interleaved_masks(form: str) -> None:
    """The structure of what is kept may not be taken from another mask's tracing."""

    @jax.jit
    def layer(x: Any, weight: Any, bias: Any) -> Any:
        return F.batch_norm(x, None, None, weight, bias, use_running_average=False)[0]

    def net(x: Any, weight: Any, bias: Any) -> Any:
        y = layer(x, lax.stop_gradient(weight), bias)
        y = layer(y, weight, lax.stop_gradient(bias))
        y = layer(lax.stop_gradient(y), weight, bias) + layer(y, weight, bias)
        return (y**3).sum()

    x = jnp.arange(24.0).reshape(8, 3) ** 1.5
    args = (x, jnp.arange(1.0, 4.0), jnp.ones(3))
    for wanted_ in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2), (0,)):
        with function.using("stock"):
            expected = jax.grad(net, wanted_)(*args)
        with function.using(form):
            assert_close(jax.grad(net, wanted_)(*args), expected)
            assert_close(jax.jit(jax.grad(net, wanted_))(*args), expected)


@every_row_and_form
def test_one_jitted_layer_of_every_row_under_all_masks(row: Layer, form: str) -> None:
    rule = JAX.following(row).rules[row.name]
    call = Call(None, rule, case(row, frozenset(row.reads)))

    def masked(function_: Function) -> Any:
        once = jax.jit(lambda *args: function_(*args, **call.options(call.key)))

        def total(args: dict[str, Any]) -> Any:
            sums = []
            for wrt in wanted(row):
                fixed = {**call.args, **jax.tree.map(lax.stop_gradient, args)}
                some = [args[n] if n in wrt else fixed[n] for n in row.args]
                sums.append(sum(jnp.sin(y).sum() for y in jax.tree.leaves(once(*some))))
            return sum(k * s for k, s in enumerate(sums, start=1))

        return jax.grad(total)({n: a for n, a in call.args.items() if n not in row.integers})

    with function.using(form):
        assert_close(masked(function.differentiable(rule)), masked(rule.primal))


@every_row_and_form
def test_strict_rank_promotion(row: Layer, form: str) -> None:
    rule = JAX.following(row).rules[row.name]
    call = Call(None, rule, case(row, frozenset(row.reads)))
    floats = {name: call.args[name] for name in row.reads}

    def loss(function_: Function, floats: dict[str, Any]) -> Array:
        args = {**call.args, **floats}
        y = function_(*[args[name] for name in row.args], **call.options(call.key))
        return sum(leaf.sum() for leaf in jax.tree.leaves(y))

    with function.using(form), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.grad(functools.partial(loss, function.differentiable(rule))), floats)


NORMS: dict[str, tuple[tuple[int, ...], Function]] = {
    "batch_norm": (
        (4, 1),
        lambda x, *v: F.batch_norm(x, None, None, *v, use_running_average=False)[0],
    ),
    "layer_norm": ((1, 4), F.layer_norm),
    "layer_norm_from_output": ((1, 4), F.layer_norm_from_output),
    "group_norm": ((1, 4), functools.partial(F.group_norm, num_groups=1)),
    "group_norm_from_output": ((1, 4), functools.partial(F.group_norm_from_output, num_groups=1)),
    "instance_norm": ((1, 4, 1), F.instance_norm),
    "instance_norm_from_output": ((1, 4, 1), F.instance_norm_from_output),
}


@every_form
@pytest.mark.parametrize("name", NORMS)
def test_no_gradient_passes_a_variance_that_was_clipped(name: str, form: str) -> None:
    """The fast one of a large mean comes out negative, and is taken for 0."""
    shape, norm = NORMS[name]
    x = jnp.array([1000, 1000.03, 1000.05, 1000.01], jnp.float32)
    assert jnp.square(x).mean() - jnp.square(x.mean()) < 0
    x, vector = x.reshape(shape), jnp.full(shape[-1:], 2, jnp.float32)
    g = jnp.arange(4, dtype=jnp.float32).reshape(shape)

    def gradients() -> Any:
        return jax.vjp(norm, x, vector, vector)[1](g)

    with function.using("stock"):
        expected = gradients()
    with function.using(form):
        actual = gradients()
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4)


@every_form
def test_options_that_are_equal_numbers(form: str) -> None:
    """NumPy's promote, and -0.0 has another sign."""
    x = jnp.array([-1.0, 0.0, 2.0], jnp.bfloat16)
    with function.using(form):
        for slope in (0.25, np.float64(0.25), 0.25, 0.0, -0.0, 1, 1.0, True):
            assert_close(F.leaky_relu(x, slope), jax.nn.leaky_relu(x, slope))
            assert F.leaky_relu(x, slope).dtype == jax.nn.leaky_relu(x, slope).dtype
            sign = jnp.signbit(F.leaky_relu(x, slope))
            assert (sign == jnp.signbit(jax.nn.leaky_relu(x, slope))).all()
            assert F.elu(x, slope).dtype == jax.nn.elu(x, slope).dtype


# Devices.


def mesh(size: int = 8, kind: AxisType = AxisType.Auto) -> Any:
    if len(jax.devices()) < 8:
        pytest.skip("needs eight devices, which conftest.py asks of XLA")
    return jax.make_mesh((size,), ("data",), axis_types=(kind,))


def split(row: Layer) -> list[str]:
    """The arguments of which each device has one example, and which have a gradient."""
    return [name for name in per_example(row) if name in row.reads]


def per_example(row: Layer) -> list[str]:
    return [name for name, axes in row.args.items() if axes.split()[0].lstrip("*") == "n"]


def targets(row: Layer, call: Call) -> dict[str, Any]:
    """The other arguments of which each device has one example, which are split, too."""
    return {name: call.args[name] for name in per_example(row) if name not in row.reads}


def on_devices(row: Layer, form: str, run: Function) -> dict[str, Any]:
    """Under every mask that wants the gradient of all that is split."""
    return {
        label(wrt): run(call, call.wanted)
        for wrt, call in calls(row, form).items()
        if wrt.issuperset(split(row))
    }


@every_row_and_form
@pytest.mark.parametrize("axis", [0, -2, -1])
def test_explicit_mesh(row: Layer, form: str, axis: int) -> None:
    """Where JAX keeps account of how arrays lie, what stock does of an input that is split."""
    halves = mesh(2, AxisType.Explicit)
    rule = JAX.following(row).rules[row.name]
    call = Call(None, rule, case(row, frozenset(row.reads)))
    name, x = next(iter(call.args.items()))
    if name not in row.reads or x.ndim < -axis or x.shape[axis] % 2:
        pytest.skip("nothing to split")
    spec = [None] * x.ndim
    spec[axis] = "data"

    def gradient(function_: Function) -> Any:
        def loss(wanted: dict[str, Array]) -> Array:
            args = {**call.args, **wanted}
            y = function_(*[args[name] for name in row.args], **call.options(call.key))
            return sum(jnp.sin(leaf).sum() for leaf in jax.tree.leaves(y))

        whole = {name: call.args[name] for name in row.reads if call.args[name] is not None}
        wanted = jax.device_put(whole, NamedSharding(halves, PartitionSpec()))
        wanted[name] = jax.device_put(x, NamedSharding(halves, PartitionSpec(*spec)))
        grads = jax.jit(jax.grad(loss))(wanted)
        return grads, {name: jax.typeof(grad).sharding.spec for name, grad in grads.items()}

    with jax.set_mesh(halves), function.using(form):
        try:
            expected = gradient(rule.primal)
        except Exception as error:
            pytest.skip(f"stock raises {type(error).__name__}")
        actual = gradient(function.differentiable(rule))
    assert_close(actual[0], expected[0])
    assert actual[1] == expected[1]


@every_form
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_explicit_mesh_of_group_norm_of_images(form: str, axis: int) -> None:
    halves = mesh(2, AxisType.Explicit)
    spec = ["data" if k == axis else None for k in range(4)]

    def gradient() -> Array:
        x = jax.device_put(jnp.arange(192.0).reshape(2, 6, 4, 4) % 7, PartitionSpec(*spec))
        return jax.jit(jax.grad(lambda x: jnp.sin(F.group_norm(x, num_groups=2)).sum()))(x)

    with jax.set_mesh(halves), function.using(form):
        actual = gradient()
    with jax.set_mesh(halves), function.using("stock"):
        assert_close(actual, gradient())


@every_form
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("norm", [functools.partial(F.group_norm, num_groups=2), F.instance_norm])
def test_sharded_images_of_group_norm_stay_where_they_are(
    norm: Function, axis: int, form: str
) -> None:
    spec = ["data" if k == axis else None for k in range(4)]
    halves, x = mesh(2), jnp.arange(192.0).reshape(2, 6, 4, 4) % 7
    scale = bias = jnp.ones(4)

    def step(x: Array, scale: Array, bias: Array) -> Any:
        return jax.grad(lambda *args: jnp.sin(norm(*args)).sum(), (0, 1, 2))(x, scale, bias)

    def run() -> tuple[Any, str]:
        placed = jax.device_put(x, NamedSharding(halves, PartitionSpec(*spec)))
        program = jax.jit(step).lower(placed, scale, bias).compile()
        return program(placed, scale, bias), program.as_text()

    with function.using(form):
        ours, text = run()
    assert "all-gather" not in text
    with function.using("stock"):
        assert_close(ours, run()[0])


@every_form
def test_explicit_mesh_of_features(form: str) -> None:
    """Split as those of the scale are."""
    halves, x = mesh(2, AxisType.Explicit), jnp.arange(48.0).reshape(2, 6, 4) % 7
    features, scale = PartitionSpec(None, None, "data"), jnp.arange(1.0, 5.0)

    def run() -> Any:
        def loss(x: Array, scale: Array) -> Array:
            return jnp.sin(F.rms_norm(x, scale)).sum()

        args = jax.device_put(x, features), jax.device_put(scale, PartitionSpec("data"))
        return jax.grad(loss, (0, 1))(*args)

    with jax.set_mesh(halves):
        with function.using(form):
            ours = run()
        with function.using("stock"):
            assert_close(ours, run())


@every_form
def test_explicit_mesh_of_max_pooling_with_a_stride(form: str) -> None:
    halves = mesh(2, AxisType.Explicit)
    with jax.set_mesh(halves), function.using(form):
        x = jax.device_put(jnp.arange(192.0).reshape(2, 6, 4, 4) % 7, PartitionSpec("data"))
        actual = jax.grad(lambda x: F.max_pool(x, (2, 2), (2, 2)).sum())(x)
        assert_close(actual, jax.grad(lambda x: nn.max_pool(x, (2, 2), (2, 2)).sum())(x))


@every_row_and_form
def test_sharded_input(row: Layer, form: str) -> None:
    by_example = NamedSharding(mesh(), PartitionSpec("data"))
    rule = JAX.rules[row.name]

    def run(call: Call, args: Any) -> Any:
        count = len(split(row))
        args = [*(jax.device_put(arg, by_example) for arg in args[:count]), *args[count:]]
        others = jax.device_put(targets(row, call), by_example)
        step = jax.jit(lambda others, *args: every(loss(call, **others))(*args))
        program = step.lower(others, *args).compile()
        if call.function is not rule.primal:  # (Stock max pooling gathers all inputs.)
            assert "all-gather" not in program.as_text()
        grads = program(others, *args)
        for grad in grads[:count]:
            assert grad.sharding.is_equivalent_to(by_example, grad.ndim)
        return grads

    with function.using(form):
        ours = on_devices(row, form, run)
    assert_close(ours, on_devices(row, "stock", run))


@every_row_and_form
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_shard_map(row: Layer, form: str, inside: bool) -> None:
    """The gradient of a sum over devices, and sums over devices of gradients."""
    devices = mesh()

    def run(call: Call, args: Any) -> Any:
        count = len(split(row))
        specs = (*[PartitionSpec("data")] * count, *[PartitionSpec()] * (len(args) - count))

        def local(others: dict[str, Any], *args: Any) -> Any:
            if inside:
                return every(loss(call, **others))(*args)
            return lax.psum(loss(call, **others)(*args), "data")

        mapped = jax.shard_map(
            local,
            mesh=devices,
            in_specs=(PartitionSpec("data"), *specs),
            out_specs=specs if inside else PartitionSpec(),
        )
        mapped = functools.partial(mapped, targets(row, call))
        return jax.jit(mapped if inside else every(mapped))(*args)

    with function.using(form):
        ours = on_devices(row, form, run)
    assert_close(ours, on_devices(row, "stock", run))


@every_form
@pytest.mark.parametrize("layer", [F.prelu, F.prelu_from_input])
def test_slope_of_nothing_in_shard_map(layer: Callable[..., Any], form: str) -> None:
    """A zero that is the same on all devices is none of a slope that is not."""
    local = jax.grad(lambda w, x: layer(x, w).sum())
    specs = (PartitionSpec(), PartitionSpec("data"))
    mapped = jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=PartitionSpec())
    with function.using(form):
        assert mapped(jnp.asarray(0.2), jnp.ones((8, 0))) == 0


@every_row_and_form
def test_donated_arguments(row: Layer, form: str) -> None:
    call = calls(row, form)[frozenset(row.reads)]
    with function.using(form):
        expected = jax.jit(every(loss(call)))(*call.wanted)
        step = jax.jit(every(loss(call)), donate_argnums=tuple(range(len(call.wanted))))
        donated = [jnp.array(arg) for arg in call.wanted]
        assert_close(step(*donated), expected)
    assert all(arg.is_deleted() for arg in donated)


@every_row_and_form
def test_export(row: Layer, form: str) -> None:
    call = calls(row, form)[frozenset(row.reads)]
    with function.using(form):
        exported = export.export(jax.jit(loss(call)))(*call.wanted)
        loaded = export.deserialize(exported.serialize(vjp_order=1))
        ours = every(loaded.call)(*call.wanted)
    assert_close(
        ours, jax.jit(every(loss(calls(row, "stock")[frozenset(row.reads)])))(*call.wanted)
    )


@every_row
@pytest.mark.parametrize("known", [0, 1])
def test_export_of_unknown_sizes(row: Layer, known: int) -> None:
    """All of the input's, or all but the last."""
    rule, wanted = JAX.rules[row.name], case(row, frozenset({next(iter(row.reads))}))
    (x,) = Call(None, rule, wanted).wanted
    names = [f"n{k}" if k < x.ndim - known else str(x.shape[k]) for k in range(x.ndim)]
    unknown = jax.ShapeDtypeStruct(export.symbolic_shape(", ".join(names)), x.dtype)

    def exported(layer: Function) -> Any:
        step = jax.jit(every(loss(Call(layer, rule, wanted))))
        return export.export(step)(unknown).call(x)

    try:
        expected = exported(rule.primal)
    except (TypeError, ValueError, jax.errors.InconclusiveDimensionOperation) as error:
        pytest.skip(f"stock raises {type(error).__name__}")
    assert_close(exported(function.differentiable(rule)), expected)


# Memory of the compiled program.


@every_form
@pytest.mark.parametrize("concurrent", [True, False], ids=["concurrent", "sequential"])
@pytest.mark.parametrize(
    ("name", "loop"),
    # (Of an unrolled program, XLA:CPU draws the random numbers of all layers at the beginning, as
    # it does for stock's.)
    [("relu", False), ("relu", True), ("dropout", True)],
    ids=["relu-unrolled", "relu-loop", "dropout-loop"],
)
def test_compiled_layers_keep_bits(name: str, loop: bool, concurrent: bool, form: str) -> None:
    """Whichever of its schedulers XLA orders the program by: temporaries per layer more."""

    def layer(k: Any, x: Any) -> Any:
        if name == "relu":
            return F.relu(x @ weight)
        return F.dropout(x @ weight, 0.5, jax.random.fold_in(jax.random.key(0), k))

    x, weight = jnp.ones((64, 128), jnp.float32), jnp.eye(128, dtype=jnp.float32)

    def net(depth: int, x: Any) -> Any:
        if loop:
            return lax.fori_loop(0, depth, layer, x).sum()
        for k in range(depth):
            x = layer(k, x)
        return x.sum()

    def temporaries(depth: int) -> int:
        step = jax.jit(jax.grad(functools.partial(net, depth)))
        options = {"xla_cpu_enable_concurrency_optimized_scheduler": concurrent}
        program = step.lower(x).compile(compiler_options=options)
        return program.memory_analysis().temp_size_in_bytes

    with function.using(form):
        slope = (temporaries(24) - temporaries(12)) / 12 / x.size
    assert slope == pytest.approx(1 / 8, abs=0.01)


@every_form
@pytest.mark.parametrize("name", ["group_norm", "instance_norm"])
def test_compiled_blocks_keep_less_than_of_stock(name: str, form: str) -> None:
    """Of a residual network with norms in front, whose scales are trained: no ``x - mean``."""
    x, kernel, vector = jnp.ones((4, 8, 8, 16)), jnp.ones((3, 3, 16, 16)), jnp.ones(16)
    options = {"num_groups": 4} if name == "group_norm" else {}

    def step(scales: list[Array], x: Array) -> Array:
        for scale in scales:
            y = F.silu(getattr(F, name)(x, scale, vector, **options))
            x = x + F.conv(y, kernel, vector, padding="SAME")
        return jnp.square(x).sum()

    def temporaries(depth: int, form: str) -> int:
        with function.using(form):
            program = jax.jit(jax.grad(step)).lower([vector] * depth, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    per_block = [temporaries(8, form) - temporaries(4, form) for form in (form, "stock")]
    assert per_block[0] < 0.7 * per_block[1]


@every_form
@pytest.mark.parametrize(("window", "stride"), [(2, 2), (3, 1), (3, 2)])
def test_compiled_average_pooling_is_stocks(window: int, stride: int, form: str) -> None:
    """Not longer: transposed twice, it needs twice as much."""

    def temporaries(pool: Function) -> float:
        def step(x: Array) -> Array:
            y = pool(jnp.sin(x), (window, window), (stride, stride), "SAME")
            return jnp.sin(y).sum()

        program = jax.jit(jax.grad(step)).lower(x).compile()
        return program.memory_analysis().temp_size_in_bytes

    x = jnp.ones((4, 32, 32, 8))
    with function.using(form):
        assert temporaries(F.avg_pool) <= temporaries(nn.avg_pool)


# Arguments of every kind.


@every_form
@pytest.mark.parametrize("x", [2.0, -1, True, 0.0], ids=repr)
def test_python_scalars(x: Any, form: str) -> None:
    with function.using(form):
        y = F.relu(x)
        expected = jax.nn.relu(x)
        assert (y, y.dtype, y.weak_type) == (expected, expected.dtype, expected.weak_type)
        if isinstance(x, float):
            assert jax.grad(F.relu)(x) == jax.grad(jax.nn.relu)(x)
            one, other = jax.vjp(F.relu, x)[0], jax.vjp(jax.nn.relu, x)[0]
            assert (one.dtype, one.weak_type) == (other.dtype, other.weak_type)


@every_form
@pytest.mark.parametrize(
    "name",
    [
        *("leaky_relu", "hard_tanh", "hard_sigmoid", "silu", "sigmoid", "elu"),
        *("softplus", "log_sigmoid", "mish"),
    ],
)
def test_python_scalars_of_other_kinds(name: str, form: str) -> None:
    stock = getattr(jax.nn, name)
    with function.using(form):
        for x in (2.0, -1.0, -0.0):
            y, expected = getattr(F, name)(x), stock(x)
            assert (y, y.dtype, y.weak_type) == (expected, expected.dtype, expected.weak_type)
        dx, expected = jax.grad(getattr(F, name))(-0.5), jax.grad(stock)(-0.5)
        assert dx == pytest.approx(expected)
        assert (dx.dtype, dx.weak_type) == (expected.dtype, expected.weak_type)


def test_functions_that_flax_does_not_have() -> None:
    """As in PyTorch, which has them. (Properties check the rows that they call.)"""
    x = np.linspace(-3.0, 3.0, 24).reshape(2, 3, 4)
    image, there = jnp.asarray(x), torch.from_numpy(x)
    for ours, its in (
        (F.threshold(image, 0.5, 2.0), torch.nn.functional.threshold(there, 0.5, 2.0)),
        (F.hard_shrink(image), torch.nn.functional.hardshrink(there)),
        (F.soft_shrink(image, 1.0), torch.nn.functional.softshrink(there, 1.0)),
        (F.tanh_shrink(image), torch.nn.functional.tanhshrink(there)),
        (F.swiglu(image, 2 * image), torch.nn.functional.silu(there) * 2 * there),
        (F.geglu(image, image, False), torch.nn.functional.gelu(there) * there),
        (F.geglu(image, image), torch.nn.functional.gelu(there, approximate="tanh") * there),
        (
            F.adaptive_max_pool(image, (2,)),
            torch.nn.functional.adaptive_max_pool1d(there.mT, 2).mT,
        ),
        (
            F.adaptive_avg_pool(image, (2,)),
            torch.nn.functional.adaptive_avg_pool1d(there.mT, 2).mT,
        ),
        (F.pad(image, (1, 2), "circular"), torch.nn.functional.pad(there, (1, 2), "circular")),
    ):
        np.testing.assert_allclose(ours, its, rtol=1e-12, atol=1e-12)


def test_cross_entropy_is_that_of_optax() -> None:
    """With the options of PyTorch, with which the rows are compared."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 5)))
    labels, q = jnp.array([[0, 4, 2], [1, 1, 3]]), jax.nn.softmax(x[::-1])
    of_labels = optax.softmax_cross_entropy_with_integer_labels
    assert_close(F.cross_entropy(x, labels), of_labels(x, labels))
    assert_close(F.cross_entropy(x, q), optax.softmax_cross_entropy(x, q))
    with pytest.raises(ValueError, match="reduction is none, mean or sum"):
        F.cross_entropy(x, labels, reduction="max")
    with pytest.raises(ValueError, match="not one of each of 5 classes"):
        F.cross_entropy(x, labels, jnp.ones((1, 5)))
    # By the target, of which the table has no gradient.
    ours = jax.grad(lambda q: F.cross_entropy(x, q).sum())(q)
    assert_close(ours, jax.grad(lambda q: optax.softmax_cross_entropy(x, q).sum())(q))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(
    ("x", "q"),
    [
        *[((2, 1, 5), (3, 5)), ((5,), (4, 5)), ((4, 5), (5,)), ((4, 5), (4, 1)), ((4, 1), (4, 5))],
        ((0, 5), (0, 5)),
    ],
    ids=str,
)
@every_form
def test_cross_entropy_broadcasts_as_that_of_optax(
    x: tuple[int, ...], q: tuple[int, ...], reduction: str, form: str
) -> None:
    """A row's arguments have the shapes that it says."""
    random = np.random.default_rng(0)
    logits, labels = jnp.asarray(random.normal(size=x)), jnp.asarray(random.random(q))
    total = {"sum": jnp.sum, "mean": jnp.mean}[reduction]
    with function.using(form):
        ours = jax.grad(lambda x: F.cross_entropy(x, labels, reduction=reduction))(logits)
    assert_close(ours, jax.grad(lambda x: total(optax.softmax_cross_entropy(x, labels)))(logits))


@every_form
@pytest.mark.parametrize(
    "name", [row.name.removesuffix("_train") for row in TABLE.values() if "rstd" in row.extras]
)
def test_norms_of_an_empty_batch(name: str, form: str) -> None:
    """The properties draw one seldom."""
    of_batch = name == "batch_norm"
    statistics = (None, None) if of_batch else ()
    options: dict[str, Any] = {"num_groups": 2} if "group" in name else {}
    options |= {"use_running_average": False} if of_batch else {}

    def loss(x: Any) -> Any:
        return jax.tree.leaves(getattr(F, name)(x, *statistics, **options))[0].sum()

    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.ones((0, 6, 4), dtype)
        with function.using(form):
            gradient = jax.grad(loss)(x)
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


@every_form
@pytest.mark.parametrize(
    ("window", "padding"),
    [((1, 1), [(2, 0), (2, 1)]), ((2, 1), [(3, 0), (0, 1)])],
    ids=str,
)
def test_averages_of_padding_alone(window: Any, padding: Any, form: str) -> None:
    """Of no places that count there is none."""

    def run(pool: Function) -> tuple[Array, Array]:
        y, pull = jax.vjp(lambda x: pool(x, window, (1, 1), padding, count_include_pad=False), x)
        return y, pull(jnp.ones_like(y))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4, 2)))
    with function.using(form):
        assert_close(run(F.avg_pool), run(nn.avg_pool))


@every_form
@pytest.mark.parametrize("prelu", [F.prelu, F.prelu_from_input])
def test_second_derivative_of_prelu_at_zero(prelu: Function, form: str) -> None:
    """By the input and the slope, as stock's ``where`` has it."""
    x, slope = jnp.array([-1.0, 0.0, -0.0, 1.0]), jnp.array([0.25])
    with function.using(form):
        mixed = jax.grad(lambda x: jax.grad(lambda s: prelu(x, s).sum())(slope).sum())(x)
    np.testing.assert_array_equal(mixed, [1.0, 0.0, 0.0, 0.0])


def test_causal_padding_of_dilated_inputs() -> None:
    """As stock, and other padding by a name."""
    with pytest.raises(ValueError, match="not implemented for dilated inputs"):
        F.conv(jnp.ones((1, 4, 1)), jnp.ones((3, 1, 2)), padding="CAUSAL", input_dilation=2)


@pytest.mark.parametrize("options", [{"strides": ()}, {"kernel_dilation": (1, 1)}], ids=str)
def test_options_of_another_number_of_axes(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="the kernel has 1 axes"):
        F.conv_transpose(jnp.ones((1, 4, 1)), jnp.ones((3, 1, 2)), **options)


def test_dtype_of_averages() -> None:
    """Flax counts in the widest float, which is wider here."""
    x = jnp.ones((1, 4, 4, 1), jnp.float32)
    for options in (("SAME", False), ("SAME", True), ("VALID", False)):
        pools = (pool(x, (3, 3), (2, 2), *options) for pool in (F.avg_pool, nn.avg_pool))
        assert len({pool.dtype for pool in pools}) == 1


def test_norms_of_arrays_of_numpy() -> None:
    """Stock computes them by JAX."""
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 4)).astype(np.float32)
    expected = nn.GroupNorm(2, use_scale=False, use_bias=False).apply({}, x)
    np.testing.assert_array_equal(F.group_norm(x, num_groups=2), expected)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize(
    ("x", "labels"),
    [
        ((2, 300), np.array([2, 156], np.uint8)),
        ((2, 300), np.array([-1, 127], np.int8)),
        ((2, 70000), np.array([156, 65436], np.uint16)),
        ((2, 5), np.array([-1, -5], np.int32)),
        ((5, 5), np.array([-5, -6, -10, 5, 10], np.int32)),
        ((1, 5), np.array([3, 0, 4], np.int32)),
        ((3, 1, 5), np.array([[3, 0]], np.int32)),
        ((4, 5), np.array([1], np.int32)),
    ],
    ids=lambda of: f"{of.dtype}{of.tolist()}" if isinstance(of, np.ndarray) else str(of),
)
@every_form
def test_labels_are_those_of_optax(
    x: tuple[int, ...], labels: np.ndarray, reduction: str, form: str
) -> None:
    """Negative ones, of narrow dtypes, and those that broadcast."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=x))
    total = {"sum": jnp.sum, "mean": jnp.mean, "none": lambda x: x}[reduction]

    def stock(x: Any) -> Any:
        return total(optax.softmax_cross_entropy_with_integer_labels(x, labels))

    @jax.jit  # (In one program: to compile each operation takes longer.)
    def both(x: Array) -> Any:
        y, pull = jax.vjp(lambda x: F.cross_entropy(x, labels, reduction=reduction), x)
        expected, pull_stock = jax.vjp(stock, x)
        g = jnp.arange(1.0, 1 + y.size).reshape(y.shape)
        return (y, pull(g)), (expected, pull_stock(g))

    with function.using(form):
        assert_close(*both(logits))


@every_form
def test_infinite_logits_are_those_of_optax(form: str) -> None:
    """With indices one of them is in one place, with probabilities everywhere."""
    x = jnp.array([[0.5, jnp.inf, 1.0], [0.5, -jnp.inf, 1.0], [-jnp.inf] * 3])
    of_labels = optax.softmax_cross_entropy_with_integer_labels
    for k in range(3):
        labels = jnp.full(3, k)
        with function.using(form):
            ours = jax.vmap(jax.value_and_grad(F.cross_entropy))(x, labels)
            soft = jax.vmap(jax.value_and_grad(F.cross_entropy))(x, jax.nn.one_hot(labels, 3))
        assert_close(ours, jax.vmap(jax.value_and_grad(of_labels))(x, labels))
        stock = jax.vmap(jax.value_and_grad(optax.softmax_cross_entropy))
        assert_close(soft, stock(x, jax.nn.one_hot(labels, 3)))


@every_form
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_compiled_cross_entropy_behind_a_head_is_stocks(
    has_bias: bool, dtype: Any, form: str
) -> None:
    """Of several axes: no more arrays of the size of the logits, beside them, than in stock."""
    x, kernel, bias = (jnp.zeros(n, dtype) for n in ((4, 32, 8), (8, 512), 512))
    labels = jnp.zeros((4, 32), jnp.int32)

    def temporaries(loss: Function) -> int:
        def step(x: Array, kernel: Array, bias: Array) -> Array:
            logits = x @ kernel + bias if has_bias else x @ kernel
            return loss(logits).mean()

        program = jax.jit(jax.grad(step, (0, 1, 2))).lower(x, kernel, bias).compile()
        return program.memory_analysis().temp_size_in_bytes

    def stock(logits: Array) -> Array:
        wide = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(wide, labels)

    with function.using(form):
        ours = temporaries(lambda logits: F.cross_entropy(logits, labels, dtype=jnp.float32))
    assert ours <= temporaries(stock)


@pytest.mark.parametrize("shape", [(2, 5), (), (3,), (1, 2)], ids=str)
def test_labels_have_one_axis_less(shape: tuple[int, ...]) -> None:
    x, labels = jnp.zeros((2, 5)), jnp.zeros(shape, jnp.int32)
    for loss in (F.cross_entropy, optax.softmax_cross_entropy_with_integer_labels):
        with pytest.raises(ValueError):
            loss(x, labels)


@every_form
def test_cross_entropy_in_another_dtype(form: str) -> None:
    """It keeps the narrow logits, and computes as stock does with wide ones."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.bfloat16)
    labels = jnp.arange(3, dtype=jnp.uint8)

    def wide(x: Any) -> Any:
        return F.cross_entropy(x, labels, dtype=jnp.float32)

    with function.using(form):
        y, pull = jax.vjp(wide, x)
        kept = {id(leaf): leaf for leaf in jax.tree.leaves(pull) if leaf.size > 3}
        (dx,) = pull(jnp.ones_like(y))
    assert [leaf.dtype for leaf in kept.values()] == [jnp.bfloat16]
    with function.using("stock"):
        expected, pull = jax.vjp(lambda x: F.cross_entropy(x, labels), x.astype(jnp.float32))
    np.testing.assert_array_equal(y, expected, strict=True)
    (expected,) = pull(jnp.ones_like(y))
    np.testing.assert_allclose(dx.astype(jnp.float32), expected, rtol=1e-2)
    assert dx.dtype == jnp.bfloat16


DROPOUTS = (
    lambda x: F.dropout(x, 0.3, jax.random.key(0)),
    lambda x: F.alpha_dropout(x, 0.3, jax.random.key(0)),
)


@pytest.mark.parametrize(
    "layer",
    [
        *(*DROPOUTS, F.relu, F.relu6, F.hard_sigmoid),
        *(F.leaky_relu, lambda x: F.prelu(x, jnp.full(1, 0.3))),
    ],
    ids=["dropout", "alpha_dropout", "relu", "relu6", "hard_sigmoid", "leaky_relu", "prelu"],
)
@pytest.mark.parametrize("shape", [(3, 13), (16,), (7,), (1, 2, 1), (2, 0)], ids=str)
def test_bits_where_there_is_a_gpu(
    layer: Function, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output goes by the bits only of what was drawn, but all values are the same."""
    x = jax.random.normal(jax.random.key(1), shape).at[:1].multiply(jnp.nan)
    made, unpacked = [], []
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        traced = jax.jit(lambda x: jax.vjp(layer, x)).trace(x)
        y, pull = traced.lower().compile()(x)
        unpacked.append(str(traced.jaxpr).count("shift_right_logical"))
        made.append((y, pull(jnp.cos(x)), [a for a in jax.tree.leaves(pull) if a.dtype == "uint8"]))
    jax.tree.map(np.testing.assert_array_equal, made[0], made[1])
    assert len(made[0][2]) == (x.size > 0 or layer in DROPOUTS)  # of nothing JAX keeps nothing
    assert unpacked[0] == unpacked[1] + (layer not in DROPOUTS)


@pytest.mark.parametrize(
    ("name", "dtype", "behind_barrier_on"),
    [
        ("hard_silu", "float32", ""),
        ("hard_silu", "bfloat16", "cpu"),
        ("silu", "bfloat16", "cpu"),
        ("gelu", "float32", "cpu"),
        ("gelu", "bfloat16", "cpu"),
        ("gelu, exact", "float32", "cpu"),
        ("mish", "float32", "cpu"),
        ("softplus", "float32", "cpu"),
        ("glu", "bfloat16", "cpu"),
        ("swiglu", "bfloat16", "cpu"),
        ("geglu", "float32", "cpu"),
        ("layer_norm_from_output", "float32", "cpu"),
    ],
)
def test_xla_is_told_what_to_keep_where_it_would_keep_more(
    name: str, dtype: str, behind_barrier_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, _, exact = name.partition(", ")
    options = {"approximate": False} if exact else {}

    def step(x: Array) -> Array:
        args = (x, x) if name in ("swiglu", "geglu") else (x,)
        return getattr(F, name)(*args, **options).sum().astype(jnp.float32)

    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        jax.clear_caches()
        program = str(jax.make_jaxpr(jax.grad(step))(jnp.ones((4, 8), dtype)))
        jax.clear_caches()
        assert ("optimization_barrier" in program) == (backend in behind_barrier_on.split())


@pytest.mark.parametrize("approximate", [True, False])
def test_gelu_is_written_again_for_its_gradient(
    approximate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where XLA would keep forward's own value, if that would do. It is the same at every
    point.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()

    def slopes(gelu: Function) -> tuple[Array, Array]:
        slope = jax.grad(lambda x: gelu(x, approximate).sum())
        return slope(x), jax.grad(lambda x: slope(x).sum())(x)

    with jax.enable_x64(True):
        x = jnp.array([-30, -5, -1, -1e-3, -0.0, 0.0, 1e-3, 1, 5, 30], "float64")
        for ours, stock in zip(slopes(F.gelu), slopes(jax.nn.gelu), strict=True):
            np.testing.assert_allclose(ours, stock, rtol=1e-12, atol=1e-13)

    step = jax.make_jaxpr(lambda x: jax.vjp(lambda x: F.gelu(x, approximate), x)[1](x))(x)
    jax.clear_caches()
    assert "select_n" in str(step)
    assert str(step).count(" tanh " if approximate else " erfc ") == 2 - approximate


@pytest.mark.parametrize("name", ["conv", "conv_transpose"])
@pytest.mark.parametrize("shape", [(), (1,), (2,)], ids=str)
def test_a_bias_that_broadcasts(name: str, shape: tuple[int, ...]) -> None:
    """Of one channel, also to several. (A batch is stock's anyway.)"""
    x, kernel = jnp.linspace(-1, 1, 108).reshape(6, 6, 3), jnp.ones((1, 1, 3, 1))

    def loss(x: Array, bias: Array) -> Array:
        return jnp.sin(getattr(F, name)(x, kernel, bias)).sum()

    slopes = []
    for form in ("stock", *FORMS):
        with function.using(form):
            slopes.append(jax.grad(loss, argnums=(0, 1))(x, jnp.full(shape, 0.5)))
    for ours in slopes[1:]:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), ours, slopes[0])


def test_where_values_are_checked_stock_runs() -> None:
    """JAX has its operations write errors down, which those of a rule cannot."""
    x = jnp.linspace(-1, 1, 32).reshape(4, 8)
    try:
        jax.config.update("jax_error_checking_behavior_nan", "raise")
        slopes = jax.jit(jax.grad(lambda x: F.layer_norm(x, x[0]).sum()))(x)
    finally:
        jax.config.update("jax_error_checking_behavior_nan", "ignore")
        jax.clear_caches()
    assert slopes.shape == x.shape


@pytest.mark.parametrize("name", ["softplus", "log_sigmoid", "mish"])
def test_slopes_of_narrow_floats_far_from_zero(name: str) -> None:
    """By sigmoids: of float16, exponentials are soon infinite."""
    x = jnp.linspace(-12, 12, 49, dtype=jnp.float16)  # (whose slopes have a few digits)
    exact = jax.vmap(jax.grad(getattr(jax.nn, name)))(x.astype(jnp.float32))
    slopes = jax.vmap(jax.grad(getattr(F, name)))(x)
    np.testing.assert_allclose(slopes, exact, rtol=5e-3, atol=1e-7)


def test_dropouts_that_flax_does_not_have() -> None:
    x, key = jnp.ones((64, 3, 16)), jax.random.key(0)
    y = F.feature_dropout(x, 0.25, key)
    assert (y == y[:, :1]).all()
    assert {*np.unique(y)} == {0.0, 1 / 0.75}
    assert (y[:, 0] == 0).mean() == pytest.approx(0.25, abs=0.05)
    y, pull = jax.vjp(lambda x: F.feature_dropout(x, 0.25, key), jnp.ones(64))  # of a vector
    assert (y == pull(jnp.ones(64))[0]).all()
    assert 0 < (y == 0).sum() < 64
    x = jax.random.normal(key, (10_000,))
    y = F.alpha_dropout(x, 0.25, jax.random.key(1))
    assert y.mean() == pytest.approx(0.0, abs=0.05)
    assert y.std() == pytest.approx(1.0, abs=0.05)
    for layer in (F.feature_dropout, F.alpha_dropout):
        assert (layer(x[:, None], 0.5, key, deterministic=True) == x[:, None]).all()
        assert (layer(x[:, None], 0.0, key) == x[:, None]).all()
        assert not layer(x[:, None], 1.0, key).any()


@every_form
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9])
def test_last_axes_of_all_sizes(size: int, form: str) -> None:
    x = jnp.linspace(-1.0, 1.0, 3 * size).reshape(3, size)
    with function.using(form):
        assert_close(
            jax.grad(lambda x: F.relu(x).sum())(x), jax.grad(lambda x: jax.nn.relu(x).sum())(x)
        )


@every_form
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_strict_promotion(dtype: str, form: str) -> None:
    """Nothing is promoted that stock does not promote."""
    x = jnp.linspace(-1, 1, 64, dtype=dtype).reshape(2, 4, 4, 2)
    vector, running = jnp.ones(2, dtype), (jnp.zeros(2, dtype), jnp.ones(2, dtype))

    def net(x: Any, vector: Any) -> Any:
        y = F.relu(F.max_pool(x, (2, 2), (2, 2)))
        y = F.dropout(y, 0.5, jax.random.key(0))
        y, *_ = F.batch_norm(y, *running, vector, vector, use_running_average=True)
        return F.conv(y, jnp.ones((1, 1, 2, 2), dtype), vector).sum()

    with jax.numpy_dtype_promotion("strict"), function.using(form):
        grads = jax.jit(jax.grad(net, (0, 1)))(x, vector)
    assert [g.dtype for g in grads] == [dtype, dtype]


ARRAY_OPTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "layer_norm": lambda x, one: F.layer_norm(x, epsilon=1e-2 * one),
    "group_norm": lambda x, one: F.group_norm(x, num_groups=2, epsilon=1e-2 * one),
    "rms_norm": lambda x, one: F.rms_norm(x, epsilon=1e-2 * one),
    "batch_norm": lambda x, one: F.batch_norm(
        x, None, None, use_running_average=False, epsilon=1e-2 * one
    )[0],
    "dropout": lambda x, one: F.dropout(x, 0.5 * one, jax.random.key(0)),
}


@every_form
@pytest.mark.parametrize("call", ARRAY_OPTIONS.values(), ids=ARRAY_OPTIONS)
def test_options_that_are_arrays(call: Callable[[Any, Any], Any], form: str) -> None:
    """It is stock then, and has its gradients."""
    x = jnp.linspace(-1.0, 2.0, 32).reshape(4, 8)

    def gradient(one: Any) -> Any:
        return jax.grad(lambda x: (call(x, one) ** 2).sum())(x)

    with function.using(form):
        assert_close(gradient(jnp.array(1.0)), gradient(1.0))


def test_sums_of_gradients_in_8_bits() -> None:
    """Max pooling adds them up in more: 2 + 1/8 is 2 in these 8 bits, but 2 + 4/8 is not."""
    x = jnp.zeros((1, 9, 1), jnp.float8_e4m3fn).at[0, 4].set(1)
    pool = lambda x: F.max_pool(x, (5,), (1,))  # noqa: E731
    g = jnp.array([*[1 / 8] * 4, 2], jnp.float8_e4m3fn).reshape(1, 5, 1)
    (dx,) = jax.vjp(pool, x)[1](g)
    assert dx[0, 4, 0] == jnp.float8_e4m3fn(2.5)


@pytest.mark.parametrize("width", [3, 81])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2fnuz", "float8_e5m2"])
def test_padding_in_8_bits(dtype: str, width: int) -> None:
    """Of which some kinds have no infinity."""
    x = jnp.array([1, 2, 3, 2, 1, 0.5], dtype).reshape(1, 6, 1)
    results = []
    for layer in (nn.max_pool, F.max_pool):
        pool = lambda x, layer=layer: layer(x, (width,), (1,), "SAME")  # noqa: E731
        y, pull = jax.vjp(pool, x)
        results.append((*pull(jnp.ones_like(y)), jax.jvp(pool, (x,), (x,))[1]))
    for ours, stock in zip(*reversed(results), strict=True):
        assert ours.dtype == dtype
        assert jnp.array_equal(ours, stock)


@every_form
@pytest.mark.parametrize("name", ["softplus", "log_sigmoid", "mish"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
def test_curves_of_a_narrow_range(dtype: str, name: str, form: str) -> None:
    """Whose exponentials are infinite, or nan where there is no infinity."""
    numbers = jnp.arange(256, dtype=jnp.uint8).view(jnp.float8_e5m2)
    x = jnp.clip(numbers, -200, 200).astype(dtype)
    x = x[jnp.isfinite(x)]

    def gradient(layer: Callable[..., Any], x: Any) -> Any:
        return jax.grad(lambda x: layer(x).astype(jnp.float32).sum())(x)

    with function.using(form):
        ours = gradient(getattr(F, name), x)
    assert ours.dtype == dtype
    exact = gradient(getattr(jax.nn, name), x.astype(jnp.float32))
    eps, tiny = (float(getattr(jnp.finfo(dtype), n)) for n in ("eps", "smallest_normal"))
    off = abs(ours.astype(jnp.float32) - exact)
    assert (off <= eps * jnp.maximum(abs(exact), tiny)).all()


@every_row_and_form
def test_leaks_and_nans_are_looked_for(row: Layer, form: str) -> None:
    call = calls(row, form)[frozenset(row.reads)]
    with function.using(form), jax.checking_leaks(), jax.debug_nans(True):
        jax.jit(every(loss(call)))(*call.wanted)


@every_form
@pytest.mark.parametrize("window", [(2, 2), (9, 9)], ids=str)
def test_infinite_padding_of_max_pooling_is_not_found(window: tuple[int, int], form: str) -> None:
    """Eagerly it was seen by those who look for what is infinite."""
    x = jnp.arange(256.0).reshape(1, 16, 16, 1)
    with function.using(form), jax.debug_infs(True):
        for padding in ("VALID", "SAME"):
            jax.grad(lambda x, p=padding: F.max_pool(x, window, padding=p).sum())(x)


@every_form
def test_integers_and_complex_numbers_are_stock(form: str) -> None:
    with function.using(form):
        assert F.relu(jnp.arange(-2, 3)).tolist() == [0, 0, 0, 1, 2]
        slope, integers = jnp.full(1, 0.25), jnp.arange(-2, 3)
        assert jax.grad(lambda w: F.prelu(integers, w).sum() * 1.0)(slope).tolist() == [0]
        x = jnp.array([[1 + 2j, 3.0], [0, 1j]])
        y, _, _ = F.batch_norm(x, None, None, use_running_average=False)
        assert jnp.iscomplexobj(y)
        jax.grad(
            lambda x: jnp.abs(F.batch_norm(x, None, None, use_running_average=False)[0]).sum()
        )(x)


@pytest.mark.parametrize("name", ["elu", "selu"])
def test_second_derivatives_from_outputs_that_are_infinite(name: str) -> None:
    """(Of CELU, stock's is nan.)"""
    x = jnp.array([-1.0, 2.0, jnp.inf])

    def twice(function: Function) -> Any:
        slope = jax.grad(lambda x: function(x) ** 2)
        return [jax.vmap(twofold(slope))(x) for twofold in (jax.jacfwd, jax.jacrev)]

    assert_close(twice(getattr(F, f"{name}_from_output")), twice(getattr(jax.nn, name)))


def test_derivative_that_the_table_does_not_have_is_stocks() -> None:
    """By the running statistics, as of somebody who differentiates by all of a model's state."""
    x, vector = jnp.arange(24.0).reshape(8, 3), jnp.arange(1.0, 4.0)

    def norm(*args: Any) -> Any:
        return (F.batch_norm(*args, use_running_average=True)[0] ** 3).sum()

    args = (x, vector, 2 * vector, vector, vector)
    with function.using("stock"):
        expected = every(norm)(*args)
    assert_close(every(norm)(*args), expected)
    with function.using("custom_vjp"), pytest.raises(NotImplementedError, match="running_mean"):
        every(norm)(*args)


def test_options_may_be_scalars_of_numpy() -> None:
    x, key = jnp.arange(24.0).reshape(8, 3), jax.random.key(0)
    eps, rate = 1e-5, 0.5
    (y, _, _), (expected, _, _) = (
        F.batch_norm(x, None, None, use_running_average=False, epsilon=of(eps))
        for of in (np.float64, float)
    )
    assert_close(y, expected)
    dx, expected = (
        jax.grad(lambda x, of=of: F.dropout(x, of(rate), key).sum())(x)
        for of in (np.float64, float)
    )
    assert_close(dx, expected)


def test_one_bias_for_all_features() -> None:
    def loss(bias: Any) -> Any:
        return (F.conv(jnp.ones((5, 2)), jnp.ones((3, 2, 4)), bias) ** 2).sum()

    actual = jax.grad(loss)(jnp.ones(1))
    with function.using("stock"):
        assert_close(actual, jax.grad(loss)(jnp.ones(1)))


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.instance_norm(jnp.ones(4)),
        lambda: F.instance_norm_from_output(jnp.ones(4)),
        lambda: F.adaptive_avg_pool(jnp.ones((2, 4)), ()),
        lambda: F.adaptive_max_pool(jnp.ones((2,) * 6), (1,) * 4),
        lambda: F.pad(jnp.ones(4), (1, 1), "constant"),
    ],
)
def test_errors_of_what_flax_does_not_have(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError):
        call()


def test_unknown_padding() -> None:
    x, kernel = jnp.ones((1, 4, 2)), jnp.ones((2, 2, 2))
    for layer in (F.conv, F.conv_transpose):
        with pytest.raises((ValueError, RuntimeError), match=r"(?i)un(known|recognized) padding"):
            layer(x, kernel, padding="NONE")


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("layer", [F.dropout, F.dropout_from_rng])
def test_dropout_that_draws_twice_says_so(layer: Function, make: Function, jitted: bool) -> None:
    """To the debugging mode that looks for keys which are used twice."""
    x = jnp.ones((2, 4, 8))

    def gradient(key: Any) -> Array:
        return jax.grad(lambda x: layer(x, 0.5, key, broadcast_dims=(1,)).sum())(x)

    with jax.debug_key_reuse(True):
        found = (jax.jit(gradient) if jitted else gradient)(make(0))
    assert jnp.array_equal(found, gradient(make(0)))


@pytest.mark.parametrize("name", ["log_softmax", "sigmoid", "relu_from_output"])
def test_second_derivatives_keep_no_more(name: str) -> None:
    """Reverse over forward: the rule's own derivative, not also stock's."""
    x = jnp.linspace(-2, 2, 512).reshape(8, 64)

    def kept() -> int:
        pull = jax.vjp(lambda x: jax.jvp(getattr(F, name), (x,), (x + 1,))[1], x)[1]
        return sum({id(leaf): leaf.nbytes for leaf in jax.tree.leaves(pull)}.values())

    ours = kept()
    with function.using("stock"):
        assert ours <= kept()


@every_form
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_dropout_of_nothing_and_of_all(rate: float, form: str) -> None:
    with function.using(form):
        for layer in (F.dropout, F.dropout_from_rng):
            y, pull = jax.vjp(lambda x, layer=layer: layer(x, rate, jax.random.key(0)), jnp.ones(3))
            assert y.tolist() == pull(jnp.ones(3))[0].tolist() == [1.0 - rate] * 3
            ones = layer(jnp.ones(3), rate, jax.random.key(0), deterministic=True)
            assert ones.tolist() == [1.0] * 3


@pytest.mark.parametrize("name", [name for name in F.__all__ if "_from_" in name])
def test_variants_take_what_the_layer_takes(name: str) -> None:
    variant, layer = (getattr(F, function) for function in (name, name.partition("_from_")[0]))
    parameters = [inspect.signature(function).parameters for function in (variant, layer)]
    assert list(parameters[0].values()) == list(parameters[1].values())


# The engine.


def test_unknown_form() -> None:
    with pytest.raises(ValueError, match="the forms are"):
        function.using("reverse")  # type: ignore[arg-type]


def test_function_jitted_before_is_traced_again() -> None:
    """The form is part of JAX's caches."""
    f = jax.jit(lambda x: F.relu(x).sum())
    text = {}
    for form in ("stock", "custom_vjp", "custom_jvp"):
        with function.using(form):
            f(jnp.ones(3))
            text[form] = str(jax.make_jaxpr(f)(jnp.ones(3)))
    assert "custom_vjp" in text["custom_vjp"]
    assert "memsave" not in text["stock"]
    assert len(set(text.values())) == 3


def test_rows_are_defined_once_and_completely() -> None:
    with pytest.raises(ValueError, match="has a rule already"):
        function.define(TABLE["linear"], lambda x: x)
    with pytest.raises(ValueError, match="needs a fwd"):
        function.define(TABLE["relu"], lambda x: x)


@every_form
def test_a_gradient_of_another_shape_is_named(form: function.Form) -> None:
    rule = RULES["relu"]._replace(bwd=lambda g, *_, **__: {"x": g[None]})
    relu = differentiable(rule)
    text = r"'relu' gives 'x', which has the shape \(3,\), a gradient of shape \(1, 3\)"
    with function.using(form), pytest.raises(TypeError, match=text):
        jax.grad(lambda x: relu(x).sum())(jnp.ones(3))


def test_layouts_are_orders_of_the_rows_axes() -> None:
    for rule in function.RULES.values():
        for name, axes in rule.row.args.items():
            permutation(axes, rule.layout[name], 6 if "*" in axes else len(axes.split()))


def test_layers_of_the_same_types_are_traced_once() -> None:
    """As it takes longer than all else, in deep models that are not rolled into loops."""
    calls = 0
    rule = RULES["relu"]

    def bwd(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return rule.bwd(*args, **options)

    relu = differentiable(rule._replace(bwd=bwd))

    def loss(x: jax.Array) -> jax.Array:
        for _ in range(5):
            x = relu(x - 0.1)
        return x.sum()

    x = jnp.linspace(-1, 1, 24).reshape(4, 6)
    gradient = jax.jit(jax.grad(loss))(x)
    assert 0 < calls <= 2  # for the types of its results, and for its transpose
    np.testing.assert_array_equal(gradient, (x > 0.5).astype(x.dtype))


def test_many_parts_of_a_long_axis() -> None:
    """Where they begin had over 32 bits on the way."""
    size, count = 65536, 40000
    saved = {"offsets": jnp.zeros((count, 1), jnp.uint8)}
    shapes = {"x": jax.ShapeDtypeStruct((size, 1), jnp.float32)}
    ones = jnp.ones((count, 1))
    grads = pooling._adaptive_bwd(1, ones, frozenset({"x"}), saved, shapes, output_size=count)
    starts = np.arange(count, dtype=np.int64) * size // count
    np.testing.assert_array_equal(grads["x"][:, 0], np.bincount(starts, minlength=size))


def test_the_gradient_of_a_scale_over_many_rows() -> None:
    """The mean was taken off in the end: of two large sums, their difference."""
    random = np.random.default_rng(0)
    x, g = (random.random((1 << 15, 4)) + 0.1 for _ in range(2))
    scale = np.ones(4)
    normalized = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
    args = [jnp.asarray(array, jnp.float32) for array in (x, scale, scale)]
    exact = (g * normalized).sum(0)
    found = jax.vjp(F.layer_norm, *args)[1](jnp.asarray(g, jnp.float32))[1]
    assert np.linalg.norm(found - exact) < 2e-5 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["elu", "celu", "selu", "selu_from_output"])
def test_slopes_of_16_bits_near_the_limit(name: str) -> None:
    """There the output has too few digits; and so has stock's gradient, which comes of it."""
    x = jnp.array([-12.0, -10.0, -3.0], jnp.bfloat16)
    (gradient,) = jax.vjp(getattr(F, name), x)[1](jnp.ones_like(x))
    stock, wide = getattr(jax.nn, name.partition("_")[0]), x.astype(jnp.float64)
    (exact,) = jax.vjp(stock, wide)[1](jnp.ones_like(wide))
    np.testing.assert_allclose(gradient.astype(jnp.float64), exact, rtol=1.5 * 2**-8)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_one_mesh_after_another(kind: AxisType) -> None:
    """What was traced on the first, JAX would run on its devices."""
    gradients = []
    for devices in (jax.devices()[:2], jax.devices()[2:4]):
        mesh = jax.sharding.Mesh(devices, ("a",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.ones((4, 32)), NamedSharding(mesh, PartitionSpec("a")))
            gradients.append(np.asarray(jax.grad(lambda x: (F.relu(x) ** 2).sum())(x)))
    np.testing.assert_array_equal(*gradients)


def test_a_bias_of_a_wider_dtype() -> None:
    """So is the output then, and what comes in; a convolution is transposed in its own dtype."""
    x, kernel = (jnp.ones(shape, jnp.bfloat16) for shape in ((5, 5, 3), (3, 3, 3, 3)))
    for layer in (F.conv, functools.partial(F.conv_transpose, transpose_kernel=True)):
        args = x, kernel, jnp.ones(3, jnp.float32)
        grads = jax.grad(lambda *args, layer=layer: layer(*args).sum(), (0, 1, 2))(*args)
        assert [g.dtype for g in grads] == [arg.dtype for arg in args]


def test_pooling_to_no_places() -> None:
    for pool in (F.adaptive_avg_pool, F.adaptive_max_pool):
        assert pool(jnp.ones((1, 4, 5, 2)), (0, 3)).shape == (1, 0, 3, 2)


def test_no_strides_of_pooling_are_one() -> None:
    x = jnp.ones((1, 4, 4, 2))
    assert F.max_pool(x, (2, 2), ()).shape == nn.max_pool(x, (2, 2), ()).shape
