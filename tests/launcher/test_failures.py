"""When a rank hangs, on made-up status files and processes; errors with their rank and action."""

import os
import re
import time
from dataclasses import replace

import pytest
import torch

from planner.artefacts.plan import MemoryParts
from planner.launcher.failures import errors, status, watch
from planner.launcher.failures.errors import introduce, out_of_memory, with_causes
from planner.launcher.failures.rank import RankProcess, current_status
from planner.launcher.failures.status import Phase, StatusFile, status_paths
from planner.launcher.failures.watch import FIRST, KNOWN, MAX_LOOK_S, STOPPED_S, HangDetector
from planner.support.errors import LaunchError
from tests.launcher.test_launch import write_case
from tests.support.launch_worker import Case, load_model, make_plan

T = 20.0


class Ranks:
    """Ranks that are watched, with a clock and processes that a test decides on."""

    def __init__(self, num_ranks, world_size=None):
        self.files = {rank: StatusFile() for rank in range(num_ranks)}
        self.now_s = 0.0
        self.computes_s = dict.fromkeys(range(num_ranks), 0.0)
        self.stopped = set()
        for rank, one in self.files.items():
            one.describe(f"stage {rank}", 0, T)
            one.process = 100 + rank
        self.detector = HangDetector(
            {rank: _Numbered(one, 100 + rank) for rank, one in self.files.items()},
            world_size or num_ranks,
            lives=lambda process: True,
            stopped=lambda process: process - 100 in self.stopped,
            computed=lambda process: self.computes_s[process - 100],
        )

    def passes(self, seconds, busy=()):
        """The first hang within a time, and when it was found."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for rank in busy:
                self.computes_s[rank] += 0.9
            hang = self.detector.look(self.now_s)
            if hang is not None:
                return hang
        return None


class _Numbered:
    """The status of a process with a number of its own."""

    def __init__(self, of, process):
        self._of, self._process = of, process

    def look(self):
        return replace(self._of.look(), process=self._process)


def knows(one, phase, longest_s, *where):
    """The rank has been in such an action before, and is now in another one."""
    one.enter(phase, *where)
    one._longest_s[one._key] = longest_s
    one.enter(Phase.BETWEEN)
    one._longest_s[one._key] = longest_s
    one.enter(Phase.BETWEEN)


def test_a_known_action_may_take_the_timeout_and_no_longer():
    ranks = Ranks(1)
    knows(ranks.files[0], Phase.FORWARD, 0.5, 1)
    ranks.files[0].enter(Phase.FORWARD, 1, 3)
    assert ranks.passes(T) is None
    hang = ranks.passes(2)
    assert hang.ranks == (0,)
    assert hang.message == (
        "rank 0 (stage 0) hangs: it has stood for 21 s at 1F3 of step 0; such an action took at "
        "most 500 ms before; if that is right, give more time with --hang-timeout (now 20)"
    )


def test_a_slow_action_may_take_many_times_as_long_as_before():
    ranks = Ranks(1)
    knows(ranks.files[0], Phase.FORWARD, 6.0, 0)
    ranks.files[0].enter(Phase.FORWARD, 0, 3)
    assert ranks.passes(KNOWN * 6) is None
    assert ranks.passes(2) is not None


def test_the_first_action_of_a_kind_has_time_to_compile():
    ranks = Ranks(1)
    ranks.files[0].enter(Phase.FORWARD, 0, 0)
    assert ranks.passes(FIRST * T) is None
    assert "such an action was none before" in ranks.passes(2).message


def test_data_that_computes_has_time_and_data_that_waits_has_not():
    ranks = Ranks(2)
    for one in ranks.files.values():
        knows(one, Phase.STEP, 0.1)
    ranks.files[1].enter(Phase.RECEIVE)
    assert ranks.passes(5 * T, busy={0}) is None
    hang = ranks.passes(T + 3)
    assert hang.ranks == (0,)
    assert "its processes compute nothing" in hang.message


def test_who_waits_for_a_rank_that_hangs_is_not_to_blame():
    ranks = Ranks(2)
    for one in ranks.files.values():
        knows(one, Phase.STEP, 0.1)
        knows(one, Phase.RECEIVE, 0.1)
    ranks.files[0].enter(Phase.RECEIVE)
    assert ranks.passes(10) is None
    ranks.files[1].enter(Phase.STEP)
    assert ranks.passes(T + 5).ranks == (1,)


def test_ranks_that_all_wait_for_each_other_hang_together():
    ranks = Ranks(2)
    for rank, one in ranks.files.items():
        knows(one, Phase.RECEIVE, 0.1, rank)
        one.enter(Phase.RECEIVE, rank, 2, 1 - rank)
    assert ranks.passes(T) is None
    hang = ranks.passes(2)
    assert hang.ranks == (0, 1)
    assert hang.message.splitlines() == [
        "all ranks wait for each other for 21 s:",
        "  rank 0 (stage 0): waiting for device 1 in stage 0, microbatch 2, of step 0",
        "  rank 1 (stage 1): waiting for device 0 in stage 1, microbatch 2, of step 0",
    ]


def test_ranks_that_wait_for_those_of_another_host_do_not_hang():
    ranks = Ranks(2, world_size=4)
    for one in ranks.files.values():
        knows(one, Phase.BARRIER, 0.1)
        one.enter(Phase.BARRIER)
    assert ranks.passes(40 * T) is None


def test_all_is_judged_by_one_look_at_each_rank():
    ranks, looks = Ranks(3), []
    for number, one in enumerate(ranks.files.values()):
        knows(one, Phase.BARRIER, 0.1)
        one.enter(Phase.BARRIER)
        look = ranks.detector.files[number].look
        ranks.detector.files[number].look = lambda n=number, look=look: looks.append(n) or look()
    assert ranks.passes(3) is None
    assert looks == 3 * [0, 1, 2]


def test_a_stopped_rank_hangs_soon_wherever_it_is():
    ranks = Ranks(2)
    ranks.files[1].enter(Phase.BARRIER)
    assert ranks.passes(3) is None
    ranks.stopped = {1}
    assert ranks.passes(STOPPED_S - 1) is None
    assert ranks.passes(3).message == (
        "rank 1 (stage 1) hangs: it has given no sign of life for 20 s, at the start of step 0, "
        "waiting for the other ranks; process 101 was stopped by a signal"
    )


def test_a_rank_is_stopped_only_while_it_is():
    ranks = Ranks(1)
    for _ in range(3):
        ranks.stopped = {0}
        assert ranks.passes(STOPPED_S - 1) is None
        ranks.stopped = set()
        assert ranks.passes(1) is None


def test_nothing_hangs_while_the_machine_sleeps():
    ranks = Ranks(1)
    knows(ranks.files[0], Phase.FORWARD, 0.5, 0)
    ranks.files[0].enter(Phase.FORWARD, 0, 0)
    assert ranks.passes(5) is None
    ranks.now_s += 3600
    assert ranks.passes(T - 5 - MAX_LOOK_S) is None


def test_no_timeout_no_hang():
    ranks = Ranks(1)
    ranks.files[0].describe("", 0, 0.0)
    ranks.stopped = {0}
    assert ranks.passes(1000) is None


# ------------------------------------------------------------------------------- status files


def test_another_process_reads_what_a_rank_does(tmp_path):
    mine = StatusFile.of_this_process(tmp_path, 1)
    mine.describe("stages 0 and 2", 5 << 30, T)
    mine.begin_step(7)
    mine.enter(Phase.BACKWARD, 2, 3)
    found = StatusFile.at(status_paths(tmp_path)[1]).look()
    assert str(found.action) == "at 2B3 of step 7"
    assert (found.process, found.description, found.predicted_bytes) == (
        os.getpid(), "stages 0 and 2", 5 << 30,
    )  # fmt: skip
    assert StatusFile().look().process == 0
    with pytest.raises(OSError, match="No such file"):
        StatusFile.at(tmp_path / "none")


def test_the_longest_action_of_a_kind_is_kept(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(status.time, "monotonic", lambda: now[0])
    one = StatusFile()
    for spent_s in (3.0, 1.0):
        one.enter(Phase.FORWARD, 1, 0)
        now[0] += spent_s
        one.enter(Phase.STEP)
    one.enter(Phase.FORWARD, 1, 5)
    assert one.look().action.longest_s == 3.0
    one.enter(Phase.FORWARD, 2, 5)
    assert one.look().action.longest_s == 0.0


def test_the_system_knows_of_this_process():
    me = os.getpid()
    assert watch.lives(me) and not watch.is_stopped(me)
    assert watch.used_bytes(me) > 10 << 20
    before = watch.computed_s(me)
    end_s = time.process_time() + 0.05
    while time.process_time() < end_s:
        pass
    assert watch.computed_s(me) > before
    assert watch.is_stopped(2**22 + 1) is None and watch.computed_s(2**22 + 1) is None


# --------------------------------------------------------------------------------- causes


@pytest.fixture
def plan(tmp_path, monkeypatch):
    write_case(tmp_path, Case((1, 1), 4))
    made = make_plan(Case((1, 1), 4), load_model(tmp_path / "net.onnx"))
    monkeypatch.setattr("planner.launcher.failures.rank._alone", StatusFile())
    monkeypatch.setattr("planner.launcher.failures.rank._current", RankProcess(1))
    current_status().describe("", 0, 0.0)
    introduce(made, made.ranks[1], T)
    return made


def raised(plan, error, monkeypatch, memory=None):
    if memory is not None:
        one = errors.predicted(plan, plan.ranks[1])
        monkeypatch.setattr(errors, "predicted", lambda *_: replace(one, memory=memory))
    current_status().begin_step(5)
    current_status().enter(Phase.FORWARD, 1, 3)
    with pytest.raises(LaunchError) as caught, with_causes(plan, plan.ranks[1]):
        raise error
    return str(caught.value)


def test_an_error_names_rank_stage_action_and_cause(plan, monkeypatch):
    message = raised(plan, ZeroDivisionError("no batch"), monkeypatch)
    assert re.fullmatch(
        r"rank 1 \(stage 1\) at 1F3 of step 5: ZeroDivisionError: no batch "
        r"\(.*test_failures\.py, line \d+\)",
        message,
    )


def test_a_message_stays_as_it_is(plan, monkeypatch):
    assert raised(plan, LaunchError("--data: no"), monkeypatch) == "--data: no"


CPU_SAYS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)
CUDA_SAYS = "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16 GiB"


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError(CPU_SAYS), "4 TiB"),
        (torch.OutOfMemoryError(CUDA_SAYS), "512.00 MiB"),
        (MemoryError(), None),
    ],
    ids=["cpu", "cuda", "python"],
)
def test_out_of_memory_names_stage_bytes_and_remedy(plan, monkeypatch, error, asked):
    memory = MemoryParts(parameter_bytes=3 << 30, stash_bytes=1 << 30)
    wrapped = LaunchError("at 1F3")
    wrapped.__cause__ = error
    first, second = raised(plan, wrapped, monkeypatch, memory).splitlines()
    more = f" when it asked for {asked} more" if asked else ""
    device = plan.ranks[1]
    name = errors.predicted(plan, device).name
    assert re.fullmatch(
        rf"rank 1 \(stage 1\) at 1F3 of step 5: out of memory on device {device} \({name}\): "
        rf"[\d.]+ [MG]iB in use \(peak [\d.]+ [MG]iB\){more}; predicted were 4 GiB "
        r"\(parameter 3 GiB, stash 1 GiB\)",
        first,
    )
    assert second.startswith('  plan with less: planner solve --device-memory "3.2 GiB", with --re')


def test_torch_says_out_of_memory_as_expected():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert out_of_memory(caught.value) is caught.value
    assert out_of_memory(RuntimeError("shapes do not fit")) is None
