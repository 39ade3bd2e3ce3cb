"""Several ranks of a script: started by torchrun, or forked from a process that has torch."""

import atexit
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"} | {
    name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ
}


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
        env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def forked(script, num_ranks, *arguments, folder=None, timeout_s=200):
    """The same with ranks that are forked from a process which has imported torch and the launcher,
    and nothing else in common: each rank runs the script from its first line, in the seat that
    torchrun would give it.

    Args:
        folder: where the ranks run; None for this process's folder.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as at:
        request = {
            "script": str(script), "arguments": [*map(str, arguments)], "num_ranks": num_ranks,
            "folder": str(folder or Path.cwd()), "port": store.port, "timeout_s": timeout_s,
            "stdout": f"{at}/stdout", "stderr": f"{at}/stderr",
        }  # fmt: skip
        forge = _forge()
        forge.stdin.write(json.dumps(request) + "\n")
        forge.stdin.flush()
        answer = forge.stdout.readline()
        printed, said = (Path(request[name]).read_text() for name in ("stdout", "stderr"))
    assert answer == "null\n", f"{answer}{said}"
    return printed


@cache
def _forge():
    """The process that forks, for all tests of this process. It ends with its standard input."""
    passed = {name: os.environ[name] for name in ("NUMBA_CACHE_DIR",) if name in os.environ}
    forge = subprocess.Popen(
        [sys.executable, "-m", "tests.support.rank_forge"], cwd=ROOT, env=ENVIRONMENT | passed,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(forge.communicate)  # closes its standard input, and waits
    return forge
