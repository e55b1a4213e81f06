"""The decoding step of the paper's section 6.3."""

from tree_attn.cost.step import DecodeStep


def make_step(**changes) -> DecodeStep:
    """Returns the configuration of section 6.3: 16 heads of 128, 640,000 keys, 8 devices, bfloat16."""
    sizes = dict(batch=1, num_keys=640_000, num_heads=16, num_kv_heads=16, head_dim=128, dtype="bfloat16", n_devices=8)
    return DecodeStep(**(sizes | changes))
