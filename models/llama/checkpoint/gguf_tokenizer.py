"""The tokenizer in a GGUF file's metadata, rebuilt with the tokenizers package: byte-level BPE or SentencePiece."""

from typing import Any

from tree_attn.models.llama.checkpoint import chat_template
from tree_attn.models.llama.checkpoint.gguf import GGUFFile
from tree_attn.models.llama.checkpoint.gguf_sentencepiece import sentencepiece_core
from tree_attn.models.llama.checkpoint.reading import CheckpointError
from tree_attn.models.llama.checkpoint.tokenizer import Tokenizer, making, tokenizers_package, tried

# GGUF's token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "tokenizer.ggml.token_type".
_CONTROL, _USER_DEFINED = 3, 4
_KINDS = {str: "texts", int: "integers", float: "numbers"}

# The cut of text before BPE in Llama 3, from the published tokenizer.json.
_LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# That of Qwen2 and its successors takes each digit by itself.
_QWEN_2_SPLIT = _LLAMA_3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def from_gguf(file: GGUFFile) -> Tokenizer:
    """Rebuilds the tokenizer in a GGUF file's metadata with the tokenizers package.

    Raises:
      CheckpointError: another model than byte-level BPE (`gpt2`) and SentencePiece's (`llama`), an unknown cut of text
        before BPE, or metadata that contradict one another.
      ImportError: the tokenizers package is not installed.
    """
    tokenizers = tokenizers_package()
    model = file.require("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{file.path.name}: tokenizer.ggml.model must be 'gpt2' or 'llama', got {model!r:.200}; "
            "pass a folder with a tokenizer.json instead"
        )
    tokens = _array(file, "tokens", str)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        raise CheckpointError(f"{file.path.name}: tokenizer.ggml.tokens names a token twice")
    bos, eos = _token_id(file, "bos", len(tokens)), _token_id(file, "eos", len(tokens))
    with making(file.path.name):
        core = tried(_gguf_core(tokenizers, file, vocabulary, bos))
    template = file.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise CheckpointError(f"{file.path.name}: tokenizer.chat_template must be a text, got {template!r:.200}")
    if template is not None:
        chat_template.check_template(template, file.path.name)
    ends = {eos, _token_id(file, "eot", len(tokens)), _token_id(file, "eom", len(tokens))} - {None}
    named = {"bos_token": bos, "eos_token": eos}
    return Tokenizer(
        core=core,
        special_tokens={name: tokens[index] for name, index in named.items() if index is not None},
        chat_template=template,
        stop_ids=tuple(sorted(ends)),
        file_name=file.path.name,
        template_file_name=file.path.name,
    )


def _gguf_core(tokenizers: Any, file: GGUFFile, vocabulary: dict[str, int], bos: int | None) -> Any:
    """Returns the `tokenizers.Tokenizer` of a GGUF file's vocabulary; `bos` is the token of the model's prefix."""
    tokens, types = list(vocabulary), _array(file, "token_type", int)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{file.path.name}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    is_sentencepiece = file.require("tokenizer.ggml.model") == "llama"
    if is_sentencepiece:
        has_space_prefix = _flag(file, "add_space_prefix", True)
        scores = _array(file, "scores", float)
        core = sentencepiece_core(tokenizers, file.path.name, vocabulary, scores, types, has_space_prefix)
    else:
        core = _byte_level_core(tokenizers, file, vocabulary)
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        texts = [token for token, token_type in zip(tokens, types, strict=True) if token_type == wanted]
        core.add_tokens([tokenizers.AddedToken(text, special=special, normalized=False) for text in texts])
    is_llama_3 = file.get("tokenizer.ggml.pre") == "llama-bpe"
    if _flag(file, "add_bos_token", is_sentencepiece or is_llama_3) and bos is not None:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return core


def _byte_level_core(tokenizers: Any, file: GGUFFile, vocabulary: dict[str, int]) -> Any:
    merges = [tuple(merge.partition(" ")[::2]) for merge in _array(file, "merges", str)]
    for left, right in merges:
        if not right or not {left, right, left + right} <= vocabulary.keys():
            raise CheckpointError(
                f"{file.path.name}: tokenizer.ggml.merges has {left!r:.200} and {right!r:.200}; "
                "they and what they make must be tokens"
            )
    pre = file.get("tokenizer.ggml.pre", "gpt-2")
    # Llama 3's vocabulary has whole words that its merges do not reach.
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    core.pre_tokenizer = _pre_tokenizer(tokenizers, pre, file.path.name)
    core.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        core.normalizer = tokenizers.normalizers.NFC()
    return core


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{file.path.name}: tokenizer.ggml.{name} must be true or false")
    return value


def _array(file: GGUFFile, name: str, kind: type) -> list:
    """Returns an array of the tokenizer's metadata; raises CheckpointError unless all its elements are of that type."""
    key = f"tokenizer.ggml.{name}"
    values = file.require(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise CheckpointError(f"{file.path.name}: {key} must be an array of {_KINDS[kind]}")
    return values


def _token_id(file: GGUFFile, name: str, num_tokens: int) -> int | None:
    """Returns a token id of the tokenizer's metadata, or None; raises CheckpointError if it is no token's."""
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = file.get(key)
    if token_id is not None and (type(token_id) is not int or not 0 <= token_id < num_tokens):
        raise CheckpointError(f"{file.path.name}: {key} must be in [0, {num_tokens}), got {token_id!r:.200}")
    return token_id


def _pre_tokenizer(tokenizers: Any, pre: str, file_name: str) -> Any:
    """Returns the cut of text before BPE by its name in the metadata: the three cut digits, for one, differently."""
    pre_tokenizers = tokenizers.pre_tokenizers
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre in ("llama-bpe", "qwen2"):
        pattern = _LLAMA_3_SPLIT if pre == "llama-bpe" else _QWEN_2_SPLIT
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise CheckpointError(
        f"{file_name}: tokenizer.ggml.pre must be 'gpt-2', 'smollm', 'llama-bpe' or 'qwen2', got {pre!r:.200}; "
        "pass a folder with a tokenizer.json instead"
    )
