"""`python cli.py` with each rank of torchrun on a core of its own, if there are enough. More ranks
than cores share all of them, as without this program: two that are bound to one core would wait for
each other while another core idles.

torchrun --nproc-per-node 2 tests/support/pinned.py launch strategy.json

Hosts that are namespaces of one machine (shaped_hosts.py) share its cores, too.
"""

import os
import sys
from pathlib import Path


def pin() -> None:
    """Restricts this process and its threads to one core, if every rank can have one."""
    cores = sorted(os.sched_getaffinity(0))
    if int(os.environ.get("WORLD_SIZE", "1")) <= len(cores):
        os.sched_setaffinity(0, {cores[int(os.environ.get("RANK", "0"))]})


if __name__ == "__main__":
    pin()
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import cli

    cli.start()
