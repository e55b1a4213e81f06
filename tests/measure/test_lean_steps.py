"""FlashDecoding's fixed split in the lean kernel: its number of parts, and that a part is a CTA's whole run."""

import jax
import jax.numpy as jnp
import pytest
from lean_interpreter import interpreter, needs_interpreter

from tree_attn import attend
from tree_attn.kernels import schedule
from tree_attn.measure.steps import lean


def step(batch, keys, heads, head_dim=64):
    return lean.LeanStep(lengths=(keys,) * batch, num_heads=heads, num_kv_heads=heads, head_dim=head_dim)


# By hand from flash-attention's C++: waves of tiles x parts over 132 SMs, and 85 % of the best share.
@pytest.mark.parametrize(
    "batch, keys, heads, splits",
    [
        (6, 65536, 48, 1),  # Figure 8 of the paper: 288 heads are more than the SMs
        (4, 262144, 32, 1),  # 128 of 132
        (4, 262144, 24, 4),  # 96, 192, 288, 384 parts fill 73, 73, 73, 97 % of their waves
        (4, 262144, 16, 2),  # 128
        (1, 131072, 56, 2),  # 112
        (1, 512, 1, 2),  # no more parts than blocks of 256 keys
    ],
)
def test_the_number_of_parts_is_flash_decodings(batch, keys, heads, splits):
    assert lean.num_splits(step(batch, keys, heads), num_sms=132) == splits


@pytest.mark.parametrize("batch, keys, heads", [(6, 4096, 48), (4, 65536, 24), (1, 131072, 56), (2, 1000, 3)])
def test_a_part_is_the_run_of_one_cta(batch, keys, heads):
    """Equal parts, and none that crosses the end of a head."""
    case = step(batch, keys, heads)
    config, splits = lean.split_config(case)
    kv_tiles, tiles = -(-keys // config.block_kv), batch * heads
    assert config.num_ctas == tiles * splits and kv_tiles % splits == 0
    runs = schedule.num_runs(tiles * kv_tiles, config.num_ctas)
    for tile in range(tiles):
        _, parts = schedule.partials_of_output_tile(tile, tile * kv_tiles, kv_tiles, tiles * kv_tiles, runs)
        assert parts == splits


def test_sequences_of_several_lengths_have_no_fixed_split():
    ragged = lean.LeanStep(lengths=(64, 128), num_heads=2, num_kv_heads=2, head_dim=64)
    with pytest.raises(NotImplementedError, match="sequences of one length"):
        lean.split_config(ragged)


@needs_interpreter
@pytest.mark.slow
def test_a_fixed_split_is_exact_and_has_no_race(time_limit):
    case = step(1, 512, 2)
    assert lean.split_config(case)[1] == 2  # parts are merged
    draw = lambda seed, tokens: jax.random.normal(jax.random.key(seed), (1, tokens, 2, 64), jnp.bfloat16)
    query, key, value = draw(0, 1), draw(1, 512), draw(2, 512)
    with interpreter() as kernels:
        out = lean.fixed_split(case).run(query, key, value)
    assert len(kernels) == 2 and not any(kernel.races_found for kernel in kernels)
    expected = attend(query, key, value, implementation="xla").out
    assert jnp.abs(out.astype(jnp.float32) - expected.astype(jnp.float32)).max() < 0.005
