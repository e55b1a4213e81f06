"""Ring Attention, written as well as we can write it: the baseline Tree Attention is compared with.

Between GPUs, call `spread_transfers()` and `join_transfers()` of `tree_attn.measure.links` before JAX starts them, as
the commands do. Without the first, NCCL sends transfers of 17 to 84 MB at less than half of the link's rate. Without
the second, XLA waits for one of K and V in each hop, where a shard of both has more than 32 MiB. `tree-attn compare
--nccl search` finds the fastest setting for a size; `tree_attn.measure.transfer_settings.apply` takes its name.
"""

from tree_attn.ring_baseline.attention import ring_attention
from tree_attn.ring_baseline.decode import ring_decode
from tree_attn.ring_baseline.prefill import ring_prefill
from tree_attn.ring_baseline.ulysses import ulysses_attention

__all__ = ["ring_attention", "ring_decode", "ring_prefill", "ulysses_attention"]
