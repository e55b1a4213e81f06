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


def test_every_file_of_the_tree_exists():
    tree = (ROOT / "README.md").read_text().split("## Files")[1]
    names = re.findall(r"^  ([\w.]+(?:, [\w./]+)*)\s", tree, flags=re.MULTILINE)
    paths = [name for line in names for name in line.split(", ")]
    assert len(paths) > 10
    for name in paths:
        assert (ROOT / "tree_attn" / name).exists(), name
