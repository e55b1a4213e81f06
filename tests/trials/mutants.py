"""Mutants of the core: one small change of the source each, which the tests of that module should notice.

A mutant is made in a copy of the repository, where the module's own tests run until the first fails. One that passes
them all is a survivor: it is printed as a diff, to be read. Some survivors change nothing that can be seen.
"""

import ast
import copy
import dataclasses
import difflib
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np

ROOT = pathlib.Path(__file__).parent.parent.parent
LIMIT_S = 600  # for the tests of one mutant: what takes longer has been noticed
COPIED = ("tree_attn", "models", "ring_baseline", "tests", "scripts", "pyproject.toml", "README.md", "docs/log")
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
COMMUTATIVE = ("minimum", "maximum", "min", "max", "logaddexp")
# Tests of modules whose own are not test_NAME.py beside them; names are of files in `tests/`.
TESTS = {
    "tree_attn/arguments.py": ("test_arguments.py", "test_wrong_calls.py"),
    "tree_attn/array_axes.py": ("test_sharded.py", "test_modes.py"),
    "tree_attn/cache_checks.py": ("test_cache.py", "test_wrong_calls.py"),
    "tree_attn/cache_layer.py": ("test_cache.py", "test_cache_modes.py"),
    "tree_attn/cache_reads.py": ("test_cache.py", "test_cache_modes.py"),
    "tree_attn/cache_writes.py": ("test_cache.py", "test_cache_modes.py"),
    "tree_attn/masking.py": ("test_masking.py", "local/test_dispatch.py", "local/test_xla.py"),
    "tree_attn/placement.py": ("test_placement.py", "test_arguments.py"),
    "tree_attn/prefix_level.py": ("test_shared_prefix.py",),
    "tree_attn/ragged.py": ("test_ragged.py", "kernels/test_lean_kernel.py"),
    "tree_attn/sharded.py": ("test_sharded.py", "test_decode.py"),
    "tree_attn/sparq": ("sparq", "kernels/test_sparq_kernel.py"),
    "tree_attn/reduce/collectives.py": ("test_modes.py",),
    "tree_attn/reduce/gather.py": ("reduce/test_reduce.py",),
    "tree_attn/reduce/allreduce.py": ("reduce/test_reduce.py",),
    "tree_attn/reduce/hierarchical.py": ("reduce/test_reduce.py",),
    "tree_attn/reduce/__init__.py": ("reduce/test_reduce.py",),
    "ring_baseline": ("ring_baseline",),
    "ring_baseline/attention.py": ("ring_baseline/test_ring_attention.py",),
    "ring_baseline/hops.py": ("ring_baseline/test_ring_gradient.py", "ring_baseline/test_ring_attention.py"),
    "ring_baseline/rotation.py": ("ring_baseline/test_ring_rotation.py", "ring_baseline/test_ring_decode.py"),
    "ring_baseline/runs.py": ("ring_baseline/test_ring_gradient.py",),
    "ring_baseline/ulysses.py": ("ring_baseline/test_ulysses.py",),
    "tree_attn/local/gradient.py": ("ring_baseline/test_ring_gradient.py",),
    "ring_baseline/decode.py": ("ring_baseline/test_ring_decode.py",),
}
LEFT_OUT = ("reference.py", "tolerances.py", "cli.py", "extras.py", "__init__.py", "__main__.py")  # of the flat modules


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a file: the place of a node and the text that stands there instead."""

    path: str
    begin: int  # in bytes of the file
    end: int
    text: str


def run(num_mutants: int, seed: int) -> int:
    """Makes mutants, runs their tests, prints the survivors and the share noticed; returns the exit status."""
    rng = np.random.default_rng(seed)
    candidates = [mutant for path in modules() for mutant in mutants(path)]
    chosen = [candidates[i] for i in rng.permutation(len(candidates))[:num_mutants]]
    num_noticed, passes = 0, {}
    with tempfile.TemporaryDirectory() as folder:
        tree = _copied(pathlib.Path(folder))
        for mutant in chosen:
            tests = tests_of(mutant.path)
            if passes.setdefault(tests, _passes(tree, tests)) is False:
                print(f"{mutant.path}: its tests fail without a change: {', '.join(tests)}")
                return 1
            original = (ROOT / mutant.path).read_bytes()
            changed = original[: mutant.begin] + mutant.text.encode() + original[mutant.end :]
            (tree / mutant.path).write_bytes(changed)
            is_noticed = not _passes(tree, tests)
            (tree / mutant.path).write_bytes(original)
            num_noticed += is_noticed
            print(f"{'noticed' if is_noticed else 'SURVIVED'} {_diff(mutant.path, original, changed)}", flush=True)
    print(f"{num_noticed} of {len(chosen)} mutants noticed, of {len(candidates)} that can be made")
    return int(num_noticed < len(chosen))


def modules() -> list[str]:
    """Returns the files of the core."""
    flat = [path for path in (ROOT / "tree_attn").glob("*.py") if path.name not in LEFT_OUT]
    wings = [
        path for wing in ("tree_attn/reduce", "tree_attn/sparq", "ring_baseline") for path in (ROOT / wing).glob("*.py")
    ]
    return sorted(str(path.relative_to(ROOT)) for path in (*flat, *wings))


def tests_of(path: str) -> tuple[str, ...]:
    """Returns the tests of a module, as paths in the repository."""
    folder = str(pathlib.Path(path).parent)
    names = TESTS.get(path) or TESTS.get(folder)
    if names is None:
        own_tests = pathlib.Path(folder).relative_to("tree_attn") / f"test_{pathlib.Path(path).stem}.py"
        names = (str(own_tests),)
    return tuple(f"tests/{name}" for name in names if (ROOT / "tests" / name).exists())


def mutants(path: str) -> Iterator[Mutant]:
    """Yields every mutant of a file."""
    source = (ROOT / path).read_bytes()
    lines = np.cumsum([0, *map(len, source.splitlines(keepends=True))])
    for node, changed in _changes(ast.parse(source)):
        begin, end = (
            int(lines[row - 1]) + column
            for row, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        )
        yield Mutant(path, begin, end, f"({ast.unparse(changed)})")


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields expressions, each with a changed copy; none of messages, annotations and docstrings."""
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            is_text = isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert | ast.Import | ast.ImportFrom)
            if not isinstance(child, ast.AST) or is_text or name in ("annotation", "returns", "decorator_list"):
                continue
            yield from _changes(child)
            if isinstance(child, ast.expr):
                yield from ((child, changed) for changed in _changed(child))
                if name == "test":
                    yield child, ast.UnaryOp(ast.Not(), child)


