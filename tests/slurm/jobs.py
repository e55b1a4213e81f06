"""What the SLURM tests ask of the cluster."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parent.parent.parent
MINICLUSTER = ROOT / "slurm" / "minicluster" / "minicluster"


def minicluster(*arguments: str, timeout: float = 90) -> str:
    """Runs `minicluster` and returns what it printed; fails with its message if it failed."""
    done = subprocess.run([MINICLUSTER, *arguments], capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"minicluster {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout
