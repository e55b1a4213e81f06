"""Ranks that would generate different texts: the job ends before the first token and says which differs in what."""

import pytest
from jobs import SETTINGS, submit

from tree_attn.models.llama.checkpoint import hub

# In a GGUF file: a key, the number of the type uint32, and the value.
LAYERS = b"llama.block_count" + (4).to_bytes(4, "little")


@pytest.fixture(scope="module")
def shorter_model(tmp_path_factory):
    """Returns SmolLM2 without its last layer."""
    content = bytearray(hub.resolve(hub.SMOLLM2).read_bytes())
    place = content.index(LAYERS) + len(LAYERS)
    content[place : place + 4] = (int.from_bytes(content[place : place + 4], "little") - 1).to_bytes(4, "little")
    path = tmp_path_factory.mktemp("model") / "shorter.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--model {shorter_model}", "num_layers: 30 on rank 0 on n1, 29 on rank 1 on n2; the model's file: "),
        ("--seed 1", "--seed: 0 on rank 0 on n1 "),
    ],
    ids=["a model of fewer layers", "a seed"],
)
def test_one_rank_runs_something_else(cluster, shorter_model, tmp_path, option, words):
    starts = tmp_path / "starts"
    other = option.format(shorter_model=shorter_model)
    starts.write_text(
        f'#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || set -- "$@" {other}\nexec {SETTINGS["TREE_ATTN_COMMAND"]} "$@"\n'
    )
    starts.chmod(0o755)
    where = ("--nodelist=n[1-2]", "--ntasks-per-node=1")
    # Each rank ends by itself: srun would end the second one by a signal, and the status would be that.
    settings = {"TREE_ATTN_COMMAND": str(starts), "TREE_ATTN_SRUN": "--kill-on-bad-exit=0"}
    job = submit("decode", tmp_path / "out", "--max-new-tokens", "4", sbatch=where, **settings)
    assert job.wait(60) == "FAILED", job.story()
    assert job.facts["ExitCode"] == "2:0"
    for rank in range(2):
        assert f"the ranks do not agree on {words}" in job.rank_log(rank), job.story()
    assert job.rows("tokens.jsonl") == []
