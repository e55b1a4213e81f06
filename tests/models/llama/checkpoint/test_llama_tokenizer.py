"""Token ids: SmolLM2's against transformers, the rules of each way to cut text, chat templates and streaming."""

import dataclasses
import json
import re
import sys

import pytest

from tree_attn.extras import how_to_install
from tree_attn.models.llama.checkpoint import gguf_tokenizer
from tree_attn.models.llama.checkpoint import tokenizer as llama_tokenizer
from tree_attn.models.llama.checkpoint.reading import CheckpointError
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


def edit_json(path, edit) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def special_token_without_ids(content):
    content["post_processor"]["special_tokens"] = {}


def long_prefix(content):
    content["model"].update(continuing_subword_prefix="####", vocab={"a": 0, "b": 1, "ab": 2}, merges=[["a", "b"]])


def merge_to_no_token(content):
    content["model"].update(vocab={"a": 0, "b": 1}, merges=[["a", "b"]])


TOKENIZER_FAULTS = {
    "a special token that is unknown": special_token_without_ids,
    "a prefix longer than the tokens": long_prefix,
    "a merge that makes no token": merge_to_no_token,
    "chunks of length 0": lambda content: content.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a character map that is none": lambda content: content.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "another type": lambda content: content.update(model=3),
}


@pytest.mark.parametrize("name", TOKENIZER_FAULTS)
def test_a_panic_or_error_of_the_tokenizers_package_is_an_error_of_the_file(folder, name, capfd):
    """Some of them show at the first text only. A panic would leave a trace on stderr beside the one error."""
    edit_json(folder / "tokenizer.json", TOKENIZER_FAULTS[name])
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the tokenizers package refuses it: "):
        llama_tokenizer.from_folder(folder, [])
    assert capfd.readouterr().err == ""


def test_a_panic_at_a_later_text_names_the_file_and_an_interruption_passes(folder):
    class Core:
        def __init__(self, error):
            self.error = error

        def encode(self, *args, **options):
            raise self.error

    panic = type("PanicException", (BaseException,), {})
    tokenizer = dataclasses.replace(llama_tokenizer.from_folder(folder, []), core=Core(panic("index\nout of range")))
    with pytest.raises(CheckpointError, match=r"tokenizer.json: the tokenizer fails: index out of range"):
        tokenizer.encode("x")
    with pytest.raises(KeyboardInterrupt):
        dataclasses.replace(tokenizer, core=Core(KeyboardInterrupt())).encode("x")


def test_texts_are_neither_cut_nor_padded_and_must_be_characters(folder):
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.enable_truncation(3)
    core.enable_padding(length=10**6)
    core.save(str(folder / "tokenizer.json"))
    tokenizer = llama_tokenizer.from_folder(folder, [])
    assert len(tokenizer.encode("abcdef")) == 7
    with pytest.raises(ValueError, match=r"text must be characters, got '\\udcff' at index 2"):
        tokenizer.encode("hi\udcff")


SETTING_FAULTS = {
    "an object without content": ({"bos_token": {"id": 3}}, "tokenizer_config.json: bos_token must be a text"),
    "a number as a token": ({"eos_token": 3}, "tokenizer_config.json: eos_token must be a text, .*, got 3"),
    "half a character": ({"bos_token": "\ud800"}, "tokenizer_config.json: not JSON: .* surrogates not allowed"),
    "a number as template": ({"chat_template": 3}, "tokenizer_config.json: chat_template must be a text, got 3"),
    "templates without names": ({"chat_template": ["x"]}, "tokenizer_config.json: chat_template must be a text, or a"),
    "a default that is no text": (
        {"chat_template": [{"name": "default", "template": []}]},
        r"tokenizer_config.json: chat_template must be a text, got \[\]",
    ),
    "a template that does not compile": (
        {"chat_template": "{% for %}"},
        "tokenizer_config.json: the chat template does not compile: ",
    ),
    "a template of deep brackets": (
        {"chat_template": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}"},
        "tokenizer_config.json: the chat template does not compile: ",
    ),
}


@pytest.mark.parametrize("name", SETTING_FAULTS)
def test_wrong_settings_are_refused_as_the_folder_is_read(folder, name):
    settings, message = SETTING_FAULTS[name]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=message):
        llama_tokenizer.from_folder(folder, [])


