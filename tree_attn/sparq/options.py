"""SparQ's options as one argument, and the static part of a call."""

import dataclasses

from jax.sharding import Mesh

from tree_attn.arguments import check_integer, one_of

SELECTIONS = ("global", "per_shard")
SCORE_TEMPERATURES = ("coverage", "head_dim", "num_components")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparqOptions:
    """The keys that SparQ keeps, as one argument. The fields have the meanings of `sparq_decode`'s arguments.

    Raises:
      ValueError: a field that `sparq_decode` does not take; the message names it.

    Example:
      >>> attention = by_name("sparq", sharding, sparq=SparqOptions(num_components=32, num_keys=128))
    """

    num_components: int
    num_keys: int
    local_window: int = 0
    reallocate: bool | None = None
    selection: str = "global"
    score_temperature: str = "coverage"

    def __post_init__(self) -> None:
        one_of("score_temperature", self.score_temperature, SCORE_TEMPERATURES)
        one_of("selection", self.selection, SELECTIONS)
        one_of("reallocate", self.reallocate, (None, True, False))
        check_integer("num_components", self.num_components, minimum=1)
        check_integer("num_keys", self.num_keys, minimum=1)
        check_integer("local_window", self.local_window, minimum=0, maximum=self.num_keys)

    def check_head_dim(self, head_dim: int) -> None:
        """Raises ValueError if `num_components` exceeds the head dim."""
        check_integer("num_components", self.num_components, minimum=1, maximum=head_dim)

    def coverage(self, head_dim: int) -> float | None:
        """Returns the share of the query's size that the score temperature takes the kept components to have.

        None: the share that they do have, which depends on the query.
        """
        shares = {"coverage": None, "head_dim": 1.0, "num_components": self.num_components / head_dim}
        return shares[self.score_temperature]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparqCall:
    """The static part of a call, as a shard sees it.

    options:         `reallocate` is True or False
    axes, mesh:      the mesh axes over which the sequence is sharded, `()` on one device, and their mesh if known
    reduction:       as `tree_attn.reduce.check_reduction` returns it
    num_shards:      how many shards there are
    scale:           of logits
    implementation:  as in `tree_attn.local.attend`
    """

    options: SparqOptions
    axes: tuple[str, ...]
    mesh: Mesh | None
    reduction: str | tuple[str, ...] | None
    num_shards: int
    scale: float
    implementation: str | None

    @property
    def is_global(self) -> bool:
        """All shards choose together."""
        return self.options.selection == "global" and self.num_shards > 1

    @property
    def max_keys_per_shard(self) -> int:
        """Keys that a shard may keep."""
        num_keys = self.options.num_keys
        return num_keys if self.is_global else -(-num_keys // self.num_shards)