def _changed(node: ast.expr) -> Iterator[ast.expr]:
    other = copy.deepcopy(node)
    match other:
        case ast.Compare() if type(other.ops[0]) in SWAPPED:
            other.ops[0] = SWAPPED[type(other.ops[0])]()
        case ast.BinOp() | ast.BoolOp() if type(other.op) in SWAPPED:
            other.op = SWAPPED[type(other.op)]()
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            other = other.operand
        case ast.Constant(value=bool()):
            other.value = not other.value
        case ast.Constant(value=int() | float()) if other.value + 1 != other.value:
            other.value += 1
        case ast.Call(args=[ast.expr() as first, ast.expr() as second, *rest]) if _are_ordered(other):
            other.args = [second, first, *rest]
        case _:
            return
    yield other


def _are_ordered(call: ast.Call) -> bool:
    """Returns whether the call's first two arguments may mean another thing in another order."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name not in COMMUTATIVE and not any(isinstance(x, ast.Starred) for x in call.args[:2])


def _copied(folder: pathlib.Path) -> pathlib.Path:
    for name in COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    return folder


def _passes(tree: pathlib.Path, tests: tuple[str, ...]) -> bool:
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(command, cwd=tree, timeout=LIMIT_S, capture_output=True).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _diff(path: str, original: bytes, changed: bytes) -> str:
    before, after = (x.decode().splitlines(keepends=True) for x in (original, changed))
    lines = list(difflib.unified_diff(before, after, path, path, n=0))
    return "".join([f"{path}\n", *(f"  {line}" for line in lines[2:])]).rstrip()
