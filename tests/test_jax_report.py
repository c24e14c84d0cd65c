"""The JAX report: it counts what an eager call keeps, asks the compiler, and says who made what."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

import memsave_jax
from memsave import spec
from memsave_jax import functional as F
from memsave_jax.function import using

X = (2, 9, 9, 3)


def net(params: dict[str, Any], x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A layer of each family, and ops outside the table."""
    x = F.conv(x, params["kernel"], params["bias"])
    x, mean, _ = F.batch_norm(
        x, params["mean"], params["var"], params["scale"], None, use_running_average=False
    )
    x = F.max_pool(F.relu(x), (2, 2), (2, 2))
    x = F.dropout(x, 0.5, key)
    return jnp.sin(x).mean((1, 2)) @ params["head"], mean


def arguments() -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    shapes = {
        "kernel": (3, 3, 3, 4), "bias": (4,), "mean": (4,), "var": (4,), "scale": (4,),
        "head": (4, 5),
    }  # fmt: skip
    draw = np.random.default_rng(0).standard_normal
    params = {name: jnp.asarray(draw(shape), jnp.float32) for name, shape in shapes.items()}
    return params, jnp.asarray(draw(X), jnp.float32), jax.random.key(2)


def types(args: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)


def place(array: Any) -> Any:
    """What tells one array's memory from another's."""
    if not isinstance(array, jax.Array):  # NumPy's, or JAX's wrapper of it
        return np.asarray(array).ctypes.data
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array).tobytes()
    return array.unsafe_buffer_pointer()


def measured(fn: Callable[..., Any], *args: Any, wrt: Callable[[str], bool]) -> int:
    """An independent count: buffers behind the pull-back of a real call, without the arguments."""
    paths, tree = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths]
    chosen = [k for k, (path, _) in enumerate(paths) if wrt(jax.tree_util.keystr(path))]

    def call(*wanted: Any) -> Any:
        now = list(leaves)
        for k, leaf in zip(chosen, wanted, strict=True):
            now[k] = leaf
        return fn(*jax.tree.unflatten(tree, now))

    _, pull = jax.vjp(call, *(leaves[k] for k in chosen))
    given = {place(leaf) for leaf in (*leaves, JAX, NUMPY)}
    sizes = {place(leaf): leaf.nbytes for leaf in jax.tree.leaves(pull)}
    return sum(size for key, size in sizes.items() if key not in given)


MASKS = {
    "params": lambda path: path.startswith("[0]"),
    "x": lambda path: path == "[1]",
    "norm": lambda path: "scale" in path,
    "head": lambda path: "head" in path,
    "bias and x": lambda path: "bias" in path or path == "[1]",
    "all": lambda path: path != "[2]",
}


@pytest.mark.parametrize(
    ("mask", "form"), [*((mask, "custom_jvp") for mask in MASKS), ("all", "custom_vjp")]
)
def test_totals_are_what_an_eager_call_keeps(mask, form):
    wrt = MASKS[mask]
    args = arguments()
    with using(form):
        report = memsave_jax.report(net, *args, wrt=lambda path, _: wrt(path), compiled=False)
        assert report.now == measured(net, *args, wrt=wrt)
    with using("stock"):
        assert report.stock == measured(net, *args, wrt=wrt)
    for column in ("stock", "now"):
        assert sum(getattr(row, column) for row in report.rows) == getattr(report, column)
        for row in report.rows:
            residuals = getattr(row, f"{column}_residuals")
            assert sum(residual.nbytes for residual in residuals) == getattr(row, column)


def test_count_can_differ(monkeypatch):
    """A layer that keeps more than its row says is found out."""
    args = arguments()
    honest = memsave_jax.report(net, *args, wrt=1, compiled=False).now

    def leaky(params: Any, x: Any, key: Any) -> Any:
        y, mean = net(params, x, key)
        return jnp.exp(y), mean

    assert memsave_jax.report(leaky, *args, wrt=1, compiled=False).now == honest + 4 * 2 * 5


