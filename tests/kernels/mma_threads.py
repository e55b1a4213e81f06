"""The threads of a warpgroup in NumPy: what `mma`, `columns` and `warps` emit is carried out instead of compiled.

Pallas' interpreter knows no inline PTX. Here each emitted operation acts on the values of all 128 threads, and each PTX
instruction does what NVIDIA's manual says of its fragments. Shared memory is bytes, swizzled as a TMA copy leaves them.
"""

import contextlib
import dataclasses
import itertools
import re
import types

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from tree_attn.kernels import columns, few_rows_mma, mma, warps
from tree_attn.kernels.lean_layout import LeanShape
from tree_attn.kernels.targets import AMPERE

THREADS, WARPS = 128, 4
LANE, WARP = np.arange(THREADS) % 32, np.arange(THREADS) // 32
DTYPES = {"i32": np.int32, "f32": np.float32, "i1": np.bool_}


@dataclasses.dataclass
class Value:
    """A value of each thread, `[128]` or, of a vector, `[128, n]`."""

    kind: str
    array: np.ndarray

    @property
    def type(self):
        return self.kind


@dataclasses.dataclass
class Fragments:
    """A `FragmentedArray`."""

    registers: np.ndarray
    layout: object
    shape: tuple = ()


@dataclasses.dataclass
class Ref:
    """A reference to shared memory: its address, and its shape as Pallas sees it and as it is tiled."""

    address: int
    shape: tuple
    itemsize: int
    tiled: tuple = ()
    dtype: object = None

    @property
    def type(self):
        shape = self.tiled or self.shape
        strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        return types.SimpleNamespace(shape=shape, get_strides_and_offset=lambda: (strides, 0))


