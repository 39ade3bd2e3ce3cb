"""How much processes that compute at the same time slow each other."""

import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from planner.artefacts.files import artefact_hash, read_profile, to_plain, write_profile
from planner.artefacts.profile import Contention, slowdown_among
from planner.profilers import contention as here
from planner.profilers.contention import MachineContention, contention_of, slowdowns
from planner.support.errors import FileError
from tests.support.builders import graph_of, profile_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of its own, and nothing measured yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(here, "available_cores", lambda: 2)
    here._measured.cache_clear()
    yield tmp_path / "cache"
    here._measured.cache_clear()


def phases(work, *cpu_s):
    """Pairs of a phase of one process, 1 s, and one of (number, CPU time in s)."""
    for number, time_s in cpu_s:
        yield from ((work, 1, 1.0, 1.0), (work, number, 9.0, time_s))


def test_a_slowdown_is_the_median_of_pairs_and_counts_turns_on_the_cores():
    pairs = [(2, 1.2), (3, 1.4), (4, 1.3), (2, 1.1), (3, 1.2), (4, 1.3), (2, 9.0), (3, 1.2),
             (4, 1.3)]  # fmt: skip
    some = [*phases("compute", *pairs), *phases("memory", (2, 1.9), (3, 1.0), (4, 0.9))]
    assert slowdowns(some, "compute", 2.0) == {2: 1.2, 3: pytest.approx(1.8), 4: 2.6}
    # No smaller for more processes, and none below 1.
    assert slowdowns(some, "memory", 2.0) == {2: 1.9, 3: 1.9, 4: 1.9}
    assert slowdowns([*phases("memory", (2, 0.8))], "memory", 2.0) == {2: 1.0}
    # With two threads each, two processes already take turns.
    assert slowdowns([*phases("memory", (2, 1.5))], "memory", 1.0) == {2: 3.0}


def test_contention_is_weighted_by_the_time_of_operators_of_either_kind():
    # 9 s of computation and 3 s of an operator with 1 FLOP per byte.
    profile = profile_of(graph_of([[], [0]]), [3.0, 1.0], work=[(10**9, 10**6), (10**6, 10**6)])
    machine = MachineContention(2, {2: 1.2, 4: 2.4}, {2: 2.0, 4: 4.0})
    assert contention_of(profile, machine) == Contention(2, {2: 1.4, 4: 2.8})


def test_processes_that_wait_for_their_turn_cost_those_that_compute():
    profile = profile_of(graph_of([[], [0]]), [3.0, 1.0], work=[(10**9, 10**6), (10**6, 10**6)])
    machine = MachineContention(2, {2: 1.0, 4: 2.0}, {2: 1.0, 4: 2.0}, {3: 1.1}, {3: 1.5})
    known = contention_of(profile, machine)
    assert known.turns == {3: 1.2}
    # Two cores: of two processes none waits for a core, of three and more some do.
    assert [slowdown_among(known, 1, n) for n in (1, 2, 3, 4, 8)] == [1.0, 1.0, 1.2, 1.2, 1.2]
    # All of them cost what was measured for all, and no smaller number costs more.
    assert [slowdown_among(known, n, 4) for n in (1, 2, 3, 4)] == pytest.approx(
        [1.2, 1.2, 1.8, 2.0]
    )


def test_contention_of_this_machine_is_measured_and_kept(own_cache, monkeypatch):
    monkeypatch.setattr(here, "numbers_of_processes", lambda cores: (2, 3))
    monkeypatch.setattr(here, "BUDGET_S", 0.0)
    monkeypatch.setattr(here, "MAX_WALL_PER_CPU", 1e9)
    measured, warning = here.machine_contention(1, cached=True)
    assert (measured.cores, warning) == (2, "")
    # Even on a busy machine, two processes on two cores take less than thrice the time of one.
    assert measured.compute.keys() == measured.memory.keys() == {2, 3}
    assert measured.compute_turns.keys() == measured.memory_turns.keys() == {3}
    assert all(1.0 <= turns[3] < 3.0 for turns in (measured.compute_turns, measured.memory_turns))
    assert all(1.0 <= slow[2] < 3.0 for slow in (measured.compute, measured.memory))
    monkeypatch.setattr(here, "_phases", None)
    here._measured.cache_clear()
    assert here.machine_contention(1, cached=True) == (measured, "")


