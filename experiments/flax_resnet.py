"""The ResNet of the experiments in Flax, with the names of the one in transformers.

So the weights of either move to the other by name (:mod:`memsave_jax.interop`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .resnet import DEPTHS


class Kind(NamedTuple):
    """Widths and depths of the stages, classes, and whether it is for small images."""

    sizes: tuple[int, ...]
    depths: Sequence[int]
    classes: int = 1000
    small: bool = False


KINDS = {depth: Kind((256, 512, 1024, 2048), depths) for depth, depths in DEPTHS.items()}
KINDS[20] = Kind((16, 32, 64), (3, 3, 3), classes=10, small=True)


class ConvLayer(nnx.Module):
    """Convolution, BatchNorm and, if asked for, ReLU."""

    def __init__(
        self, i: int, o: int, kernel: int, stride: int, rngs: nnx.Rngs, relu: bool = True
    ) -> None:
        pad = kernel // 2
        self.convolution = nnx.Conv(
            i, o, (kernel, kernel), strides=stride, padding=pad, use_bias=False, rngs=rngs
        )
        self.normalization = nnx.BatchNorm(o, momentum=0.9, epsilon=1e-5, rngs=rngs)
        self.activation = nnx.relu if relu else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.normalization(self.convolution(x))
        return x if self.activation is None else self.activation(x)


class Block(nnx.Module):
    """Convolutions beside a shortcut: three (a bottleneck), or two (basic)."""

    def __init__(self, i: int, o: int, stride: int, basic: bool, rngs: nnx.Rngs) -> None:
        inner = o if basic else o // 4
        sizes = (
            [(i, o, 3, stride), (o, o, 3, 1)]
            if basic
            else [(i, inner, 1, 1), (inner, inner, 3, stride), (inner, o, 1, 1)]
        )
        last = len(sizes) - 1
        self.shortcut = (
            ConvLayer(i, o, 1, stride, rngs, relu=False) if i != o or stride > 1 else None
        )
        self.layer = nnx.List(
            [ConvLayer(*size, rngs, relu=k < last) for k, size in enumerate(sizes)]
        )
        self.activation = nnx.relu

    def __call__(self, x: jax.Array) -> jax.Array:
        shortcut = x if self.shortcut is None else self.shortcut(x)
        for layer in self.layer:
            x = layer(x)
        return self.activation(x + shortcut)


class Stage(nnx.Module):
    """Blocks, of which the first has the stride."""

    def __init__(
        self, i: int, o: int, stride: int, depth: int, basic: bool, remat: bool, rngs: nnx.Rngs
    ) -> None:
        first = Block(i, o, stride, basic, rngs)
        rest = (Block(o, o, 1, basic, rngs) for _ in range(depth - 1))
        self.layers = nnx.List([first, *rest])
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.remat(type(layer).__call__)(layer, x) if self.remat else layer(x)
        return x


class Embedder(nnx.Module):
    """The stem: a convolution and a max pooling; of small images, a convolution alone."""

    def __init__(self, o: int, small: bool, rngs: nnx.Rngs) -> None:
        self.embedder = ConvLayer(3, o, 3 if small else 7, 1 if small else 2, rngs)
        self.pooler: Callable[..., jax.Array] | None = None if small else nnx.max_pool

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embedder(x)
        return x if self.pooler is None else self.pooler(x, (3, 3), (2, 2), ((1, 1), (1, 1)))


class Encoder(nnx.Module):
    """The stages."""

    def __init__(self, i: int, kind: Kind, remat: bool, rngs: nnx.Rngs) -> None:
        stages = []
        for k, (o, depth) in enumerate(zip(kind.sizes, kind.depths, strict=True)):
            stages.append(Stage(i, o, 2 if k else 1, depth, kind.small, remat, rngs))
            i = o
        self.stages = nnx.List(stages)

    def __call__(self, x: jax.Array) -> jax.Array:
        for stage in self.stages:
            x = stage(x)
        return x


class Trunk(nnx.Module):
    """Everything but the classifier."""

    def __init__(self, kind: Kind, remat: bool, rngs: nnx.Rngs) -> None:
        stem = kind.sizes[0] if kind.small else 64
        self.embedder = Embedder(stem, kind.small, rngs)
        self.encoder = Encoder(stem, kind, remat, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.encoder(self.embedder(x))


class ResNet(nnx.Module):
    """``(n, h, w, 3)`` to logits ``(n, classes)``.

    ResNet-50 and -101 are those of transformers, with 1000 classes. ResNet-20 is the one for images
    of 32x32 (He et al., arXiv 1512.03385, section 4.2; with convolutions as shortcuts), with 10.
    ``remat`` computes every block again in backward.
    """

    def __init__(self, depth: int, rngs: nnx.Rngs, remat: bool = False) -> None:
        kind = KINDS[depth]
        self.resnet = Trunk(kind, remat, rngs)
        classifier = nnx.Linear(kind.sizes[-1], kind.classes, rngs=rngs)
        self.classifier = nnx.List([_mean_over_places, classifier])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.resnet(x)
        for layer in self.classifier:
            x = layer(x)
        return x


def _mean_over_places(x: jax.Array) -> jax.Array:
    return jnp.mean(x, (1, 2))
