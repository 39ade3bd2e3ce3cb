"""A process that has imported what ranks need, and forks them: `tests.support.ranks.forked`.

A line of JSON on standard input asks for the ranks of a script; the answer is a line too, null or
what went wrong. Nothing here runs a model, so that no thread is left behind by a fork.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from select import select

from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.schedules.dry_run import dry_run
from planner.schedules.program import program
from tests.support.accuracy_plans import planned
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type

POLL_S = 0.01
MODULES = (
    "planner.commands.launch", "planner.training.launch", "tests.support.split_worker",
    "torch.distributed.checkpoint", "torch._dynamo",
)  # fmt: skip
"""The first optimizer imports the last one otherwise."""


def load():
    """Has what every rank uses in this process: modules, and compiled kernels."""
    for name in MODULES:
        importlib.import_module(name)
    profile = profile_of(graph_of([[], [0]]), [1.0, 1.0])
    stages = tuple(Stage.whole((one.name,), (s,), 2 - s, False)
                   for s, one in enumerate(profile.graph.operators))  # fmt: skip
    strategy = Strategy(stages, ScheduleName.ONE_F_ONE_B, 2)
    problem = problem_of(profile, cluster([unit_type()] * 2, 1e9), 2)
    plan = planned(problem, strategy)
    assert dry_run(program(strategy, profile.graph, plan.prediction.stages)) is None


def main():
    """Serves requests until standard input ends."""
    load()
    for line in iter(sys.stdin.readline, ""):
        answer = served(**json.loads(line))
        print(json.dumps(answer), flush=True)


def served(num_ranks, timeout_s, **how):
    """Runs the ranks of a request; None, or what went wrong. No rank is left."""
    ranks = {start(rank, num_ranks, **how): rank for rank in range(num_ranks)}
    running, limit_s = {*ranks}, time.monotonic() + timeout_s
    try:
        while running:
            for number in [*running]:
                ended, status = os.waitpid(number, os.WNOHANG)
                if ended:
                    running.remove(number)
                    if status:
                        code = os.waitstatus_to_exitcode(status)
                        return f"rank {ranks[number]} has ended with {code}"
            if time.monotonic() > limit_s:
                return f"{len(running)} ranks run after {timeout_s} s"
            if select([sys.stdin], [], [], POLL_S)[0]:  # whoever asked is gone
                return "nobody waits any more"
    finally:
        for number in running:
            with suppress(ProcessLookupError):
                os.killpg(number, signal.SIGKILL)
            os.waitpid(number, 0)
    return None


def start(rank, num_ranks, script, arguments, folder, port, stdout, stderr):
    """Forks a rank; gives its process."""
    number = os.fork()
    if number:
        with suppress(ProcessLookupError, PermissionError):  # it may have done so itself
            os.setpgid(number, number)
        return number
    code = 1
    try:
        os.setpgid(0, 0)
        for descriptor, name in ((0, os.devnull), (1, stdout), (2, stderr)):
            flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(os.open(name, flags), descriptor)
        seat = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }  # fmt: skip
        os.environ.update({name: str(value) for name, value in seat.items()})
        os.chdir(folder)
        sys.path[0] = str(Path(script).parent)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
