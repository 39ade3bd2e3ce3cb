"""`planner launch` hashes strings alike in every process, however it is started."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a command sees of its process; the program prints it instead of running a command.
PROGRAM = """
import json, os, sys
starts = os.environ.get("STARTS", "") + "*"
os.environ["STARTS"] = starts
import cli
cli.main = lambda: print(json.dumps({
    "hash": hash("doc1"), "process": os.getpid(), "arguments": sys.argv[1:], "starts": len(starts),
    "folder": os.getcwd(), "stdin": sys.stdin.read(), "rank": os.environ.get("RANK"),
    "safe": sys.flags.safe_path, "torch": "torch" in sys.modules,
}))
if __name__ == "__main__":
    cli.start()
"""
NAME = "program"
ARGUMENTS = ["launch", "my plan.json", "--data", "nets:samples"]


def seen(folder, how, arguments=ARGUMENTS, **variables):
    """What the program sees, started as `how` says, and the number of the process."""
    (folder / f"{NAME}.py").write_text(PROGRAM)
    path = os.pathsep.join([str(ROOT), str(folder)])
    environment = {name: one for name, one in os.environ.items() if name != "PYTHONHASHSEED"}
    process = subprocess.Popen(
        [sys.executable, *how, *arguments], cwd=folder, stdin=subprocess.PIPE, text=True,
        stdout=subprocess.PIPE, env={**environment, "PYTHONPATH": path, "RANK": "1", **variables},
    )  # fmt: skip
    printed, _ = process.communicate("words")
    assert process.returncode == 0
    return json.loads(printed), process.pid


@pytest.mark.parametrize("how", [[f"{NAME}.py"], ["-P", "-m", NAME], ["-c", PROGRAM]])
def test_a_launch_starts_itself_anew_with_the_seed_of_all_others(tmp_path, how):
    one, process = seen(tmp_path, how)
    other, _ = seen(tmp_path, how)
    assert one["hash"] == other["hash"]
    assert one == {
        "hash": one["hash"], "process": process, "arguments": ARGUMENTS, "starts": 2,
        "folder": str(tmp_path), "stdin": "words", "rank": "1", "safe": "-P" in how,
        "torch": False,
    }  # fmt: skip


def test_a_seed_of_the_user_stays(tmp_path):
    (one, _), (other, _) = (seen(tmp_path, [f"{NAME}.py"], PYTHONHASHSEED=n) for n in "78")
    assert one["hash"] != other["hash"]
    assert one["starts"] == 1


def test_other_commands_are_not_started_anew(tmp_path):
    found, _ = seen(tmp_path, [f"{NAME}.py"], ["solve", "launch"])
    assert found["starts"] == 1


def test_a_python_that_reads_no_environment_starts_once(tmp_path):
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}"
    found, _ = seen(tmp_path, ["-E", "-c", code])
    assert found["starts"] == 1


def test_a_process_that_another_program_has_made_is_not_started_anew(tmp_path):
    """A forked rank, or a process of multiprocessing, was not started by its arguments."""
    code = f"import sys\nsys.argv = {['planner', *ARGUMENTS]!r}\n{PROGRAM}"
    found, _ = seen(tmp_path, ["-c", code], [])
    assert (found["arguments"], found["starts"]) == (ARGUMENTS, 1)
