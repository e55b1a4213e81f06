"""The choice of an attention by name: the names, what each can do, and checks that need no model.

Commands call the checks, so that a wrong choice is refused before a model is read.
"""

from collections.abc import Sequence

from tree_attn.arguments import check_exchanged_heads, is_integer, one_of
from tree_attn.models.llama.config import LlamaConfig
from tree_attn.models.llama.storage import BLOCK_SIZE
from tree_attn.reduce import check_reduction
from tree_attn.sparq import SparqOptions

#: The names that `by_name` takes.
ATTENTIONS = ("tree", "ring", "single", "sparq")
REDUCING = ("tree", "sparq")
SHARING = ("tree", "single")
CHUNKING = ("tree", "single", "sparq")

# Ways to attend within prompts that are sharded. Over two mesh axes "ulysses" has a ring outside.
PREFILLS = ("ring", "ring_joint", "ring_two_way", "ulysses")

CANNOT_SHARE = "has no form for shared prefixes; 'tree' and 'single' have"
NO_SCALES = "attention='sparq' takes no scales; float8_e4m3fn needs none"
NO_WINDOWED_PREFIXES = "tokens would see a prefix whole, where the model's layers have a window"


def check_choice(
    name: str, reduction: str | None, axes: tuple[str, ...], num_shards: int, sparq: SparqOptions | None = None
) -> str | None:
    """Returns the reduction that attention `name` will use over these mesh axes.

    Raises:
      ValueError, TypeError: as `attention.by_name`.
    """
    one_of("attention", name, ATTENTIONS)
    if sparq is not None and not isinstance(sparq, SparqOptions):
        raise TypeError(f"sparq must be SparqOptions or None, got {sparq!r}")
    if name == "sparq" and sparq is None:
        raise ValueError("sparq must be SparqOptions (num_components, num_keys) for attention='sparq', got None")
    if name != "sparq" and sparq is not None:
        raise ValueError(f"sparq must be None for attention={name!r}, which attends to all keys, got {sparq!r}")
    if reduction is not None and name not in REDUCING:
        raise ValueError(
            f"reduction must be None, got {reduction!r}: attention={name!r} does not reduce across devices; "
            f"only {_quoted(REDUCING)} take one"
        )
    if name == "single" and num_shards != 1:
        raise ValueError(f"attention='single' keeps all keys on one device: the sequence must have 1, got {num_shards}")
    if name not in REDUCING:
        return None
    chosen = check_reduction(reduction, axes)
    return "hierarchical" if isinstance(chosen, tuple) else chosen


def check_prefill(
    prefill: str | None, name: str, config: LlamaConfig | None = None, axis_sizes: Sequence[int] = ()
) -> None:
    """Raises where attention `name` cannot read prompts by `prefill` (None: its own way).

    Args:
      config: of the model, whose heads are checked too; None: they are not.
      axis_sizes: of the sequence's mesh axes, fastest links first.

    Raises:
      ValueError: an unknown name; one for `single`; numbers of heads that the devices of "ulysses" do not divide.
      NotImplementedError: "ring_two_way" for a model with a single KV head.
    """
    one_of("prefill", prefill, (None, *PREFILLS))
    if prefill is not None and name == "single":
        raise ValueError(f"prefill must be None for attention='single', which has whole prompts, got {prefill!r}")
    if config is None:
        return
    if prefill == "ulysses":
        check_exchanged_heads(config.num_heads, config.num_kv_heads, axis_sizes[0])
    if prefill == "ring_two_way" and config.num_kv_heads == 1:
        raise NotImplementedError("prefill='ring_two_way' sends half of the KV heads each way, and the model has 1")


def check_sharing(name: str, share_prefixes: bool | None) -> None:
    """Raises where attention `name` cannot share prefixes as `share_prefixes` says.

    Raises:
      ValueError: `share_prefixes` is not None, True or False.
      NotImplementedError: it is True, for an attention without a form for shared prefixes.
    """
    one_of("share_prefixes", share_prefixes, (None, True, False))
    if share_prefixes and name not in SHARING:
        raise NotImplementedError(f"{share_prefixes=}: attention={name!r} {CANNOT_SHARE}")


def check_prefill_chunk(name: str, prefill_chunk: int | None, num_shards: int) -> None:
    """Raises where attention `name` cannot read prompts by `prefill_chunk` tokens on `num_shards`.

    Raises:
      ValueError: `prefill_chunk` is no positive multiple of the shards.
      NotImplementedError: `ring`, whose chunks would need the keys of earlier chunks.
    """
    if prefill_chunk is None:
        return
    if not is_integer(prefill_chunk) or prefill_chunk < 1 or prefill_chunk % (num_shards * BLOCK_SIZE):
        raise ValueError(f"prefill_chunk must be a multiple of {num_shards * BLOCK_SIZE} shards, got {prefill_chunk!r}")
    if name not in CHUNKING:
        raise NotImplementedError(f"{prefill_chunk=}: attention={name!r} reads prompts whole")


def check_cache_dtype(name: str, cache_dtype: str | None) -> None:
    """Raises where attention `name` cannot decode over a cache of `cache_dtype` (None: the model's).

    Raises:
      NotImplementedError: `sparq` over int8.
    """
    if name == "sparq" and cache_dtype == "int8":
        raise NotImplementedError(f"{cache_dtype=}: {NO_SCALES}")


def check_model_options(name: str, config: LlamaConfig, prefill_chunk: int | None = None) -> None:
    """Raises where attention `name` has not what layers of this model need, or cannot read their prompts in chunks.

    Raises:
      NotImplementedError: `sparq`, for a model with a window or a soft cap; `prefill_chunk`, for one with a window.
    """
    for field in ("window", "attention_soft_cap"):
        value = getattr(config, field)
        if name == "sparq" and value is not None:
            raise NotImplementedError(f"attention='sparq' has no form for the model's {field}={value}")
    if prefill_chunk is not None and config.window is not None:
        raise NotImplementedError(f"{prefill_chunk=}: {NO_WINDOWED_PREFIXES}")


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))
