"""Mutated checkpoints: a damaged file opens, loads, tokenizes and chats as its bytes say, or raises CheckpointError."""

import dataclasses
import functools
import json
import pathlib
import resource
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Iterator

import numpy as np

from . import checkpoints

SUBJECT = "files"

MAX_SECONDS = 5  # of CPU time
MAX_MEBIBYTES = 150  # that the process grows by


@dataclasses.dataclass(frozen=True)
class Case:
    """One file of a valid checkpoint, and what is done to it.

    Attributes:
      kind: "folder", "sharded" or "gguf".
      file: the file's name.
      edits: in order: ("put", offset, bytes), ("insert", offset, bytes), ("cut", length); or of the JSON value at a
        path of keys and indices ("json", path, text), ("twice", path, text), ("nest", path, depth),
        ("long", path, length), ("drop", path). The JSON of a safetensors file is its header.
    """

    kind: str
    file: str
    edits: tuple[tuple, ...]


def draw(rng: np.random.Generator) -> Case:
    """Returns a random case of one to three edits."""
    kind = _one(rng, ["folder", "folder", "sharded", "gguf", "gguf"])
    files = sorted(checkpoints.files(kind))
    if kind == "sharded":  # the other files are those of a folder
        files = [name for name in files if name.startswith("model")]
    file = _one(rng, files)
    content = checkpoints.files(kind)[file]
    edits = []
    for _ in range(_one(rng, [1, 1, 1, 2, 3])):
        edit = _edit(rng, kind, file, content)
        content = _edited(content, edit, file)
        edits.append(edit)
    return Case(kind, file, tuple(edits))


def simpler(case: Case) -> Iterator[Case]:
    """Yields the case without one of its edits."""
    if len(case.edits) > 1:
        for i in range(len(case.edits)):
            yield dataclasses.replace(case, edits=case.edits[:i] + case.edits[i + 1 :])


def check(case: Case) -> str | None:
    """Returns what is wrong: another error, no file's name in it, other weights, or too much time or memory."""
    from tree_attn.models.llama.checkpoint.reading import CheckpointError

    _warm_up()
    memory, seconds = _peak_mebibytes(), time.process_time()
    fault = None
    try:
        with _time_limit(10 * MAX_SECONDS):
            fault = _use(case)
    except CheckpointError as error:
        if case.file not in str(error):
            fault = f"no name: {error}"
        elif len(str(error)) > 2000 or "\n" in str(error):
            fault = f"long message: {str(error)[:200]!r}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of Rust are no `Exception`
        fault = f"{type(error).__name__}: {error}"
    memory, seconds = _peak_mebibytes() - memory, time.process_time() - seconds
    if fault is None and seconds > MAX_SECONDS:
        fault = f"slow: {seconds:.1f} s"
    if fault is None and memory > MAX_MEBIBYTES:
        fault = f"large: {memory} MiB"
    return fault


@functools.cache
def _warm_up() -> None:
    """Imports packages and compiles what loading does, which are not a damaged file's time and memory."""
    for kind in ("folder", "gguf"):
        _use(Case(kind, "", ()))


def _use(case: Case) -> str | None:
    """Opens, loads, tokenizes and chats; returns what is wrong with the weights."""
    import jax.numpy as jnp

    from tree_attn.models.llama.checkpoint.open import open_checkpoint
    from tree_attn.models.llama.checkpoint.tokenizer import TextStream

    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        for name, content in checkpoints.files(case.kind).items():
            if name == case.file:
                content = functools.reduce(lambda content, edit: _edited(content, edit, name), case.edits, content)
            (folder / name).write_bytes(content)
        checkpoint = open_checkpoint(folder / "model.gguf" if case.kind == "gguf" else folder)
        tokenizer = checkpoint.tokenizer
        ids = tokenizer.encode("Hello 12 \N{SLIGHTLY SMILING FACE}")
        stream = TextStream(tokenizer)
        pieces = [stream.push(token) for token in ids] + [stream.flush()]
        if tokenizer.chat_template is not None:
            tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
        if not all(isinstance(piece, str) for piece in (*pieces, tokenizer.decode(ids))):
            return "no text: a decoded piece"
        model = checkpoint.load(_sharding(checkpoint.config), jnp.float32)
        return _wrong_weights(model, folder, case.kind)


