"""Ranks that differ in what they run: all end before the first step, and say which rank differs in what."""

import sys
import textwrap
import threading

from ranks import STARTS_S, endings, running

from tree_attn.cluster import agreement as agreement_module
from tree_attn.cluster.agreement import Agreement, disagreement
from tree_attn.cluster.launch import Launch


def name_of(rank: int) -> str:
    return f"rank {rank}"


def test_facts_that_differ_are_named_with_the_ranks_of_each_value():
    facts = {rank: {"layers": "30", "seed": "0"} for rank in range(7)}
    assert disagreement(facts, name_of) is None
    facts[2] = {"layers": "29", "seed": "0"}
    others = "rank 0 and rank 1 and rank 3 and rank 4 and 2 more"
    assert disagreement(facts, name_of) == f"the ranks do not agree on layers: 30 on {others}, 29 on rank 2"
    facts[3] = {"layers": "30"}
    assert "; seed: 0 on rank 0 and rank 1 and rank 2 and rank 4 and 2 more, absent on rank 3" in str(
        disagreement(facts, name_of)
    )


def test_a_rank_that_ends_without_its_facts_is_named():
    agreement = Agreement(Launch(source="torchrun", num_processes=3, hosts=("n1", "n1", "n2")))
    number = agreement.propose({"seed": "0"})
    agreement.take(1, number, {"seed": "0"})
    agreement.pass_on({}, staying=[1])
    assert agreement.wait(number) == "rank 2 on n2 ended before all ranks had agreed on what to run"


def test_the_last_rank_does_not_wait_for_ever():
    agreement = Agreement(Launch(source="torchrun", num_processes=2, process_id=1, hosts=("n1", "n1")))
    number = agreement.propose({})
    agreement.close()
    assert "all other ranks ended" in str(agreement.wait(number))


def test_rank_0_says_whom_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(agreement_module, "_PATIENCE_S", 0.05)
    agreement = Agreement(Launch(source="torchrun", num_processes=3, hosts=("n1", "n1", "n2")))
    number = agreement.propose({})
    agreement.pass_on({}, staying=[1, 2])
    agreement.take(1, number, {})
    later = threading.Timer(0.2, lambda: (agreement.take(2, number, {}), agreement.pass_on({}, staying=[1, 2])))
    later.start()
    assert agreement.wait(number) is None
    later.join()
    assert caplog.messages[0] == "rank 0 waits for rank 2 on n2 to say what to run"


def of_ranks(count: int, code: str):
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with running(command, count) as processes:
        return endings(processes, STARTS_S)


def test_other_arguments_on_one_rank():
    """The roll call ends it, before a model is looked for."""
    line = f"exec {sys.executable} -m tree_attn.cli generate --quiet --model absent.gguf --seed $RANK --prompt x$RANK"
    with running(["sh", "-c", line], 2) as processes:
        for status, errors in endings(processes, STARTS_S):
            assert status == 2 and errors.count("\n") == 1, errors
            assert 'the ranks do not agree on --prompt: ["x0"] on rank 0 ' in errors and '["x1"] on rank 1 ' in errors
            assert "; --seed: 0 on rank 0 " in errors and ", 1 on rank 1 " in errors


def test_another_model_on_one_rank(tmp_path):
    """Rank 1 has a layer less, and so another file too."""
    for rank in range(2):
        (tmp_path / f"{rank}.gguf").write_bytes(b"weights of %d" % rank)
    code = f"""
        import os, pathlib
        from tree_attn import cli, initialize
        from tree_attn.cluster import join
        from tree_attn.commands import processes
        from tree_attn.models.llama.config import LlamaConfig
        rank = int(os.environ["RANK"])
        sizes = dict(hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16)
        config = LlamaConfig(num_layers=3 - rank, **sizes, vocab_size=256, max_position=512)
        initialize()
        processes.agree_on_model(pathlib.Path(f"{tmp_path}/{{rank}}.gguf"), config)
    """
    for _, errors in of_ranks(2, code):
        assert "ValueError: the ranks do not agree on num_layers: 3 on rank 0 on" in errors
        assert "; the model's file: 12 bytes (" in errors
