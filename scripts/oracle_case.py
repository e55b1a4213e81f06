"""One attention call with random inputs, its exact result, and a row with the error of a backend (`gpu_check.py`)."""

import functools
import json
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Lengths end in the first shard, nowhere in particular, and at 0; sizes divide nothing but the placement needs.
OPTIONS = {
    "plain": {},
    "lengths": dict(key_value_seq_lengths=np.array([1861, 100, 0], np.int32)),
    "causal": dict(is_causal=True, key_value_seq_lengths=np.array([1861, 100, 1], np.int32)),
    "window": dict(local_window_size=(300, 0), key_value_seq_lengths=np.array([1861, 1100, 30], np.int32)),
    "soft_cap": dict(logits_soft_cap=5.0),
    "sinks": dict(sinks="per head", key_value_seq_lengths=np.array([1861, 100, 0], np.int32)),
    "huge_logits": dict(scale=1e3),
}
SHAPES = (
    dict(num_queries=1, num_heads=16, num_kv_heads=16, head_dim=128, num_keys=1920),
    dict(num_queries=1, num_heads=8, num_kv_heads=2, head_dim=64, num_keys=1920),
    dict(num_queries=5, num_heads=8, num_kv_heads=1, head_dim=128, num_keys=1920),
)
SHORT_SHAPES = (  # sequences of a tile, and of two that no run cuts
    dict(num_queries=1, num_heads=8, num_kv_heads=8, head_dim=128, num_keys=40),
    dict(num_queries=3, num_heads=8, num_kv_heads=2, head_dim=64, num_keys=64),
    dict(num_queries=1, num_heads=8, num_kv_heads=8, head_dim=128, num_keys=104),
)
# Special cases of the Hopper kernels: padded head dims, several blocks of query columns, and many query rows.
LEAN_SHAPES = (
    dict(num_queries=1, num_heads=6, num_kv_heads=2, head_dim=80, num_keys=1920),
    dict(num_queries=2, num_heads=4, num_kv_heads=4, head_dim=96, num_keys=1920),
    dict(num_queries=1, num_heads=4, num_kv_heads=2, head_dim=256, num_keys=1920),
    dict(num_queries=8, num_heads=16, num_kv_heads=1, head_dim=128, num_keys=1920),
    dict(num_queries=40, num_heads=8, num_kv_heads=2, head_dim=64, num_keys=1920),
    dict(num_queries=200, num_heads=6, num_kv_heads=3, head_dim=128, num_keys=1920),
    dict(num_queries=9, num_heads=2, num_kv_heads=2, head_dim=256, num_keys=1920),
    # 42 and 48 query columns, and fewer than a copy moves; 12 and 15, which 8 does not divide.
    dict(num_queries=7, num_heads=12, num_kv_heads=2, head_dim=128, num_keys=1920),
    dict(num_queries=6, num_heads=8, num_kv_heads=1, head_dim=64, num_keys=1920),
    dict(num_queries=3, num_heads=4, num_kv_heads=2, head_dim=256, num_keys=1920),
    dict(num_queries=4, num_heads=6, num_kv_heads=2, head_dim=128, num_keys=1920),
    dict(num_queries=3, num_heads=10, num_kv_heads=2, head_dim=256, num_keys=1920),
    dict(num_queries=3, num_heads=10, num_kv_heads=2, head_dim=80, num_keys=1920),
    dict(num_queries=5, num_heads=6, num_kv_heads=2, head_dim=96, num_keys=1920),
    # Few queries of so many columns that they are rows.
    dict(num_queries=6, num_heads=32, num_kv_heads=2, head_dim=128, num_keys=1920),
    dict(num_queries=8, num_heads=28, num_kv_heads=4, head_dim=128, num_keys=8192),
    dict(num_queries=5, num_heads=22, num_kv_heads=2, head_dim=64, num_keys=1920),
    dict(num_queries=8, num_heads=8, num_kv_heads=1, head_dim=64, num_keys=128),
    # Many partial states of an output tile.
    dict(num_queries=4, num_heads=16, num_kv_heads=2, head_dim=128, num_keys=8000),
    dict(num_queries=1, num_heads=16, num_kv_heads=1, head_dim=64, num_keys=8192),
    dict(num_queries=3, num_heads=4, num_kv_heads=2, head_dim=256, num_keys=8192),
)
# Sequences that share their first keys: as query columns, as query rows of one and of several heads, and in two blocks;
# numbers that eight does not divide, and groups whose heads do not share a tile, with sequences in two blocks of rows.
PREFIX_SHAPES = tuple(
    dict(zip(("batch", "num_queries", "num_heads", "num_kv_heads", "head_dim", "shared", "num_keys"), sizes))
    for sizes in (
        (16, 1, 2, 2, 128, 1000, 1072),
        (13, 1, 3, 3, 80, 1000, 1072),
        (12, 2, 2, 2, 64, 1000, 1104),
        (40, 1, 2, 2, 128, 1000, 1072),
        (16, 1, 8, 2, 128, 1000, 1072),
        (70, 2, 16, 2, 64, 400, 504),
        (20, 1, 6, 2, 128, 1000, 1072),
        (33, 1, 4, 1, 256, 400, 472),
        (64, 1, 4, 4, 128, 96, 168),
        (58, 1, 2, 2, 256, 591, 656),
        (43, 1, 16, 2, 128, 1000, 1072),
        (45, 1, 8, 2, 64, 1000, 1072),
        (133, 1, 2, 1, 128, 600, 664),
        (26, 1, 14, 2, 128, 2000, 2072),
        (30, 3, 10, 2, 64, 1000, 1104),
        (40, 5, 16, 2, 64, 176, 200),
        (7, 1, 8, 1, 64, 3000, 3200),
    )
)
# Special cases of an exchange at the end of the lean kernel: many partial states of an output tile, padded head dims,
# many query columns, keys and values that are widened.
EXCHANGED_SHAPES = (
    dict(num_queries=1, num_heads=8, num_kv_heads=1, head_dim=128, num_keys=36_864),
    dict(num_queries=2, num_heads=8, num_kv_heads=1, head_dim=128, num_keys=3840),
    dict(num_queries=1, num_heads=6, num_kv_heads=2, head_dim=80, num_keys=3840),
    dict(num_queries=3, num_heads=8, num_kv_heads=2, head_dim=128, num_keys=3840),
    dict(num_queries=1, num_heads=4, num_kv_heads=2, head_dim=256, num_keys=3840),
    dict(num_queries=1, num_heads=8, num_kv_heads=2, head_dim=128, num_keys=3840, stored_dtype="float8_e4m3fn"),
    # So many elements that a thread exchanges several at once.
    dict(num_queries=1, num_heads=160, num_kv_heads=40, head_dim=128, num_keys=3840),
)


