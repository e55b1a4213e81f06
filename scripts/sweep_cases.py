"""Decode steps of a sweep: drawn from a seed as serving sees them, and a fixed table of sixteen."""

import dataclasses
import functools

import numpy as np
from benching import PRODUCTS_TFLOPS, READ_GB_PER_S, ROTATE_BYTES

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
MAX_BYTES, MAX_BYTES_OF_COPIES = 4e9, 10e9  # of all slots of K and V, in one copy and in all that rotate
MIN_BYTES = 8e6  # read in a step
MAX_LIMIT_US = 1000
MAX_COPIES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One decoding step of a batch.

    Attributes:
      family: one of FAMILIES.
      case: name that tells the step from others, "seed 7, case 3" or "table 0".
      lengths: keys of each sequence; of its suffix, where sequences share a prefix.
      gives_lengths: whether the call is given the lengths; without them all sequences fill their slots.
      slots: keys that each sequence has room for, at least the longest's.
      dtype: of keys and values; queries are bfloat16.
      window: keys that a query sees, its own among them; None is all.
      page: keys in a page, or None for one array `[B, slots, K, H]`.
      prefix: keys that all sequences share, before their suffixes.
    """

    family: str
    case: str
    lengths: tuple[int, ...]
    gives_lengths: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    num_queries: int = 1
    slots: int = 0
    dtype: str = "bfloat16"
    window: int | None = None
    page: int | None = None
    prefix: int = 0

    def __post_init__(self):
        object.__setattr__(self, "slots", max(self.slots, *self.lengths))

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def key_value_bytes(self) -> int:
        """Bytes of one key and one value of all KV heads."""
        return 2 * self.num_kv_heads * self.head_dim * (1 if self.dtype == "float8_e4m3fn" else 2)

    @property
    def keys_read(self) -> int:
        """Keys that a step has to read: those in the window of some query, and the prefix once."""
        seen = self.slots if self.window is None else self.window + self.num_queries - 1
        return self.prefix + sum(min(length, seen) for length in self.lengths)

    @property
    def bytes_read(self) -> int:
        """Bytes of the keys and values that a step has to read."""
        return self.keys_read * self.key_value_bytes

    @property
    def bytes_held(self) -> int:
        """Bytes of all slots of one copy."""
        if self.page is not None:
            return sum(self.pages) * self.page * self.key_value_bytes
        return (self.prefix + self.batch * self.slots) * self.key_value_bytes

    @property
    def pages(self) -> tuple[int, ...]:
        """Number of pages of each sequence."""
        return tuple(-(-length // self.page) for length in self.lengths)

    @property
    def bytes_us(self) -> float:
        """Time to read those bytes at the datasheet's rate."""
        return self.bytes_read / READ_GB_PER_S / 1e3

    @property
    def products_us(self) -> float:
        """Time of the matrix products at the datasheet's rate."""
        seen = self.keys_read - self.prefix + self.prefix * self.batch
        return 4 * self.num_queries * self.num_heads * self.head_dim * seen / PRODUCTS_TFLOPS / 1e6

    @property
    def copies(self) -> int:
        """Number of copies that a chain of steps rotates over, so that the L2 cache holds none of them."""
        return min(MAX_COPIES, max(2, -int(-ROTATE_BYTES // self.bytes_read)))

    def row(self) -> dict:
        """Returns the fields of a row that name this step."""
        fields = dataclasses.asdict(self)
        lengths = fields.pop("lengths")
        sizes = {"batch": self.batch, "min_keys": min(lengths), "max_keys": max(lengths), "sum_keys": sum(lengths)}
        limits = {"bytes": self.bytes_read, "bytes_us": self.bytes_us, "products_us": self.products_us}
        return fields | sizes | limits | {"copies": self.copies}

    def title(self) -> str:
        """Returns the step in words: "200 x 50 to 3,000, 32/8 of 128"."""
        low, high = min(self.lengths), max(self.lengths)
        keys = f"{high:,}" if low == high else f"{low:,} to {high:,}"
        keys = f"({self.prefix:,} + {keys})" if self.prefix else keys
        parts = [f"{self.batch} x {keys}", f"{self.num_heads}/{self.num_kv_heads} of {self.head_dim}"]
        words = {
            "lengths": self.gives_lengths and low == high,
            f"{self.slots:,} slots": self.slots > high,
            f"{self.num_queries} queries": self.num_queries > 1,
            f"window {self.window}": self.window is not None,
            f"pages of {self.page}": self.page is not None,
            "float8": self.dtype != "bfloat16",
        }
        return ", ".join(parts + [word for word, is_true in words.items() if is_true])


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
