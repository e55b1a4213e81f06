"""Wrong calls, each with its one clear error: the argument, its value, and nothing compiled before it."""

import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tree_attn import (
    Shard,
    SoftmaxState,
    attend,
    make_mesh,
    merge_segments,
    merge_state,
    merge_states,
    sparq_decode,
    storage_order,
    tree_decode,
)
from tree_attn.cache import KVCache
from tree_attn.cache_checks import CacheFullError
from tree_attn.placement import PromptLayout
from tree_attn.ring_baseline import ring_attention, ring_decode, ring_prefill

QUERY, KEY = np.zeros((2, 3, 4, 8), np.float32), np.zeros((2, 12, 2, 8), np.float32)
PROMPT = np.zeros((2, 12, 4, 8), np.float32)
NEW = np.zeros((2, 1, 2, 8), np.float32)
BFLOAT16, FLOAT8 = np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e4m3fn)


def ints(*values):
    return np.array(values, np.int32)


def local(query=QUERY, key=KEY, value=None, **options):
    return attend(query, key, key if value is None else value, **options)


def sharded(function, query=QUERY, key=KEY, **options):
    return function(query, key, key, **{"axis_name": "seq"} | options)


tree, ring, prefill = partial(sharded, tree_decode), partial(sharded, ring_decode), partial(sharded, ring_attention)


def in_shard_map(call):
    """Traces `call` where a mesh of 2 x 2 devices binds the axes "seq" and "other"."""
    mesh = make_mesh({"seq": 2, "other": 2})
    return jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))


def state(rows=(2,), head_dim=4, dtype=np.float32, lse_rows=None, lse_dtype=np.float32):
    return SoftmaxState(np.zeros((*rows, head_dim), dtype), np.zeros(rows if lse_rows is None else lse_rows, lse_dtype))


def create(devices, **options):
    sizes = dict(
        batch=2, capacity=12, num_kv_heads=2, head_dim=8, dtype=jnp.float32, mesh=devices.mesh, axis_name="seq"
    )
    return KVCache.create(**sizes | options)


