"""`python cli.py` on one core: each rank of torchrun on its own, as long as there are enough.

torchrun --nproc-per-node 2 tests/support/pinned.py launch strategy.json

Hosts that are namespaces of one machine (shaped_hosts.py) share its cores, too.
"""

import os
import sys
from pathlib import Path


def pin() -> None:
    """Restricts this process and its threads to one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ.get("RANK", "0")) % len(cores)]})


if __name__ == "__main__":
    pin()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import cli

    cli.start()