def _wrong_weights(model, folder: pathlib.Path, kind: str) -> str | None:
    """Compares parameters with the files' bytes, found by the format's rules and nothing of ours."""
    layers = model.config.num_layers
    if kind == "gguf":
        import gguf

        reader = gguf.GGUFReader(folder / "model.gguf")
        tensors = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
        of = lambda name: tensors[f"{checkpoints.GGUF_NAMES[name]}.weight"]
        of_layers = lambda name: [tensors[f"blk.{i}.{checkpoints.GGUF_NAMES[name]}.weight"] for i in range(layers)]
    else:
        tensors = _safetensors(folder)
        of = lambda name: tensors[f"{name}.weight"]
        of_layers = lambda name: [tensors[f"model.layers.{i}.{name}.weight"] for i in range(layers)]
    for name, array, expected in (
        ("embedding", model.embedding, of("model.embed_tokens")),
        ("final norm", model.final_norm.scale, of("model.norm")),
        ("norm", model.layers.attention_norm.scale, np.stack(of_layers("input_layernorm"))),
        ("down", model.layers.mlp.down, np.stack(of_layers("mlp.down_proj"))),
        ("output", model.layers.attention.output, np.stack(of_layers("self_attn.o_proj"))),
    ):
        if not np.array_equal(np.asarray(array[...]).reshape(expected.shape), expected, equal_nan=True):
            return f"wrong weights: {name}"
    return None


def _safetensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    dtypes = {"F32": np.float32, "F64": np.float64, "F16": np.float16}
    tensors = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__" and entry["dtype"] in dtypes:
                first, stop = entry["data_offsets"]
                data = np.frombuffer(raw[start + first : start + stop], dtypes[entry["dtype"]])
                tensors[name] = data.reshape(entry["shape"]).astype(np.float32)
    return tensors


@functools.lru_cache(maxsize=64)
def _sharding(config):
    import jax

    from tree_attn.mesh import make_mesh
    from tree_attn.models.llama import spread_over

    return spread_over(config, make_mesh({"seq": 1}, jax.devices()[:1]))


def _peak_mebibytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class _time_limit:
    """Raises TimeoutError within after some seconds, in the main thread; elsewhere there is no limit."""

    def __init__(self, seconds: float):
        self.seconds = seconds if threading.current_thread() is threading.main_thread() else 0

    def __enter__(self):
        if self.seconds:
            self.handler = signal.signal(signal.SIGALRM, self.stop)
            signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *_):
        if self.seconds:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.handler)

    def stop(self, *_):
        raise TimeoutError(f"after {self.seconds} s")


# Edits.

_NUMBERS = ("0", "1", "-1", "2", "3", "7", "1.5", "2.0", "1e-45", "1e39", "1e999", "NaN", "Infinity", "-0.0")
_NUMBERS += tuple(str(number) for number in (257, 10**9, 2**31 - 1, 2**31, 2**63, 2**64, 10**400))
_TEXTS = ('""', '"x"', '"F64"', '"\\ud800"', '"a\\u0000b"', '"{{ x.y.z }}"', '"{% for %}"', '"../x"', '"/etc/hosts"')
_OTHERS = ("null", "true", "false", "[]", "{}", "[1]", '["x"]', "[[]]", '{"a": 1}', '{"content": 3}', "[257, {}]")
# Parts of a tokenizer.json, some of them wrong.
_COMPONENTS = (
    '{"type": "FixedLength", "length": 0}',
    '{"type": "Strip", "content": "a", "start": 9, "stop": 9}',
    '{"type": "Strip", "strip_left": true, "strip_right": true}',
    '{"type": "Precompiled", "precompiled_charsmap": "AAAA"}',
    '{"type": "Replace", "pattern": {"Regex": "("}, "content": "x"}',
    '{"type": "Replace", "pattern": {"Regex": ""}, "content": "xx"}',
    '{"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": true}',
    '{"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": true}',
    '{"type": "ByteFallback"}',
    '{"type": "Fuse"}',
    '{"type": "WordPiece", "prefix": "", "cleanup": true}',
    '{"type": "BPEDecoder", "suffix": ""}',
    '{"type": "CTC", "pad_token": "a", "word_delimiter_token": "", "cleanup": true}',
    '{"type": "BertProcessing", "sep": ["x", 4294967295], "cls": ["y", 0]}',
    '{"type": "RobertaProcessing", "sep": ["", 1], "cls": ["", 0], "trim_offsets": true, "add_prefix_space": true}',
    '{"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}',
    '{"type": "Sequence", "normalizers": []}',
    '{"type": "Sequence", "pretokenizers": []}',
    '{"type": "Sequence", "decoders": []}',
    '{"type": "Sequence", "processors": []}',
    '{"strategy": {"Fixed": 1000000000000}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, '
    '"pad_type_id": 0, "pad_token": "a"}',
    '{"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}',
    '{"type": "Unigram", "unk_id": null, "vocab": [], "byte_fallback": false}',
    '{"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0], ["a", -1.0]], "byte_fallback": true}',
    '{"type": "WordLevel", "vocab": {"a": 4294967295}, "unk_token": "b"}',
    '{"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 0, '
    '"vocab": {"a": 1, "": 2}}',
    '{"type": "BPE", "vocab": {"a": 0, "": 1}, "merges": [["a", ""]]}',
    '{"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "continuing_subword_prefix": "####"}',
    '{"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"], "byte_fallback": true, "unk_token": "c"}',
)
_VALUES = (*_NUMBERS, *_TEXTS, *_OTHERS)
_INTEGERS = (0, 1, 2, 3, 8, 9, 12, 13, 33, 2**31, 2**32 - 1, 10**18, 2**63, 2**64 - 32, 2**64 - 1)