# name: (call, exception, pattern)
ATTEND = {
    "query_is_a_list": (lambda _: local([0.0]), TypeError, r"query must be an array \[B, T, N, H\], got list"),
    "query_of_three_axes": (lambda _: local(QUERY[0]), ValueError, r"query must be .*, got shape \(3, 4, 8\)"),
    "key_of_three_axes": (
        lambda _: local(key=KEY[0]),
        ValueError,
        r"key must be \[B, S, K, H\], got shape \(12, 2, 8\)",
    ),
    "part_of_a_block_of_a_shard": (
        lambda _: local(shard=Shard(index=1, num_shards=2, block_size=5)),
        ValueError,
        r"key must hold a multiple of block_size = 5 slots, got 12",
    ),
    "odd_slots_of_a_zigzag_shard": (
        lambda _: local(key=KEY[:, :11], shard=Shard(num_shards=2, block_size="zigzag")),
        ValueError,
        r"key must hold a multiple of 2 runs = 2 slots, got 11",
    ),
    "integer_query": (lambda _: local(QUERY.astype(int)), ValueError, r"query.dtype must be one of .*, got int64"),
    "float64_key": (lambda _: local(key=KEY.astype(float)), ValueError, r"key.dtype must be one of .*, got float64"),
    "two_dtypes": (
        lambda _: local(key=KEY.astype(np.float16)),
        ValueError,
        r"one dtype, got query float32, key float16",
    ),
    "float8_query": (
        lambda _: local(QUERY.astype(FLOAT8)),
        ValueError,
        r"query.dtype must be one of float32, bfloat16, float16, got float8_e4m3fn",
    ),
    "another_float8": (
        lambda _: local(key=KEY.astype(jnp.float8_e5m2)),
        ValueError,
        r"key.dtype must be one of .*float8_e4m3fn, int8, got float8_e5m2",
    ),
    "float8_value_of_another_kind": (
        lambda _: local(key=KEY.astype(FLOAT8), value=KEY.astype(jnp.float8_e4m3b11fnuz)),
        ValueError,
        r"value.dtype must be one of .*float8_e4m3fn, int8, got float8_e4m3b11fnuz",
    ),
    "float8_key_alone": (
        lambda _: local(key=KEY.astype(FLOAT8), value=KEY),
        ValueError,
        r"got .* key float8_e4m3fn, value float32; .* key and value must both be float8_e4m3fn",
    ),
    "float8_value_alone": (
        lambda _: local(value=KEY.astype(FLOAT8)),
        ValueError,
        r"got .* key float32, value float8_e4m3fn; .* key and value must both be float8_e4m3fn or int8",
    ),
    "int8_beside_float8": (
        lambda _: local(key=KEY.astype(FLOAT8), value=KEY.astype(np.int8)),
        ValueError,
        r"got .* key float8_e4m3fn, value int8; .* key and value must both be",
    ),
    "key_scale_of_query_heads": (
        lambda _: local(key_scale=np.ones(4, np.float32)),
        ValueError,
        r"key_scale must be float32 of shape \[K\] = \(2,\), got float32 of shape \(4,\)",
    ),
    "value_scale_is_a_number": (
        lambda _: local(value_scale=0.5),
        ValueError,
        r"value_scale must be float32 of shape \[K\] = \(2,\), got float64 of shape \(\)",
    ),
    "narrow_key_scale": (
        lambda _: local(key_scale=np.ones(2, BFLOAT16)),
        ValueError,
        r"key_scale must be float32 .*, got bfloat16 of shape \(2,\)",
    ),
    "value_of_other_length": (
        lambda _: local(value=KEY[:, :5]),
        ValueError,
        r"value must agree with key .*\(2, 5, 2, 8\)",
    ),
    "value_of_other_heads": (lambda _: local(value=KEY[:, :, :1]), ValueError, r"value must agree .*\(2, 12, 1, 8\)"),
    "batches_differ": (lambda _: local(key=KEY[:1]), ValueError, r"key must have the batch size of query, 2, got 1"),
    "head_dims_differ": (
        lambda _: local(key=KEY[..., :4]),
        ValueError,
        r"key must have the head dim of query, 8, got 4",
    ),
    "heads_do_not_divide": (lambda _: local(QUERY[:, :, :3]), ValueError, r"multiple of key heads, got N=3 and K=2"),
    "no_queries": (lambda _: local(QUERY[:, :0]), ValueError, r"query .*must not have empty axes, got \(2, 0, 4, 8\)"),
    "lengths_of_other_batch": (
        lambda _: local(key_value_seq_lengths=ints(1, 2, 3)),
        ValueError,
        r"key_value_seq_lengths must have shape \[B\] = \(2,\), got \(3,\)",
    ),
    "negative_length": (
        lambda _: local(key_value_seq_lengths=ints(3, -1)),
        ValueError,
        r"key_value_seq_lengths must lie in \[0, 12\] .*, got \[3, -1\]",
    ),
    "length_beyond_the_keys": (
        lambda _: local(key_value_seq_lengths=ints(13, 1)),
        ValueError,
        r"key_value_seq_lengths must lie in \[0, 12\] .*, got \[13, 1\]",
    ),
    "float_lengths": (
        lambda _: local(key_value_seq_lengths=np.ones(2, np.float32)),
        ValueError,
        r"key_value_seq_lengths must be integers, got dtype float32",
    ),
    "is_causal_is_a_word": (lambda _: local(is_causal="no"), TypeError, r"is_causal must be True or False, got 'no'"),
    "positions_of_other_length": (
        lambda _: local(query_positions=ints(1, 2)),
        ValueError,
        r"query_positions must have shape \[B, T\] or \[T\], .*, got \(2,\)",
    ),
    "float_positions": (
        lambda _: local(query_positions=np.zeros(3)),
        ValueError,
        r"query_positions must be integers, got dtype float64",
    ),
    "reads_keys_early_is_a_number": (
        lambda _: local(reads_keys_early=1),
        TypeError,
        r"reads_keys_early must be True or False, got 1",
    ),
    "negative_window": (lambda _: local(local_window_size=-1), ValueError, r"local_window_size must be .*, got -1"),
    "window_of_three": (
        lambda _: local(local_window_size=(1, 2, 3)),
        ValueError,
        r"local_window_size .*got \(1, 2, 3\)",
    ),
    "fractional_window": (
        lambda _: local(local_window_size=(2.5, 0)),
        ValueError,
        r"local_window_size .*got \(2.5, 0\)",
    ),
    "soft_cap_of_zero": (lambda _: local(logits_soft_cap=0.0), ValueError, r"logits_soft_cap must be .*, got 0.0"),
    "infinite_soft_cap": (lambda _: local(logits_soft_cap=np.inf), ValueError, r"logits_soft_cap must be .*, got inf"),
    "scale_is_nan": (lambda _: local(scale=float("nan")), ValueError, r"scale must be .*finite.*, got nan"),
    "scale_is_an_array": (lambda _: local(scale=np.ones(2)), ValueError, r"scale must be .*Python number, got array"),
    "sinks_of_other_heads": (
        lambda _: local(sinks=np.zeros(2)),
        ValueError,
        r"sinks must have shape \[N\] = \(4,\), got \(2,\)",
    ),
    "unknown_implementation": (
        lambda _: local(implementation="cuda"),
        ValueError,
        r"implementation must be one of .*'cuda'",
    ),
    "float32_on_cudnn": (
        lambda _: local(implementation="cudnn"),
        NotImplementedError,
        r"implementation='cudnn' cannot run: ",
    ),
}

