"""One process per device: what becomes of the processes."""

import os
import pathlib
import subprocess
import sys

import process_per_device
import pytest

WORKER = [sys.executable, "-c", "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"]


def test_the_processes_end_with_the_one_that_started_them():
    folder = pathlib.Path(process_per_device.__file__).parent
    program = f"import process_per_device; process_per_device.spawn({WORKER!r}, 2)"
    env = os.environ | {"PYTHONPATH": str(folder)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env) as parent:
        numbers = [int(parent.stdout.readline()) for _ in range(2)]
        parent.terminate()
        assert parent.wait(timeout=30) == 128 + 15
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def test_the_worst_status_is_returned():
    fail = [sys.executable, "-c", "import sys; sys.exit(3 * sys.argv[-1].endswith(',1'))"]
    assert process_per_device.spawn(fail, 2) == 3
