"""Calls for SparQ's kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from tree_attn import sparq_decode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call; `lengths` has one per sequence."""

    lengths: tuple[int, ...]
    slots: int = 512
    heads: int = 2
    group: int = 1
    head_dim: int = 64
    queries: int = 1
    dtype: str = "bfloat16"
    num_components: int = 8
    num_keys: int = 20
    local_window: int = 5
    is_causal: bool = False
    reallocate: bool = True
    equal_keys: bool = False
    score_temperature: str = "coverage"

    def __str__(self):
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return " ".join(f"{name}={x}" for name, x in values.items() if x != getattr(Call, name, "")).replace(", ", "_")

    @property
    def num_kernels(self) -> int:
        """One more where lists of chunks compete, and one more where a group's logits pass through memory."""
        chunk = 4096 if self.group <= 4 else 2048
        in_memory = self.group > 1 and (self.slots > chunk or self.reallocate)
        return 3 + (self.slots > 4096) + in_memory

    def arrays(self):
        """Query, key, value, keys by component, and the lengths; NaN beyond them."""
        rng = np.random.default_rng(0)
        shape = (len(self.lengths), self.slots, self.heads, self.head_dim)
        dtype = jnp.dtype(self.dtype)
        key, value = (rng.normal(size=shape).astype(dtype) for _ in range(2))
        key = np.broadcast_to(key[:, :1], shape) if self.equal_keys else key
        is_garbage = (np.arange(self.slots) >= np.array(self.lengths)[:, None])[:, :, None, None]
        key, value = (np.where(is_garbage, np.asarray(np.nan, dtype), x) for x in (key, value))
        query = 2 * rng.normal(size=(shape[0], self.queries, self.heads * self.group, self.head_dim))
        lengths = np.asarray(self.lengths, np.int32)
        return tuple(map(jnp.asarray, (query.astype(dtype), key, value, key.transpose(0, 2, 3, 1), lengths)))

    def shapes(self, sharding=None):
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in jax.eval_shape(self.arrays)]

    def run(self, query, key, value, key_by_component, lengths, **changed):
        names = ("num_components", "num_keys", "local_window", "is_causal", "reallocate", "score_temperature")
        options = {name: getattr(self, name) for name in names} | changed
        return sparq_decode(
            query, key, value, key_by_component=key_by_component, key_value_seq_lengths=lengths, return_lse=True,
            **options,
        )  # fmt: skip


CALLS = [
    Call(lengths=(1024, 700, 5), slots=1024, heads=3),
    Call(lengths=(3, 0), head_dim=128, num_keys=130, dtype="float16"),  # three tiles, of which little is visible
    Call(lengths=(500,), queries=3, is_causal=True, head_dim=80, reallocate=False),
    # Three chunks, which compete.
    Call(lengths=(8200, 4000), slots=8704, heads=1, num_keys=70, score_temperature="num_components"),
    Call(lengths=(400,), equal_keys=True, local_window=2),  # of equals the earliest
]
GROUPED = [
    Call(lengths=(1024, 700, 5), slots=1024, heads=1, group=4, reallocate=False),  # one kernel chooses
    Call(lengths=(500, 0), group=2, queries=3, is_causal=True, head_dim=128, reallocate=False),
    Call(lengths=(400,), group=8, equal_keys=True, local_window=2, dtype="float16", reallocate=False),
    Call(lengths=(900, 3), slots=1024, heads=1, group=8, head_dim=128, num_keys=70),
    Call(lengths=(4000,), slots=4096, heads=1, group=8, queries=3, is_causal=True),  # two chunks, one list
    Call(lengths=(8200,), slots=8704, heads=1, group=4, num_keys=70, score_temperature="num_components"),
    Call(lengths=(5000,), slots=5120, heads=1, group=2, head_dim=80, reallocate=False),
]
_LONG = dict(lengths=(1,), heads=1, head_dim=128, num_components=32, num_keys=128)
COMPILED = [  # what differs most in registers
    CALLS[2],
    CALLS[3],
    Call(**_LONG | {"lengths": (4096,), "heads": 2}, slots=4096),
]
COMPILED_GROUPED = [
    *(Call(**_LONG, group=group, slots=4096, reallocate=False) for group in (2, 3, 4)),
    *(Call(**_LONG, group=group, slots=2048, reallocate=False) for group in (7, 8)),
    *(Call(**_LONG, group=group, slots=16384) for group in (4, 8)),
]
