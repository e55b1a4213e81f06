"""Decoding methods that are compared, and the budgets at which they move as much data.

Sources: SparQ Attention, section 5 and appendix G (methods, transfers and budgets).
"""

import dataclasses
import functools

from tree_attn.cache import KVCache
from tree_attn.models.llama.attention import by_name
from tree_attn.models.llama.evaluation.baselines import flexgen_decode, h2o_decode, lm_infinite_decode
from tree_attn.models.llama.sharding import LlamaSharding
from tree_attn.sparq import SCORE_TEMPERATURES, SparqOptions, transfers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """An attention for decoding, and its budget.

    Attributes:
      name: "dense", "sparq", "sparq_mean", "h2o", "lm_infinite" or "flexgen".
      num_keys: k, keys that each step attends to; None for dense.
      num_components: r, of SparQ.
      local_window: l, of SparQ; None: a quarter of its keys, as in the paper.
      score_temperature: of SparQ.
    """

    name: str
    num_keys: int | None = None
    num_components: int | None = None
    local_window: int | None = None
    score_temperature: str = "coverage"

    @property
    def is_sparq(self) -> bool:
        """True for SparQ, without or with the mean value."""
        return self.name.startswith("sparq")

    def transfer_elements(self, num_keys: int, head_dim: int) -> int:
        """Returns the elements moved per KV head and step at a length: the paper's equations 3 and 11, appendix G."""
        sizes = dict(num_keys=num_keys, head_dim=head_dim)
        if self.name == "dense":
            return transfers.dense_transfer_elements(**sizes)
        if self.is_sparq:
            return transfers.sparq_transfer_elements(
                num_components=self.num_components, num_kept=self.num_keys, **sizes
            )
        if self.name == "h2o":
            return transfers.h2o_transfer_elements(num_kept=self.num_keys, **sizes)
        if self.name == "flexgen":
            return transfers.flexgen_transfer_elements(num_kept=self.num_keys, **sizes)
        return transfers.lm_infinite_transfer_elements(head_dim=head_dim, num_kept=self.num_keys)

    def attend(self, query, cache: KVCache, layer, scores):
        """Attends with the newest T queries, causal, as `Attention.decode`.

        Args:
          query: `[B, T, N, H]`.
          cache: holds the keys and values of these queries already, and does not count them yet.
          layer: index of the layer.
          scores: of H2O's keys in this layer; other methods return them unchanged.

        Returns:
          `(out, scores)`.
        """
        operands = cache.operands(layer, num_new=query.shape[1])
        key, value = operands["key"], operands["value"]
        options = dict(num_keys=self.num_keys, key_value_seq_lengths=operands["key_value_seq_lengths"])
        if self.name == "h2o":
            return h2o_decode(query, key, value, scores, **options)
        if self.name == "lm_infinite":
            return lm_infinite_decode(query, key, value, is_causal=True, **options), scores
        if self.name == "flexgen":
            return flexgen_decode(query, key, value, is_causal=True, **options), scores
        sharding = LlamaSharding(mesh=cache.mesh, sequence=cache.axis_name)
        sparq, name = self.sparq_options(), "single" if self.name == "dense" else "sparq"
        return by_name(name, sharding, sparq=sparq).decode(query, cache, layer), scores

    def sparq_options(self) -> SparqOptions | None:
        """Returns the options of `sparq_decode`; None for methods other than SparQ."""
        if not self.is_sparq:
            return None
        return SparqOptions(
            num_components=self.num_components, num_keys=self.num_keys, reallocate=self.name == "sparq_mean",
            local_window=self.num_keys // 4 if self.local_window is None else self.local_window,
            score_temperature=self.score_temperature,
        )  # fmt: skip

    def ablations(self) -> list["Method"]:
        """Returns SparQ with each other temperature and local window; nothing for other methods.

        Source: SparQ Attention, Figure 7b, for the temperature.
        """
        if not self.is_sparq:
            return []
        temperatures = [{"score_temperature": name} for name in SCORE_TEMPERATURES if name != self.score_temperature]
        windows = [{"local_window": count} for count in (0, self.num_keys // 2, self.num_keys)]
        return [dataclasses.replace(self, **change) for change in (*temperatures, *windows)]


def methods_for(ratio: float, num_keys: int, head_dim: int, num_kept: int) -> list[Method]:
    """Returns every method with the budget whose transfers are nearest to `ratio` of dense attention's at a length.

    SparQ keeps `num_kept` keys and varies its components, as in the paper. FlexGen reads all of K, so it is absent
    where half is too much.

    Example:
      >>> [method.name for method in methods_for(1 / 4, num_keys=1024, head_dim=64, num_kept=64)]
      ['sparq', 'sparq_mean', 'h2o', 'lm_infinite']
    """
    target = ratio * transfers.dense_transfer_elements(num_keys=num_keys, head_dim=head_dim)
    nearest = lambda make, budgets: min(
        map(make, budgets), key=lambda method: abs(method.transfer_elements(num_keys, head_dim) - target)
    )
    sparq = lambda name: nearest(
        lambda r: Method(name=name, num_keys=num_kept, num_components=r), range(1, head_dim + 1)
    )
    budgets = range(20, num_keys + 1)
    methods = [sparq("sparq"), sparq("sparq_mean")]
    methods += [nearest(functools.partial(_with_keys, name), budgets) for name in ("h2o", "lm_infinite")]
    if ratio >= 0.5:
        methods.append(nearest(functools.partial(_with_keys, "flexgen"), range(2, num_keys + 1)))
    return methods


def _with_keys(name: str, num_keys: int) -> Method:
    return Method(name=name, num_keys=num_keys)
