"""The GPT-2 and the Llama of `torch_decoders` in plain JAX: functions of nested dicts; none imports the package."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
Tree = dict[str, Any]


def layer_norm(p: Tree, x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * p["gain"] + p["bias"]


def gpt_block(p: Tree, x: Array, heads: int) -> Array:
    b, s, h = x.shape
    parts = jnp.split(layer_norm(p["first"], x) @ p["fused"] + p["fused_bias"], 3, -1)
    q, k, v = (part.reshape(b, s, heads, h // heads) for part in parts)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, s, h)
    x = x + (mixed @ p["out"] + p["out_bias"])
    return x + (jax.nn.gelu(layer_norm(p["second"], x) @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"])


def gpt(p: Tree, ids: Array, heads: int) -> Array:
    x = p["tokens"][ids] + p["places"][jnp.arange(ids.shape[1])]
    for block in p["blocks"]:
        x = gpt_block(block, x, heads)
    return layer_norm(p["norm"], x) @ p["tokens"].T


def gpt_shapes(layers: int, hidden: int, vocab: int, positions: int) -> Tree:
    h, norm = hidden, {"gain": (hidden,), "bias": (hidden,)}
    block = {"first": norm, "second": norm, "fused": (h, 3 * h), "fused_bias": (3 * h,), "out": (h, h)}
    block |= {"out_bias": (h,), "up": (h, 4 * h), "up_bias": (4 * h,), "down": (4 * h, h), "down_bias": (h,)}
    return {"tokens": (vocab, h), "places": (positions, h), "blocks": [block] * layers, "norm": norm}


def rms_norm(gain: Array, x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * gain


def turned(x: Array, cos: Array, sin: Array) -> Array:
    half = x.shape[-1] // 2
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], -1) * sin


def llama_block(p: Tree, x: Array, cos: Array, sin: Array) -> Array:
    y = rms_norm(p["first"], x)
    q, k, v = (jnp.einsum("bsh,hnd->bsnd", y, p[name]) for name in "qkv")
    mixed = jax.nn.dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
    x = x + jnp.einsum("bsnd,ndh->bsh", mixed, p["o"])
    y = rms_norm(p["second"], x)
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def llama(p: Tree, ids: Array) -> Array:
    width = p["blocks"][0]["q"].shape[-1]
    rates = 500000.0 ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = jnp.arange(ids.shape[1], dtype=jnp.float32)[:, None] * rates
    angles = jnp.concatenate([angles, angles], -1)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x = p["tokens"][ids]
    for block in p["blocks"]:
        x = llama_block(block, x, cos, sin)
    return rms_norm(p["norm"], x) @ p["head"]


def llama_shapes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> Tree:
    d = hidden // heads
    block = {"first": (hidden,), "second": (hidden,), "q": (hidden, heads, d), "o": (heads, d, hidden)}
    block |= {"k": (hidden, kv_heads, d), "v": (hidden, kv_heads, d)}
    block |= {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
    return {"tokens": (vocab, hidden), "head": (hidden, vocab), "norm": (hidden,), "blocks": [block] * layers}
