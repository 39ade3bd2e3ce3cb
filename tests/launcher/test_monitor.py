"""What the launcher and the monitor beside torchrun's ranks do, with clocks and ranks of a test."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.launcher.failures import monitor
from planner.launcher.failures.monitor import CAUSE_S, Monitor, watch_ranks
from planner.launcher.failures.rank import LEFT, RankProcess
from planner.launcher.failures.status import StatusFile, claim_report, status_paths
from planner.support.errors import LaunchError

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

# A process with a status file; it says so, and goes on as it is told.
RANK = """
import os, signal, sys, time
from pathlib import Path
from planner.launcher.failures.status import Phase, StatusFile
file = StatusFile.of_this_process(Path(sys.argv[1]), int(sys.argv[2]))
file.describe("stage 1", 5 << 30, 20.0)
file.enter(Phase.FORWARD, 1, 3)
print("ready", flush=True)
{act}
time.sleep(600)
"""


@pytest.fixture
def start(tmp_path):
    """Starts processes with a status in a folder, each in a session of its own."""
    ranks = []

    def started(rank, act=""):
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK.format(act=act), str(tmp_path), str(rank)], cwd=ROOT,
                stdout=subprocess.PIPE, text=True, start_new_session=True,
            )
        )  # fmt: skip
        assert ranks[-1].stdout.readline() == "ready\n"
        return ranks[-1]

    yield started
    for rank in ranks:
        rank.kill()
        rank.communicate()


def test_a_killed_rank_is_known_by_its_lock_and_a_living_or_ended_one_is_not(start, tmp_path):
    killed, _, done = start(1), start(2), start(3, "file.enter(Phase.ENDED); os._exit(0)")
    files = {rank: StatusFile.at(path) for rank, path in status_paths(tmp_path).items()}
    assert not any(file.has_died() for rank, file in files.items() if rank != 3)
    killed.kill()
    killed.wait()
    done.wait()
    assert [rank for rank in sorted(files) if files[rank].has_died()] == [1]


def test_the_others_say_of_a_killed_rank_where_it_was_and_its_memory(start, tmp_path):
    killed, own = start(1), RankProcess(0, folder=tmp_path)
    own.status = StatusFile.of_this_process(tmp_path, 0)
    assert own.lost_rank_message() == "rank 0 stops because another rank has ended"
    assert Monitor(tmp_path, 2).look(0.0) is None
    killed.kill()
    killed.wait()
    said = own.lost_rank_message()
    assert said.startswith(
        "rank 1 (stage 1) has ended without a word at 1F3 of step 0: by code that it ran, killed by"
        " a signal, or out of memory ("
    )
    assert said.endswith(" MiB in use, 5 GiB predicted)")


def test_a_process_that_a_rank_has_started_is_not_taken_for_the_rank(start, tmp_path):
    start(1)
    with pytest.raises(FileExistsError):
        StatusFile.of_this_process(tmp_path, 1)


def test_one_of_several_claims_the_report(tmp_path):
    assert [claim_report(tmp_path) for _ in range(3)] == [True, False, False]
    first, second = RankProcess(0, folder=tmp_path / "new"), RankProcess(1)
    with first.reporter_lock() as is_reporter:
        assert is_reporter, "the folder is gone: rather two reports than none"
    with second.reporter_lock() as is_reporter:
        assert is_reporter, "nobody to share the report with"


def test_a_rank_of_a_launcher_leaves_it_to_say_that_another_one_has_ended(tmp_path):
    rank = RankProcess(0, has_launcher=True, folder=tmp_path)
    with rank.reporter_lock(of_an_end=True) as is_reporter:
        assert not is_reporter
    with rank.reporter_lock() as is_reporter:
        assert is_reporter
    assert not claim_report(tmp_path)


def test_the_monitor_kills_a_rank_that_hangs_and_reports_it(start, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(monitor, "LOOK_S", 0.01)
    ticks = iter(range(0, 10**6, 2))
    monkeypatch.setattr(monitor.time, "monotonic", lambda: next(ticks))
    rank = start(1, "os.kill(os.getpid(), signal.SIGSTOP)")
    hang = watch_ranks(tmp_path, os.getpid(), 1)
    assert hang.ranks == (1,)
    assert rank.wait() == -signal.SIGKILL
    said = capfd.readouterr().err
    assert said.startswith(
        "Error: rank 1 (stage 1) hangs: it has given no sign of life for 20 s, at 1F3"
    )
    assert not claim_report(tmp_path)


def test_the_monitor_ends_with_the_agent_or_the_last_rank(start, tmp_path):
    rank = start(1)
    rank.kill()
    rank.wait()
    assert watch_ranks(tmp_path, os.getpid(), 1) is None
    start(2)
    assert watch_ranks(tmp_path, rank.pid, 1) is None


@pytest.fixture
def clock(monkeypatch):
    """A clock on which every wait lasts a second: the host is busy."""
    now = SimpleNamespace(s=0.0)

    def sleep(_):
        now.s += 1.0

    monkeypatch.setattr(monitor.time, "monotonic", lambda: now.s)
    monkeypatch.setattr(monitor.time, "sleep", sleep)
    return now


def test_the_cause_of_a_lost_rank_is_waited_for_by_the_clock(clock, monkeypatch):
    monkeypatch.setattr(monitor, "_exit_code", lambda code: code)
    calm = SimpleNamespace(look=lambda now_s: None, has_failed=lambda rank, code: True)
    assert monitor._wait([LEFT, None], calm) == ({0: LEFT}, None)
    assert clock.s == CAUSE_S


# A command of a launcher: notes its folder, and ends as its first argument says.
COMMAND = """
import os, sys, time
open("folder", "a").write(os.environ["PLANNER_RANKS"] + "\\n")
while len(open("folder").readlines()) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    exec(sys.argv[1])
    time.sleep(600)
"""


@pytest.mark.parametrize(("act", "end"), [
    ("sys.exit(0)", 0),
    ("open(os.environ['PLANNER_RANKS'] + '/report', 'x'); sys.exit(1)", 1),
    ("sys.exit(3)", "rank 1 ended by itself with exit code 3: code that it ran has ended the"
     " process, by os._exit for example"),
    ("os.kill(os.getpid(), 9)", "rank 1 was ended by SIGKILL; it may have been out of memory"),
    ("sys.exit(75)", "rank 1 has lost its connections to the others"),
])  # fmt: skip
def test_the_folder_of_a_launcher_ends_with_it(tmp_path, monkeypatch, act, end):
    (tmp_path / "command").write_text(COMMAND)
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(monitor, "CLI", tmp_path / "command")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    try:
        assert monitor.start_ranks([act], 2) == end
    except LaunchError as error:
        assert str(error) == end
    first, second = (tmp_path / "folder").read_text().splitlines()
    assert first == second and first.startswith(str(tmp_path / "tmp"))
    assert list((tmp_path / "tmp").iterdir()) == []
