"""Sequences that share prefixes, against the oracle over the keys that each would have by itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assertions import assert_attention
from attention_cases import rounded
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tree_attn import SoftmaxState, make_mesh, storage_order
from tree_attn.measure import hlo
from tree_attn.shared_prefix import PrefixLevel, bifurcated_decode, hydragen_decode

GARBAGE = 300.0  # where a node or a suffix has no key
H = 16


class Tree:
    """A tree over a batch, its suffixes, and the keys that each sequence has with all of its path written out."""

    def __init__(
        self, levels, suffix_lengths, *, queries=1, kv_heads=2, group=2, dtype=np.float32, logits=1.0, slots=None
    ):
        """`levels`: for each level its nodes as (length, sequences); slots beyond the longest node hold garbage."""
        self.rng, self.dtype, self.batch = np.random.default_rng(0), dtype, len(suffix_lengths)
        self.query = rounded(logits * self.rng.normal(size=(self.batch, queries, kv_heads * group, H)), dtype)
        paths = [[] for _ in range(self.batch)]
        self.levels = []
        for nodes in levels:
            keys = self._keys([length for length, _ in nodes], kv_heads)
            for node, (length, sequences) in enumerate(nodes):
                for sequence in sequences:
                    paths[sequence].append([np.asarray(x[node, :length]) for x in keys])
            lengths = jnp.asarray([length for length, _ in nodes], jnp.int32)
            served = tuple(tuple(sequences) for _, sequences in nodes)
            self.levels.append(
                PrefixLevel(key=keys[0], value=keys[1], lengths=lengths, sequences=served, block_size=None)
            )
        self.key, self.value = self._keys(suffix_lengths, kv_heads, slots)
        self.lengths = np.array(suffix_lengths, np.int32)
        for i, path in enumerate(paths):
            path.append([np.asarray(x[i, : suffix_lengths[i]]) for x in (self.key, self.value)])
        self.whole_lengths = np.array([sum(len(keys) for keys, _ in path) for path in paths], np.int32)
        self.whole = [self._padded([np.concatenate([part[i] for part in path]) for path in paths]) for i in range(2)]

    def _keys(self, lengths, kv_heads, slots=None):
        slots = max(lengths) + 3 if slots is None else slots
        shape = (len(lengths), slots, kv_heads, H)
        is_valid = np.arange(slots)[None, :, None, None] < np.array(lengths)[:, None, None, None]
        return [rounded(np.where(is_valid, self.rng.normal(size=shape), GARBAGE), self.dtype) for _ in range(2)]

    def _padded(self, arrays):
        longest = max(1, *map(len, arrays))
        return np.stack([np.pad(x, [(0, longest - len(x)), (0, 0), (0, 0)]) for x in arrays])

    def decoded(self, **options):
        decode = functools.partial(
            hydragen_decode, key_value_seq_lengths=self.lengths, return_lse=True, implementation="xla", **options
        )
        return SoftmaxState(*jax.jit(decode)(self.query, self.levels, self.key, self.value))

    def check(self, options=None, **sharding):
        """Asserts that decoding is the attention of every sequence over its own keys."""
        options = options or {}
        state = self.decoded(**options, **sharding)
        assert_attention(state, self.query, *self.whole, key_value_seq_lengths=self.whole_lengths, **options)


def three_levels(**options):
    """Six sequences: a root for all, nodes for some, one without a key; one sequence has neither, one no suffix."""
    return Tree([[(9, range(6))], [(5, (0, 2)), (0, (1,)), (12, (3, 4))], [(4, (4, 0))]], [3, 1, 0, 7, 2, 5], **options)


@pytest.mark.parametrize(
    "tree, options",
    [
        ({}, {}),
        ({"queries": 3}, {}),
        ({"kv_heads": 1, "group": 4}, {"logits_soft_cap": 3.0}),
        ({"kv_heads": 3, "group": 1}, {"sinks": np.array([1.0, -2.0, 0.0], np.float32)}),
        ({"logits": 1e4}, {}),
        ({"dtype": jnp.bfloat16}, {"scale": 0.5}),
    ],
    ids=str,
)
def test_a_tree_is_what_its_sequences_are_by_themselves(tree, options):
    three_levels(**tree).check(options)


def test_several_tokens_see_the_suffix_up_to_their_own():
    tree = Tree([[(9, range(3))], [(6, (2,))]], [4, 9, 4], queries=4)
    tree.check({"is_causal": True})


def test_a_node_that_serves_no_sequence_gives_its_keys_to_none():
    """The node's place among the queries is that of the first sequence, if all were in order."""
    Tree([[(5, ()), (4, (1,)), (3, (2,))]], [2, 0, 1]).check()


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_random_trees(data):
    """Depth to 4; nodes of length 0, sequences in no node of a level, and without a suffix."""
    batch = data.draw(st.integers(1, 5))
    levels = []
    for _ in range(data.draw(st.integers(0, 4))):
        node_of = data.draw(st.lists(st.integers(-1, 2), min_size=batch, max_size=batch))
        served = [[i for i in range(batch) if node_of[i] == node] for node in range(3)]
        levels.append([(data.draw(st.integers(0, 7)), rows) for rows in served])
    suffixes = data.draw(st.lists(st.integers(0, 6), min_size=batch, max_size=batch))
    Tree(levels, suffixes, queries=data.draw(st.sampled_from([1, 2]))).check()