@pytest.mark.parametrize("stops", ["2", True, 2.0, [2, {}], {"a": 1}, -1, 2**63])
def test_stop_tokens_of_another_type_are_refused(folder, stops):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id must be a token id or a list"):
        llama_tokenizer.from_folder(folder, [])


def test_a_template_that_fails_at_a_chat_names_its_file(folder):
    (folder / "chat_template.jinja").write_text("{{ 1 / (messages | length - 1) }}")
    tokenizer = llama_tokenizer.from_folder(folder, [])
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: the chat template fails: division by zero"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template.jinja: .*can't decode"):
        llama_tokenizer.from_folder(folder, [])


def test_templates_may_mark_the_answer_ask_for_tools_and_for_the_date(folder):
    template = "{% generation %}{{ tools is none }}{% endgeneration %} {{ strftime_now('%Y') | length }}"
    (folder / "chat_template.jinja").write_text(template)
    assert llama_tokenizer.from_folder(folder, []).render_chat([]) == "True 4"


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


def tokenizer_of_gguf(tmp_path, **changes) -> Tokenizer:
    return gguf_tokenizer.from_gguf(FakeGGUF(tmp_path / "fake.gguf", **changes))


def test_llama_3_metadata_gives_its_prefix_and_groups_digits_by_three(tmp_path):
    tokenizer = tokenizer_of_gguf(tmp_path)
    (one, two, both) = (tokenizer.core.token_to_id(token) for token in ("1", "2", "12"))
    assert tokenizer.encode("12") == [257, both]
    # Cut as "112", "2": the pair on either side of the cut is not merged.
    assert tokenizer.encode("1112", add_special_tokens=False) == [one, one, one, two]
    assert tokenizer.encode("<end>", add_special_tokens=False) == [258]
    assert tokenizer.stop_ids == (258,)
    assert tokenizer.decode([257, both, 258]) == "12"


def test_qwen_metadata_cut_each_digit_compose_characters_and_give_no_prefix(tmp_path):
    tokenizer = tokenizer_of_gguf(tmp_path, pre="qwen2")
    one, two = (tokenizer.core.token_to_id(token) for token in "12")
    assert tokenizer.encode("12") == [one, two]
    assert tokenizer.encode("e\N{COMBINING ACUTE ACCENT}") == tokenizer.encode("\N{LATIN SMALL LETTER E WITH ACUTE}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model must be 'gpt2' or 'llama', got 't5'"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre must be 'gpt-2', 'smollm', 'llama-bpe' or 'qwen2', got 'tekken'"),
        ({"tokens": 3}, "tokenizer.ggml.tokens must be an array of texts"),
        ({"tokens": ["a"] * 259}, "tokenizer.ggml.tokens names a token twice"),
        ({"token_type": [1.0] * 259}, "tokenizer.ggml.token_type must be an array of integers"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries for 259 tokens"),
        ({"merges": ["12"]}, "tokenizer.ggml.merges has '12' and ''; they and what they make must be tokens"),
        ({"merges": ["1 3"]}, "tokenizer.ggml.merges has '1' and '3'; they and what they make must be tokens"),
        ({"merges": ["1 34"]}, "tokenizer.ggml.merges has '1' and '34'"),
        ({"merges": [1]}, "tokenizer.ggml.merges must be an array of texts"),
        ({"bos_token_id": 259}, r"tokenizer.ggml.bos_token_id must be in \[0, 259\), got 259"),
        ({"eot_token_id": "2"}, r"tokenizer.ggml.eot_token_id must be in \[0, 259\), got '2'"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be true or false"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template must be a text, got 1"),
        ({"tokenizer.chat_template": "{% if %}"}, "the chat template does not compile"),
    ],
)
def test_another_tokenizer_in_gguf_is_refused(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=f"fake.gguf: {message}"):
        tokenizer_of_gguf(tmp_path, **changes)


def test_without_the_tokenizers_package_it_says_how_to_install_it(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=re.escape(how_to_install("demo"))):
        llama_tokenizer.from_folder(folder, [])
    with pytest.raises(ImportError, match=re.escape(how_to_install("demo"))):
        gguf_tokenizer.from_gguf(FakeGGUF.__new__(FakeGGUF))
