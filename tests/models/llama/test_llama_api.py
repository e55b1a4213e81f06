"""The public names of the Llama: resolved on first use, and all of them declared for type checkers."""

import ast
import inspect
import subprocess
import sys

from tree_attn.models import llama


def test_the_import_loads_no_other_module_and_generation_no_kernel():
    code = (
        "import sys\n"
        "import tree_attn.models.llama\n"
        "print(*(name for name in sys.modules if name.startswith(('tree_attn', 'jax', 'flax'))))\n"
        "import tree_attn.models.llama.generation.generate\n"
        "print(*(name for name in sys.modules if name.startswith(('tree_attn.kernels', 'tree_attn.cluster'))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["tree_attn", "tree_attn.models", "tree_attn.models.llama"]


def test_every_public_name_resolves_and_is_declared_for_type_checkers():
    assert all(getattr(llama, name) is not None for name in llama.__all__)
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(llama))) if isinstance(node, ast.ImportFrom)]
    declared = {(node.module, alias.asname) for node in imports for alias in node.names if alias.asname}
    prefix = "tree_attn.models.llama."
    assert declared == {(prefix + module, name) for name, module in llama._MODULE_OF.items()}
