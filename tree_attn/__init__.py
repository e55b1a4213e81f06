"""tree-attn: exact attention over a KV cache that is sharded along the sequence. Touches no device at import."""

from tree_attn.decode import tree_decode
from tree_attn.local import attend
from tree_attn.mesh import make_mesh
from tree_attn.placement import Shard, storage_order
from tree_attn.ragged import lean_decode, paged_decode
from tree_attn.shared_prefix import PrefixLevel, bifurcated_decode, hydragen_decode
from tree_attn.sparse import SparqOptions, sparq_decode
from tree_attn.state import SoftmaxState, empty_like, merge_segments, merge_state, merge_states

__all__ = [
    "PrefixLevel",
    "Shard",
    "SoftmaxState",
    "SparqOptions",
    "attend",
    "bifurcated_decode",
    "empty_like",
    "hydragen_decode",
    "lean_decode",
    "make_mesh",
    "merge_segments",
    "merge_state",
    "merge_states",
    "paged_decode",
    "sparq_decode",
    "storage_order",
    "tree_decode",
]
