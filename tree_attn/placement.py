"""Placement of a sequence's keys on shards: contiguous, block-cyclic or, of prompts, zigzag.

Contiguous (`block_size=None`): shard i holds the i-th run of keys. Appending then fills the last shard only.
Block-cyclic (`block_size=b`): b consecutive keys go to each shard in turn, so that a growing sequence stays balanced
to within one block. `b=1` is the striping that balances causal prefill.
Zigzag (`block_size="zigzag"`): of 2 p runs of keys, shard i of p holds runs i and 2 p - 1 - i. So a causal prompt is
balanced too, and its tokens stay in long runs; its length must be known, and it cannot grow.
In all placements the valid keys of a shard are a prefix of its slots, and their positions ascend.
"""

import dataclasses
import enum
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Integer

from tree_attn.arguments import AnyArray, check_integer, concrete, is_integer


class Unnamed(enum.Enum):
    """Type of `UNNAMED`, the default of `block_size`: the caller has not named the placement of the arrays."""

    UNNAMED = enum.auto()

    def __repr__(self) -> str:
        return self.name


UNNAMED = Unnamed.UNNAMED
ZIGZAG = "zigzag"
BlockSize = int | Literal["zigzag"] | None
Placement = BlockSize | Unnamed  # what a `block_size` argument takes; only prompts take "zigzag"


