"""tree-attn: exact attention over a KV cache that is sharded along the sequence. Touches no device at import."""

from tree_attn.decode import tree_decode
from tree_attn.local import attend
from tree_attn.mesh import make_mesh
from tree_attn.placement import Shard, storage_order
from tree_attn.state import SoftmaxState, empty_like, merge_segments, merge_state, merge_states

__all__ = [
    "Shard",
    "SoftmaxState",
    "attend",
    "empty_like",
    "make_mesh",
    "merge_segments",
    "merge_state",
    "merge_states",
    "storage_order",
    "tree_decode",
]