SHARDED = {
    "unknown_reduction": (
        lambda devices: tree(mesh=devices.mesh, reduction="tree"),
        ValueError,
        r"reduction must be one of 'allreduce', 'gather', 'fused', 'hierarchical', got 'tree'",
    ),
    "hierarchical_over_one_axis": (
        lambda devices: tree(mesh=devices.mesh, reduction="hierarchical"),
        ValueError,
        r"reduction='hierarchical' needs axis_name to be a tuple of two or more axes, got \('seq',\)",
    ),
    "levels_are_not_one_per_axis": (
        lambda devices: tree(mesh=devices.mesh, reduction=("gather", "gather")),
        ValueError,
        r"reduction given as a tuple must name .* for each axis of \('seq',\), got \('gather', 'gather'\)",
    ),
    "a_level_is_unknown": (
        lambda devices: tree(mesh=devices.mesh, reduction=("hierarchical",)),
        ValueError,
        r"reduction given as a tuple must name one of .*, got \('hierarchical',\)",
    ),
    "tree_mesh_lacks_the_axis": (
        lambda devices: tree(mesh=devices.mesh, axis_name="data"),
        ValueError,
        r"axis_name \('data',\) must name axes of the mesh \('seq',\), not found: \['data'\]",
    ),
    "ring_mesh_lacks_one_of_two_axes": (
        lambda devices: ring(mesh=devices.mesh, axis_name=("seq", "node")),
        ValueError,
        r"axis_name .* must name axes of the mesh .*, not found: \['node'\]",
    ),
    "batch_axis_that_the_mesh_lacks": (
        lambda devices: tree(mesh=devices.mesh, batch_axis_name="data"),
        ValueError,
        r"batch_axis_name \('data',\) must name axes of the mesh \('seq',\) beside axis_name .*, got \['data'\]",
    ),
    "prefill_batch_axis_of_the_sequence": (
        lambda devices: prefill(query=PROMPT, mesh=devices.mesh, batch_axis_name="seq", block_size=1),
        ValueError,
        r"batch_axis_name \('seq',\) must name axes .*, got \['seq'\]",
    ),
    "batch_axis_that_is_no_name": (
        lambda devices: ring(mesh=devices.mesh, batch_axis_name=1),
        ValueError,
        r"batch_axis_name must be a mesh axis or .*, got 1",
    ),
    "batch_that_its_axis_does_not_divide": (
        lambda _: tree(QUERY[:1], KEY[:1], mesh=make_mesh({"seq": 2, "data": 2}), batch_axis_name="data"),
        ValueError,
        r"batch must be a multiple of the 2 devices of batch_axis_name, got 1",
    ),
    "batch_axis_without_the_sequence": (
        lambda _: sparq_decode(QUERY, KEY, KEY, num_components=4, num_keys=4, batch_axis_name="data"),
        ValueError,
        r"batch_axis_name must be None where axis_name is, got 'data'",
    ),
    "an_axis_twice": (
        lambda devices: tree(mesh=devices.mesh, axis_name=("seq", "seq")),
        ValueError,
        r"axis_name must not name an axis twice, got \('seq', 'seq'\)",
    ),
    "no_axis": (lambda devices: tree(mesh=devices.mesh, axis_name=()), ValueError, r"axis_name must be .*, got \(\)"),
    "axis_is_none": (
        lambda devices: ring(mesh=devices.mesh, axis_name=None),
        ValueError,
        r"axis_name must be .*, got None",
    ),
    "no_mesh_and_no_axis_bound": (lambda _: tree(), ValueError, r"mesh must be given .* binds axis_name .*, got None"),
    "no_mesh_for_prefill": (lambda _: prefill(PROMPT, block_size=1), ValueError, r"mesh must be given .*, got None"),
    "mesh_is_a_name": (lambda _: tree(mesh="seq"), TypeError, r"mesh must be a jax.sharding.Mesh, got str"),
    "part_of_a_block_in_a_shard_map": (
        lambda _: in_shard_map(lambda: tree(block_size=5)),
        ValueError,
        r"key must hold a multiple of block_size = 5 slots, got 12",
    ),
    "part_of_a_prompts_block_in_a_shard_map": (
        lambda _: in_shard_map(lambda: prefill(PROMPT, PROMPT, block_size=5)),
        ValueError,
        r"key must hold a multiple of block_size = 5 slots, got 12",
    ),
    "mesh_inside_a_shard_map": (
        lambda devices: in_shard_map(lambda: tree(mesh=devices.mesh)),
        ValueError,
        r"mesh must be None inside a shard_map that binds axis_name \('seq',\), got ",
    ),
    "one_of_two_axes_bound": (
        lambda _: in_shard_map(lambda: tree(axis_name=("seq", "node"))),
        ValueError,
        r"axis_name \('seq', 'node'\) is bound only in part: not bound here are \['node'\]",
    ),
    "length_beyond_all_shards": (
        lambda _: in_shard_map(lambda: tree(key_value_seq_lengths=ints(25, 0))),
        ValueError,
        r"key_value_seq_lengths must lie in \[0, 24\] .*, got \[25, 0\]",
    ),
    "heads_do_not_divide_over_shards": (
        lambda devices: tree(QUERY[:, :, :3], mesh=devices.mesh),
        ValueError,
        r"query heads must be a multiple of key heads, got N=3 and K=2",
    ),
    "ring_key_scale_of_other_heads": (
        lambda devices: ring(mesh=devices.mesh, key_scale=np.ones(3, np.float32)),
        ValueError,
        r"key_scale must be float32 of shape \[K\] = \(2,\), got float32 of shape \(3,\)",
    ),
    "tree_value_scale_of_other_heads": (
        lambda devices: tree(mesh=devices.mesh, value_scale=np.ones(1, np.float32)),
        ValueError,
        r"value_scale must be float32 of shape \[K\] = \(2,\), got float32 of shape \(1,\)",
    ),
    "block_of_zero": (
        lambda devices: tree(mesh=devices.mesh, block_size=0),
        ValueError,
        r"block_size must be .*, got 0",
    ),
    "block_is_a_bool": (
        lambda devices: ring(mesh=devices.mesh, block_size=True),
        ValueError,
        r"block_size must be .*, got True",
    ),
    "zigzag_outside_of_prompts": (
        lambda devices: ring(mesh=devices.mesh, block_size="zigzag"),
        ValueError,
        r"block_size must be None \(contiguous\) or an integer of at least 1, got 'zigzag'",
    ),
    "unknown_placement_of_a_prompt": (
        lambda devices: prefill(PROMPT, mesh=devices.mesh, block_size="zag"),
        ValueError,
        r"block_size must be None \(contiguous\), 'zigzag' or an integer of at least 1, got 'zag'",
    ),
    "zigzag_prompt_does_not_divide": (
        lambda devices: prefill(PROMPT[:, :9], KEY[:, :9], mesh=devices.mesh, block_size="zigzag"),
        ValueError,
        r"key must hold a multiple of 2 num_shards = 6 slots, got 9",
    ),
    "unknown_rotation": (
        lambda devices: ring(mesh=devices.mesh, rotation="both"),
        ValueError,
        r"rotation must be one of None, 'one_way', 'joint', 'two_way', got 'both'",
    ),
    "keys_do_not_fill_blocks": (
        lambda devices: tree(mesh=devices.mesh, block_size=5),
        ValueError,
        r"key must hold a multiple of num_shards \* block_size = 15 slots, got 12",
    ),
    "unknown_implementation_over_shards": (
        lambda devices: ring(mesh=devices.mesh, implementation="triton"),
        ValueError,
        r"implementation must be one of .*, got 'triton'",
    ),
    "unknown_variant": (
        lambda devices: ring(mesh=devices.mesh, variant="fast"),
        ValueError,
        r"variant must be one of .*'fast'",
    ),
    "fewer_queries_than_keys_in_prefill": (
        lambda devices: prefill(mesh=devices.mesh, block_size=1),
        ValueError,
        r"query must have one position per key, S = 12, got T = 3",
    ),
    "prompt_does_not_divide": (
        lambda devices: prefill(PROMPT[:, :10], KEY[:, :10], mesh=devices.mesh, block_size=None),
        ValueError,
        r"key must hold a multiple of num_shards \* block_size = 3 slots, got 10",
    ),
}

