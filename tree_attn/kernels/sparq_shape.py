"""The static part of a call of SparQ's kernels for Hopper, the calls they support, and their shares of an SM."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from tree_attn.kernels.targets import SMEM_BYTES_PER_SM

HEAD_DIMS = (64, 80, 96, 128)
SLOT_MULTIPLE = 512  # TMA moves components by 8 rows of 64 keys
CHUNK = 4096  # slots whose scores fit in the registers of a warpgroup, three times per SM
COLUMNS = 64  # keys in a row of a chunk, 128 bytes: TMA is slower with shorter rows
COLS = 8  # queries of a group at most: the fewest columns that a tensor core takes
GROUP_LOGITS = 4 * CHUNK  # of all queries of a group, which registers hold twice per SM
REDUCTION_BYTES = 1024
WARPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparqShape:
    """The static part of a call.

    A choice is one group of query heads of one query. Its slots are cut into chunks, for `select_keys` and
    `approximate_logits`, or into lists of `CHUNK` slots, for `select_by_share`.

    is_shard:    the slots are one shard of those that are chosen from together
    reallocate:  whether the caller needs the total weight of the kept keys; ungrouped kernels always return it
    """

    batch: int
    num_queries: int
    num_kv_heads: int
    group: int
    head_dim: int
    num_slots: int
    num_components: int
    num_keys: int
    scale: float
    dtype: Any
    num_sms: int
    is_shard: bool
    reallocate: bool

    @property
    def choices(self) -> int:
        """B x T x K, in that order."""
        return self.batch * self.num_queries * self.num_kv_heads

    @property
    def chunk(self) -> int:
        """Slots of a chunk: registers hold the logits of all queries of a group for them."""
        return next(chunk for chunk in (CHUNK, CHUNK // 2) if chunk * self.group <= GROUP_LOGITS)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a chunk in registers; there are at least 64 rows."""
        columns = min(COLUMNS, self.chunk // 64)
        return self.chunk // columns, columns

    @property
    def num_chunks(self) -> int:
        """Chunks of a choice."""
        return pl.cdiv(self.num_slots, self.chunk)

    @property
    def num_lists(self) -> int:
        """Lists of a choice: parts of `CHUNK` slots whose best keys compete."""
        return pl.cdiv(self.num_slots, CHUNK)

    @property
    def is_final(self) -> bool:
        """The keys that a chunk keeps are the keys that its choice keeps; otherwise the lists of all chunks compete."""
        # While a group chooses, registers cannot hold the logits of each query, by which the kept keys are weighed.
        needs_logits = self.group > 1 and self.reallocate
        return self.num_chunks == 1 and not self.is_shard and not needs_logits

    @property
    def num_stages(self) -> int:
        """Components in flight per CTA; for groups as many bytes as fit, since few CTAs do."""
        return 6 if self.group == 1 else 12 * CHUNK // self.chunk

    @property
    def stream_ctas_per_sm(self) -> int:
        """CTAs whose registers fit an SM."""
        return 3 if self.group == 1 and self.is_final else 2

    @property
    def padded_head_dim(self) -> int:
        """Rows of O^T: V's columns, which a tensor core takes 64 at a time."""
        return -(-self.head_dim // 64) * 64

    def sequence_and_head(self, choice):
        """Returns the sequence and the KV head of a choice."""
        return lax.div(choice, self.num_queries * self.num_kv_heads), lax.rem(choice, self.num_kv_heads)


def unsupported(query, key, value, key_by_component, sparq) -> str | None:
    """Returns why the kernels cannot do this, or None; `sparq` is a `SparqOptions`."""
    dtypes = {x.dtype for x in (query, key, value)}
    if dtypes not in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)}):
        return f"one dtype, bfloat16 or float16, not {sorted(map(str, dtypes))}"
    if query.shape[2] > COLS * key.shape[2]:
        return f"at most {COLS} query heads per key head, not {query.shape[2]} and {key.shape[2]}"
    if key.shape[-1] not in HEAD_DIMS or value.shape[-1] != key.shape[-1]:
        return f"a head dim of {HEAD_DIMS}, not {key.shape[-1]} for keys and {value.shape[-1]} for values"
    if key_by_component is None:
        return "key_by_component"
    if key.shape[1] % SLOT_MULTIPLE or sparq.num_components % 4:
        return (
            f"S to be a multiple of {SLOT_MULTIPLE} and num_components of 4, not {key.shape[1]} and "
            f"{sparq.num_components}"
        )
    return None


def ctas_for(shape: SparqShape, num_parts: int, smem_bytes: int, max_per_sm: int) -> int:
    """Returns how many CTAs run at once, at most `max_per_sm` by their registers; n CTAs take every n-th part each."""
    return min(num_parts, shape.num_sms * max(1, min(max_per_sm, SMEM_BYTES_PER_SM // (smem_bytes + 4096))))
