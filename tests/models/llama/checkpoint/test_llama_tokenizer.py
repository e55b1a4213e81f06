"""Token ids: SmolLM2's against transformers, the rules of each way to cut text, chat templates and streaming."""

import json
import sys

import pytest

from tree_attn.models.llama.checkpoint import tokenizer as llama_tokenizer
from tree_attn.models.llama.checkpoint.safetensors import CheckpointError
from tree_attn.models.llama.checkpoint.tokenizer import TextStream, Tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers: pip install 'tree-attn[demo]'")

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnew\n\n\nlines",
    "naïve café 日本語 🙂 Ω≈ç",
    "In 2024, 1234567 things cost $3.50.",
    "don't we've I'll they'd it's",
    "def f(x):\n    return x * 12\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<repo_name>a<file_sep>b<|endoftext|>",
    "not special: <|im_start > <unknown>",
    "",
]

CONVERSATIONS = [
    [{"role": "user", "content": "Hi  there"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
    [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three <|im_end|> four"},
    ],
]


@pytest.fixture(scope="module")
def reference(smollm2_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers torch")
    pytest.importorskip("torch", reason="transformers reads GGUF with torch: pip install torch==2.13.0")
    return transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_token_ids_are_those_of_transformers(smollm2, reference, text):
    ids = smollm2.tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    assert smollm2.tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_smollm2_chats_are_those_of_transformers(smollm2, reference, messages):
    expected = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert smollm2.tokenizer.encode_chat(messages) == expected


def test_smollm2_chat_text(smollm2):
    assert smollm2.tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm2_cuts_each_digit_from_what_is_before_it(smollm2):
    """Its published tokenizer does so, and llama.cpp; transformers 5.23 forgets it when it converts a GGUF file.

    It shows where white space comes before a digit: two line ends stay one token.
    """
    tokenizer = smollm2.tokenizer
    assert tokenizer.encode("\n\n2") == [*tokenizer.encode("\n\n"), *tokenizer.encode("2")]
    assert len(tokenizer.encode("\n\n")) == 1
    assert len(tokenizer.encode("1234")) == 4


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text and "<r" not in text])
def test_smollm2_decodes_what_it_encoded(smollm2, text):
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


def test_a_stream_never_prints_half_a_character(smollm2):
    tokenizer = smollm2.tokenizer
    text = "日本語 🙂 naïve"
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "" in pieces, "the text has no character of several tokens"
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    # Cut within a character, what was held back comes out in the end.
    stream = TextStream(tokenizer)
    cut = tokenizer.encode("🙂")[:1]
    assert [stream.push(token) for token in cut] == [""]
    assert stream.flush() == tokenizer.decode(cut)


def byte_level_core() -> "tokenizers.Tokenizer":
    """A vocabulary of the bytes and one special token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<s>", "<end>"])
    core.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return core


@pytest.fixture
def folder(tmp_path):
    byte_level_core().save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "<end>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_folder_gives_prefix_template_and_stops(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 12]}))
    tokenizer = llama_tokenizer.from_folder(folder, [7])
    assert tokenizer.stop_ids == (7, 12, 257)
    assert tokenizer.encode("ab") == [256, *tokenizer.encode("ab", add_special_tokens=False)]
    # The template writes the prefix, so it is there once.
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]).count(256) == 1


def test_a_template_of_its_own_file_or_of_several_is_found(folder):
    settings = {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert llama_tokenizer.from_folder(folder, []).render_chat([]) == "yes"
    (folder / "chat_template.jinja").write_text("file")
    assert llama_tokenizer.from_folder(folder, []).render_chat([]) == "file"


def test_a_template_can_refuse_and_cannot_reach_out(folder):
    def render(template: str) -> str:
        (folder / "chat_template.jinja").write_text(template)
        return llama_tokenizer.from_folder(folder, []).render_chat([{"role": "user", "content": "x"}])

    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Exception, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}")


def test_without_a_template_chat_says_what_to_do(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = llama_tokenizer.from_folder(folder, [])
    with pytest.raises(ValueError, match="no chat template: send the prompt as it is"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("text", "message"), [(None, r"tokenizer.json is missing"), ("{", "not JSON"), ("{}", r"tokenizer.json")]
)
def test_a_damaged_folder_is_refused(folder, text, message):
    path = folder / "tokenizer.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        llama_tokenizer.from_folder(folder, [])


class FakeGGUF:
    """The metadata of a byte-level vocabulary, as `GGUFFile` gives it."""

    def __init__(self, path, **changes):
        tokens = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        self.path = path
        self.metadata = {
            "model": "gpt2",
            "pre": "llama-bpe",
            "tokens": [*tokens, "12", "<s>", "<end>"],
            "token_type": [1] * 257 + [3, 3],
            "merges": ["1 2"],
            "bos_token_id": 257,
            "eos_token_id": 258,
            **changes,
        }

    def get(self, key, default=None):
        return self.metadata.get(key.removeprefix("tokenizer.ggml."), default)

    require = get


def gguf_tokenizer(tmp_path, **changes) -> Tokenizer:
    return llama_tokenizer.from_gguf(FakeGGUF(tmp_path / "fake.gguf", **changes))


def test_llama_3_metadata_gives_its_prefix_and_groups_digits_by_three(tmp_path):
    tokenizer = gguf_tokenizer(tmp_path)
    (one, two, both) = (tokenizer.core.token_to_id(token) for token in ("1", "2", "12"))
    assert tokenizer.encode("12") == [257, both]
    # Cut as "112", "2": the pair on either side of the cut is not merged.
    assert tokenizer.encode("1112", add_special_tokens=False) == [one, one, one, two]
    assert tokenizer.encode("<end>", add_special_tokens=False) == [258]
    assert tokenizer.stop_ids == (258,)
    assert tokenizer.decode([257, both, 258]) == "12"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model must be 'gpt2', got 'llama'"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre must be 'gpt-2', 'smollm' or 'llama-bpe', got 'qwen2'"),
    ],
)
def test_another_tokenizer_in_gguf_is_refused(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        gguf_tokenizer(tmp_path, **changes)


def test_without_the_tokenizers_package_it_says_how_to_install_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'tree-attn\[demo\]'"):
        llama_tokenizer.from_folder(folder, [])
    with pytest.raises(ImportError, match=r"pip install 'tree-attn\[demo\]'"):
        llama_tokenizer.from_gguf(FakeGGUF.__new__(FakeGGUF))