ALGEBRA = {
    "states_of_other_shapes": (
        lambda _: merge_state(state(), state(rows=(3,))),
        ValueError,
        r"b.out must have the shape and dtype of a.out, \(2, 4\) float32; got \(3, 4\) float32",
    ),
    "states_of_other_dtypes": (
        lambda _: merge_state(state(), state(dtype=BFLOAT16)),
        ValueError,
        r"b.out must have the shape and dtype of a.out, .*; got \(2, 4\) bfloat16",
    ),
    "narrow_lse": (
        lambda _: merge_state(state(), state(lse_dtype=BFLOAT16)),
        ValueError,
        r"b.lse must be float32 .*, got bfloat16",
    ),
    "lse_of_other_rows": (
        lambda _: merge_states(state(rows=(2, 3), lse_rows=(3, 2)), axis=0),
        ValueError,
        r"stacked.lse must have the shape of stacked.out \(2, 3, 4\) less its last axis, got \(3, 2\)",
    ),
    "no_such_axis": (lambda _: merge_states(state(), axis=1), ValueError, r"axis must be an axis of lse \(2,\), got 1"),
    "ids_of_other_length": (
        lambda _: merge_segments(state(), ints(0, 0, 1), 2),
        ValueError,
        r"segment_ids must have shape \[n\] .*, got \(3,\)",
    ),
    "float_ids": (
        lambda _: merge_segments(state(), np.zeros(2, np.float32), 2),
        ValueError,
        r"segment_ids must be integers, got float32",
    ),
    "negative_number_of_segments": (
        lambda _: merge_segments(state(), ints(0, 0), -1),
        ValueError,
        r"num_segments must be at least 0, got -1",
    ),
    "tokens_do_not_fill_blocks": (
        lambda _: storage_order(10, 4, 2),
        ValueError,
        r"num_tokens must be a multiple of num_shards \* block_size = 8, got 10",
    ),
    "fractional_block": (lambda _: storage_order(8, 2, 1.5), ValueError, r"block_size must be .*, got 1.5"),
    "no_shards": (lambda _: storage_order(8, 0, 1), ValueError, r"num_shards must be an integer of at least 1, got 0"),
    "too_few_devices": (
        lambda _: make_mesh({"seq": 9}),
        ValueError,
        r"axis_shapes \{'seq': 9\} needs 9 devices, got 8; .* tree_attn.devices.ensure_devices\(9\) before",
    ),
    "axis_of_no_devices": (
        lambda _: make_mesh({"a": 2, "b": 0}),
        ValueError,
        r"axis_shapes\['b'\] must be an integer of at least 1, got 0",
    ),
    "mesh_without_axes": (lambda _: make_mesh({}), ValueError, r"axis_shapes must .*, got \{\}"),
    "mesh_of_lists": (
        lambda _: make_mesh([8], ["seq"]),
        TypeError,
        r"axis_shapes must be a dict of sizes by axis name, such as {'seq': 8}, or a tuple of names, got \[8\]",
    ),
    "mesh_of_a_list": (lambda _: make_mesh(["seq"]), TypeError, r"axis_shapes must be a dict .*, got \['seq'\]"),
    "mesh_of_true": (lambda _: make_mesh({"seq": True}), ValueError, r"axis_shapes\['seq'\] must be .*, got True"),
    "mesh_of_numbers": (lambda _: make_mesh({3: 2}), ValueError, r"axis_shapes must .* by strings, got {3: 2}"),
}

