"""The order of the house: which package may import which, read from the source without running it."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# From the bottom to the top. A module imports modules of its own place and of places before it, no others.
ORDER = (
    ("state", "devices", "extras", "topology", "arguments", "reference", "tolerances"),
    ("placement", "masking", "mesh"),
    ("kernels",),
    ("local",),
    ("cost",),
    ("reduce",),
    ("array_axes", "sharded", "prefix_level"),
    (
        "decode",
        "shared_prefix",
        "ragged",
        "energy_function",
        "sparq",
        "cache",
        "cache_checks",
        "cache_layer",
        "cache_reads",
        "cache_writes",
    ),
    ("measure",),
    ("cluster",),
    ("ring_baseline",),
    ("models",),
    ("cli", "commands", "__main__"),
)
PLACES = {name: place for place, names in enumerate(ORDER) for name in names}


def modules() -> dict[str, pathlib.Path]:
    """Returns every module of the package by its dotted name, those in `models/` and `ring_baseline/` included."""
    found = {}
    for folder, prefix in (("tree_attn", "tree_attn"), ("models", "tree_attn.models")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((prefix, *parts)).removesuffix(".__init__")] = path
    for path in (ROOT / "ring_baseline").rglob("*.py"):
        found[f"tree_attn.ring_baseline.{path.stem}".removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported(path: pathlib.Path, *, at_import_only: bool) -> set[str]:
    """Returns the modules of ours that a file imports, where `at_import_only` without those inside functions."""
    names = set()

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if not (inside and at_import_only):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: imports are absolute"
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                names.update(name if name in MODULES else node.module for name in submodules)
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside or is_function)

    visit(ast.parse(path.read_text()), False)
    return {name for name in names if name in MODULES} - {"tree_attn"}


def place(module: str) -> str:
    return module.split(".")[1]


def test_every_module_has_a_place():
    assert {place(module) for module in MODULES if module != "tree_attn"} == set(PLACES)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"tree_attn"}))
def test_no_import_climbs(module):
    """Imports inside functions count too: what is loaded later is still depended on."""
    for name in imported(MODULES[module], at_import_only=False):
        assert PLACES[place(name)] <= PLACES[place(module)], f"{module} imports {name}, which is above it"


def test_kernels_import_only_the_formula_and_themselves():
    for module, path in MODULES.items():
        if place(f"{module}.") == "kernels":
            others = {name for name in imported(path, at_import_only=False) if place(name) != "kernels"}
            assert others <= {"tree_attn.state"}, module


def test_kernels_are_imported_inside_functions():
    for module, path in MODULES.items():
        if place(f"{module}.") != "kernels":
            at_import = {name for name in imported(path, at_import_only=True) if place(name) == "kernels"}
            assert not at_import, f"{module} loads {at_import} when it is imported"


def test_modules_import_in_no_circle():
    """A depth-first search over all imports but those of a package by its own modules."""
    edges = {module: imported(path, at_import_only=False) - {module} for module, path in MODULES.items()}
    done, path = set(), []

    def visit(module: str) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for name in sorted(edges[module]):
            visit(name)
        path.pop()
        done.add(module)

    for module in sorted(edges):
        visit(module)


def test_packages_import_in_no_circle():
    """Wings as a whole: one that imports another is not imported by it."""
    edges = {
        (place(module), place(name))
        for module, path in MODULES.items()
        if module != "tree_attn"
        for name in imported(path, at_import_only=False)
    }
    assert [(a, b) for a, b in edges if a < b and (b, a) in edges] == []
