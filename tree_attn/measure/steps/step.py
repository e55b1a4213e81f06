"""A decode step of a batch, in numbers, and its limits by the datasheet of an H200."""

import dataclasses

from tree_attn.cost import datasheets

# Limits are those of the datasheet, which nothing exceeds: 4,800 GB/s and 989.5 TFLOP/s on an H200.
PEAKS = datasheets.rates("NVIDIA H200")
READ_GB_PER_S = PEAKS["read_bytes_per_s"] / 1e9
PRODUCTS_TFLOPS = PEAKS["product_flops_per_s"] / 1e12
ROTATE_BYTES = 200e6  # three times the L2 cache of an H200
MAX_COPIES = 32
MAX_BYTES = 4e9  # of all slots of K and V of a drawn step, in one copy


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
