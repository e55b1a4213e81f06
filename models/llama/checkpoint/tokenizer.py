"""Tokenizers, text to token ids and back: a Hugging Face `tokenizer.json`, or the byte-level BPE of a GGUF file."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tree_attn.models.llama.checkpoint.gguf import GGUFFile
from tree_attn.models.llama.checkpoint.huggingface import read_json
from tree_attn.models.llama.checkpoint.safetensors import CheckpointError

# A byte-level decoder writes this for bytes that are not (yet) a character.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

# GGUF's token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "tokenizer.ggml.token_type".
_CONTROL, _USER_DEFINED = 3, 4

# The cut of text before BPE in Llama 3, from the published tokenizer.json.
_LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _tokenizers():
    try:
        import tokenizers
    except ImportError:
        raise ImportError("reading a tokenizer needs the tokenizers package: pip install 'tree-attn[demo]'") from None
    return tokenizers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer and its chat template.

    Attributes:
      core: a `tokenizers.Tokenizer`.
      special_tokens: the texts that a chat template may use by name, such as `bos_token`.
      chat_template: Jinja source, or None for a model that was not tuned for chat.
      stop_ids: tokens after which generation ends.

    Example:
      >>> tokenizer.decode(tokenizer.encode("Hello, world"))
      'Hello, world'
    """

    core: Any
    special_tokens: dict[str, str]
    chat_template: str | None
    stop_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`; recognises special tokens in it, and adds the model's own prefix."""
        return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Returns the token ids of a conversation, ready for the assistant's answer.

        Args:
          messages: `{"role": ..., "content": ...}` each.

        Raises:
          ValueError: the model has no chat template, or the template refuses the messages.
        """
        # The template writes the prefix itself.
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Renders a conversation by the chat template."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template: send the prompt as it is (--raw)")
        template = _template_environment().from_string(self.chat_template)
        return template.render(messages=list(messages), add_generation_prompt=True, **self.special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids without special tokens."""
        return self.core.decode(list(ids), skip_special_tokens=True)


class TextStream:
    """Turns token ids that come one at a time into text that can be printed at once.

    A character can span tokens, so text is held back while its last character is incomplete.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._printed = 0

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes, perhaps empty."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith(_INCOMPLETE) else self._advance(text)

    def flush(self) -> str:
        """Returns the text that was held back."""
        return self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        new, self._printed = text[self._printed :], len(text)
        return new


@functools.cache
def _template_environment():
    try:
        import jinja2
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        raise ImportError("a chat template needs jinja2: pip install 'tree-attn[demo]'") from None

    def raise_exception(message: str):
        raise ValueError(f"the chat template refuses these messages: {message}")

    # Sandboxed, for the template comes with the weights; templates are written for these settings.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment


def from_folder(folder: Path, eos_token_ids: Iterable[int]) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder: `tokenizer.json`, and the template beside it if there is one.

    Args:
      folder: the checkpoint's.
      eos_token_ids: from `config.json`; those of `generation_config.json`, which instruct models extend, are added.

    Raises:
      CheckpointError: `tokenizer.json` is missing or damaged.
      ImportError: the tokenizers package is not installed.
    """
    path = folder / "tokenizer.json"
    read_json(path)
    try:
        core = _tokenizers().Tokenizer.from_file(str(path))
    except ImportError:
        raise
    except Exception as error:  # the package raises bare Exception
        raise CheckpointError(f"tokenizer.json: {error}") from None
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    return Tokenizer(
        core=core,
        special_tokens=_special_tokens(settings),
        chat_template=_folder_template(folder, settings),
        stop_ids=tuple(sorted({*eos_token_ids, *_generation_stops(folder)})),
    )


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Returns `bos_token` and other tokens by name; each is a string in the file, or an object with its content."""
    named = {name: value for name, value in settings.items() if name.endswith("_token") and value}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _folder_template(folder: Path, settings: dict[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _generation_stops(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    stops = read_json(path).get("eos_token_id") if path.is_file() else None
    if stops is None:
        return ()
    return (stops,) if isinstance(stops, int) else tuple(stops)


def from_gguf(file: GGUFFile) -> Tokenizer:
    """Rebuilds the tokenizer in a GGUF file's metadata with the tokenizers package.

    Raises:
      CheckpointError: another model than byte-level BPE (`gpt2`), or an unknown cut of text before it.
      ImportError: the tokenizers package is not installed.
    """
    tokenizers = _tokenizers()
    model = file.require("tokenizer.ggml.model")
    if model != "gpt2":
        raise CheckpointError(
            f"{file.path.name}: tokenizer.ggml.model must be 'gpt2', got {model!r}; "
            "pass a folder with a tokenizer.json instead"
        )
    tokens = file.require("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges")]
    pre = file.get("tokenizer.ggml.pre", "gpt-2")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3's vocabulary has whole words that its merges do not reach.
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    core.pre_tokenizer = _pre_tokenizer(tokenizers, pre, file.path.name)
    core.decoder = tokenizers.decoders.ByteLevel()
    types = file.require("tokenizer.ggml.token_type")
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        texts = [token for token, token_type in zip(tokens, types, strict=True) if token_type == wanted]
        core.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False) for text in texts])
    bos, eos = file.get("tokenizer.ggml.bos_token_id"), file.get("tokenizer.ggml.eos_token_id")
    if file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and bos is not None:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    ends = {eos, file.get("tokenizer.ggml.eot_token_id"), file.get("tokenizer.ggml.eom_token_id")} - {None}
    named = {"bos_token": bos, "eos_token": eos}
    return Tokenizer(
        core=core,
        special_tokens={name: tokens[index] for name, index in named.items() if index is not None},
        chat_template=file.get("tokenizer.chat_template"),
        stop_ids=tuple(sorted(ends)),
    )


def _pre_tokenizer(tokenizers: Any, pre: str, file_name: str) -> Any:
    """Returns the cut of text before BPE by its name in the metadata: the three cut digits, for one, differently."""
    pre_tokenizers = tokenizers.pre_tokenizers
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre == "llama-bpe":
        split = pre_tokenizers.Split(tokenizers.Regex(_LLAMA_3_SPLIT), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise CheckpointError(
        f"{file_name}: tokenizer.ggml.pre must be 'gpt-2', 'smollm' or 'llama-bpe', got {pre!r}; "
        "pass a folder with a tokenizer.json instead"
    )
