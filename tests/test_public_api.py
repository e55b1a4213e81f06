"""The public names of `tree_attn`, which resolve on first use, and the modules that an import loads."""

import ast
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys
import types

import pytest

import tree_attn
from tree_attn import ring_baseline

ROOT = pathlib.Path(__file__).parent.parent
# What attention on a CPU has no use for: kernels, what joins processes, and the command line's libraries.
HEAVY = (
    "jax.experimental.mosaic",
    "jax.experimental.pallas",
    "selectors",
    "socketserver",
    "flax",
    "rich",
    "matplotlib",
)


def loaded_by(statement: str) -> set[str]:
    """Returns the modules that a fresh interpreter has loaded after `statement`, beyond those of `import jax`."""
    code = f"import sys, jax\nbefore = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return set(done.stdout.split())


def test_import_loads_nothing_else():
    """The package alone: no module of ours, none of JAX's beyond those of `import jax`, no socket, no thread."""
    assert {name for name in loaded_by("import tree_attn") if not name.startswith("importlib")} == {"tree_attn"}


@pytest.mark.parametrize(
    "name", ["tree_decode", "attend", "KVCache", "energy", "hydragen_decode", "lean_decode", "sparq_decode"]
)
def test_attention_loads_no_kernel_and_nothing_of_the_cluster(name):
    loaded = loaded_by(f"from tree_attn import {name}")
    assert [module for module in sorted(loaded) if module.startswith(HEAVY)] == []
    ours = {module.split(".")[1] for module in loaded if module.startswith("tree_attn.")}
    assert ours.isdisjoint({"kernels", "cluster", "commands", "models", "ring_baseline", "measure"})


def test_help_loads_no_jax():
    code = (
        "import sys\n"
        "from tree_attn import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'numpy', 'rich', 'flax'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tree-attn demo" in done.stdout or "demo" in done.stdout


def test_every_public_name_resolves_to_what_its_module_defines():
    for name in tree_attn.__all__:
        value = getattr(tree_attn, name)
        assert getattr(value, "__name__", name) == name or name == "Window"
    assert set(tree_attn.__all__) <= set(dir(tree_attn))
    with pytest.raises(AttributeError, match="'tree_attn' has no attribute 'tree_decoder'"):
        tree_attn.tree_decoder  # noqa: B018


def test_type_checkers_see_the_same_names():
    """The imports under `TYPE_CHECKING` and the table of modules name the same."""
    declared = {}
    for node in ast.walk(ast.parse(pathlib.Path(tree_attn.__file__).read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert [alias.asname for alias in line.names] == [alias.name for alias in line.names], "re-exported"
                declared |= {alias.name: line.module.removeprefix("tree_attn.") for alias in line.names}
    assert declared == tree_attn._MODULE_OF


def test_names_of_the_readme_are_public():
    """Each `from tree_attn import ...` and `tree_attn.name` of the README and the docs exists."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    names = set()
    for text in map(pathlib.Path.read_text, texts):
        for line in re.findall(r"^from tree_attn import (.+)$", text, flags=re.MULTILINE):
            names |= {name.strip() for name in line.split("#")[0].split(",")}
    assert names
    for name in names:
        assert hasattr(tree_attn, name) or importlib.import_module(f"tree_attn.{name}"), name


def packages():
    """Returns the packages of ours, each with the names of its modules."""
    for package in ("tree_attn", "tree_attn.models.llama", "tree_attn.ring_baseline"):
        yield package
        found = importlib.import_module(package)
        yield from (f"{package}.{module.name}" for module in pkgutil.iter_modules(found.__path__[:1]) if module.ispkg)


@pytest.mark.parametrize("package", sorted(set(packages())))
def test_no_function_shadows_the_module_that_holds_it(package):
    """After all its modules are imported, a package's attribute of a module's name is that module."""
    found = importlib.import_module(package)
    for module in pkgutil.iter_modules(found.__path__[:1]):
        importlib.import_module(f"{package}.{module.name}")
        assert isinstance(getattr(found, module.name), types.ModuleType), f"{package}.{module.name}"


def functions_with_lse():
    """Yields the definitions in the source of each public function that has `return_lse`, its overloads first."""
    for package in (tree_attn, ring_baseline):
        for name in package.__all__:
            function = getattr(package, name)
            if inspect.isfunction(function) and "return_lse" in inspect.signature(function).parameters:
                module = ast.parse(inspect.getsource(inspect.getmodule(function)))
                yield pytest.param([node for node in module.body if getattr(node, "name", "") == name], id=name)


@pytest.mark.parametrize("definitions", functions_with_lse())
def test_overloads_are_the_function_itself_but_for_return_lse(definitions):
    """A type checker reads the overloads alone: each has the parameters and annotations of the function."""

    def described(node):
        args, defaults = node.args, dict(zip(node.args.kwonlyargs, node.args.kw_defaults))
        keywords = {arg.arg: (ast.unparse(arg), defaults[arg] is None) for arg in args.kwonlyargs}
        flag = keywords.pop("return_lse")
        positional = [ast.unparse(arg) for arg in args.args], len(args.defaults), ast.unparse(args.kwarg)
        return (positional, list(keywords.values())), flag[0].removeprefix("return_lse: ")

    *overloads, function = definitions
    assert all([ast.unparse(decorator) for decorator in node.decorator_list] == ["overload"] for node in overloads)
    expected, _ = described(function)
    found = {}
    for node in overloads:
        parameters, flag = described(node)
        assert parameters == expected
        found[flag] = ast.unparse(node.returns)
    array, pair = map(ast.unparse, (function.returns.left, function.returns.right))
    assert found == {"Literal[False]": array, "Literal[True]": pair, "bool": ast.unparse(function.returns)}


def test_public_functions_are_documented():
    """A summary, arguments, errors, an example and a source; classes at least a summary and an example or fields."""
    for name in tree_attn.__all__:
        value = getattr(tree_attn, name)
        if inspect.isfunction(value):
            text = inspect.getdoc(value)
            missing = [part for part in ("Example:", "Source:") if part not in text]
            assert not missing, f"{name}: {missing}"