def _one(rng: np.random.Generator, choices):
    return choices[int(rng.integers(len(choices)))]


def _edit(rng: np.random.Generator, kind: str, file: str, content: bytes) -> tuple:
    tree = _tree(content, file) if file.endswith((".json", ".safetensors")) else None
    if isinstance(tree, dict) and tree and rng.random() < 0.75:
        path = _path(rng, tree)
        if file == "tokenizer.json" and rng.random() < 0.4:
            return ("json", (_one(rng, list(tree)),), _one(rng, _COMPONENTS))
        action = _one(rng, ["json"] * 8 + ["twice", "drop", "nest", "long"])
        if action in ("json", "twice"):
            return (action, path, _one(rng, _VALUES))
        if action == "drop":
            return (action, path)
        return (action, path, _one(rng, [50, 500, 5000, 100_000]))
    if kind == "gguf" and rng.random() < 0.6:
        offset, code = _one(rng, checkpoints.gguf()[1])
        size = struct.calcsize(code)
        value = _one(rng, _INTEGERS)
        before = int.from_bytes(content[offset : offset + size], "little")
        value = _one(rng, [value, value, value, before + 1, before - 1, before ^ 8, before * 2])
        return ("put", offset, (value % 256**size).to_bytes(size, "little"))
    head = _head_length(content, file)
    offset = int(rng.integers(head if rng.random() < 0.9 else len(content) + 1))
    action = _one(rng, ["put", "put", "put", "put", "insert", "cut"])
    if action == "cut":
        return (action, offset if rng.random() < 0.7 else len(content) - 1)
    num_bytes = _one(rng, [1, 1, 1, 2, 8])
    return (action, offset, rng.bytes(num_bytes) if rng.random() < 0.8 else _one(rng, [b"\0", b"\xff"]) * num_bytes)


def _head_length(content: bytes, file: str) -> int:
    """Returns the bytes in which a change is likely to be noticed."""
    if file.endswith(".safetensors"):
        return max(8, min(8 + int.from_bytes(content[:8], "little"), len(content)))
    return max(1, min(checkpoints.gguf()[2] if file.endswith(".gguf") else len(content), len(content)))


def _edited(content: bytes, edit: tuple, file: str) -> bytes:
    action, place, *rest = edit
    if action == "put":
        return content[:place] + rest[0] + content[place + len(rest[0]) :]
    if action == "insert":
        return content[:place] + rest[0] + content[place:]
    if action == "cut":
        return content[:place]
    text = _edited_json(_tree(content, file), edit)
    if file.endswith(".safetensors"):
        length = int.from_bytes(content[:8], "little")
        return struct.pack("<Q", len(text)) + text + content[8 + length :]
    return text


def _edited_json(tree, edit: tuple) -> bytes:
    """Returns a JSON text with one value replaced, repeated or removed; what is no JSON in Python is put in as text."""
    action, path, *rest = edit
    if not path:
        path, tree = (0,), [tree]
        strip = slice(1, -1)
    else:
        strip = slice(None)
    parent = functools.reduce(lambda node, key: node[key], path[:-1], tree)
    mark = "replaced by what follows"
    if action == "drop":
        del parent[path[-1]]
        return json.dumps(tree)[strip].encode()
    value = json.dumps(parent[path[-1]])
    new = {
        "json": lambda: rest[0],
        "twice": lambda: f"{value}, {json.dumps(path[-1]) + ': ' if isinstance(path[-1], str) else ''}{rest[0]}",
        "nest": lambda: "[" * rest[0] + "]" * rest[0],
        "long": lambda: json.dumps("x" * rest[0]),
    }[action]()
    parent[path[-1]] = mark
    return json.dumps(tree).replace(json.dumps(mark), new)[strip].encode()


def _tree(content: bytes, file: str):
    """Returns the JSON of a file, or None if earlier edits left none that Python reads."""
    if file.endswith(".safetensors"):
        content = content[8 : 8 + int.from_bytes(content[:8], "little")]
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _path(rng: np.random.Generator, tree) -> tuple:
    path = []
    while isinstance(tree, dict | list) and tree and rng.random() < (0.95 if not path else 0.8):
        key = _one(rng, list(tree) if isinstance(tree, dict) else range(len(tree)))
        path.append(key)
        tree = tree[key]
    return tuple(path)
