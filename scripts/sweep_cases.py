"""Decode steps of a sweep: drawn from a seed as serving sees them, and a fixed table of sixteen."""

import functools

import numpy as np

from tree_attn.measure.steps.step import MAX_BYTES, Step

FAMILIES = ("dense", "ragged", "paged", "queries", "window", "float8", "prefix")
# Query heads, KV heads and head dim of published models, or of a device's part of one.
MODELS = (
    (32, 8, 128),
    (64, 8, 128),
    (32, 32, 128),
    (40, 8, 128),
    (28, 4, 128),
    (16, 16, 128),
    (8, 1, 128),
    (24, 8, 128),
    (48, 8, 128),
    (64, 4, 128),
    (32, 8, 64),
    (64, 8, 64),
    (32, 32, 64),
    (16, 16, 256),
    (8, 1, 256),
    (16, 8, 256),
)
PAGES = (16, 32, 64, 64, 64, 128)
WINDOWS = (128, 512, 1024, 4096)
MAX_BATCH, MAX_KEYS = 512, 524_288
MAX_BYTES_OF_COPIES = 10e9  # of all slots of K and V, in all copies that rotate
MIN_BYTES = 8e6  # read in a step
MAX_LIMIT_US = 1000


def draw(seed: int, index: int) -> Step:
    """Returns case `index` of a seed; families take turns, and no case depends on another."""
    rng, family = np.random.default_rng([seed, index]), FAMILIES[index % len(FAMILIES)]
    while True:
        step = _draw(rng, family, f"seed {seed}, case {index}")
        if step is not None and is_bounded(step):
            return step


def is_bounded(step: Step) -> bool:
    """Returns whether a step is neither too small to time nor too large to hold twice."""
    limit_us = max(step.bytes_us, step.products_us)
    is_held = step.bytes_held <= MAX_BYTES and step.copies * step.bytes_held <= MAX_BYTES_OF_COPIES
    return step.bytes_read >= MIN_BYTES and is_held and limit_us <= MAX_LIMIT_US


def _draw(rng: np.random.Generator, family: str, case: str) -> Step | None:
    heads, kv_heads, head_dim = MODELS[rng.integers(len(MODELS))]
    labels = dict(family=family, case=case, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    batch = _log_uniform(rng, 1, MAX_BATCH)
    if family == "dense":
        lengths = (_log_uniform(rng, 64, MAX_KEYS),) * batch
        return Step(**labels, lengths=lengths, gives_lengths=bool(rng.integers(2)))
    if family == "prefix":
        prefix = _log_uniform(rng, 512, 65_536)
        prefix = prefix if rng.integers(2) else -(-prefix // 64) * 64
        lengths = _lengths(rng, batch, _log_uniform(rng, 16, 2048))
        labels |= {"prefix": prefix, "gives_lengths": len(set(lengths)) > 1}
        return Step(**labels, lengths=lengths) if batch > 1 else None
    lengths = _lengths(rng, batch, _log_uniform(rng, 64, MAX_KEYS), only_ragged=family == "ragged")
    if family == "ragged" and len(set(lengths)) == 1:
        return None
    labels["gives_lengths"] = len(set(lengths)) > 1 or family == "paged" or bool(rng.integers(2))
    # A cache may have more room than the longest sequence takes.
    has_room = labels["gives_lengths"] and family != "paged" and rng.integers(4) == 0
    labels["slots"] = -(-max(lengths) // 1024) * 1024 if has_room else max(lengths)
    if family == "paged":
        labels["page"] = int(rng.choice(PAGES))
    elif family == "float8":
        labels["dtype"] = "float8_e4m3fn"
    elif family == "window":
        labels["window"] = int(rng.choice(WINDOWS))
    if family == "queries":
        labels["num_queries"] = int(rng.integers(2, 9))
    elif family in ("paged", "window", "float8"):
        labels["num_queries"] = 1 if rng.integers(4) else int(rng.integers(2, 5))
    if min(lengths) < labels.get("num_queries", 1) or max(lengths) <= labels.get("window", 0):
        return None
    return Step(**labels, lengths=lengths)


def _lengths(rng: np.random.Generator, batch: int, keys: int, only_ragged: bool = False) -> tuple[int, ...]:
    """Returns equal lengths, lengths spread over a range, or one long one among short ones; `keys` is the longest."""
    kind = rng.choice(("spread", "one long") if only_ragged else ("equal", "spread", "one long"))
    if kind == "equal":
        return (keys,) * batch
    shortest = max(1, keys // int(rng.choice((4, 20, 100))))
    if kind == "spread":
        return tuple(_log_uniform(rng, shortest, keys) for _ in range(batch))
    lengths = [shortest] * batch
    lengths[rng.integers(batch)] = keys
    return tuple(lengths)


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))


def table() -> list[Step]:
    """Returns sixteen steps that do not change, so that runs of different days can be compared."""
    # The seeds give batches of 125 and 285 us, as those had that the table was first measured with.
    seeded = lambda seed, *bounds: functools.partial(_log_uniform, np.random.default_rng(seed), *bounds)
    ragged, long_ragged = seeded(7, 50, 3000), seeded(3, 200, 40_000)
    grouped = dict(num_heads=32, num_kv_heads=8)
    steps = [
        dict(family="dense", lengths=(700,) * 512, gives_lengths=True, **grouped),
        dict(family="ragged", lengths=tuple(ragged() for _ in range(200)), gives_lengths=True, **grouped),
        dict(family="dense", lengths=(1500,) * 128, num_heads=64, num_kv_heads=8),
        dict(family="dense", lengths=(4096,) * 32, num_heads=32, num_kv_heads=32, head_dim=64),
        dict(family="dense", lengths=(50_001,) * 4, num_heads=40, num_kv_heads=8),
        dict(family="dense", lengths=(20_011,), **grouped),
        dict(family="dense", lengths=(300_000,) * 2, num_heads=8, num_kv_heads=1),
        dict(family="dense", lengths=(8192,) * 16, num_heads=28, num_kv_heads=4),
        dict(family="float8", lengths=(4096,) * 64, dtype="float8_e4m3fn", **grouped),
        dict(family="ragged", lengths=tuple(long_ragged() for _ in range(48)), gives_lengths=True, **grouped),
        dict(family="queries", lengths=(16_384,) * 8, num_queries=4, **grouped),
        dict(family="window", lengths=(65_536,) * 8, window=4096, **grouped),
        dict(family="prefix", prefix=16_384, lengths=(128,) * 256, num_heads=8, num_kv_heads=1),
        dict(family="prefix", prefix=16_384, lengths=(128,) * 1024, num_heads=8, num_kv_heads=1),
        dict(family="prefix", prefix=8192, lengths=(64,) * 16, **grouped),
        dict(family="prefix", prefix=3000, lengths=(300,) * 200, **grouped),
    ]
    return [Step(**{"case": f"table {i}", "gives_lengths": False} | step) for i, step in enumerate(steps)]
