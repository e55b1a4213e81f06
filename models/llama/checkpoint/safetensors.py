"""`.safetensors` files, read slice by slice by the format's own package, with checks over it.

Format: 8 bytes little-endian header length, then the header `{name: {dtype, shape, data_offsets}}`, then the data that
the offsets count in. Source: https://github.com/huggingface/safetensors, README, "Format".
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy the dtype bfloat16, by which the package reads BF16
import numpy as np

from tree_attn.extras import how_to_install
from tree_attn.models.llama.checkpoint.reading import CheckpointError, blaming, shortened, unique

# The dtypes of weights; the format has integers and narrower floats too.
_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a file: its shape, and its dtype by the format's name, such as `BF16`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Any = dataclasses.field(repr=False, compare=False)

    def check_dtype(self) -> None:
        """Raises CheckpointError unless its dtype is a float of 16 bits or more."""
        if self.dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.path.name}: tensor {self.name} has dtype {self.dtype}; this reads {', '.join(_DTYPES)}"
            )

    def read(self, index: Sequence[slice]) -> np.ndarray:
        """Reads a slice; the rest of the file is not touched.

        Raises:
          CheckpointError: its dtype is not a float that numpy and ml_dtypes can hold.
        """
        self.check_dtype()
        with blaming(self.path.name):
            return self.file.get_slice(self.name)[tuple(index)]


def read_header(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a `.safetensors` file by name, checked against the file's size.

    Raises:
      CheckpointError: the file is truncated, its header is damaged or names a tensor twice, or its tensors overlap or
        do not cover its data; the message names the file.
      ImportError: the safetensors package is not installed.

    Example:
      >>> read_header(Path("model.safetensors"))["model.norm.weight"].read([slice(3)])  # doctest: +SKIP
    """
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError(f"reading {path.name} needs the safetensors package: {how_to_install('demo')}") from None
    with blaming(path.name, "damaged, truncated or not safetensors: "):
        if not path.is_file():
            raise CheckpointError(f"{shortened(path.name)}: must be a file")
        file = safe_open(path, "numpy")
        _refuse_doubles(path)
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
        return {
            name: Tensor(path=path, name=name, dtype=part.get_dtype(), shape=tuple(part.get_shape()), file=file)
            for name, part in parts.items()
        }


def _refuse_doubles(path: Path) -> None:
    """Raises ValueError if a name occurs twice in the header; of two tensors the package would give the last."""
    with path.open("rb") as file:
        json.loads(file.read(int.from_bytes(file.read(8), "little")), object_pairs_hook=unique)
