"""The calls for the sanitizer, through `xla` where there is no GPU: each is compared with the oracle."""

import json

import jax
import numpy as np
import pytest
import sanitize
from lean_interpreter import interpreter, needs_interpreter

from tree_attn.kernels import few_rows_call, few_rows_chain_call, lean_call, targets
from tree_attn.local import mosaic_gpu

ON_ONE = [call for call in sanitize.ATTENTION if not call.startswith("exchanged")]


@pytest.mark.parametrize("call", ON_ONE)
def test_a_call_of_attention_is_compared_with_the_oracle(call, monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "IMPLEMENTATION", "xla")
    assert sanitize.main([call]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["passed"] and row["same_bits_again"] and row["max_abs_error"] <= row["tolerance"]
    assert row["stored_dtype"] == ("float8_e4m3fn" if call == "float8" else "bfloat16")


def test_a_result_that_is_wrong_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(sanitize, "IMPLEMENTATION", "xla")
    monkeypatch.setattr(sanitize.OracleCase, "expected", lambda case, prefill: 3 * (case.query.astype(float),))
    monkeypatch.setattr("tree_attn.tolerances.max_abs_error", lambda *_: 1.0)
    monkeypatch.setattr("tree_attn.tolerances.lse_tolerance", lambda *_: 0.5)
    assert sanitize.main(["whole"]) == 1


@pytest.mark.skipif(jax.__version_info__ < mosaic_gpu.OLDEST_JAX, reason="runs with JAX 0.11 or newer")
@pytest.mark.parametrize("capability", ["8.9", "9.0"])
def test_it_is_planned_for_the_gpu_that_is_named(capability, monkeypatch):
    planned = []

    def run(call, *_, **__):
        planned.append(call.shape.target)
        raise NotImplementedError("not run")

    monkeypatch.setattr(mosaic_gpu, "unavailable", lambda: None)
    monkeypatch.setattr(lean_call.LeanCall, "run", run)
    for call in ("cut", "odd", "small_pages", "float8"):
        assert sanitize.main([call, "--as", capability]) == 1, "what is refused has not passed"
    is_hopper = capability == "9.0"
    assert [target.is_hopper for target in planned] == [is_hopper, is_hopper, False, is_hopper]
    assert all(target.smem_bytes_per_sm == targets.TARGETS[capability].smem_bytes_per_sm for target in planned)


@needs_interpreter
@pytest.mark.usefixtures("time_limit")
@pytest.mark.parametrize(("call", "launches"), [("products", 1), ("appended", 1), ("chained", 3)])
def test_products_have_no_race_in_the_interpreter(call, launches, monkeypatch, capsys):
    monkeypatch.setattr(few_rows_call, "num_sms", lambda: 2)
    monkeypatch.setattr(few_rows_chain_call, "num_sms", lambda: 2)
    with interpreter() as found:
        assert sanitize.main([call]) == 0
    assert np.isfinite(float(capsys.readouterr().out))
    assert [races.races_found for races in found] == [False] * launches


def test_kernels_for_hopper_are_not_forced_into_another_form(capsys):
    with pytest.raises(SystemExit):
        sanitize.main(["sparq", "--as", "8.9"])
    assert "sparq has kernels for Hopper only" in capsys.readouterr().err
