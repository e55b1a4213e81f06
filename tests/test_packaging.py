"""The files that an installation writes: one top-level package, beside which a user's own `models` works on."""

import email
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest
import yaml

import tree_attn

ROOT = pathlib.Path(__file__).parent.parent
USER_MODEL = "WHOSE = 'the user'\n"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> pathlib.Path:
    """A copy of what is built, so that building leaves nothing in the repository."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("tree_attn", "models", "ring_baseline", "slurm", "docs"):
        unwanted = shutil.ignore_patterns("__pycache__", "results", "*.png")  # measured rows and pictures: 5 MB
        shutil.copytree(ROOT / folder, copy / folder, ignore=unwanted)
    for file in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / file, copy / file)
    return copy


def build(checkout: pathlib.Path, hook: str, folder: pathlib.Path) -> pathlib.Path:
    """Builds by setuptools' hook `build_wheel`, `build_editable` or `build_sdist` (PEP 517, PEP 660), as pip does."""
    code = f"import setuptools.build_meta as build; print(build.{hook}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module", params=["build_wheel", "build_editable"])
def installed(request, checkout, tmp_path_factory):
    """Returns the interpreter of a fresh environment that holds tree-attn and its dependencies, and the wheel."""
    folder = tmp_path_factory.mktemp(request.param)
    wheel = build(checkout, request.param, folder)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    site = folder / "env" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # A path file names one folder; the path files inside that folder, such as an editable tree-attn's, are not read.
    folders = [path for path in sys.path if pathlib.Path(path).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(folders) + "\n")
    return folder / "env" / "bin" / "python", wheel


