"""A random model in the place of any that a command names: its tokens are characters, and it has a chat template."""

import pytest
import tokenizers

from tree_attn.commands import session
from tree_attn.models.llama import LlamaConfig, parameters
from tree_attn.models.llama.checkpoint.open import Checkpoint
from tree_attn.models.llama.checkpoint.tokenizer import Tokenizer

LETTERS = "?abcdefghijklmnopqrstuvwxyz .<>/"
TINY = LlamaConfig(
    num_layers=1,
    hidden_size=16,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    vocab_size=len(LETTERS),
    max_position=64,
)
TEMPLATE = "{% for one in messages %}<{{ one.role[0] }}>{{ one.content }}{% endfor %}<a>"


@pytest.fixture
def tiny_checkpoint(monkeypatch) -> Checkpoint:
    """The opened model, which `session.open_with_progress` gives for every name."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token="?"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    names = dict(file_name="tokenizer.json", template_file_name="tokenizer_config.json")
    tokenizer = Tokenizer(core=core, special_tokens={}, chat_template=TEMPLATE, stop_ids=(), **names)
    make_create = lambda sharding, dtype, on_bytes: parameters.random(sharding, dtype)
    opened = Checkpoint(config=TINY, tokenizer=tokenizer, make_create=make_create)
    monkeypatch.setattr(session, "open_with_progress", lambda model: opened)
    return opened