def test_contention_of_a_busy_machine_is_told_and_not_kept(own_cache, monkeypatch):
    seen = [*phases("compute", (2, 1.0)), *phases("memory", (2, 1.0))]
    monkeypatch.setattr(here, "_phases", lambda threads, numbers, turns: seen)
    measured, warning = here.machine_contention(1, cached=True)
    assert measured is not None
    assert "took 5.00 times their own CPU time: the machine was busy" in warning
    assert not own_cache.exists()


@pytest.mark.parametrize("error", [ValueError("killed"), OSError("no fork")])
def test_contention_that_cannot_be_measured_is_a_warning(own_cache, monkeypatch, error):
    def fail(threads, numbers, turns):
        raise error

    monkeypatch.setattr(here, "_phases", fail)
    measured, warning = here.machine_contention(1, cached=True)
    assert measured is None
    assert f"could not be measured, and is taken for processes / cores: {error}" in warning


def test_contention_of_a_worker_that_fails_tells_its_last_line(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text("raise OSError('Cannot allocate memory')")
    monkeypatch.setattr(here, "_WORKER", worker)
    with pytest.raises(ValueError, match=r"^OSError: Cannot allocate memory$"):
        here._phases(1, (2,))


def measured_quickly(monkeypatch):
    """A number of measurements, which take no time."""
    runs = []

    def seen(threads, numbers, turns):
        runs.append(numbers)
        return [*phases("compute", (2, 1.0)), *phases("memory", (2, 1.0))]

    monkeypatch.setattr(here, "_phases", seen)
    monkeypatch.setattr(here, "MAX_WALL_PER_CPU", 1e9)
    return runs


@pytest.mark.parametrize("damage", [b"", b"{", b"[" * 10**5, b'{"cores": 2}', b"\xff\x00"])
def test_a_damaged_entry_of_contention_is_measured_anew_and_said(
    own_cache, monkeypatch, caplog, damage
):
    runs = measured_quickly(monkeypatch)
    first, _ = here.machine_contention(1, cached=True)
    (path,) = own_cache.rglob("*.entry")
    path.write_bytes(damage)
    here._measured.cache_clear()
    assert here.machine_contention(1, cached=True) == (first, "")
    assert len(runs) == 2
    assert f"{path}: expected an entry of the cache, but the entry is" in caplog.text
    here._measured.cache_clear()
    assert here.machine_contention(1, cached=True) == (first, "")
    assert len(runs) == 2


def test_contention_that_cannot_be_kept_is_said_with_the_path(own_cache, monkeypatch, caplog):
    measured_quickly(monkeypatch)
    own_cache.write_text("in the way")
    measured, warning = here.machine_contention(1, cached=True)
    assert measured is not None
    assert warning == ""
    assert re.search(r"cache/planner/contention/\w+\.entry: cannot be written: .+", caplog.text)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_processes_that_measure_contention_end_with_the_one_that_started_them():
    code = "from planner.profilers import contention; contention._phases(1, (2,))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        while len(family := processes_of(parent.pid)) < 3:  # the worker and what it has forked
            assert parent.poll() is None
            time.sleep(0.05)
        parent.kill()
    assert family
    latest_s = time.monotonic() + 10.0
    while processes_of(parent.pid):
        assert time.monotonic() < latest_s
        time.sleep(0.05)


def processes_of(parent):
    """The processes that measure contention for another one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes().split(b"\0")[:-1]
            if str(here._WORKER).encode() in command and command[-1] == str(parent).encode():
                found.append(path.parent.name)
    return found


def test_a_profile_with_contention_is_written_and_read_and_one_without_is_as_before(tmp_path):
    plain = profile_of(graph_of([[]]), [1.0])
    known = replace(plain, contention=Contention(2, {2: 1.25, 4: 2.5}))
    for one in (plain, known):
        write_profile(one, tmp_path / "profile.json")
        assert read_profile(tmp_path / "profile.json") == one
    assert "contention" not in to_plain(plain)
    assert to_plain(known)["contention"] == {"cores": 2, "slowdown": {"2": 1.25, "4": 2.5}}
    assert artefact_hash(plain) != artefact_hash(known)


def test_a_profile_with_a_contention_that_cannot_be_names_the_field(tmp_path):
    text = json.dumps({"format": "planner-profile/2", **to_plain(
        replace(profile_of(graph_of([[]]), [1.0]), contention=Contention(2, {2: 1.25}))
    )})  # fmt: skip
    (tmp_path / "profile.json").write_text(text.replace("1.25", "0.25"))
    with pytest.raises(FileError, match=r"contention\.slowdown\.2: expected at least 1"):
        read_profile(tmp_path / "profile.json")
