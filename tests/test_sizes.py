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


def definitions(path: pathlib.Path):
    """Yields a file's classes and functions, nested ones too, but not a kernel's main body and what lies in it."""
    nodes = [ast.parse(path.read_text())]
    while nodes:
        for node in ast.iter_child_nodes(nodes.pop()):
            is_kernel = KERNELS in path.parents and getattr(node, "name", "").endswith("_scoped")
            if not is_kernel:
                nodes.append(node)
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    yield node


def test_no_long_function_and_no_long_class():
    long = []
    for path in SOURCES:
        for node in definitions(path):
            is_class = isinstance(node, ast.ClassDef)
            lines = node.end_lineno - node.lineno + 1 if is_class else code_lines(node)
            if lines > (MAX_CLASS if is_class else MAX_FUNCTION):
                long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines}")
    assert not long, "\n".join(long)
