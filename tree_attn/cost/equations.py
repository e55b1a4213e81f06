"""Equations 8 to 14 of Tree Attention: memory and communication of one decoding step, in elements.

Symbols, as in section 6 of the paper:

    b    batch size                          p    number of devices
    t    keys per device, N / p              d    hidden size, d_h * n_h (head dim times query heads)
    n_h  query heads

The paper has as many key heads as query heads, and one query per sequence. `d_kv = d_h * n_kv` is the width of one key
under grouped queries (GQA). Its default, d, gives the paper's formulas back. Only terms that hold keys and values
shrink with it: queries, outputs and softmax states keep n_h heads.
"""

from tree_attn.arguments import check_integer


def ring_memory_elements(*, b: int, t: int, d: int, d_kv: int | None = None, num_queries: int = 1) -> int:
    """Returns the peak memory of Ring Attention per device: `4 b t d + 2 b d`.

    These are two shards of keys and values (the one in use and the one arriving), a query and an output. With GQA and
    T queries per sequence: `4 b t d_kv + 2 b d T`.

    Raises:
      ValueError: a size is not an integer of at least 1.

    Example:
      >>> ring_memory_elements(b=1, t=1024, d=2048)
      8392704

    Source: Tree Attention, equation 8.
    """
    d_kv = d if d_kv is None else d_kv
    check_positive(b=b, t=t, d=d, d_kv=d_kv, num_queries=num_queries)
    return 4 * b * t * d_kv + 2 * b * d * num_queries


def tree_memory_elements(*, b: int, t: int, d: int, n_h: int, d_kv: int | None = None, num_queries: int = 1) -> int:
    """Returns the peak memory of Tree Attention per device: `2 b t d + 2 b d + 2 b n_h`.

    These are one shard of keys and values, a query, a numerator, and a denominator and a maximum per head. With GQA and
    T queries per sequence: `2 b t d_kv + (2 b d + 2 b n_h) T`.

    Raises:
      ValueError: a size is not an integer of at least 1.

    Source: Tree Attention, equation 9.
    """
    d_kv = d if d_kv is None else d_kv
    check_positive(b=b, t=t, d=d, n_h=n_h, d_kv=d_kv, num_queries=num_queries)
    return 2 * b * t * d_kv + (2 * b * d + 2 * b * n_h) * num_queries


def ring_volume_elements(*, b: int, t: int, d: int, p: int, d_kv: int | None = None) -> int:
    """Returns the elements that Ring Attention communicates: `2 b t d p` (GQA: `2 b t d_kv p`).

    Each of p hops moves a shard of keys and values, `2 b t d`. One device sends this much in a whole pass; all p
    devices together send as much in one hop. A ring without its last hop, which only brings every shard home, sends
    `(p - 1) / p` of it.

    Raises:
      ValueError: a size is not an integer of at least 1.

    Source: Tree Attention, equation 10.
    """
    d_kv = d if d_kv is None else d_kv
    check_positive(b=b, t=t, d=d, p=p, d_kv=d_kv)
    return 2 * b * t * d_kv * p


def allreduce_volume_elements(numel: float, *, p: int) -> float:
    """Returns the elements that each device sends in an all-reduce of `numel` elements: `2 (p - 1) / p * numel`.

    Raises:
      ValueError: `p` is not an integer of at least 1, or `numel` is negative.

    Source: Tree Attention, equation 12.
    """
    check_positive(p=p)
    if numel < 0:
        raise ValueError(f"numel must be at least 0, got {numel}")
    return 2 * (p - 1) / p * numel


def tree_volume_elements(*, b: int, d: int, n_h: int, p: int) -> float:
    """Returns the elements that each device sends in Tree Attention: `2 (p - 1) / p * (b d + 2 b n_h)`.

    Equation 12 for numerator, denominator and maximum. The number of keys does not occur in it, and GQA changes
    nothing: d and n_h are those of the query.

    Raises:
      ValueError: a size is not an integer of at least 1.

    Example:
      >>> tree_volume_elements(b=1, d=2048, n_h=16, p=8)
      3640.0

    Source: Tree Attention, equation 14.
    """
    check_positive(b=b, d=d, n_h=n_h, p=p)
    return allreduce_volume_elements(b * d + 2 * b * n_h, p=p)


def check_positive(**sizes: int) -> None:
    """Raises ValueError, with its name, for a size that is not an integer of at least 1."""
    for name, size in sizes.items():
        check_integer(name, size, minimum=1)
