"""The sizes that the house allows: a function that fits a screen, a class that owns one noun."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("tree_attn", "models", "ring_baseline", "scripts")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
MAX_FUNCTION, MAX_CLASS = 60, 200
# A kernel's main body is one straight program; it is cut where a part has a name of its own.
KERNELS = ROOT / "tree_attn" / "kernels"


def code_lines(node: ast.AST) -> int:
    """Returns the lines of a definition without its decorators, signature and docstring."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def test_no_long_function_and_no_long_class():
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {getattr(node, 'name', '')}"
            if isinstance(node, ast.ClassDef) and node.end_lineno - node.lineno >= MAX_CLASS:
                long.append(f"{place}: {node.end_lineno - node.lineno + 1}")
            is_kernel = KERNELS in path.parents and getattr(node, "name", "").endswith("_scoped")
            if isinstance(node, ast.FunctionDef) and not is_kernel and code_lines(node) > MAX_FUNCTION:
                long.append(f"{place}: {code_lines(node)}")
    assert not long, "\n".join(long)
