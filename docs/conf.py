"""Configures Sphinx: `sphinx-build -W --keep-going -q docs site` makes the site of these documents.

Pages are Markdown, by MyST, and read on their own too. The reference comes from the docstrings. Equations become MathML
when the site is built, by Docutils' converter: neither the build nor a reader's browser needs a network for them.
"""

import importlib
import inspect
import operator
import pathlib
import re

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.domains.python import PyProperty
from sphinx.util.inspect import stringify_signature

import tree_attn

project = "tree-attn"
release = version = tree_attn.__version__
author = "tree-attn developers"
copyright = f"2026, {author}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"tree-attn {release}"
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["dollarmath"]  # equations as GitHub shows them too
myst_dmath_allow_digits = False
myst_heading_anchors = 4  # as on GitHub
html_math_renderer = "mathml"

default_role = "code"  # docstrings have code between single backticks, as Markdown does
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # `signature` and `Property` below show them; autodoc alone shows every overload
python_maximum_signature_line_length = 80


def signature(app, what, name, obj, options, given, returns):
    """Returns the arguments and the result with their types, an array of JAX or NumPy as `AnyArray`."""
    if what not in ("class", "function", "method"):
        return given, returns
    text = stringify_signature(inspect.signature(obj), unqualified_typehints=True)
    text = re.sub(r"~jaxtyping\.(\w+)\[Array, ('[^']*')\] \| ~jaxtyping\.\1\[ndarray, \2\]", r"\1[AnyArray, \2]", text)
    arguments, _, result = re.sub(r"~(\w+\.)*", "", text).partition(") -> ")
    result = "" if what == "class" else result
    return arguments.removesuffix(")").replace("(self, ", "(").replace("(self", "(") + ")", result


class Property(PyProperty):
    """A property with the type that its function returns, written as `signature` writes results."""

    def run(self):
        """Adds the option `type`, where the directive names a module and has no type."""
        if "module" in self.options and "type" not in self.options:
            module = importlib.import_module(self.options["module"])
            found = operator.attrgetter(self.arguments[0])(module)
            function = found.func if hasattr(found, "func") else found.fget  # a cached property, or any other
            if inspect.signature(function).return_annotation is not inspect.Signature.empty:
                _, self.options["type"] = signature(None, "method", self.arguments[0], function, None, "", "")
        return super().run()


def readmes(app, page, source):
    """Has links to folders lead to their READMEs, which are what a browser of the repository shows."""
    folder = pathlib.Path(app.srcdir, page).parent

    def link(found):
        is_folder = (folder / found[1] / "README.md").is_file()
        return f"]({found[1].rstrip('/')}/README.md)" if is_folder else found[0]

    source[0] = re.sub(r"\]\(([^)#:\s]+)\)", link, source[0])


def math(as_block: bool):
    """Returns a visitor that writes an equation as MathML."""

    def visit(translator, node):
        translator.body.append(tex2mathml(node.astext(), as_block=as_block))
        raise SkipNode

    return visit, None


def setup(app):
    """Adds them to the build."""
    app.connect("source-read", readmes)
    app.add_directive_to_domain("py", "property", Property, override=True)
    app.connect("autodoc-process-signature", signature)
    app.add_html_math_renderer("mathml", math(as_block=False), math(as_block=True))