@partial(jax.tree_util.register_dataclass, data_fields=["index"], meta_fields=["num_shards", "block_size"])
@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """Names one shard of a sequence: the `index`-th of `num_shards`, in the placement given by `block_size`.

    `index` may be traced (`jax.lax.axis_index`); the others are static.

    Example:
      >>> Shard(index=1, num_shards=2, block_size=2).positions(4)   # keys 2, 3 and 6, 7 of a sequence of 8
    """

    index: Int[Array, ""] | int = 0
    num_shards: int = 1
    block_size: BlockSize = None

    def positions(
        self, num_slots: int, start: Int[Array, ""] | int = 0, size: int | None = None
    ) -> Int[Array, " size"]:
        """Returns the global position held by each of the slots `start .. start + size` of `num_slots`, int32."""
        slots = start + jnp.arange(num_slots if size is None else size, dtype=jnp.int32)
        if self.block_size is None:
            return self.index * num_slots + slots
        if self.block_size == ZIGZAG:
            size = max(num_slots // 2, 1)
            first, second = self.runs
            return jnp.where(slots < size, first, second) * size + slots % size
        block, offset = slots // self.block_size, slots % self.block_size
        return (block * self.num_shards + self.index) * self.block_size + offset

    def local_lengths(self, lengths: Int[AnyArray, "*shape"], num_slots: int) -> Int[Array, "*shape"]:
        """Returns how many of this shard's slots hold valid keys, int32; `lengths` count over all shards."""
        if self.block_size is None:
            return jnp.clip(lengths - self.index * num_slots, 0, num_slots).astype(jnp.int32)
        if self.block_size == ZIGZAG:
            size = num_slots // 2
            first, second = (jnp.clip(lengths - run * size, 0, size) for run in self.runs)
            return (first + second).astype(jnp.int32)
        keys_per_round = self.num_shards * self.block_size
        whole_rounds, rest = lengths // keys_per_round, lengths % keys_per_round
        in_last_round = jnp.clip(rest - self.index * self.block_size, 0, self.block_size)
        return jnp.clip(whole_rounds * self.block_size + in_last_round, 0, num_slots).astype(jnp.int32)

    @property
    def runs(self) -> tuple[Int[Array, ""] | int, Int[Array, ""] | int]:
        """The two runs of a zigzag placement that this shard holds, of `2 num_shards`."""
        return self.index, 2 * self.num_shards - 1 - self.index


def check_shard(shard: Shard, num_slots: int) -> None:
    """Raises TypeError or ValueError unless `shard` can have `num_slots` slots; a traced index is not checked."""
    if not isinstance(shard, Shard):
        raise TypeError(f"shard must be a Shard, got {shard!r}")
    check_integer("shard.num_shards", shard.num_shards, minimum=1)
    if not _is_in_runs(shard.block_size):
        check_integer("shard.block_size", shard.block_size, minimum=1)
    index = shard.index
    if is_integer(index) or (isinstance(index, jax.Array) and concrete(index) is not None):
        index = index if is_integer(index) else concrete(index)[()]
        check_integer("shard.index", index, minimum=0, maximum=shard.num_shards - 1)
    elif not (isinstance(index, jax.Array) and index.shape == () and jnp.issubdtype(index.dtype, jnp.integer)):
        raise TypeError(f"shard.index must be an integer, got {index!r}")
    unit = slot_unit(shard.block_size)
    if num_slots % unit and (shard.num_shards > 1 or shard.block_size == ZIGZAG):  # one shard may end in any block
        name = slot_unit_name(shard.block_size, is_of_shard=True)
        raise ValueError(f"key must hold a multiple of {name} = {unit} slots, got {num_slots}")


def locate(
    positions: Integer[AnyArray, "*n"], num_shards: int, block_size: int
) -> tuple[Integer[AnyArray, "*n"], Integer[AnyArray, "*n"]]:
    """Returns the shard that holds each position and its slot there, block-cyclic; the inverse of `Shard.positions`.

    Example:
      >>> locate(jnp.array([2, 6]), num_shards=2, block_size=2)   # shard 1 for both, slots 0 and 2
    """
    block, offset = positions // block_size, positions % block_size
    return block % num_shards, (block // num_shards) * block_size + offset


def slot_unit(block_size: BlockSize) -> int:
    """Returns the number of slots in which a shard grows: a block, or two halves."""
    return 2 if block_size == ZIGZAG else block_size or 1


def slot_unit_name(block_size: BlockSize, *, is_of_shard: bool = False) -> str:
    """Returns the unit in which all shards together grow, or one shard, in the words of an error."""
    if is_of_shard:
        return "2 runs" if block_size == ZIGZAG else "block_size"
    return "2 num_shards" if block_size == ZIGZAG else "num_shards * block_size"


def storage_order(num_tokens: int, num_shards: int, block_size: BlockSize) -> np.ndarray:
    """Returns the permutation `p` with `stored = natural[:, p]`: stored index i holds the key at position `p[i]`.

    Stored arrays are sharded evenly along the sequence. Shard s holds the stored indices from
    `s * num_tokens / num_shards` on.

    Args:
      num_tokens: length of the sequence; a multiple of `num_shards` (contiguous), of `num_shards * block_size`, or of
        `2 num_shards` (zigzag).
      block_size: None for contiguous, "zigzag", else keys per block.
    Returns:
      numpy int32 `[num_tokens]`. Its inverse is `np.argsort(p)`.
    Raises:
      ValueError: `num_tokens` is not such a multiple; a count that is no positive integer.

    Example:
      >>> storage_order(8, num_shards=2, block_size=2)   # array([0, 1, 4, 5, 2, 3, 6, 7])

    Source: Striped Attention (Brandon et al. 2023), section 3, for blocks of one key; zigzag: ring-flash-attention.
    """
    check_block_size(block_size, takes_zigzag=True)
    check_integer("num_tokens", num_tokens, minimum=0)
    check_integer("num_shards", num_shards, minimum=1)
    unit = num_shards * slot_unit(block_size)
    if num_tokens % unit:
        raise ValueError(f"num_tokens must be a multiple of {slot_unit_name(block_size)} = {unit}, got {num_tokens}")
    if block_size is None:
        return np.arange(num_tokens, dtype=np.int32)
    if block_size == ZIGZAG:
        runs = np.arange(num_tokens, dtype=np.int32).reshape(2 * num_shards, -1)
        return runs[_run_order(num_shards)].reshape(-1)
    blocks = np.arange(num_tokens, dtype=np.int32).reshape(-1, num_shards, block_size)
    return blocks.transpose(1, 0, 2).reshape(-1)


def _run_order(num_shards: int) -> np.ndarray:
    """Returns the runs of a zigzag placement in storage order: 0, 2 p - 1, 1, 2 p - 2, ..."""
    return np.stack([np.arange(num_shards), 2 * num_shards - 1 - np.arange(num_shards)], axis=1).reshape(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLayout:
    """The way prompts of `num_tokens` tokens lie on shards: padded at their end, then in storage order.

    Attributes:
      num_tokens: length of the arrays in natural order, that of the longest prompt; any number of at least 1.
      num_shards: shards of the sequence.
      block_size: as in `storage_order`.
    Raises:
      ValueError: a count that is no positive integer.

    Example:
      >>> layout = PromptLayout(num_tokens=250, num_shards=8, block_size=1)
      >>> stored = layout.store(x)                                 # [B, 250, ...] to [B, 256, ...]
      >>> x = layout.restore(stored)                               # and back
      >>> last = stored[jnp.arange(2), layout.last(lengths)]       # each prompt's last token
    """

    num_tokens: int
    num_shards: int
    block_size: BlockSize

    def __post_init__(self) -> None:
        check_block_size(self.block_size, takes_zigzag=True)
        check_integer("num_tokens", self.num_tokens, minimum=1)
        check_integer("num_shards", self.num_shards, minimum=1)

    @property
    def padded_tokens(self) -> int:
        """Tokens with the padding: whole blocks, as many on every shard."""
        unit = self.num_shards * slot_unit(self.block_size)
        return -(-self.num_tokens // unit) * unit

    @property
    def positions(self) -> np.ndarray:
        """The position of each stored token, int32 `[padded_tokens]`: `storage_order`."""
        return storage_order(self.padded_tokens, self.num_shards, self.block_size)

    def store(self, x, axis: int = 1):
        """Returns `x`, in natural order along `axis`, padded with zeros and in storage order.

        Raises:
          ValueError: `x` has not `num_tokens` tokens along `axis`.
        """
        if x.shape[axis] != self.num_tokens:
            raise ValueError(f"x must have num_tokens={self.num_tokens} along axis {axis}, got shape {x.shape}")
        numpy = np if isinstance(x, np.ndarray) else jnp
        widths = [(0, self.padded_tokens - self.num_tokens if i == axis % x.ndim else 0) for i in range(x.ndim)]
        return self._exchanged(numpy.pad(_whole(x, axis), widths), axis, is_stored=False)

    def restore(self, x, axis: int = 1):
        """Returns `x`, in storage order along `axis`, in natural order and without the padding.

        Raises:
          ValueError: `x` has not `padded_tokens` tokens along `axis`.
        """
        if x.shape[axis] != self.padded_tokens:
            raise ValueError(f"x must have padded_tokens={self.padded_tokens} along axis {axis}, got shape {x.shape}")
        natural = self._exchanged(_whole(x, axis), axis, is_stored=True)
        return natural[(slice(None),) * (axis % x.ndim) + (slice(self.num_tokens),)]

    def last(self, lengths: Integer[AnyArray, "*shape"]) -> Integer[AnyArray, "*shape"]:
        """Returns the stored index of the last token of prompts of these lengths; of empty ones that of the first."""
        position = lengths.clip(1, self.num_tokens) - 1  # in this order unsigned lengths do not wrap
        if self.block_size is None:
            return position
        if self.block_size == ZIGZAG:
            size = self.padded_tokens // (2 * self.num_shards)
            numpy = np if isinstance(position, np.ndarray) else jnp
            run, within = numpy.divmod(position.astype(np.int32), size)
            # Shard i holds run i first, and then the i-th from the last.
            stored = numpy.where(run < self.num_shards, 2 * run, 4 * self.num_shards - 1 - 2 * run)
            return stored * size + within
        shard, slot = locate(position, self.num_shards, self.block_size)
        return shard * (self.padded_tokens // self.num_shards) + slot

    def _exchanged(self, x, axis: int, *, is_stored: bool):
        """Exchanges rounds of blocks with shards: storage order has the shards outside, natural order the rounds."""
        if self.block_size is None:
            return x
        axis = axis % x.ndim
        if self.block_size == ZIGZAG:
            # Pairs of runs are the shards; the second half of the runs is in descending order.
            numpy = np if isinstance(x, np.ndarray) else jnp
            by_run = (self.num_shards, 2, -1) if is_stored else (2, self.num_shards, -1)
            runs = x.reshape(*x.shape[:axis], *by_run, *x.shape[axis + 1 :])
            first, second = (runs[(slice(None),) * (axis + is_stored) + (i,)] for i in range(2))
            pair = first, numpy.flip(second, axis)
            return numpy.stack(pair, axis + (not is_stored)).reshape(x.shape)
        sizes = -1, self.num_shards, self.block_size
        sizes = (sizes[1], sizes[0], sizes[2]) if is_stored else sizes
        blocks = x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
        return blocks.swapaxes(axis, axis + 1).reshape(x.shape)


def _whole(x, axis: int):
    """Returns `x` with all of `axis` on every device, where its type names Explicit mesh axes there.

    Explicit types let no such dimension be padded, cut or exchanged unless each device keeps whole parts. Other axes
    of a mesh are left to XLA.
    """
    if not isinstance(x, jax.Array):
        return x
    sharding = jax.typeof(x).sharding
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    if spec[axis] is None:
        return x
    spec[axis] = None
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, P(*spec)))


def named_block_size(
    block_size: Placement,
    *,
    axes: tuple[str, ...],
    depends_on_positions: bool,
    name: str = "block_size",
    takes_zigzag: bool = False,
) -> BlockSize:
    """Returns the placement that a call names. Without `axes` no keys are sharded, and none need be named.

    Args:
      depends_on_positions: whether the result depends on the keys' positions. Where it does not, `UNNAMED` is
        contiguous: all placements give the same.
      name: of the argument, for messages.
      takes_zigzag: "zigzag" is one of the placements.
    Raises:
      ValueError: `block_size` is no placement, or `UNNAMED` although the result depends on it.
    """
    if block_size is not UNNAMED:
        check_block_size(block_size, name, takes_zigzag)
        return block_size if _is_in_runs(block_size) else int(block_size)
    if axes and depends_on_positions:
        raise ValueError(
            f"{name} must be named where lengths, a causal rule or a window make the result depend on the order of "
            "the keys: None for contiguous (shard i holds the i-th run of keys), b for block-cyclic (b keys to each "
            f"shard in turn); got {block_size!r}. A KVCache is attended to by cache.attend(query)"
        )
    return None


def check_block_size(block_size: BlockSize, name: str = "block_size", takes_zigzag: bool = False) -> None:
    """Raises ValueError unless `block_size` is None (contiguous), an integer of at least 1, or "zigzag" if taken."""
    is_in_runs = _is_in_runs(block_size) and (takes_zigzag or block_size is None)
    if not is_in_runs and not (is_integer(block_size) and block_size >= 1):
        other = ", 'zigzag'" * takes_zigzag
        raise ValueError(f"{name} must be None (contiguous){other} or an integer of at least 1, got {block_size!r}")


def _is_in_runs(block_size: BlockSize) -> bool:
    """Returns whether a placement is contiguous or zigzag, and so has no blocks of a size."""
    return block_size is None or (isinstance(block_size, str) and block_size == ZIGZAG)
