"""`.safetensors` files: a length, a JSON header, and raw tensors. Memory-mapped, so only slices in use are read.

Format: 8 bytes little-endian header length, then the header `{name: {dtype, shape, data_offsets}}`, then the data that
the offsets count in. Source: https://github.com/huggingface/safetensors, README, "Format".
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# Longer headers are refused by the format's own readers too: such files are damaged.
_MAX_HEADER_BYTES = 100_000_000


class CheckpointError(ValueError):
    """A file of weights is damaged, or is not what the model needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a file: its range of bytes, shape and dtype. `dtype` is the format's name, such as `BF16`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def array(self) -> np.ndarray:
        """Returns a read-only view of the file; nothing is read until it is sliced.

        Raises:
          CheckpointError: its dtype is not a float that numpy and ml_dtypes can hold.
        """
        if self.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.path.name}: tensor {self.name} has dtype {self.dtype}; this reads {', '.join(_DTYPES)}"
            )
        data = np.memmap(self.path, mode="r", offset=self.start, shape=(self.stop - self.start,), dtype=np.uint8)
        return data.view(_DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a `.safetensors` file by name, checked against the file's size.

    Raises:
      CheckpointError: the file is truncated, or its header is damaged or at odds with its data; the message names
        the file and the tensor.

    Example:
      >>> read_header(Path("model.safetensors"))["model.norm.weight"].array()[:3]  # doctest: +SKIP
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or length > min(num_bytes - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path.name}: truncated or not safetensors: {num_bytes} bytes, header of {length} bytes"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{path.name}: the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: the header must be a JSON object")
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, entry, 8 + length, num_bytes) for name, entry in header.items()}


def _tensor(path: Path, name: str, entry: Any, data_start: int, num_bytes: int) -> Tensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        is_valid = all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)) and start <= stop
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise CheckpointError(f"{path.name}: tensor {name} has a damaged header entry: {entry!r}")
    if data_start + stop > num_bytes:
        raise CheckpointError(
            f"{path.name}: truncated: tensor {name} ends at byte {data_start + stop} of a file of {num_bytes}"
        )
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != stop - start:
        raise CheckpointError(
            f"{path.name}: tensor {name} is labelled {dtype} {list(shape)}, which is "
            f"{math.prod(shape) * _DTYPES[dtype].itemsize} bytes, but holds {stop - start}"
        )
    return Tensor(path=path, name=name, dtype=dtype, shape=shape, start=data_start + start, stop=data_start + stop)
