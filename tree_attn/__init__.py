"""tree-attn: exact attention over a KV cache that is sharded along the sequence.

Each public name is imported on first use, so `import tree_attn` costs little and touches no device.
"""

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_attn.arguments import Window as Window
    from tree_attn.cache import KVCache as KVCache
    from tree_attn.cache_checks import CacheFullError as CacheFullError
    from tree_attn.cluster.join import initialize as initialize
    from tree_attn.decode import tree_decode as tree_decode
    from tree_attn.energy_function import attention_moments as attention_moments
    from tree_attn.energy_function import energy as energy
    from tree_attn.local import attend as attend
    from tree_attn.mesh import make_mesh as make_mesh
    from tree_attn.placement import PromptLayout as PromptLayout
    from tree_attn.placement import Shard as Shard
    from tree_attn.placement import storage_order as storage_order
    from tree_attn.prefix_level import PrefixLevel as PrefixLevel
    from tree_attn.ragged import lean_decode as lean_decode
    from tree_attn.ragged import paged_decode as paged_decode
    from tree_attn.shared_prefix import bifurcated_decode as bifurcated_decode
    from tree_attn.shared_prefix import hydragen_decode as hydragen_decode
    from tree_attn.sparq import SparqOptions as SparqOptions
    from tree_attn.sparq import sparq_decode as sparq_decode
    from tree_attn.state import SoftmaxState as SoftmaxState
    from tree_attn.state import empty_like as empty_like
    from tree_attn.state import merge_segments as merge_segments
    from tree_attn.state import merge_state as merge_state
    from tree_attn.state import merge_states as merge_states

__version__ = "0.2.0"  # pyproject.toml reads it from here, so that a checkout that is not installed has it too

_MODULE_OF = {
    "CacheFullError": "cache_checks",
    "KVCache": "cache",
    "PrefixLevel": "prefix_level",
    "PromptLayout": "placement",
    "Shard": "placement",
    "SoftmaxState": "state",
    "SparqOptions": "sparq",
    "Window": "arguments",
    "attend": "local",
    "attention_moments": "energy_function",
    "bifurcated_decode": "shared_prefix",
    "empty_like": "state",
    "energy": "energy_function",
    "hydragen_decode": "shared_prefix",
    "initialize": "cluster.join",
    "lean_decode": "ragged",
    "make_mesh": "mesh",
    "merge_segments": "state",
    "merge_state": "state",
    "merge_states": "state",
    "paged_decode": "ragged",
    "sparq_decode": "sparq",
    "storage_order": "placement",
    "tree_decode": "decode",
}
__all__ = sorted(_MODULE_OF)

# In a checkout `models` and `ring_baseline` lie beside this folder; a wheel has them in it. So a checkout that is not
# installed works, and one beside another that is installed takes no part of the other.
if not os.path.isdir(os.path.join(__path__[0], "models")):
    __path__.append(os.path.dirname(__path__[0]))


def __getattr__(name: str):
    """Imports the module that defines `name`, on first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'tree_attn' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tree_attn.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
