"""Attend over a paged pool with the kernels, without the engine: write the KV of a sequence, then decode.

python examples/kernels_alone.py
"""

import jax
import jax.numpy as jnp

from pallas_kernels import select_for

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 64, 16


def main() -> None:
    model = dict(
        num_attention_heads=NUM_HEADS, num_key_value_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16"
    )  # fmt: skip
    kernels = select_for(jax.devices()[0], model, block_size=BLOCK_SIZE)
    print(f"{kernels.name}: {kernels.reason}")
    k_pool, v_pool = jnp.zeros((2, 8, NUM_KV_HEADS, BLOCK_SIZE, kernels.head_dim), jnp.bfloat16)
    table = jnp.array([[5, 2, 0]])  # the sequence has 20 tokens, in blocks 5 and 2
    positions = jnp.arange(20)
    slots = table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    k, v = jax.random.normal(jax.random.key(0), (2, 20, NUM_KV_HEADS, HEAD_DIM), jnp.bfloat16)
    k_pool, v_pool = kernels.write_kv(k_pool, v_pool, k, v, slots)
    q = jax.random.normal(jax.random.key(1), (1, NUM_HEADS, HEAD_DIM), jnp.bfloat16)
    o = kernels.paged_decode_attention(q, k_pool, v_pool, table, jnp.array([20]), scale=HEAD_DIM**-0.5)
    print(f"o {o.shape} {o.dtype}, mean {float(o.mean()):.4f}")


if __name__ == "__main__":
    main()
