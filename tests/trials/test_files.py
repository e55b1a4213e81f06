"""Some mutated checkpoints of the trials; `python3 -m tests.trials --subject files` runs more."""

import faulthandler
import struct

import numpy as np
import pytest

from tree_attn.models.llama.checkpoint import open as load
from tree_attn.models.llama.checkpoint.reading import CheckpointError
from tree_attn.models.llama.checkpoint.safetensors import Tensor

from . import checkpoints, files

pytest.importorskip("gguf", reason="needs gguf: pip install 'tree-attn[demo]'")
pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'tree-attn[demo]'")


@pytest.fixture(autouse=True)
def limit():
    """Ends the run with a trace after a hang that Python cannot interrupt."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.parametrize("kind", ["folder", "sharded", "gguf"])
def test_the_valid_files_are_read_right(kind):
    for file in checkpoints.files(kind):
        assert files.check(files.Case(kind, file, ())) is None


@pytest.mark.parametrize("element_type", [0, 1, 5, 6, 9])
def test_an_array_longer_than_its_file_ends(element_type):
    """The package's reader follows it beyond the end of the file, and takes memory until the process is killed."""
    content, numbers, _ = checkpoints.gguf()
    lengths = [at for at, code in numbers if code == "Q" and content[at : at + 8] == struct.pack("<Q", 288)]
    for at in lengths:
        edit = ("put", at - 4, struct.pack("<IQ", element_type, 10**18))
        assert files.check(files.Case("gguf", "model.gguf", (edit,))) is None


@pytest.mark.parametrize("seed", range(3))
def test_mutated_files_are_read_right_or_raise_the_one_error(seed):
    rng = np.random.default_rng(seed)
    for _ in range(40):
        case = files.draw(rng)
        assert (fault := files.check(case)) is None, f"{fault}\n{case!r}"


def test_the_trial_notices_another_error_a_missing_name_and_wrong_weights(monkeypatch):
    assert files.check(files.Case("folder", "config.json", ())) is None  # the first check opens all kinds of files
    case = files.Case("folder", "config.json", (("json", ("vocab_size",), "1"),))
    for error, fault in (
        (KeyError("content"), "KeyError: "),
        (type("PanicException", (BaseException,), {})("index"), "PanicException: index"),
        (CheckpointError("hidden_size must be"), "no name: "),
    ):

        def fail(path, error=error):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(load, "open_checkpoint", fail)
            assert files.check(case).startswith(fault)
    monkeypatch.setattr(Tensor, "read", lambda tensor, index, read=Tensor.read: read(tensor, index) + 1)
    assert files.check(files.Case("folder", "config.json", ())) == "wrong weights: embedding"