class Memory:
    """Shared memory, and which threads write.

    Since the last barrier of all warps, no warp may read what another one wrote, or write what another one read. Of
    reads only those of two floats are watched.
    """

    def __init__(self):
        self.bytes, self.end, self.is_writing = np.zeros(1 << 20, np.uint8), 1024, np.ones(THREADS, bool)
        self.array_of = np.zeros(1 << 20, np.int32)  # the address of the array that a byte is of, or 0
        self.has_written, self.has_read = (np.zeros((WARPS, 1 << 20), bool) for _ in range(2))

    def allocate(self, count: int) -> int:
        address, self.end = self.end, self.end + -(-count // 1024) * 1024
        self.array_of[address : address + count] = address
        return address

    def words(self, address):
        return self.bytes[address[:, None] + np.arange(4)].copy().view(np.int32)[:, 0]

    def barrier(self):
        self.has_written[:], self.has_read[:] = False, False

    def access(self, at, count: int, is_write: bool):
        """Notes that threads read or write `count` bytes from `at` on, `[128]`; -1 is no access."""
        touched = [at[(warp == WARP) & (at >= 0)][:, None] + np.arange(count) for warp in range(WARPS)]
        for warp, other in itertools.permutations(range(WARPS), 2):
            is_taken = self.has_written[other][touched[warp]]
            if is_write:
                is_taken |= self.has_read[other][touched[warp]]
            assert not is_taken.any(), "warps meet without a barrier"
        for warp in range(WARPS):
            (self.has_written if is_write else self.has_read)[warp][touched[warp]] = True

    def put(self, array, transforms):
        """Writes `[rows, columns]` as a TMA copy does, and returns its reference."""
        rows = len(array)
        raw = array.view(np.uint8).reshape(rows, -1)
        ref = Ref(self.allocate(raw.size), array.shape, array.itemsize, dtype=array.dtype)
        if transforms:
            width = transforms[1].swizzle
            tiles = raw.reshape(rows // 8, 8, -1, width).swapaxes(1, 2)
            ref.tiled = (*tiles.shape[:3], width // array.itemsize)
            at = np.arange(tiles.size)
            at ^= (at >> 3) & (width - 16)  # bits of the address from 128 bytes on permute chunks of 16 bytes
            self.bytes[ref.address + at] = tiles.ravel()
        else:
            self.bytes[ref.address : ref.address + raw.size] = raw.ravel()
        return ref

    def get(self, ref, dtype):
        count = int(np.prod(ref.shape)) * ref.itemsize
        return self.bytes[ref.address : ref.address + count].copy().view(dtype).reshape(ref.shape)


def _halves(words, dtype=np.float16):
    return np.ascontiguousarray(words, np.int32).view(dtype).reshape(*words.shape, 2)


def _packed(halves, dtype=np.float16):
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(halves.astype(dtype)).view(np.int32)[..., 0]


def _by_warp(x):
    return x.reshape(WARPS, 32, *x.shape[1:])


class Instructions:
    """PTX by the beginning of its text."""

    def __init__(self, memory: Memory):
        self.memory = memory

    def run(self, text, *operands):
        for pattern, run in {
            r"mov\.u32 \$0, %tid\.x": lambda _: [np.arange(THREADS, dtype=np.int32)],
            r"ld\.shared\.(b32|f32) \$0, \[\$1(?:\+(\d+))?\]": self._load_word,
            r"st\.shared\.f32": self._store,
            r"ld\.shared\.v2\.f32": self._load,
            r"st\.shared\.v2": self._store,
            r"st\.shared\.v4\.b32 \[\$0\], \{\$1, \$1, \$1, \$1\}": lambda m, at, x: self._store(m, at, x, x, x, x),
            r"fence\.proxy\.async\.shared::cta; bar\.warp\.sync": lambda _: [],
            r"ldmatrix\.sync\.aligned\.m8n8\.x([24])\.(trans\.)?shared": self._ldmatrix,
            r"stmatrix\.sync\.aligned\.m8n8\.x([24])\.trans\.shared": self._stmatrix,
            r"shfl\.sync\.idx": lambda _, x, lane: [x[WARP * 32 + lane]],
            r"shfl\.sync\.bfly\.b32 \$0, \$1, (\d+)": lambda m, x: [x[np.arange(THREADS) ^ int(m[1])]],
            r"cvt\.rn\.(f16|bf16)x2\.f32 \$0, \$2, \$1": self._narrow,
            r"movmatrix\.sync\.aligned\.m8n8\.trans": self._movmatrix,
            r"\{ .* cvt\.rn\.f16x2\.e4m3x2 \$0, a; cvt\.rn\.f16x2\.e4m3x2 \$1, b": self._widen,
            r"prmt\.b32 \$0, \$1, 0, 0x(\d+)": self._prmt,
            r"mul\.rn\.f16x2 \$0, \$1, \$2": lambda _, x, y: [_packed(_halves(x) * _halves(y))],
            r"or\.b32 \$0, \$1, \$2": lambda _, x, y: [x | y],
            r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)": self._mma,
        }.items():
            if match := re.match(pattern, text):
                return run(match, *operands)
        raise NotImplementedError(text)

    def _load_word(self, match, at):
        words = self.memory.words(at + int(match[2] or 0))
        return [words if match[1] == "b32" else words.view(np.float32)]

    def _load(self, _, at):
        self.memory.access(at, 8, is_write=False)
        return [self.memory.words(at + 4 * i).view(np.float32) for i in range(2)]

    def _store(self, _, at, *pair):
        self.memory.access(np.where(self.memory.is_writing, at, -1), 4 * len(pair), is_write=True)
        for i, x in enumerate(pair):
            for address, value in zip(at[self.memory.is_writing], x[self.memory.is_writing]):
                self.memory.bytes[address + 4 * i : address + 4 * i + 4] = np.array([value]).view(np.uint8)
        return []

    def _ldmatrix(self, match, at):
        count = int(match[1])  # of matrices
        rows = _by_warp(at).reshape(WARPS, 4, 8)[:, :count]
        assert (rows % 16 == 0).all()
        read = rows[..., None] + np.arange(16)
        (array,) = np.unique(self.memory.array_of[read])  # nothing behind it is read
        assert array > 0
        matrices = self.memory.bytes[read].copy().view(np.int16)  # [warp, count, 8, 8]
        if match[2]:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        words = matrices.view(np.int32).reshape(WARPS, count, 32)
        return [words[:, i].reshape(THREADS) for i in range(count)]

    def _stmatrix(self, match, at, *words):
        count = int(match[1])
        assert len(words) == count
        rows = _by_warp(at).reshape(WARPS, 4, 8)[:, :count]
        assert (rows % 16 == 0).all()
        self.memory.access(np.where(8 * count > LANE, at, -1), 16, is_write=True)
        matrices = np.stack([_halves(_by_warp(x), np.int16).reshape(WARPS, 8, 8) for x in words], axis=1)
        raw = np.ascontiguousarray(matrices.swapaxes(2, 3)).view(np.uint8)  # [warp, count, 8, 16]
        self.memory.bytes[rows[..., None] + np.arange(16)] = raw
        return []

    def _narrow(self, match, low, high):
        return [_packed(np.stack([low, high], -1), np.float16 if match[1] == "f16" else ml_dtypes.bfloat16)]

    def _movmatrix(self, _, x):
        matrix = _halves(_by_warp(x), np.int16).reshape(WARPS, 8, 8)
        return [np.ascontiguousarray(matrix.swapaxes(1, 2)).view(np.int32).reshape(THREADS)]

    def _widen(self, _, x):
        narrow = np.ascontiguousarray(x).view(ml_dtypes.float8_e4m3fn).reshape(THREADS, 2, 2)
        return [_packed(narrow[:, i].astype(np.float32)) for i in range(2)]

    def _prmt(self, match, x):
        order = [int(digit) for digit in reversed(match[1])]
        eight = np.concatenate([x.view(np.uint8).reshape(THREADS, 4), np.zeros((THREADS, 4), np.uint8)], axis=1)
        return [np.ascontiguousarray(eight[:, order]).view(np.int32)[:, 0]]

    def _mma(self, match, *registers):
        dtype = np.float16 if match[1] == "f16" else ml_dtypes.bfloat16
        halves = [_halves(_by_warp(x), dtype).astype(np.float32).reshape(WARPS, 8, 4, 2) for x in registers[:6]]
        left, right = np.zeros((WARPS, 16, 16), np.float32), np.zeros((WARPS, 16, 8), np.float32)
        for i, x in enumerate(halves[:4]):
            left[:, i % 2 * 8 : i % 2 * 8 + 8, i // 2 * 8 : i // 2 * 8 + 8] = x.reshape(WARPS, 8, 8)
        for i, x in enumerate(halves[4:]):
            right[:, 8 * i : 8 * i + 8] = x.reshape(WARPS, 8, 8).swapaxes(1, 2)
        product = (left @ right).reshape(WARPS, 2, 8, 4, 2)
        sums = np.stack([_by_warp(x).reshape(WARPS, 8, 4) for x in registers[6:]], -1)
        return [(sums[..., i] + product[:, i // 2, :, :, i % 2]).reshape(THREADS) for i in range(4)]


def _of(kind, function):
    return lambda *xs: Value(kind or xs[0].kind, np.asarray(function(*(x.array for x in xs))))


def _unsigned(function):
    return _of(None, lambda *xs: function(*(x.view(np.uint32) for x in xs)).astype(np.uint32).view(np.int32))


@contextlib.contextmanager
def threads(monkeypatch):
    """Has `mma`, `columns`, `few_rows_mma` and `warps` of `tree_attn.kernels` run on threads in NumPy.

    Yields their shared memory.
    """
    memory = Memory()
    instructions = Instructions(memory)

    def emitted(text, results, *operands, moves=False):
        kinds = {"r": "i32", "f": "f32"}
        out = instructions.run(text, *(x.array for x in operands))
        return [Value(kinds[kind], np.asarray(x, DTYPES[kinds[kind]])) for kind, x in zip(results, out)]

    @contextlib.contextmanager
    def when(predicate):
        memory.is_writing = predicate.array
        yield
        memory.is_writing = np.ones(THREADS, bool)

    def maximum(x, y):
        return np.maximum(x, y)

    arith = types.SimpleNamespace(
        constant=lambda kind, x: Value(kind, np.full(THREADS, x, DTYPES[kind])),
        addi=_unsigned(np.add), subi=_unsigned(np.subtract), muli=_unsigned(np.multiply),
        andi=_unsigned(np.bitwise_and), ori=_of(None, np.logical_or), xori=_unsigned(np.bitwise_xor),
        shli=_unsigned(np.left_shift), shrui=_unsigned(np.right_shift),
        divui=_unsigned(np.floor_divide), remui=_unsigned(np.remainder), maxsi=_of("i32", np.maximum),
        minui=_unsigned(np.minimum),
        addf=_of("f32", np.add), mulf=_of("f32", np.multiply), maximumf=_of("f32", maximum),
        bitcast=lambda kind, x: Value(kind, x.array.view(DTYPES[kind])),
        cmpi=lambda compare, x, y: Value("i1", compare(x.array, y.array)),
        CmpIPredicate=types.SimpleNamespace(eq=np.equal, slt=np.less, sge=np.greater_equal),
        index_cast=lambda kind, x: x,
    )  # fmt: skip
    ir = types.SimpleNamespace(
        F32Type=types.SimpleNamespace(get=lambda: "f32"),
        MemRefType=lambda ref: ref,
    )
    fakes = {
        "arith": arith,
        "ir": ir,
        "gpu": types.SimpleNamespace(
            thread_id=lambda _: Value("i32", np.arange(THREADS, dtype=np.int32)), Dimension=types.SimpleNamespace(x=0)
        ),
        "mgpu": types.SimpleNamespace(
            when=when, FragmentedArray=lambda _registers, _layout, _is_signed: Fragments(_registers, _layout)
        ),
        "asm_results": emitted,
        "i32": lambda: "i32",
        "int32": lambda number: Value("i32", np.full(THREADS, number, np.int32)),
        "utils": types.SimpleNamespace(warpgroup_barrier=memory.barrier),
        "address_of": lambda ref: Value("i32", np.full(THREADS, ref.address, np.int32)),
        "element": lambda x, i=0: Value(x.kind, x.array[:, i] if x.array.ndim > 1 else x.array),
        "pair_of": lambda *xs: Value(xs[0].kind, np.stack([x.array for x in xs], -1)),
        "bagged": lambda words: Fragments(np.array(words, dtype=object), None),
    }
    for name, fake in fakes.items():
        users = [module for module in (mma, columns, few_rows_mma, warps) if hasattr(module, name)]
        assert users, name
        for module in users:
            monkeypatch.setattr(module, name, fake)
    monkeypatch.setattr(plgpu, "inline_mgpu", lambda **_: lambda emit: lambda *args: emit(None, *args))
    yield memory


def shape_of(head_dim, cols, dtype, key_dtype, target=AMPERE):
    """Returns a shape of the lean kernel: one sequence, one KV head and 128 slots."""
    return LeanShape(
        batch=1, num_kv_heads=1, col_blocks=1, cols=cols, head_dim=head_dim, scale=1.0, logits_soft_cap=None,
        mask="none", num_slots=128, dtype=jnp.dtype(dtype), key_dtype=jnp.dtype(key_dtype), target=target,
    )  # fmt: skip


def split(array):
    """Returns float32 `[64 m, 8 n]` as the tensor core's results are spread over threads."""
    rows, cols = array.shape
    tiles = array.reshape(rows // 64, WARPS, 2, 8, cols // 8, 4, 2)  # [m, warp, half, g, n, t, 2]
    by_thread = tiles.transpose(0, 4, 2, 1, 3, 5, 6).reshape(-1, THREADS, 2).astype(np.float32)
    registers = np.empty(len(by_thread), dtype=object)
    registers[:] = [Value("f32", x) for x in by_thread]
    return Fragments(registers, None, array.shape)


def scalar(number: int):
    """Returns a number that all threads have."""
    registers = np.empty(1, dtype=object)
    registers[0] = Value("i32", np.full(THREADS, number, np.int32))
    return Fragments(registers, None)


def joined(fragments, shape):
    """Inverts `split`."""
    rows, cols = shape
    by_thread = np.stack([x.array for x in fragments.registers.flat])
    tiles = by_thread.reshape(rows // 64, cols // 8, 2, WARPS, 8, 4, 2)
    return tiles.transpose(0, 3, 2, 4, 1, 5, 6).reshape(shape)


def per_warp(fragments):
    """Returns `[cols]` of each warp, `[4, cols]`."""
    by_thread = np.stack([x.array for x in fragments.registers.flat])  # [n, 128, 2]
    spread = by_thread.reshape(len(by_thread), WARPS, 8, 4, 2)
    assert (spread == spread[:, :, :1]).all()  # every group of a warp has them
    return spread[:, :, 0].transpose(1, 0, 2, 3).reshape(WARPS, -1)
