"""Several ranks of a script, started by torchrun."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def under_torchrun(script, num_ranks, *arguments, timeout_s=200):
    """What the ranks of a script print; an error of theirs is one here.

    Args:
        script: a file that imports from `planner` and `tests`.
        arguments: of the script.
        timeout_s: limit for all of it.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, str(num_ranks), str(script), *map(str, arguments)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
