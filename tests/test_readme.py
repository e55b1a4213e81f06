"""The README's example runs as it stands, in an interpreter of its own (it chooses its devices)."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def test_python_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    # In the README the import of tree_attn comes first, so this also shows that it touches no device.
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(1, 1, 32, 128)"


def test_the_tree_names_what_exists_and_all_of_it():
    (tree,) = re.findall(r"## Files\n+```\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    named, folder = set(), ROOT
    for line in tree.splitlines():
        names = re.split(r"\s{2,}", line.strip())[0].split(", ")
        if line.startswith(" "):
            named |= {folder / name for name in names}
        else:
            folder = ROOT / names[0]
            named.add(folder)
    assert [str(path) for path in named if not path.exists()] == []
    for folder in (ROOT / "tree_attn", ROOT / "models" / "llama"):
        modules = {path for path in folder.glob("*.py") if path.name != "__init__.py"}
        assert [str(path) for path in modules - named] == []


def test_tables_are_made_from_the_raw_rows():
    readme = (ROOT / "README.md").read_text()
    tables = re.findall(r"<!-- made by: python3 (.*?) -->\n(.*?)<!-- end", readme, flags=re.DOTALL)
    assert len(tables) == 8
    for command, table in tables:
        made = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=True, cwd=ROOT)
        assert made.stdout == table