CACHE = {
    "capacity_of_zero": (
        lambda g: create(g, capacity=0),
        ValueError,
        r"capacity must be an integer of at least 1, got 0",
    ),
    "fractional_heads": (
        lambda g: create(g, num_kv_heads=2.0),
        ValueError,
        r"num_kv_heads must be an integer .*, got 2.0",
    ),
    "contiguous_cache": (
        lambda g: create(g, block_size=None),
        ValueError,
        r"block_size must be an integer .*, got None",
    ),
    "integer_cache": (lambda g: create(g, dtype=jnp.int32), ValueError, r"dtype must be one of .*, got 'int32'"),
    "cache_mesh_lacks_the_axis": (
        lambda g: create(g, axis_name="x"),
        ValueError,
        r"axis_name \('x',\) .*not found: \['x'\]",
    ),
    "cache_without_a_mesh": (
        lambda g: create(g, mesh=None),
        ValueError,
        r"mesh must be given where jax.set_mesh has set none, got None",
    ),
    "token_of_other_heads": (
        lambda g: g.cache.append(NEW[:, :, :1], NEW),
        ValueError,
        r"key must have shape \[B=2, T, K=2, H=8\], got \(2, 1, 1, 8\)",
    ),
    "token_of_other_dtype": (
        lambda g: g.cache.append(NEW, NEW.astype(np.float16)),
        ValueError,
        r"value must have the cache's dtype float32, got float16",
    ),
    "more_values_than_keys": (
        lambda g: g.cache.append(NEW, KEY[:, :2]),
        ValueError,
        r"value must hold as many tokens as key, T = 1, got 2",
    ),
    "append_to_a_full_cache": (
        lambda g: g.full.append(NEW, NEW),
        CacheFullError,
        r"cache is full: sequence 1 holds 12 of 12 tokens, no room for 1 more",
    ),
    "room_for_more_than_the_capacity": (
        lambda g: g.cache.check_room(13),
        CacheFullError,
        r"cache is full: sequence 0 holds 0 of 12 tokens, no room for 13 more",
    ),
    "prefix_longer_than_the_capacity": (
        lambda g: g.cache.write_prefix(*2 * (np.zeros((2, 15, 2, 8), np.float32),)),
        CacheFullError,
        r"cache is full: a prefix of 15 tokens does not fit a capacity of 12",
    ),
    "prefix_does_not_fill_blocks": (
        lambda g: g.cache.write_prefix(KEY[:, :4], KEY[:, :4]),
        ValueError,
        r"key must hold a multiple of shards \* block_size = 3 tokens, got 4",
    ),
    "layer_of_a_cache_without_layers": (
        lambda g: g.cache.write(NEW, NEW, layer=0),
        ValueError,
        r"layer must be given .*layer=0",
    ),
    "no_layer_of_a_layered_cache": (
        lambda g: g.layered.write(NEW, NEW),
        ValueError,
        r"layer must be given .*layer=None",
    ),
    "append_to_a_layered_cache": (
        lambda g: g.layered.append(NEW, NEW),
        ValueError,
        r"append must be called on a cache without layers, got one of num_layers=2: call write\(key, value, layer\)",
    ),
    "scales_are_a_list": (
        lambda g: create(g, dtype="int8", key_scale=[1.0, 1.0], value_scale=[1.0, 1.0]),
        ValueError,
        r"key_scale must be float32 of shape \(2,\), got list",
    ),
    "no_such_layer": (lambda g: g.layered.write(NEW, NEW, layer=2), ValueError, r"layer must lie in \[0, 2\), got 2"),
    "lengths_of_no_such_layer": (
        lambda g: g.layered.with_lengths(ints(1, 2), layer=7),
        ValueError,
        r"layer must lie in \[0, 2\), got 7",
    ),
    "scales_of_no_such_layer": (lambda g: g.layered.scales(7), ValueError, r"layer must lie in \[0, 2\), got 7"),
    "new_keys_are_a_list": (
        lambda g: g.cache.append(NEW.tolist(), NEW.tolist()),
        TypeError,
        r"key must be an array, got list",
    ),
    "room_for_less_than_nothing": (
        lambda g: g.cache.check_room(-3),
        ValueError,
        r"num_tokens must be an integer of at least 0, got -3",
    ),
    "prefix_with_lengths_that_begins_later": (
        lambda g: g.cache.write_prefix(KEY[:, :3], KEY[:, :3], start=3, lengths=ints(1, 2)),
        ValueError,
        r"start must be 0 where lengths are given, got 3",
    ),
    "cache_lengths_of_other_batch": (
        lambda g: g.cache.with_lengths(ints(1, 2, 3)),
        ValueError,
        r"lengths must have shape \[B\] = \(2,\), got \(3,\)",
    ),
    "cache_lengths_beyond_the_capacity": (
        lambda g: g.cache.with_lengths(ints(1, 13)),
        ValueError,
        r"lengths must lie in \[0, 12\] .*, got \[1, 13\]",
    ),
    "prefix_at_a_negative_start": (
        lambda g: g.cache.write_prefix(KEY[:, :3], KEY[:, :3], start=-3),
        ValueError,
        r"start must be a multiple of .* = 3 and at least 0, got -3",
    ),
    "prefix_at_a_float": (
        lambda g: g.cache.write_prefix(KEY[:, :3], KEY[:, :3], start=3.0),
        ValueError,
        r"start must be an integer, .*, got 3.0",
    ),
    "prefix_that_ends_beyond_the_capacity": (
        lambda g: g.cache.write_prefix(KEY[:, :6], KEY[:, :6], start=9),
        CacheFullError,
        r"a prefix of 15 tokens does not fit a capacity of 12",
    ),
    "advance_by_less_than_nothing": (
        lambda g: g.cache.advance(-3),
        ValueError,
        r"num_tokens must be an integer of at least 0, got -3",
    ),
    "sequence_before_the_batch": (
        lambda g: g.cache.with_sequence(-1, g.one),
        ValueError,
        r"sequence must lie in \[0, 2\), got -1",
    ),
    "sequence_with_other_scales": (
        lambda g: g.scaled.with_sequence(0, g.scaled_otherwise),
        ValueError,
        r"other must have this cache's value_scale, \[0.5, 0.5\], got \[0.5, 0.25\]",
    ),
    "batch_axis_of_the_sequence": (
        lambda g: create(g, batch_axis_name="seq"),
        ValueError,
        r"batch_axis_name \('seq',\) must name axes of the mesh .* beside axis_name \('seq',\), got \['seq'\]",
    ),
    "attend_with_a_placement": (
        lambda g: g.cache.attend(NEW, block_size=1),
        ValueError,
        r"block_size must not be given to attend: it comes from the cache",
    ),
    "attend_with_bound_lengths": (
        lambda g: g.cache.attend(NEW, attention=partial(tree_decode, key_value_seq_lengths=ints(1, 1))),
        ValueError,
        r"key_value_seq_lengths must not be given to attend",
    ),
    "attend_by_a_function_of_one_device": (
        lambda g: g.cache.attend(NEW, attention=attend),
        ValueError,
        r"attention must take axis_name, which comes from the cache; got <function attend",
    ),
    "attend_without_scales": (
        lambda g: g.scaled.attend(NEW, attention=partial(sparq_decode, num_components=2, num_keys=2)),
        ValueError,
        r"attention must take key_scale, which comes from the cache",
    ),
    "query_of_another_head_dim": (
        lambda g: g.cache.attend(NEW[..., :4]),
        ValueError,
        r"query must have shape \[B=2, T, N, H=8\] for this cache, N a multiple of 2, got \(2, 1, 2, 4\)",
    ),
    "query_of_other_sequences": (
        lambda g: g.cache.attend(NEW[:1]),
        ValueError,
        r"query must have shape \[B=2, .*\(1, ",
    ),
    "prompt_with_heads_before_tokens": (
        lambda g: ring_prefill(g.cache, np.zeros((2, 4, 5, 8), np.float32), *2 * (np.zeros((2, 2, 5, 8), np.float32),)),
        ValueError,
        r"key must have shape \[B=2, T, K=2, H=8\], got \(2, 2, 5, 8\)",
    ),
    "lengths_in_a_list_within_a_program": (
        lambda g: jax.jit(ring_prefill)(g.cache, *3 * (np.zeros((2, 5, 2, 8), np.float32),), lengths=[5, 3]),
        TypeError,
        r"lengths must be an array of integers, got \[.*Trace",
    ),
    "attend_to_no_layer": (lambda g: g.layered.attend(NEW), ValueError, r"layer must be given .*layer=None"),
    "attend_to_fewer_than_no_new_tokens": (
        lambda g: g.cache.attend(NEW, num_new=-1),
        ValueError,
        r"num_new must be an integer of at least 0, got -1",
    ),
    "prompt_longer_than_the_capacity": (
        lambda g: ring_prefill(g.cache, *3 * (np.zeros((2, 13, 2, 8), np.float32),)),
        CacheFullError,
        r"prompts of 13 tokens do not fit a capacity of 12",
    ),
    "prompt_lengths_beyond_the_prompts": (
        lambda g: ring_prefill(g.cache, *3 * (np.zeros((2, 5, 2, 8), np.float32),), lengths=ints(5, 6)),
        ValueError,
        r"lengths must lie in \[0, 5\] .*, got \[5, 6\]",
    ),
    "layout_of_no_tokens": (
        lambda _: PromptLayout(num_tokens=0, num_shards=2, block_size=1),
        ValueError,
        r"num_tokens must be an integer of at least 1, got 0",
    ),
    "stored_prompt_of_another_length": (
        lambda _: PromptLayout(num_tokens=5, num_shards=2, block_size=1).store(KEY),
        ValueError,
        r"x must have num_tokens=5 along axis 1, got shape \(2, 12, 2, 8\)",
    ),
}