@pytest.mark.parametrize("shard_suffix", ["sequence", "batch"])
@pytest.mark.parametrize("axis_sizes", [{"seq": 2}, {"seq": 3}, {"device": 3, "node": 2}], ids=str)
def test_sharded_it_is_the_same(axis_sizes, shard_suffix):
    options = {"sinks": np.array([1.0, -2.0, 0.0, 3.0], np.float32)}
    sharding = dict(axis_name=tuple(axis_sizes), mesh=make_mesh(axis_sizes), block_size=None, shard_suffix=shard_suffix)
    three_levels(queries=2).check(options, **sharding)


def test_a_level_may_have_scales_of_its_own():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.integers(-127, 128, size=shape), jnp.int8)
    scales = [{"key_scale": np.array(k, np.float32), "value_scale": np.array(v, np.float32)} for k, v in
              (([0.02, 0.01], [0.1, 0.3]), ([0.01, 0.03], [0.2, 0.4]))]  # fmt: skip
    prefix, suffix = [draw(1, 9, 2, 8), draw(1, 9, 2, 8)], [draw(2, 6, 2, 8), draw(2, 6, 2, 8)]
    query = jnp.asarray(rng.normal(size=(2, 1, 4, 8)), jnp.float32)
    level = lambda **more: PrefixLevel(key=prefix[0], value=prefix[1], sequences=((0, 1),), **more)
    mesh = make_mesh({"seq": 3})
    call = lambda level, **scales: hydragen_decode(
        query, [level], *suffix, axis_name="seq", mesh=mesh, reduction="gather", return_lse=True, **scales
    )
    got = jax.jit(call)(level(**scales[0]), **scales[1])
    of_level, of_call = scales
    widened = [
        np.concatenate([np.repeat(x, 2, axis=0) * of_level[name][:, None], y * of_call[name][:, None]], axis=1)
        for x, y, name in zip(map(np.asarray, prefix), map(np.asarray, suffix), of_level, strict=True)
    ]
    assert_attention(got, query, *widened)
    with pytest.raises(ValueError, match=r"levels\[0\]: key_scale must be float32 of shape \[K\] = \(2,\)"):
        call(level(key_scale=np.ones(4, np.float32)))


def test_on_eight_devices_more_than_a_node_has_keys():
    three_levels().check(axis_name="seq", mesh=make_mesh({"seq": 8}), block_size=None)


def test_block_cyclic_suffixes():
    tree = three_levels(slots=16)
    order = np.arange(16).reshape(-1, 2, 2).transpose(1, 0, 2).ravel()  # blocks of 2 to each of 2 devices in turn
    tree.key, tree.value = tree.key[:, order], tree.value[:, order]
    tree.check(axis_name="seq", mesh=make_mesh({"seq": 2}), block_size=2)


def test_block_cyclic_nodes():
    """Each level has its own placement; lengths count keys in their order, whichever device holds them."""
    tree = three_levels()
    mesh = make_mesh({"seq": 3})
    for i, block_size in enumerate((1, 2)):
        level = tree.levels[i]
        padding = [(0, 0), (0, -level.key.shape[1] % (3 * block_size)), (0, 0), (0, 0)]
        order = storage_order(level.key.shape[1] + padding[1][1], 3, block_size)
        stored = {name: jnp.pad(getattr(level, name), padding)[:, order] for name in ("key", "value")}
        tree.levels[i] = dataclasses.replace(level, **stored, block_size=block_size)
    tree.check(axis_name="seq", mesh=mesh, block_size=None)