@pytest.fixture
def project(tmp_path) -> pathlib.Path:
    """A user's project with a `models` package of its own."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text(USER_MODEL)
    (tmp_path / "models" / "resnet.py").write_text(USER_MODEL)
    return tmp_path


def run(python: pathlib.Path, code: str, cwd: pathlib.Path, **variables) -> str:
    done = subprocess.run(
        [python, "-c", code],
        cwd=cwd,
        env={"JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BOTH = (
    "import models.resnet, tree_attn.models.llama, tree_attn.ring_baseline\n"
    "assert models.WHOSE == models.resnet.WHOSE == 'the user'\n"
    "assert tree_attn.models.llama.LlamaConfig and tree_attn.ring_baseline.ring_decode and tree_attn.tree_decode\n"
    "print(tree_attn.__file__)"
)


def test_one_top_level_package_and_all_of_it(installed):
    """The wheel holds every module and every data file of the repository, under one top-level name."""
    _, wheel = installed
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    if "editable" in wheel.name:
        assert all(name.startswith("__editable__") for name in top), top
        return
    assert top == {"tree_attn"}
    expected = {f"tree_attn/{path.relative_to(ROOT / 'tree_attn')}" for path in (ROOT / "tree_attn").rglob("*.py")}
    for folder in ("models", "ring_baseline"):
        expected |= {f"tree_attn/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    expected |= {f"tree_attn/{path.relative_to(ROOT)}" for path in (ROOT / "slurm").rglob("*") if path.is_file()}
    expected |= {"tree_attn/cost/datasheets.json"}
    expected |= {"tree_attn/py.typed", "tree_attn/kernels/tuning.json", "tree_attn/cost/machines/nvidia_h200.json"}
    assert expected <= set(names), expected - set(names)


def test_the_metadata_say_what_it_is(installed):
    _, wheel = installed
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
        fields = email.message_from_bytes(archive.read(name))
    assert fields["Version"] == tree_attn.__version__
    assert fields["Author"] == "tree-attn developers"
    assert "Typing :: Typed" in fields.get_all("Classifier")
    assert {"rich", "numpy", "jaxtyping"} <= set(fields.get_all("Requires-Dist"))
    assert fields.get_all("Project-URL")


def test_the_sdist_carries_documents_and_slurm(checkout, tmp_path):
    with tarfile.open(build(checkout, "build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"CHANGELOG.md", "docs/conventions.md", "slurm/job.sh", "slurm/minicluster/minicluster"}
    expected |= {"models/llama/model.py", "ring_baseline/decode.py", "tree_attn/py.typed", "tree_attn/state.py"}
    assert expected <= names, expected - names


def test_one_version_in_every_file():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    heading = re.search(r"^## (\S+), (\S+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert (citation["version"], str(citation["date-released"])) == heading.groups()
    assert citation["version"] == tree_attn.__version__


def test_an_error_names_what_can_be_installed(installed, project, checkout):
    """From a checkout by its path, which need not be installed; otherwise by the name of what is installed."""
    python, wheel = installed
    code = "from tree_attn.extras import how_to_install; print(how_to_install('demo'))"
    by_path, by_name = f"python3 -m pip install -e '{checkout}[demo]'", "python3 -m pip install 'tree-attn[demo]'"
    assert run(python, code, cwd=project) == (by_path if "editable" in wheel.name else by_name)
    assert run(python, code, cwd=project, PYTHONPATH=str(checkout)) == by_path


def test_errors_name_extras_that_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [path.read_text() for folder in ("tree_attn", "models") for path in (ROOT / folder).rglob("*.py")]
    named = {name for source in sources for name in re.findall(r"how_to_install\(['\"](\w+)", source)}
    assert {"demo", "flash", "hub", "plot"} <= named <= set(extras)
    literal = [source for source in sources if re.search(r"pip install [^{\n]*\[\w+\]", source)]
    assert literal == [], "commands that name an extra come from how_to_install"


def test_in_a_folder_with_models_of_its_own(installed, project):
    run(installed[0], BOTH, cwd=project)


def test_beside_a_project_that_a_path_file_names(installed, project, tmp_path_factory):
    python, _ = installed
    site = next((python.parent.parent / "lib").glob("python*/site-packages"))
    path_file = site / "a_project.pth"
    path_file.write_text(f"{project}\n")
    try:
        run(python, BOTH, cwd=tmp_path_factory.mktemp("elsewhere"))
    finally:
        path_file.unlink()


def test_beside_a_wheel_that_has_models_at_its_top(installed, project):
    """Both in one site-packages: neither writes a file of the other's."""
    python, _ = installed
    site = next((python.parent.parent / "lib").glob("python*/site-packages"))
    assert not (site / "models").exists()
    shutil.copytree(project / "models", site / "models")
    try:
        run(python, BOTH, cwd=project.parent)
    finally:
        shutil.rmtree(site / "models")


def test_the_command_runs_where_the_path_begins_with_such_a_folder(installed, project):
    code = "from tree_attn.cli import main; main(['generate', '--help'])"
    assert "tree-attn generate" in run(installed[0], code, cwd=project, PYTHONPATH=".")
    run(installed[0], "import tree_attn.commands.generate, tree_attn.commands.session", cwd=project, PYTHONPATH=".")


def test_an_installed_package_brings_the_slurm_files(installed, project):
    code = "from tree_attn.cli import main; main(['slurm', '--copy-to', '.'])"
    assert "files are in slurm;" in run(installed[0], code, cwd=project)
    assert (project / "slurm" / "run.sbatch").read_bytes() == (ROOT / "slurm" / "run.sbatch").read_bytes()
    assert (project / "slurm" / "minicluster" / "minicluster").exists()


def test_a_checkout_that_is_not_installed_is_whole(installed, checkout, project):
    """On the path it comes before an installed tree-attn, and no part of the installed one is mixed in."""
    code = BOTH + "\nprint(tree_attn.models.llama.__file__, tree_attn.ring_baseline.__file__)"
    files = run(installed[0], code, cwd=project, PYTHONPATH=f".:{checkout}").split()
    assert [file for file in files if not file.startswith(f"{checkout}/")] == []