PROMPTS = np.zeros((2, 12, 2, 8), np.float32)
WINDOW = {
    "window_of_no_whole_blocks": (
        lambda g: create(g, window=7),
        ValueError,
        r"window must be a multiple of shards \* block_size = 3, got 7",
    ),
    "window_of_nothing": (lambda g: create(g, window=0), ValueError, r"window must be an integer of at least 1, got 0"),
    "window_and_sums": (
        lambda g: create(g, window=6, keeps_value_sum=True),
        NotImplementedError,
        r"keeps_value_sum=True: SparQ has no form for a cache with a window, got window=6",
    ),
    "window_and_components": (
        lambda g: create(g, window=6, keeps_key_by_component=True),
        NotImplementedError,
        r"keeps_key_by_component=True: SparQ has no form",
    ),
    "two_tokens_into_a_window": (
        lambda g: g.rolling.write(KEY[:, :2], KEY[:, :2]),
        ValueError,
        r"key must be one token at a time for a cache that keeps a window, got 2",
    ),
    "two_appended_tokens_into_a_window": (
        lambda g: g.rolling.append(KEY[:, :2], KEY[:, :2]),
        ValueError,
        r"key must be one token at a time",
    ),
    "two_queries_to_a_window": (
        lambda g: g.rolling.attend(QUERY[:, :2]),
        ValueError,
        r"query must be one token at a time for a cache that keeps a window, got 2",
    ),
    "two_uncounted_tokens_of_a_window": (
        lambda g: g.rolling.attend(QUERY[:, :1], num_new=2),
        ValueError,
        r"num_new must be one token at a time .*, got 2",
    ),
    "operands_of_two_uncounted_tokens_of_a_window": (
        lambda g: g.rolling.operands(num_new=2),
        ValueError,
        r"num_new must be one token at a time",
    ),
    "attend_in_another_window_than_is_kept": (
        lambda g: g.rolling.attend(QUERY[:, :1], local_window_size=4),
        ValueError,
        r"local_window_size must be None or \(5, None\) for a cache that keeps a window of 6 tokens, got 4",
    ),
    "attend_in_no_window_where_one_is_kept": (
        lambda g: g.rolling.attend(QUERY[:, :1], local_window_size=(None, 3)),
        ValueError,
        r"local_window_size must be None or \(5, None\) .*, got \(None, 3\)",
    ),
    "attend_in_a_window_of_letters": (
        lambda g: g.rolling.attend(QUERY[:, :1], local_window_size="5"),
        ValueError,
        r"local_window_size must be None, an integer >= 0 or a pair, got '5'",
    ),
    "attend_in_a_bound_window": (
        lambda g: g.rolling.attend(QUERY[:, :1], attention=partial(tree_decode, local_window_size=5)),
        ValueError,
        r"attention must not bind local_window_size for a cache that keeps a window, got 5",
    ),
    "attend_to_a_window_at_positions": (
        lambda g: g.rolling.attend(QUERY[:, :1], query_positions=ints(3)),
        ValueError,
        r"query_positions must be None for a cache that keeps a window",
    ),
    "attend_early_to_a_window": (
        lambda g: g.rolling.attend(QUERY[:, :1], reads_keys_early=True),
        ValueError,
        r"reads_keys_early must be False for a cache that keeps a window",
    ),
    "attend_early_to_a_window_by_a_partial": (
        lambda g: g.rolling.attend(QUERY[:, :1], attention=partial(tree_decode, reads_keys_early=True)),
        ValueError,
        r"reads_keys_early must be False for a cache that keeps a window",
    ),
    "attend_to_a_window_by_sparq": (
        lambda g: g.rolling.attend(QUERY[:, :1], attention=partial(sparq_decode, num_components=2, num_keys=4)),
        NotImplementedError,
        r"SparQ has no form for a cache that keeps a window",
    ),
    "prompt_without_lengths_into_a_window": (
        lambda g: g.rolling.write_prefix(PROMPTS, PROMPTS),
        ValueError,
        r"lengths must be given for a cache that keeps a window, got None",
    ),
    "prompt_of_other_lengths": (
        lambda g: g.cache.write_prefix(PROMPTS[:, :9], PROMPTS[:, :9], lengths=[9, 10]),
        ValueError,
        r"lengths must lie in \[0, 9\] .*, got \[9, 10\]",
    ),
    "piece_of_a_prompt_into_a_window": (
        lambda g: g.rolling.write_prefix(PROMPTS[:, :3], PROMPTS[:, :3], start=3, lengths=[3, 3]),
        ValueError,
        r"start must be 0 for a cache that keeps a window, got 3",
    ),
    "prompt_in_another_window_than_is_kept": (
        lambda g: ring_prefill(g.rolling, PROMPT, PROMPTS, PROMPTS, local_window_size=3),
        ValueError,
        r"local_window_size must be None or \(5, None\)",
    ),
    "sequence_of_another_window": (
        lambda g: g.rolling.with_sequence(0, g.one_rolling),
        ValueError,
        r"other must be like this cache, .*, which keep windows of 3 and 6",
    ),
    "sequence_without_a_window": (
        lambda g: g.rolling.with_sequence(0, g.one),
        ValueError,
        r"other must be like this cache, .*, which keep windows of None and 6",
    ),
    "lengths_whose_window_is_gone": (
        lambda g: g.rolled.with_lengths(ints(4, 11)),
        ValueError,
        r"lengths must be at least 12 for sequence 1, or 0, got 11: the cache keeps a window of 6 tokens",
    ),
}

