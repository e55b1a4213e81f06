"""`tree-attn slurm`: the SLURM files that come with the package, copied to where jobs are submitted from."""

import argparse
import filecmp
import pathlib
import shutil

from tree_attn.commands.units import count

HELP = """\
Copies the files for jobs under SLURM into DIR/slurm: the sbatch files, the settings that they source, a small cluster
to try them on, and their README. A checkout has them already. A file that is there and differs is an error, before
anything is copied.

examples:
  tree-attn slurm --copy-to .
  sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 slurm/run.sbatch python3 my_program.py
  sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 slurm/decode.sbatch
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tree-attn slurm`."""
    parser.add_argument(
        "--copy-to", type=pathlib.Path, metavar="DIR", required=True, help="the folder that gets the folder slurm"
    )


def run(args: argparse.Namespace) -> int:
    """Copies and says how to go on; returns 0."""
    from tree_attn.commands import terminal

    source, target = _source(), args.copy_to / "slurm"
    files = [path.relative_to(source) for path in sorted(source.rglob("*")) if path.is_file()]
    for file in files:
        is_other = (target / file).exists() and not filecmp.cmp(source / file, target / file, shallow=False)
        if is_other:
            raise ValueError(f"--copy-to must be a folder without other SLURM files, got one with {target / file}")
    shutil.copytree(source, target, dirs_exist_ok=True)
    words = f"{count(len(files), 'file')} {'is' if len(files) == 1 else 'are'}"
    readme = target / "README.md"
    terminal.say(terminal.output(), f"{words} in {target}; how to submit jobs from {args.copy_to}: {readme}")
    return 0


def _source() -> pathlib.Path:
    """Returns the folder of the files: inside an installed package, beside it in a checkout."""
    import tree_attn

    return next(folder for path in tree_attn.__path__ if (folder := pathlib.Path(path) / "slurm").is_dir())