def forwards(x: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(x) * jnp.where(x > 0, x, 1.0)


def names(x: jax.Array) -> jax.Array:
    y = x + 1
    return y * jnp.sin(x) * checkpoint_name(y, "y")


NUMPY = np.arange(8, dtype=np.float32)
JAX = jnp.arange(8.0)
FUNCTIONS = {
    "an output": jnp.tanh,
    "one array twice": lambda x: (lambda y: y * jnp.sin(y) * y)(x + 1),
    "one array under two names": names,
    "an input under another name": forwards,
    "scalars": lambda x: jnp.sin(x * 0.5) / 3.0,
    "what it closes over": lambda x: x * NUMPY * JAX,
    "jit": jax.jit(lambda x: jnp.sin(jnp.exp(x)) * x),
    "jit in jit": jax.jit(lambda x: jax.jit(forwards)(x) * F.relu(x)),
    "scan": lambda x: jax.lax.scan(lambda c, v: (F.relu(c) * v, jnp.sin(c)), x, x[:, None])[1],
    "cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, lambda x: F.relu(x) * x, x),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))),
    "vmap": jax.vmap(lambda x: F.relu(x) * x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_totals_of_other_functions(name):
    x, fn = jnp.linspace(-1, 1, 8), FUNCTIONS[name]
    report = memsave_jax.report(fn, x, compiled=False)
    assert report.now == measured(fn, x, wrt=lambda path: True)
    with using("stock"):
        assert report.stock == measured(fn, x, wrt=lambda path: True)


def batch_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return F.batch_norm(x, None, None, scale, use_running_average=False)[0]


LAYERS = {
    "relu": (spec.RELU, F.relu, {"x": (3, 5)}, {}, {}),
    "max_pool": (  # (the row's axes are in PyTorch's order)
        spec.MAX_POOL2D, lambda x: F.max_pool(x, (3, 3), (2, 2)), {"x": (2, 7, 7, 3)},
        {"x": (2, 3, 7, 7), "y": (2, 3, 3, 3)}, {"kernel_size": (3, 3)},
    ),
    "dropout": (
        spec.DROPOUT, lambda x: F.dropout(x, 0.3, jax.random.key(0)), {"x": (3, 17)}, {}, {},
    ),
    "batch_norm": (spec.BATCH_NORM_TRAIN, batch_norm, {"x": (6, 4), "weight": (4,)}, {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_one_layer_keeps_what_the_table_says(name):
    row, fn, shapes, in_order, options = LAYERS[name]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values()]
    report = memsave_jax.report(fn, *args, wrt=tuple(range(len(args))), compiled=False)
    shapes = {**dict.fromkeys(row.args), **shapes, **in_order}
    sizes = dict.fromkeys([*shapes, *row.extras], 32)
    bits = row.saved_bits({"x", "weight"} & {*row.reads}, shapes, sizes, options, packing="last")
    (line,) = (row for row in report.rows if row.now)
    kept = {residual.name: residual.nbytes * 8 for residual in line.now_residuals}
    assert kept == {f"{row.name}.{extra}": bits.pop(extra) for extra in row.extras}
    assert report.inputs * 8 == sum(bits.values())
    assert line.reason.startswith(f"{row.name}: x")
    assert "bias" not in line.reason  # its gradient reads nothing


def test_types_serve_as_well_as_arrays():
    def wrt(path: str, leaf: Any) -> bool:
        return "kernel" in path or leaf.shape == X

    real = memsave_jax.report(net, *arguments(), wrt=wrt, compiled=False)
    assert real == memsave_jax.report(net, *types(arguments()), wrt=wrt, compiled=False)
    x = jnp.ones((64, 64))
    assert memsave_jax.report(F.relu, x) == memsave_jax.report(F.relu, types(x))


def test_ways_to_say_what_is_wanted():
    args = arguments()

    def total(wrt: Any) -> tuple[int, int]:
        report = memsave_jax.report(net, *args, wrt=wrt, compiled=False)
        return report.now, report.inputs

    paths: list[str] = []
    assert total(0) == total((0,)) == total(-3) == total(lambda path, _: path[:3] == "[0]")
    assert total((0, 1)) == total(lambda path, _: paths.append(path) is None)
    assert len({total(0), total(1), total((0, 1))}) == 3
    assert "[0]['kernel']" in paths
    assert "[2]" not in paths  # a key is not floating


def sources(residuals: Any) -> dict[str, str]:
    return {residual.name: residual.source for residual in residuals}


def here(function: Callable[..., Any], line: int) -> str:
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + line} ({code.co_qualname})"


def test_says_who_made_it_and_where():
    rows = memsave_jax.report(net, *arguments(), wrt=(0, 1), compiled=False).rows
    ours = sources(residual for row in rows for residual in row.now_residuals)
    assert ours == {
        "add output": here(net, 2),  # conv, with its bias
        "batch_norm_train.mean": here(net, 3),
        "batch_norm_train.rstd": here(net, 3),
        "relu.positive": here(net, 6),
        "max_pool2d.offsets": here(net, 6),
        "dropout.kept": here(net, 7),
        "cos output": here(net, 8),
        "div output": here(net, 8),
        "constant": "",
    }
    stock = sources(residual for row in rows for residual in row.stock_residuals)
    assert stock["relu output"] == here(net, 6)


def body(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
    with jax.named_scope("inner"):
        return jnp.sin(F.relu(x)), None


TRANSFORMED = {
    "jit": jax.jit(lambda x: body(x, None)[0]),
    "scan": lambda x: jax.lax.scan(body, x, length=3)[0],
    "scan in jit": jax.jit(lambda x: jax.lax.scan(body, x, length=3)[0]),
    "vmap": jax.vmap(lambda x: body(x, None)[0]),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: body(x, None)[0], lambda x: 1.0 * x, x),
    "checkpoint": jax.checkpoint(
        lambda x: body(x, None)[0],
        policy=jax.checkpoint_policies.save_only_these_names("relu.positive"),
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("form", ["custom_jvp", "custom_vjp"])
def test_looks_into_transformed_functions(name, form):
    jax.jit(F.relu)(jnp.ones(3))  # so that something is in the caches, from another line
    with using(form):
        report = memsave_jax.report(
            lambda x: TRANSFORMED[name](x), jnp.ones((4, 8)), compiled=False
        )
    kept = {r.name: r for row in report.rows for r in row.now_residuals}
    assert kept["relu.positive"].source == here(body, 2)
    assert kept["relu.positive"].scope.endswith("inner")
    assert kept["relu.positive"].nbytes == 4 * (3 if "scan" in name else 1)


def test_names_what_a_checkpoint_keeps():
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("mine"))
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(jnp.exp(x), "mine"))

    report = memsave_jax.report(fn, jnp.ones(8), compiled=False)
    assert [r.name for row in report.rows for r in row.now_residuals] == ["mine"]
    assert (report.now, report.inputs) == (32, 32)


def fibonacci(carry: Any, _: Any) -> tuple[Any, None]:
    return (carry[1], carry[0] * carry[1]), None


def test_follows_the_carry_of_a_loop():
    """What an iteration keeps of the carry was made by the one before, or the one before that."""

    def fn(x: jax.Array) -> jax.Array:
        return jax.lax.scan(fibonacci, (x, x), length=3)[0]

    report = memsave_jax.report(fn, jnp.ones(8), compiled=False)
    kept = {(r.name, r.source) for row in report.rows for r in row.now_residuals}
    assert kept == {("mul output", here(fibonacci, 1))}


def test_compiled_is_what_the_compiler_says():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def fn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(3):
            x = F.relu(x @ w)
        return x, x > 0

    def step(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        y, pull, positive = jax.vjp(lambda x: fn(x, w), x, has_aux=True)
        return y, positive, pull(g)

    def temp() -> int:
        compiled = jax.jit(step).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    report = memsave_jax.report(fn, x, x)
    assert report.now_temp == temp()
    with using("stock"):
        assert report.stock_temp == temp()
    assert report.stock_temp != report.now_temp
    assert "of temporaries" in str(report)
    without = memsave_jax.report(fn, x, x, compiled=False)
    assert (without.stock_temp, without.now_temp) == (None, None)
    assert "temporaries" not in str(without)


class Block(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.lin = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(self.lin(x))
        return self.drop(F.relu(x))


def test_leaves_an_nnx_model_as_it_was():
    model, x = Block(), jnp.ones((4, 8))
    before = jax.tree.map(np.asarray, jax.tree.leaves(nnx.state(model, nnx.BatchStat)))
    report = memsave_jax.report(lambda model, x: model(x), model, x, wrt=1, compiled=False)
    called = memsave_jax.report(model, x, compiled=False)
    leaves = jax.tree.leaves(model)
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    after = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert model.drop.rngs is not None
    assert int(model.drop.rngs.count[...]) == 0
    # A model that is called has parameters; one that is an argument is an input like others.
    assert called.now == report.now
    assert called.parameters + called.inputs == report.parameters + report.inputs
    assert called.parameters >= 4 * 8 * 8
    (row,) = (row for row in report.rows if "relu: x reads positive" in row.reason)
    assert row.source == here(Block.__call__, 2)


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return F.relu(linen.Dense(8)(x))


def test_names_the_scopes_of_linen():
    model, x = Dense(), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    report = memsave_jax.report(model.apply, params, x, wrt=1, compiled=False)
    assert [row.scope for row in report.rows if row.now] == ["Dense"]


def test_prints_as_a_table():
    report = memsave_jax.report(net, *arguments(), wrt=(0, 1), compiled=False)
    header, *lines = report.format(limit=None).splitlines()
    assert header.split()[:4] == ["where", "stock", "now", "saves"]
    assert [line.split("  ")[0] for line in lines[: len(report.rows)]] == [
        row.where for row in report.rows
    ]
    assert "relu.positive, max_pool2d.offsets" in lines[0]
    assert "relu: x reads positive" in lines[0]
    assert f"({len(report.rows) - 2} smaller rows)" in report.format(limit=2)
    assert f"net (test_jax_report.py:{net.__code__.co_firstlineno + 6})" in str(report)


def test_errors():
    x = jnp.ones(3)
    with pytest.raises(ValueError, match="selects no floating array"):
        memsave_jax.report(jnp.sin, x, wrt=lambda path, leaf: False)
    with pytest.raises(ValueError, match="selects no floating array"):
        memsave_jax.report(lambda x, k: x * k, x, jnp.arange(3), wrt=1)
    with pytest.raises(ValueError, match="called with 1 argument"):
        memsave_jax.report(jnp.sin, x, wrt=1)
    with pytest.raises(ValueError, match="no floating output"):
        memsave_jax.report(lambda x: x > 0, x)


def test_carries_that_change_places():
    def function(x):
        def swap(carry, _):
            return carry[::-1], None

        (a, b), _ = jax.lax.scan(swap, (jnp.sin(x), jnp.tanh(x)), None, length=3)
        return a * b

    result = memsave_jax.report(function, jnp.ones(4), compiled=False)
    assert result.now == result.stock > 0


def test_an_argnum_before_the_first():
    with pytest.raises(ValueError, match="wrt=-3, but fn is called with 2 arguments"):
        memsave_jax.report(jnp.multiply, jnp.ones(3), jnp.ones(3), wrt=-3)
