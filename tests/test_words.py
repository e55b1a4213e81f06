"""The rules of writing that a program can hold: docs/conventions.md has all of them."""

import ast
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FOLDERS = ("tree_attn", "models", "ring_baseline", "scripts", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PACKAGES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("tree_attn", "models", "ring_baseline")]
PROSE = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROSE += [ROOT / "SECURITY.md"]
SITE_FOLDERS = ("concepts", "how-to", "kernels", "reference")
PROSE += [path for folder in SITE_FOLDERS for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
PROSE += [ROOT / "slurm" / "README.md", *sorted((ROOT / "docs" / "log").glob("*.md"))]
PROSE += sorted((ROOT / "docs" / "results").rglob("README.md"))

# Words without a subject: a sentence that begins so leaves the reader to find what it speaks of.
NO_SUBJECT = re.compile(r"(As|How|Of|Or|That|Those|What|Where|Whether|Which|Whom|Whose)\b")
# Words that put a person into a program, or that speak of a time that the reader does not know.
BANNED = re.compile(r"\b(nobody|(is|are) told|of before|since then|the (former|latter))\b", flags=re.IGNORECASE)
# Adjectives and participles that name nothing by themselves.
NO_NAMES = {"how", "most", "least", "own", "given", "held", "kept", "made", "asked", "told", "laid", "beside", "onto"}
MAX_WORDS = 25


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def place(path: pathlib.Path, node: ast.AST) -> str:
    return f"{name_of(path)}:{getattr(node, 'lineno', 1)}"


def docstrings(path: pathlib.Path):
    """Yields each module, class and function of a file with its docstring or None."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, ast.get_docstring(node)


def sentences(markdown: str):
    """Yields the sentences of a text, without code, tables, headings, formulas and the targets of links."""
    text = re.sub(r"```.*?```", "", markdown, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^\$\$.*?^\$\$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\$[^$\n]+\$", "formula", text)
    text = re.sub(r"^\s*[|#].*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ {4,}\S.*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n\s*[-*] |\n\s*\d+\. ", "\n" + text):
        for sentence in re.split(r"(?<=[.!?:;])[\"')*_]*\s+", " ".join(block.split())):
            yield sentence.strip(" *_")


def long_sentences(markdown: str) -> list[str]:
    """Returns the sentences of more than `MAX_WORDS` words."""
    return [text for text in sentences(markdown) if len(re.findall(r"[A-Za-z][\w'-]*", text)) > MAX_WORDS]


def test_docstrings_begin_with_their_subject_or_a_verb():
    wrong = []
    for path in SOURCES:
        for node, text in docstrings(path):
            if text and NO_SUBJECT.match(text):
                wrong.append(f"{place(path, node)}: {text.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


def test_no_word_that_has_to_be_decoded():
    wrong = []
    for path in {*SOURCES, *PROSE} - {pathlib.Path(__file__)}:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if BANNED.search(line):
                wrong.append(f"{name_of(path)}:{number}: {line.strip()}")
    assert not wrong, "\n".join(sorted(wrong))


def test_names_are_nouns_or_verbs():
    wrong = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if is_stored else node.arg if isinstance(node, ast.arg) else None
            if name in NO_NAMES:
                wrong.append(f"{place(path, node)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_sentences_of_documents_are_short():
    long = [f"{name_of(path)}: {sentence}" for path in PROSE for sentence in long_sentences(path.read_text())]
    assert not long, "\n".join(long)


def test_sentences_of_docstrings_are_short():
    """The sections from `Args:` on are lists, and are not read."""
    long = []
    for path in SOURCES:
        for node, text in docstrings(path):
            prose = re.split(r"^(?:Args|Returns|Raises|Example|Source|Yields):", text or "", flags=re.MULTILINE)[0]
            long += [f"{place(path, node)}: {sentence}" for sentence in long_sentences(prose)]
    assert not long, "\n".join(long)


def test_public_names_have_docstrings():
    """Modules, public classes, and public functions and methods that are not nested in a function."""
    missing = []

    def visit(path, node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
                is_overload = any(ast.unparse(decorator) == "overload" for decorator in child.decorator_list)
                if ast.get_docstring(child) is None and not is_overload:  # the function itself has it
                    missing.append(f"{place(path, child)}: {child.name}")
                if isinstance(child, ast.ClassDef):
                    visit(path, child)

    for path in PACKAGES:
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            missing.append(f"{name_of(path)}: the module")
        visit(path, tree)
    assert not missing, "\n".join(missing)


def test_arguments_are_indented_by_two():
    wrong = []
    for path in PACKAGES:
        for node, text in docstrings(path):
            if set(re.findall(r"^(?:Args|Returns|Raises):\n( +)\S", text or "", flags=re.MULTILINE)) - {"  "}:
                wrong.append(place(path, node))
    assert not wrong, "\n".join(wrong)


def test_subjects_of_commits_are_short():
    """A subject has at most 72 characters, in every commit since the rule was written."""
    rule = "e956f56..HEAD"
    log = subprocess.run(["git", "log", "--no-merges", "--format=%s", rule], cwd=ROOT, capture_output=True, text=True)
    if log.returncode:
        pytest.skip(f"runs in a clone whose history holds {rule}")
    long = [subject for subject in log.stdout.splitlines() if len(subject) > 72]
    assert not long, "\n".join(long)