WRONG_CALLS = ATTEND | SHARDED | ALGEBRA | CACHE | WINDOW


@pytest.fixture(scope="module")
def devices():
    """Makes a mesh and its caches before any wrong call is counted."""
    objects = types.SimpleNamespace(mesh=make_mesh({"seq": 3}))
    objects.cache, objects.layered = create(objects), create(objects, num_layers=2)
    objects.full = objects.cache.with_lengths(ints(5, 12))
    objects.one = create(objects, batch=1)
    objects.rolling, objects.one_rolling = create(objects, window=6), create(objects, batch=1, window=3)
    objects.rolled = objects.rolling.with_lengths(ints(5, 12))
    objects.scaled, objects.scaled_otherwise = (
        create(objects, batch=batch, dtype="int8", key_scale=jnp.asarray([0.5, 0.5]), value_scale=jnp.asarray(scale))
        for batch, scale in ((2, [0.5, 0.5]), (1, [0.5, 0.25]))
    )
    return objects


@pytest.fixture(scope="module")
def compilations():
    """A list that grows by one with every program XLA compiles."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _seconds, **_: events.append(name) if name.endswith("backend_compile_duration") else None
    )
    return events


def test_the_table_has_no_name_twice():
    assert len(WRONG_CALLS) == sum(map(len, (ATTEND, SHARDED, ALGEBRA, CACHE, WINDOW))) >= 40


def test_compilations_are_counted(compilations):
    before = len(compilations)
    jax.jit(lambda x: x + 1)(np.zeros(3, np.float32)).block_until_ready()
    assert len(compilations) == before + 1


@pytest.mark.parametrize("call, exception, pattern", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_is_one_clear_error_before_anything_is_compiled(call, exception, pattern, devices, compilations):
    before = len(compilations)
    with pytest.raises(exception, match=pattern) as raised:
        call(devices)
    assert type(raised.value) is exception
    assert len(compilations) == before
