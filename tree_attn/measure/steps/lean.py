"""LeanAttention's steps: sequences of equal or of different lengths, on one GPU, beside a fixed split."""

import ctypes
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from tree_attn.devices import visible_gpus
from tree_attn.local import flash_attn
from tree_attn.measure.steps import ways
from tree_attn.measure.steps.chains import chained
from tree_attn.measure.steps.step import READ_GB_PER_S, Step

FIXED_SPLIT = "fixed split"
MAX_SPLITS = 128
ENOUGH = 0.85  # of the best share of busy SMs


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeanStep:
    """One decoding step: lengths of the sequences (no lengths are passed if all are equal), heads, head dim."""

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    figure: str = "table"

    @property
    def is_ragged(self) -> bool:
        """True if the sequences differ in length."""
        return len(set(self.lengths)) > 1

    @property
    def key_value_bytes(self) -> int:
        """Bytes of all keys and values, in bfloat16."""
        return 2 * 2 * sum(self.lengths) * self.num_kv_heads * self.head_dim

    @property
    def limit_us(self) -> float:
        """The time to read all keys and values once."""
        return self.key_value_bytes / READ_GB_PER_S / 1e3

    @property
    def num_output_tiles(self) -> int:
        """KV heads of all sequences: the least parts that a partition among CTAs has."""
        return len(self.lengths) * self.num_kv_heads

    def step(self) -> Step:
        """Returns the step as the sweep times it."""
        return Step(
            family="ragged" if self.is_ragged else "dense",
            case=self.figure,
            lengths=self.lengths,
            gives_lengths=self.is_ragged,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )

    def row(self) -> dict:
        """Returns the fields of a row that name this step."""
        shape = {"batch": len(self.lengths), "max_keys": max(self.lengths), "sum_keys": sum(self.lengths)}
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        bounds = {"key_value_bytes": self.key_value_bytes, "limit_us": self.limit_us}
        return {"figure": self.figure, "is_ragged": self.is_ragged, "dtype": "bfloat16"} | shape | heads | bounds


def implementations() -> list[str]:
    """Returns the ways of a step on a GPU: this library's, cuDNN's, and flash-attn-jax's where it is installed."""
    return [ways.OURS, "cudnn", *(["flash_attn"] if flash_attn.unavailable() is None else [])]


def time_way(case: LeanStep, name: str, n_iters: int, *, with_energy: bool = False) -> dict:
    """Returns the fields of a row: the times of a step by an implementation or by `FIXED_SPLIT`, and its energy."""
    step = case.step()
    way = fixed_split(case) if name == FIXED_SPLIT else ways.named(step, name)
    ((_, row),) = ways.time_ways(step, [way], n_iters=n_iters)
    if name == FIXED_SPLIT:
        row |= {"splits": split_config(case)[1]}
    return row | (_energy(step, way) if with_energy and "error" not in row else {})


def fixed_split(case: LeanStep) -> ways.Way:
    """Returns FlashDecoding's partition in this library's kernel: each head's keys in equal parts, a CTA each.

    It differs from the lean kernel's own in the schedule alone: the same KV tiles, the same inner loop, the same merge.

    Source: LeanAttention, section 3.3.
    """

    def run(query, key, value):
        from tree_attn.local import mosaic_gpu

        config, _ = split_config(case)
        options = dict(num_slots=key.shape[1], scale=case.head_dim**-0.5, logits_soft_cap=None)
        return mosaic_gpu.lean_state(query, key, value, None, config=config, **options).out

    return ways.Way(name=FIXED_SPLIT, run=run)


def split_config(case: LeanStep) -> tuple[Any, int]:
    """Returns the lean kernel's layout with a CTA for each part of a head's keys, and the parts of a head.

    Raises:
      NotImplementedError: sequences differ in length.
    """
    from tree_attn.kernels import lean_call, tuning

    if case.is_ragged:
        raise NotImplementedError("a fixed split is of sequences of one length")
    keys, batch = case.lengths[0], len(case.lengths)
    query = jax.ShapeDtypeStruct((batch, 1, case.num_heads, case.head_dim), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((batch, keys, case.num_kv_heads, case.head_dim), jnp.bfloat16)
    shape = lean_call.lean_shape(query, key, num_slots=keys, scale=1.0, logits_soft_cap=None)
    tuned = tuning.lean_config(shape, is_static=True)
    kv_tiles = -(-keys // tuned.block_kv)
    splits = num_splits(case)
    while kv_tiles % splits:  # equal parts: a run of the kernel then ends where a head does
        splits -= 1
    return dataclasses.replace(tuned, num_ctas=case.num_output_tiles * splits), splits


def num_splits(case: LeanStep, num_sms: int | None = None) -> int:
    """Returns in how many parts FlashDecoding cuts each head's keys: the fewest that keep about as many SMs busy.

    With heads for four fifths of the SMs it is 1. Else it is the smallest number that keeps 85 % as many SMs busy as
    the best one does, over all waves of CTAs.

    Args:
      num_sms: default: those of the GPU.

    Source: `num_splits_heuristic` of flash-attention 2.5.6, the version that LeanAttention measures.
    """
    if num_sms is None:
        from tree_attn.kernels import tuning

        num_sms = tuning.num_sms()
    tiles, blocks = case.num_output_tiles, -(-max(case.lengths) // (256 if case.head_dim <= 64 else 128))
    if tiles >= 0.8 * num_sms:
        return 1
    shares = {}
    for splits in range(1, min(MAX_SPLITS, num_sms, blocks) + 1):
        changes = splits == 1 or -(-blocks // splits) != -(
            -blocks // (splits - 1)
        )  # else as many blocks in the longest
        if changes:
            waves = tiles * splits / num_sms
            shares[splits] = waves / -(-tiles * splits // num_sms)
    return min(splits for splits, share in shares.items() if share >= ENOUGH * max(shares.values()))


def _energy(step: Step, way: ways.Way, seconds: float = 3.0) -> dict:
    """Measures joules per call and mean watts, by the energy counter of JAX's first GPU, over back-to-back calls.

    What a GPU takes while it waits between programs is counted: `energy_us_per_call`, beside a step's time, shows it.
    """
    (query, copies, shared), calls = ways.inputs(step), ways.chains(step)[1]  # the long chain: the fewest waits
    args = query, [way.cache(arrays) for arrays in copies], shared
    program = jax.jit(chained(jax.jit(way.run), calls))
    jax.block_until_ready(program(*args))
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    device, before, after = ctypes.c_void_p(), ctypes.c_ulonglong(), ctypes.c_ulonglong()
    nvml.nvmlInit_v2()
    # By its address: NVML's numbers do not follow CUDA_VISIBLE_DEVICES.
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(visible_gpus()[0].encode(), ctypes.byref(device)):
        return {"energy_error": f"NVML does not find the GPU {visible_gpus()[0]}"}
    read = lambda to: nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(to))
    if read(before):
        return {"energy_error": "NVML gives no total energy on this device"}
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        jax.block_until_ready([program(*args) for _ in range(20)])
        count += 20 * calls
    elapsed = time.perf_counter() - start
    read(after)
    joules = (after.value - before.value) / 1e3
    per_call = {"energy_mj_per_call": joules / count * 1e3, "energy_us_per_call": elapsed / count * 1e6}
    return per_call | {"power_w_mean": joules / elapsed, "energy_calls": count}
