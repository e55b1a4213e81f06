"""Ring Attention, written as well as we can write it: the baseline Tree Attention is compared with."""

from ring_baseline.attention import ring_attention
from ring_baseline.decode import ring_decode

__all__ = ["ring_attention", "ring_decode"]
