"""A program over all tasks of a SLURM job; it goes on after an interruption. docs/how-to/slurm.md starts it."""

import functools
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import tree_attn

STEPS = 3
BATCH, HEADS, KV_HEADS, HEAD_DIM = 1, 4, 2, 16


@functools.partial(jax.jit, donate_argnums=0)
def decode(cache, step):
    """Appends a token's key and value, drawn from its number, and attends to all so far."""
    keys = jax.random.split(jax.random.key(step), 3)
    shapes = [(BATCH, 1, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = map(jax.random.normal, keys, shapes)
    cache = cache.append(key, value)
    return cache, cache.attend(query).sum()


def main():
    launch = tree_attn.initialize()  # before anything uses a device; under srun it finds the other tasks
    mesh = tree_attn.make_mesh(("seq",))  # all devices of all tasks
    rows = pathlib.Path(os.environ["TREE_ATTN_OUT"]) / "sums.jsonl"  # rank 0's file, on a disk that every node sees
    done = len(rows.read_text().splitlines()) if rows.exists() else 0
    cache = tree_attn.KVCache.create(
        batch=BATCH, capacity=STEPS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=jnp.float32, axis_name="seq",
        mesh=mesh,
    )  # fmt: skip
    for step in range(STEPS):
        cache, total = decode(cache, np.int32(step))
        if step >= done and launch.process_id == 0:
            with rows.open("a") as file:
                file.write(json.dumps({"step": step, "devices": mesh.size, "sum": float(total)}) + "\n")


if __name__ == "__main__":
    main()
