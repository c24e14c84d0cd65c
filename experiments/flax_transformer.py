"""The transformer of the experiments in Flax: a small decoder (of the kind of GPT-2) with dropout.

Written as for plain Flax: what of it is converted is for ``memsave_jax.nnx.convert`` to find.
"""

from __future__ import annotations

import jax
from flax import nnx

LAYERS, WIDTH, HEADS, LENGTH, CLASSES = 6, 128, 4, 128, 256


class MLP(nnx.Module):
    """Two linear layers around an activation."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.activation = nnx.gelu
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.activation(self.up(x)))


class Block(nnx.Module):
    """Causal attention, then the MLP, each behind a norm and before a dropout."""

    def __init__(self, dropout: float, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.attention_dropout = nnx.Dropout(dropout, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.mlp = MLP(rngs)
        self.mlp_dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attention_dropout(self.attention(self.attention_norm(x), is_causal=True))
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nnx.Module):
    """Embeddings ``(n, length, WIDTH)`` to the logits of the next token ``(n, length, CLASSES)``.

    ``remat`` computes every block again in backward.
    """

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.1, remat: bool = False) -> None:
        self.blocks = nnx.List([Block(dropout, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, use_bias=False, rngs=rngs)
        self.remat = remat

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = nnx.remat(Block.__call__)(block, x) if self.remat else block(x)
        return self.head(self.norm(x))