def test_all_levels_together_take_one_collective():
    tree, mesh = three_levels(), make_mesh({"seq": 2})
    decode = functools.partial(hydragen_decode, axis_name="seq", mesh=mesh, block_size=None, reduction="gather")
    text = jax.jit(decode).lower(tree.query, tree.levels, tree.key, tree.value).compile().as_text()
    assert hlo.counts(hlo.collectives(text, num_devices=2)) == {"all-gather": 1}


@pytest.mark.parametrize("shard_suffix", ["sequence", "batch"])
def test_within_a_callers_shard_map(shard_suffix):
    tree, mesh = three_levels(slots=8), make_mesh({"seq": 2})
    levels = [
        PrefixLevel(key=jnp.pad(x.key, [(0, 0), (0, x.key.shape[1] % 2), (0, 0), (0, 0)]),
                    value=jnp.pad(x.value, [(0, 0), (0, x.key.shape[1] % 2), (0, 0), (0, 0)]),
                    lengths=x.lengths, sequences=x.sequences, block_size=None)
        for x in tree.levels
    ]  # fmt: skip
    along = P(None, "seq")
    of_levels = [
        PrefixLevel(key=along, value=along, lengths=P(), sequences=x.sequences, block_size=None) for x in levels
    ]
    of_key = P("seq") if shard_suffix == "batch" else along
    decode = functools.partial(
        hydragen_decode,
        key_value_seq_lengths=tree.lengths,
        axis_name="seq",
        block_size=None,
        shard_suffix=shard_suffix,
        return_lse=True,
    )
    mapped = jax.shard_map(decode, mesh=mesh, in_specs=(P(), of_levels, of_key, of_key), out_specs=P(), check_vma=False)
    state = SoftmaxState(*jax.jit(mapped)(tree.query, levels, tree.key, tree.value))
    assert_attention(state, tree.query, *tree.whole, key_value_seq_lengths=tree.whole_lengths)


