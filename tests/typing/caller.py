"""A user's code, which a type checker reads and no test runs: each line that is wrong says so, and the checker agrees.

`mypy` with `warn_unused_ignores` fails on a wrong call that it does not notice, and on a right call that it refuses.
"""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn import (
    KVCache,
    PrefixLevel,
    PromptLayout,
    Shard,
    SoftmaxState,
    SparqOptions,
    attend,
    attention_moments,
    bifurcated_decode,
    energy,
    hydragen_decode,
    initialize,
    lean_decode,
    make_mesh,
    merge_state,
    merge_states,
    paged_decode,
    sparq_decode,
    storage_order,
    tree_decode,
)
from tree_attn.ring_baseline import ring_attention, ring_decode, ring_prefill, ulysses_attention

mesh: jax.sharding.Mesh = make_mesh({"seq": 8})
query = jnp.ones((1, 1, 8, 64))
key = value = jnp.ones((1, 1024, 2, 64))
lengths = jnp.array([700])

tree_decode(query, key, value, axis_name="seq", mesh=mesh, block_size=None, is_causal=True)
tree_decode(query, key, value, axis_name=("device", "node"), reduction=("fused", "gather"), return_lse=True)
tree_decode(query, key, value, axis_name="seq", block_size=1, key_value_seq_lengths=np.array([700]))
tree_decode(query, key, value, axis_name="seq", block_size=1, local_window_size=(128, None))
tree_decode(query, key, value, axis_name="seq", block_size="1")  # type: ignore[call-overload]
tree_decode(query, key, value, axis_name="seq", is_casual=True)  # type: ignore[call-overload]
tree_decode(query, key, value)  # type: ignore[call-overload]
tree_decode(query, key, value, axis_name="seq", logits_soft_cap="30")  # type: ignore[call-overload]

state: SoftmaxState = attend(query, key, value, shard=Shard(index=0, num_shards=2), implementation="xla")
merged: SoftmaxState = merge_state(state, state)
merge_states(merged, axis=0)
attend(query, key, value, return_lse=True)  # type: ignore[call-arg]

ring_decode(query, key, value, axis_name="seq", mesh=mesh, block_size=1, key_value_seq_lengths=lengths)
ring_attention(query, key, value, axis_name="seq", mesh=mesh, block_size=1, return_lse=True)
ulysses_attention(query, key, value, axis_name=("device", "node"), mesh=mesh, block_size=1, rotation="two_way")
lean_decode(query, key[0], value[0], jnp.array([0, 1024]), return_lse=True, scale=0.1)
paged_decode(query, key, value, jnp.zeros((1, 16), jnp.int32), lengths, logits_soft_cap=30.0)
level = PrefixLevel(key=key, value=value, sequences=((0,),))
hydragen_decode(query, [level], key, value, axis_name="seq", mesh=mesh)
bifurcated_decode(query, key, value, key, value, axis_name="seq", mesh=mesh)
sparq_decode(query, key, value, num_components=16, num_keys=64, axis_name="seq", mesh=mesh)
sparq_options = SparqOptions(num_components=16, num_keys=64)
energy(query, key, value, jnp.zeros((1, 1, 8, 64)))
attention_moments(query, key, value, order=2)

cache = KVCache.create(
    batch=1, capacity=2048, num_kv_heads=2, head_dim=64, dtype=jnp.bfloat16, mesh=mesh, axis_name="seq", block_size=1
)
cache = cache.append(key, value).with_lengths([1024])
cache, prompt_out = ring_prefill(cache, query, key, value, lengths=np.array([1000]), local_window_size=128)
cache.attend(query, attention=ring_decode, num_new=1, is_causal=True)
hydragen_decode(query, [level], **cache.operands())
stored = PromptLayout(num_tokens=1000, num_shards=8, block_size=1).store(query)
order: np.ndarray = storage_order(1024, num_shards=8, block_size=1)
initialize(num_processes="2")  # type: ignore[arg-type]

# An array or a pair, by `return_lse`. (Only in an installed wheel does a type checker find ring_baseline.)
offsets, table = jnp.array([0, 1024]), jnp.zeros((1, 16), jnp.int32)
assert_type(tree_decode(query, key, value, axis_name="seq"), jax.Array)
assert_type(tree_decode(query, key, value, axis_name="seq", return_lse=False, scale=0.1), jax.Array)
assert_type(tree_decode(query, key, value, axis_name="seq", return_lse=True), tuple[jax.Array, jax.Array])
assert_type(lean_decode(query, key[0], value[0], offsets), jax.Array)
assert_type(lean_decode(query, key[0], value[0], offsets, return_lse=True), tuple[jax.Array, jax.Array])
assert_type(paged_decode(query, key, value, table, lengths), jax.Array)
assert_type(paged_decode(query, key, value, table, lengths, return_lse=True), tuple[jax.Array, jax.Array])
assert_type(hydragen_decode(query, [level], key, value), jax.Array)
assert_type(hydragen_decode(query, [level], key, value, return_lse=True), tuple[jax.Array, jax.Array])
assert_type(bifurcated_decode(query, key, value, key, value), jax.Array)
assert_type(bifurcated_decode(query, key, value, key, value, return_lse=True), tuple[jax.Array, jax.Array])
assert_type(sparq_decode(query, key, value, num_components=8, num_keys=9), jax.Array)
assert_type(
    sparq_decode(query, key, value, num_components=8, num_keys=64, return_lse=True), tuple[jax.Array, jax.Array]
)


def with_or_without(return_lse: bool) -> jax.Array | tuple[jax.Array, jax.Array]:
    return tree_decode(query, key, value, axis_name="seq", return_lse=return_lse)


array: jax.Array = tree_decode(query, key, value, axis_name="seq", return_lse=True)  # type: ignore[assignment]
tree_decode(query, key, value, axis_name="seq", return_lse="yes")  # type: ignore[call-overload]
