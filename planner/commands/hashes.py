"""One PYTHONHASHSEED for all ranks: a list of a set of strings has one order on all of them.

Python hashes strings by a seed that each process draws at its start, where the variable is not set.
"""

import os
import sys

HASH_SEED = "PYTHONHASHSEED"


def start_with_one_hash_seed() -> None:
    """Starts `planner launch` anew with a seed that is the same everywhere, if there is none: it
    stays the same process, with its arguments, folder, files and other variables. A seed that the
    user has set stays. `--nproc` hands its own on to its ranks.
    """
    is_drawn = HASH_SEED not in os.environ and not sys.flags.ignore_environment
    given = sys.argv[1:]
    # A process that another program has forked, or made by multiprocessing, has other arguments.
    is_own = sys.orig_argv[-len(given) :] == given
    if is_drawn and given[:1] == ["launch"] and is_own and sys.executable and os.name == "posix":
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, HASH_SEED: "0"})
