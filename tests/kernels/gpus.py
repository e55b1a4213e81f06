"""Descriptions of GPUs that are not there, for compiling ahead of time."""

import pathlib
import re

H200 = pathlib.Path(__file__).with_name("h200.txtpb").read_text()
# By compute capability: a name, streaming multiprocessors, KiB of shared memory of each; a CTA has 1 KiB less.
GPUS = {
    "8.0": ("NVIDIA A100-SXM4-80GB", 108, 164),
    "8.9": ("NVIDIA GeForce RTX 4090", 128, 100),
    "9.0": ("NVIDIA H200", 132, 228),
    "10.0": ("NVIDIA B200", 148, 228),
    "12.0": ("NVIDIA GeForce RTX 5090", 170, 100),
}


def target_config(capability: str) -> str:
    """Returns what XLA compiles for: the H200's properties, with those that programs depend on."""
    name, sms, shared = GPUS[capability]
    major, minor = capability.split(".")
    feature = " feature_extension: ACCELERATED_FEATURES" if int(major) >= 9 else ""
    text = H200
    for pattern, replacement in (
        (r"cuda_compute_capability \{.*?\}", f"cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}"),
        (r"shared_memory_per_core: \d+", f"shared_memory_per_core: {shared * 1024}"),
        (r"shared_memory_per_block_optin: \d+", f"shared_memory_per_block_optin: {(shared - 1) * 1024}"),
        (r"core_count: \d+", f"core_count: {sms}"),
        (r'device_description_str: ".*"', f'device_description_str: "{name}"'),
    ):
        text, count = re.subn(pattern, replacement, text)
        assert count == 1, pattern
    return text
