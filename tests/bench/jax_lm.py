"""The same language-model step in JAX with jmp and optax: bfloat16 compute, float32 parameters, one jitted function."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jmp
import optax

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 128, 256, 8, 4, 16


def setup(variant: str) -> Callable[[], None]:
    """Prepares the step; there is one variant."""
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    schedule = optax.linear_schedule(2e-3, 2e-4, 600)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.1))
    params = _init(jax.random.PRNGKey(0))
    state = optimizer.init(params)
    tokens = jax.random.randint(jax.random.PRNGKey(1), (BATCH, CONTEXT + 1), 0, 256)

    @jax.jit
    def step(params, state, tokens):
        def loss_fn(params):
            logits = policy.cast_to_output(_forward(policy.cast_to_compute(params), tokens[:, :-1]))
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def run() -> None:
        nonlocal params, state
        params, state, loss = step(params, state, tokens)
        jax.block_until_ready((params, state, loss))

    return run


def _init(key):
    def dense(key, rows, columns):
        return {"w": 0.02 * jax.random.normal(key, (rows, columns)), "b": jnp.zeros(columns)}

    def norm():
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    keys = iter(jax.random.split(key, 4 * LAYERS + 3))
    blocks = [
        {
            "norm_attention": norm(),
            "qkv": dense(next(keys), WIDTH, 3 * WIDTH),
            "projection": dense(next(keys), WIDTH, WIDTH),
            "norm_mlp": norm(),
            "expand": dense(next(keys), WIDTH, 4 * WIDTH),
            "contract": dense(next(keys), 4 * WIDTH, WIDTH),
        }
        for _ in range(LAYERS)
    ]
    return {
        "token": 0.02 * jax.random.normal(next(keys), (256, WIDTH)),
        "position": 0.02 * jax.random.normal(next(keys), (CONTEXT, WIDTH)),
        "blocks": blocks,
        "norm": norm(),
        "head": 0.02 * jax.random.normal(next(keys), (WIDTH, 256)),
    }


def _forward(params, tokens):
    def layer_norm(p, x):
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def dense(p, x):
        return x @ p["w"] + p["b"]

    length = tokens.shape[1]
    future = jnp.triu(jnp.ones((length, length), bool), 1)
    x = params["token"][tokens] + params["position"][:length]
    for block in params["blocks"]:
        qkv = dense(block["qkv"], layer_norm(block["norm_attention"], x))
        qkv = qkv.reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS).transpose(2, 0, 3, 1, 4)
        scores = qkv[0] @ qkv[1].swapaxes(-1, -2) * (WIDTH // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(future, -jnp.inf, scores.astype(jnp.float32))).astype(x.dtype)
        x = x + dense(block["projection"], (weights @ qkv[2]).swapaxes(1, 2).reshape(x.shape))
        x = x + dense(block["contract"], jax.nn.gelu(dense(block["expand"], layer_norm(block["norm_mlp"], x))))
    return layer_norm(params["norm"], x) @ params["head"]
