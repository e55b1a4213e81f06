"""The benchmark of reading alone: CTAs share the tiles, the kernel ends, and the summary takes the fastest layout."""

import json

import bench_read
import jax.numpy as jnp
import pytest
from lean_interpreter import interpreter, needs_interpreter


@pytest.mark.parametrize("order", bench_read.ORDERS)
@pytest.mark.parametrize("tiles, num_ctas", [(7, 3), (2, 3), (1001, 132)])
def test_each_tile_is_read_once(tiles, num_ctas, order):
    read = []
    for cta in range(num_ctas):
        first, stride, count = bench_read.tiles_of(cta, tiles, num_ctas, order)
        read += [first + i * stride for i in range(count)]
    assert sorted(read) == list(range(tiles))


@needs_interpreter
@pytest.mark.parametrize("order", bench_read.ORDERS)
def test_the_kernel_ends_without_a_race_and_hands_the_token_on(order):
    token, array = jnp.arange(128, dtype=jnp.bfloat16), jnp.ones((7 * 8, bench_read.WIDTH), jnp.bfloat16)
    with interpreter() as found:
        out = bench_read.read_all(token, array, num_ctas=3, rows=8, stages=2, order=order)
    assert (out == token).all() and found and not any(kernel.races_found for kernel in found)


def test_the_summary_takes_the_fastest_layout(tmp_path):
    row = {"megabytes": 48, "limit_us": 10.0, "order": "turns"}
    rows = [row | {"layout": [i, 32, 2], "chain_us_median": us} for i, us in ((1, 12.5), (2, 20.0))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "| 48 | 10.0 | 12.5 | 80.0% | (1, 32, 2), turns |" in bench_read.summary(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "a GPU is needed, JAX has 'cpu' devices"),
        (["--megabytes", "82,x"], "must be positive whole numbers"),
        (["--markdown"], "--markdown: there is no file"),
    ],
)
def test_what_cannot_run_says_so(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench_read.py", "--out", str(tmp_path / "rows.jsonl"), *arguments])
    with pytest.raises(SystemExit):
        bench_read.main()
    assert message in capsys.readouterr().err and not (tmp_path / "rows.jsonl").exists()
