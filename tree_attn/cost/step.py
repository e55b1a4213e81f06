"""The shape of a decoding step, and the bytes of its parts."""

import dataclasses

import numpy as np

from tree_attn.cost.equations import check_positive

STATE_BYTES = 4  # softmax states travel as float32, whatever the dtype of K and V


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """Shape of one decoding step over keys sharded on p devices; validates itself.

    Attributes:
      batch, num_keys: b sequences, and N keys of each sequence over all devices.
      num_heads, num_kv_heads: query heads n_h and key heads; the first a multiple of the second.
      head_dim: d_h, of queries, keys and values.
      dtype: of queries, keys and values, for example "bfloat16".
      n_devices: p.
      num_queries: T query tokens per sequence; the paper's formulas have 1.
    """

    batch: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    n_devices: int
    num_queries: int = 1

    def __post_init__(self):
        sizes = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "dtype"}
        check_positive(**sizes)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got num_heads={self.num_heads} and "
                f"num_kv_heads={self.num_kv_heads}"
            )
        itemsize(self.dtype)

    @property
    def hidden_size(self) -> int:
        """d, of the queries."""
        return self.num_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """d_kv, the width of one key over all key heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def keys_per_device(self) -> int:
        """t, rounded up: the number of the fullest device."""
        return -(-self.num_keys // self.n_devices)

    @property
    def key_value_bytes_per_device(self) -> int:
        """`2 b t d_kv` in bytes: keys and values that one device holds, and reads once in a step."""
        return 2 * self.batch * self.keys_per_device * self.key_size * itemsize(self.dtype)

    @property
    def packed_state_bytes(self) -> int:
        """`b d + b n_h` in float32: outputs and lse of all queries, as one gather carries them."""
        return self.batch * self.num_queries * self.num_heads * (self.head_dim + 1) * STATE_BYTES


def itemsize(dtype: str) -> int:
    """Returns the bytes of one element of a floating dtype: 2 for "bfloat16".

    Raises:
      ValueError: `dtype` does not name a floating dtype.
    """
    if dtype == "bfloat16":  # numpy learns this name only from ml_dtypes
        return 2
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed is None or parsed.kind != "f":
        raise ValueError(f"dtype must be a floating dtype such as 'bfloat16' or 'float32', got {dtype!r}")
    return parsed.itemsize