def refused(error: Exception) -> dict:
    """Returns a row's fields of a case that a backend does not support; no path of this machine is in them."""
    return {"passed": None, "reason": str(error).replace(str(ROOT), ".")}


class Thinning:
    """Selects every n-th check, from the first on; the others yield no row (`gpu_check.py --every`)."""

    def __init__(self):
        self.every, self._number = 1, -1

    def leaves_out(self) -> bool:
        """Counts a check, and returns whether it is left out."""
        self._number += 1
        return self._number % self.every > 0


THINNING = Thinning()


class OracleCase:
    """One set of inputs, its exact result, and the error that the policy allows (`tree_attn.tolerances`).

    Attributes:
      query, key, value: on the host; key and value rounded to `stored_dtype`.
      options: of the attention, with values for "sinks".
      shape: the fields of a row that name the inputs.
    """

    def __init__(
        self, *, dtype, options, num_queries, num_heads, num_kv_heads, head_dim, num_keys, stored_dtype=None,
        num_shards=1, block_size=None, batch=3, shared=0,
    ):  # fmt: skip
        """Draws the inputs; the first `shared` keys and values are those of all sequences."""
        self.batch = batch
        self.query, self.key, self.value = inputs(
            dtype, (batch, num_queries, num_heads, head_dim), (batch, num_keys, num_kv_heads, head_dim)
        )
        for x in (self.key, self.value):
            x[:, :shared] = x[:1, :shared]
        self.stored_dtype = stored_dtype or dtype
        self.key, self.value = (x.astype(self.stored_dtype).astype(x.dtype) for x in (self.key, self.value))
        if "key_value_seq_lengths" in options:
            options = options | {"key_value_seq_lengths": np.minimum(options["key_value_seq_lengths"], num_keys)}
        sinks = {"sinks": np.linspace(-2, 2, num_heads, dtype=np.float32)} if "sinks" in options else {}
        self.options, self.dtype = options | sinks, dtype
        self.num_shards, self.block_size = num_shards, block_size
        self.shape = dict(
            batch=self.batch,
            num_queries=num_queries,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_keys=num_keys,
            dtype=dtype,
            stored_dtype=self.stored_dtype,
        )

    def check(self, call, *, prefill=False, **labels) -> dict | None:
        """Runs `call` and returns the row: errors and tolerances, or why it is not supported; None if left out."""
        if THINNING.leaves_out():
            return None
        import jax

        from tree_attn import storage_order
        from tree_attn.tolerances import lse_tolerance, max_abs_error, out_tolerance

        row = labels | self.shape | dict(block_size=self.block_size)
        order = storage_order(self.key.shape[1], self.num_shards, self.block_size)
        query = self._in_padding(self.query, np.nan)[:, order] if prefill else self.query
        is_local = labels["what"] == "local"
        extra = {} if is_local else dict(block_size=self.block_size, return_lse=True)
        try:
            run = jax.jit(functools.partial(call, **extra, **self.options))
            key, value = (x[:, order].astype(self.stored_dtype) for x in self.spoiled())
            (out, lse), again = (run(query, key, value) for _ in range(2))
        except NotImplementedError as error:
            return row | refused(error)
        expected_out, expected_lse, plain = self.expected(prefill)
        tolerance = out_tolerance(self.dtype, expected_out, plain)
        out, lse = local_part(out), local_part(lse)
        if prefill:
            positions = order[out[1]]
            expected_out, expected_lse = expected_out[:, positions], expected_lse[:, positions]
        row |= dict(
            max_abs_error=max_abs_error(out[0], expected_out),
            tolerance=tolerance,
            lse_max_abs_error=max_abs_error(lse[0], expected_lse),
            lse_tolerance=lse_tolerance(expected_lse),
            same_bits_again=all(np.array_equal(local_part(x)[0], y[0]) for x, y in zip(again, (out, lse))),
            same_bits_everywhere=all(is_same_everywhere(x) for x in again),
        )
        passed = row["max_abs_error"] <= row["tolerance"] and row["lse_max_abs_error"] <= row["lse_tolerance"]
        passed = passed and row["same_bits_everywhere"]
        passed = passed and (row["same_bits_again"] or labels["implementation"] == "cudnn")
        return row | dict(passed=bool(passed))

    def spoiled(self) -> tuple:
        """Returns keys and values with NaN beyond the lengths, as a program may be given them."""
        return self._in_padding(self.key, np.nan), self._in_padding(self.value, np.nan)

    def _in_padding(self, x, fill: float):
        """Returns `x` with `fill` beyond the lengths."""
        lengths = self.options.get("key_value_seq_lengths")
        if lengths is None:
            return x
        is_padding = (np.arange(x.shape[1]) >= lengths[:, None])[:, :, None, None]
        return np.where(is_padding, x.dtype.type(fill), x)

    def expected(self, prefill):
        """Returns the oracle's out and lse, and the out of a plain implementation in the same dtype."""
        key = (
            self.dtype,
            self.stored_dtype,
            prefill,
            json.dumps({k: np.asarray(v).tolist() for k, v in self.options.items()}),
            self.query.shape,
            self.key.shape,
        )
        if key not in _EXPECTED:
            from tree_attn import reference

            options, query = dict(self.options), self.query
            if prefill:  # a prompt's padding is read as 0
                options["query_positions"] = np.arange(query.shape[1])
                query = self._in_padding(query, 0)
            state = reference.attention(query, self.key, self.value, **options)
            _EXPECTED[key] = (*state, self._plain(query, options))
        return _EXPECTED[key]

    def _plain(self, query, options):
        import jax.numpy as jnp

        from tree_attn.arguments import AttentionOptions
        from tree_attn.masking import visibility
        from tree_attn.placement import Shard
        from tree_attn.tolerances import plain_attention

        if "sinks" in options or "logits_soft_cap" in options:
            options = {k: v for k, v in options.items() if k == "key_value_seq_lengths"}
        scale = options.get("scale")
        visible = visibility(
            AttentionOptions(**options),
            batch=self.batch,
            num_queries=query.shape[1],
            num_slots=self.key.shape[1],
            shard=Shard(),
        ).mask()[:, None]
        return np.asarray(plain_attention(*map(jnp.asarray, (query, self.key, self.value)), visible, scale))


_EXPECTED: dict = {}


@functools.cache
def inputs(dtype: str, query_shape: tuple, key_shape: tuple) -> tuple:
    """Returns random query, key and value on the host, rounded to `dtype`."""
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32).astype(jnp.dtype(dtype))
    return draw(query_shape), draw(key_shape), draw(key_shape)


def local_part(x):
    """Returns this process's part of `x` along axis 1, and its indices (all of them, where `x` is replicated)."""
    shards = {}
    for shard in x.addressable_shards:
        shards[shard.index[1].start or 0] = np.asarray(shard.data)
    data = np.concatenate([shards[start] for start in sorted(shards)], axis=1)
    indices = np.concatenate([start + np.arange(shards[start].shape[1]) for start in sorted(shards)])
    return data, indices


def is_same_everywhere(x) -> bool:
    """Returns whether this process's devices have the same bits wherever they have the same part of `x`."""
    shards: dict = {}
    for shard in x.addressable_shards:
        shards.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    return all(np.array_equal(copies[0], copy) for copies in shards.values() for copy in copies)
