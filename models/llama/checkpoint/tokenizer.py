"""Tokenizers, text to token ids and back: as a Hugging Face folder has them."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tree_attn.extras import how_to_install
from tree_attn.models.llama.checkpoint import chat_template
from tree_attn.models.llama.checkpoint.reading import CheckpointError, blaming, read_json, read_text

SETTINGS = "tokenizer_config.json"


def tokenizers_package() -> Any:
    """Returns the tokenizers package; raises ImportError that says how to install it."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError(f"reading a tokenizer needs the tokenizers package: {how_to_install('demo')}") from None
    return tokenizers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer and its chat template.

    Attributes:
      core: a `tokenizers.Tokenizer`.
      special_tokens: the texts that a chat template may use by name, such as `bos_token`.
      chat_template: Jinja source, or None for a model that was not tuned for chat.
      stop_ids: tokens after which generation ends.
      file_name, template_file_name: the files that it was read from, which errors name.

    Example:
      >>> tokenizer.decode(tokenizer.encode("Hello, world"))
      'Hello, world'
    """

    core: Any
    special_tokens: dict[str, str]
    chat_template: str | None
    stop_ids: tuple[int, ...]
    file_name: str
    template_file_name: str

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`; recognises special tokens in it, and adds the model's own prefix.

        Raises:
          ValueError: `text` holds code points that are no characters, from bytes that are not UTF-8.
          CheckpointError: the tokenizer's file has no rule for this text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text must be characters, got {text[error.start]!r} at index {error.start}") from None
        with blaming(self.file_name, "the tokenizer fails: "):
            return self.core.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Returns the token ids of a conversation, ready for the assistant's answer.

        Args:
          messages: `{"role": ..., "content": ...}` each.

        Raises:
          ValueError: the model has no chat template, or the template refuses the messages.
          CheckpointError: the template is wrong, or the tokenizer.
        """
        # The template writes the prefix itself.
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Renders a conversation by the chat template; raises as `encode_chat`."""
        if self.chat_template is None:
            raise ValueError("this model has no chat template: send the prompt as it is (--raw)")
        return chat_template.render(self.chat_template, self.template_file_name, messages, self.special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids without special tokens."""
        with blaming(self.file_name, "the tokenizer fails: "):
            return self.core.decode(list(ids), skip_special_tokens=True)


class TextStream:
    """Turns token ids that come one at a time into text that can be printed at once.

    A character can span tokens, so text is held back while its last character is incomplete.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._stream = tokenizers_package().decoders.DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_printed = 0

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes, perhaps empty."""
        self._ids.append(token_id)
        with blaming(self._tokenizer.file_name, "the tokenizer fails: "):
            text = self._stream.step(self._tokenizer.core, token_id) or ""
        self._num_printed += len(text)
        return text

    def flush(self) -> str:
        """Returns the text that was held back."""
        text = self._tokenizer.decode(self._ids)[self._num_printed :]
        self._num_printed += len(text)
        return text


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
    tokenizers = tokenizers_package()
    with making(path.name):
        core = tried(tokenizers.Tokenizer.from_file(str(path)))
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    template, template_file_name = _folder_template(folder, settings)
    if template is not None:
        chat_template.check_template(template, template_file_name)
    return Tokenizer(
        core=core,
        special_tokens=_special_tokens(settings),
        chat_template=template,
        stop_ids=tuple(sorted({*eos_token_ids, *_generation_stops(folder)})),
        file_name=path.name,
        template_file_name=template_file_name,
    )


@contextlib.contextmanager
def making(file_name: str) -> Iterator[None]:
    """Raises CheckpointError for any error or panic of the tokenizers package within, in one message.

    A panic writes its trace to the file descriptor of stderr, so this leads nowhere meanwhile.
    """
    with blaming(file_name, "the tokenizers package refuses it: "), contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there may be no stderr
            saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
            stack.callback(lambda: (os.dup2(saved, 2), os.close(saved), os.close(nowhere)))
            os.dup2(nowhere, 2)
        yield


def tried(core: Any) -> Any:
    """Returns a `tokenizers.Tokenizer` of whole texts, after a first text: some faults of a file show only then."""
    core.no_truncation()
    core.no_padding()
    for text in ("", "Hello, world! 1234\n", "na\N{LATIN SMALL LETTER I WITH DIAERESIS}ve \N{SLIGHTLY SMILING FACE}"):
        ids = core.encode(text).ids
        core.decode(ids, skip_special_tokens=False)
    return core


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Returns `bos_token` and other tokens by name; each is a string in the file, or an object with its content."""
    named = {name: value for name, value in settings.items() if name.endswith("_token") and value}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if name in texts and not isinstance(texts[name], str):
            raise CheckpointError(
                f"{SETTINGS}: {name} must be a text, or an object with its content, got {named[name]!r:.200}"
            )
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _folder_template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, str]:
    """Returns the chat template, if there is one, and the name of its file."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path), path.name
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        if not all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in template):
            raise CheckpointError(
                f"{SETTINGS}: chat_template must be a text, or a list of objects with name and template"
            )
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if not isinstance(template, str | None):
        raise CheckpointError(f"{SETTINGS}: chat_template must be a text, got {template!r:.200}")
    return template, SETTINGS


def _generation_stops(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    stops = read_json(path).get("eos_token_id") if path.is_file() else None
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    for stop in stops:
        if isinstance(stop, bool) or not isinstance(stop, int) or not 0 <= stop < 2**31:
            raise CheckpointError(f"{path.name}: eos_token_id must be a token id or a list of them, got {stop!r:.200}")
    return tuple(stops)