def bifurcated(query, prefix_key, prefix_value, key, value, scale=H**-0.5):
    """The paper's four products (equations 3 and 4, appendix E.3), in float64; b samples, g groups of p heads."""
    query, *rest = (np.asarray(x, np.float64) for x in (query, prefix_key, prefix_value, key, value))
    prefix_key, prefix_value, key, value = rest
    b, n, heads, k = query.shape
    g = key.shape[2]
    q = query.reshape(b, n, g, heads // g, k).transpose(0, 2, 3, 1, 4)  # b g p n k
    of_context = np.einsum("bgpnk,mgk->bgpnm", q, prefix_key)
    of_own = np.einsum("bgpnk,bmgk->bgpnm", q, key)
    logits = scale * np.concatenate([of_context, of_own], axis=-1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    split = prefix_key.shape[0]
    out = np.einsum("bgpnm,mgv->bgpnv", weights[..., :split], prefix_value)
    out += np.einsum("bgpnm,bmgv->bgpnv", weights[..., split:], value)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, n, heads, -1)


@pytest.mark.parametrize("kv_heads, group, queries", [(4, 1, 1), (2, 3, 1), (1, 8, 5)])
def test_bifurcated_attention_is_its_four_products(kv_heads, group, queries):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    query, context = draw(5, queries, kv_heads * group, H), [draw(11, kv_heads, H) for _ in range(2)]
    suffixes = [draw(5, 4, kv_heads, H) for _ in range(2)]
    out = bifurcated_decode(query, *context, *suffixes)
    np.testing.assert_allclose(out, bifurcated(query, *context, *suffixes), atol=2e-6)
    shorter = bifurcated_decode(query, *context, *suffixes, prefix_length=7)
    np.testing.assert_allclose(shorter, bifurcated(query, *(x[:7] for x in context), *suffixes), atol=2e-6)


def test_the_context_is_read_once_for_all_samples():
    """The program holds no copy of the context for each sample, nor for every other."""
    samples, keys = 64, 512
    shapes = [(samples, 1, 4, H), (keys, 4, H), (keys, 4, H), (samples, 8, 4, H), (samples, 8, 4, H)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    memory = jax.jit(bifurcated_decode).lower(*arrays).compile().memory_analysis()
    assert memory.temp_size_in_bytes < samples / 2 * keys * 4 * H * 4


def level(sequences=((0, 1), (2,)), lengths=None, keys=4, heads=2, nodes=2, block_size=None):
    key = jnp.zeros((nodes, keys, heads, H))
    return PrefixLevel(key=key, value=key, lengths=lengths, sequences=sequences, block_size=block_size)


@pytest.mark.parametrize(
    "changed, options, said",
    [
        (
            {"sequences": ((0, 1), (1,))},
            {},
            r"levels\[0\].sequences must name sequences of the batch of 3, none twice",
        ),
        ({"sequences": ((0, 1), (3,))}, {}, r"levels\[0\].sequences must name sequences of the batch of 3"),
        ({"sequences": ((0, 1, 2),)}, {}, r"levels\[0\]: key must have the batch size of query, 1, got 2"),
        ({"heads": 3}, {}, r"levels\[0\]: query heads must be a multiple of key heads, got N=4 and K=3"),
        ({"lengths": np.array([5, 0])}, {}, r"levels\[0\]: lengths must lie in \[0, 4\]"),
        ({"lengths": np.array([1, 2, 3])}, {}, r"levels\[0\]: lengths must have shape"),
        (
            {"block_size": 0},
            {},
            r"levels\[0\]: block_size must be None \(contiguous\) or an integer of at least 1, got 0",
        ),
        (
            {"block_size": 3},
            {"devices": 2},
            r"levels\[0\]: key must hold a multiple of num_shards \* block_size = 6 slots, got 4",
        ),
        ({}, {"shard_suffix": "heads"}, "shard_suffix must be one of 'sequence', 'batch', got 'heads'"),
        ({}, {"shard_suffix": "batch"}, "shard_suffix='batch' needs axis_name, got None"),
        ({}, {"block_size": 16}, "block_size must be None where axis_name is, got 16"),
        ({}, {"reduction": "gather"}, "reduction must be None where axis_name is, got 'gather'"),
        (
            {},
            {"shard_suffix": "batch", "devices": 2},
            "shard_suffix='batch' needs as many sequences as a multiple of 2 devices, got 3",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(changed, options, said):
    options = dict(options)
    devices = options.pop("devices", None)
    sharding = {} if devices is None else dict(axis_name="seq", mesh=make_mesh({"seq": devices}))
    suffix = jnp.zeros((3, 4, 2, H))
    with pytest.raises(ValueError, match=said):
        hydragen_decode(jnp.zeros((3, 1, 4, H)), [level(**changed)], suffix, suffix, **options, **sharding)


def test_inside_a_shard_map_too_the_devices_divide_the_batch():
    """Two suffixes on each of two devices, for five queries."""
    query, suffixes, along = jnp.zeros((5, 1, 4, H)), jnp.zeros((4, 4, 2, H)), P("seq")
    decode = functools.partial(hydragen_decode, axis_name="seq", shard_suffix="batch")
    mapped = jax.shard_map(
        lambda query, key: decode(query, [], key, key), mesh=make_mesh({"seq": 2}), in_specs=(P(), along),
        out_specs=P(), check_vma=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"shard_suffix='batch' needs .* a multiple of 2 devices, got 5"):
        jax.eval_shape(mapped, query, suffixes)


def test_the_devices_of_the_batchs_axis_divide_the_batch_too():
    """Four devices of the sequence divide four queries; the eight that share the suffixes do not."""
    query, suffixes, mesh = jnp.zeros((4, 1, 4, H)), jnp.zeros((4, 4, 2, H)), make_mesh({"seq": 4, "data": 2})
    with pytest.raises(ValueError, match=r"shard_suffix='batch' needs .* a multiple of 8 devices, got 4"):
        hydragen_decode(
            query, [], suffixes, suffixes, axis_name="seq", mesh=mesh, batch_axis_name="data", shard_suffix="batch"
        )


def test_a_context_needs_no_batch_axis():
    with pytest.raises(ValueError, match=r"prefix_key must be \[S, K, H\], got shape \(1, 4, 2, 16\)"):
        x = jnp.zeros((1, 4, 2, H))
        bifurcated_decode(jnp.zeros((1, 1, 4, H)), x, x, x, x)


LEVEL = PrefixLevel(
    key=np.zeros((1, 4, 2, 16), np.float32), value=np.zeros((1, 4, 2, 16), np.float32), sequences=((0,),)
)


@pytest.mark.parametrize(
    "levels, message",
    [
        (LEVEL, "levels must be a list or tuple of PrefixLevel, got PrefixLevel"),
        (None, "levels must be a list or tuple of PrefixLevel, got NoneType"),
        ([{"key": LEVEL.key}], r"levels\[0\] must be a PrefixLevel, got dict"),
        (
            [dataclasses.replace(LEVEL, sequences=((0.5, 1),))],
            r"levels\[0\].sequences must name sequences of the batch",
        ),
        ([dataclasses.replace(LEVEL, sequences=((True,),))], r"levels\[0\].sequences must name .*got \(\(True,\),\)"),
        ([LEVEL, dataclasses.replace(LEVEL, sequences=(0,))], r"levels\[1\].sequences must be a tuple with a tuple"),
        ([dataclasses.replace(LEVEL, sequences=[[0]])], r"levels\[0\].sequences must be a tuple with a tuple"),
        ([dataclasses.replace(LEVEL, lengths=[2.5])], r"levels\[0\]: lengths must be integers, got dtype float64"),
    ],
)
def test_levels_that_are_none_are_named(levels, message):
    query, suffix = np.zeros((2, 1, 4, 16), np.float32), np.zeros((2, 3, 2, 16), np.float32)
    with pytest.raises((ValueError, TypeError), match=message):
        hydragen_decode(query, levels, suffix, suffix)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"prefix_length": 3.7}, "prefix_length must be integers, got dtype float64"),
        ({"prefix_length": True}, "prefix_length must be integers, got dtype bool"),
        ({"prefix_length": "3"}, "prefix_length must be an array of integers, got '3'"),
        ({"prefix_length": 5}, r"prefix_length must lie in \[0, 4\] .*got 5"),
        ({"prefix_length": np.array([3])}, r"prefix_length must have shape \(\), got \(1,\)"),
        (
            {"prefix_value": np.zeros((4, 2, 16), np.float16)},
            "prefix_key, prefix_value: .* got query float32",
        ),
        ({"prefix_key": [1.0]}, r"prefix_key must be \[S, K, H\], got"),
    ],
)
def test_a_context_that_does_not_fit_is_named(arguments, message):
    query, suffix = np.zeros((2, 1, 4, 16), np.float32), np.zeros((2, 3, 2, 16), np.float32)
    context = {"prefix_key": LEVEL.key[0], "prefix_value": LEVEL.value[0]}
    with pytest.raises((ValueError, TypeError), match=message):
        bifurcated_decode(query, key=suffix, value=suffix, **context | arguments)


@pytest.mark.parametrize("sequences", [((0, 1), (2,)), ((0, 1, 2), ())], ids=["filled_up", "unserved"])
def test_nan_beyond_the_lengths_is_in_no_result_and_no_gradient(sequences):
    """In nodes and suffixes; a node that serves fewer sequences than another is filled up, and the rest dropped."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    query, key, node_key = draw(3, 1, 4, 16), draw(3, 4, 2, 16), draw(2, 5, 2, 16)
    lengths, node_lengths = np.array([2, 4, 0]), np.array([3, 0])
    spoiled = lambda x, lengths: np.where(
        np.arange(x.shape[1])[:, None, None] < lengths[:, None, None, None], x, np.nan
    )

    def loss(query, key, node_key):
        level = PrefixLevel(key=node_key, value=2 * node_key, sequences=sequences, lengths=node_lengths)
        options = {"key_value_seq_lengths": lengths, "return_lse": True}
        out, lse = hydragen_decode(query, [level], key, 2 * key, **options)
        return jnp.sum(out**2) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0)), (out, lse)

    call = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    clean = call(query, key, node_key)
    got = call(query, spoiled(key, lengths), spoiled(node_key, node_lengths))
    for x, expected in zip(jax.tree.leaves(got), jax.tree.leaves(clean), strict=True):
        np.testing.assert_array_equal(x, expected)


def test_nan_in_a_nodes_keys_reaches_its_own_sequences_only():
    """The second node serves fewer sequences than the first, and is filled up."""
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    query, key, node_key = draw(0, 3, 1, 4, 16), draw(1, 3, 4, 2, 16), draw(2, 2, 5, 2, 16)

    def loss(query, node_key):
        level = PrefixLevel(key=node_key, value=2 * node_key, sequences=((0, 1), (2,)))
        out = hydragen_decode(query, [level], key, 2 * key)
        return jnp.sum(out**2), out

    call = jax.jit(jax.grad(loss, has_aux=True))
    for got, clean in zip(call(query, node_key.at[1, 3].set(jnp.nan)), call(query, node_key)):
        np.testing.assert_array_equal(got[:2], clean[:2])
        assert np.isnan(got[2]).any()
