"""Functions in processes of their own: whatever ends these, this one goes on."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from planner.support import forked
from planner.support.forked import EndedError, Forked

ROOT = Path(__file__).parents[1]
LONG_S = 600
"""Of functions that are to be ended; no test waits for it."""

pytestmark = pytest.mark.skipif(not forked.FORKS, reason="the system does not fork")


def ended(process):
    """Whether a process ends within a minute."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # nobody waits for it where the tests' own parent does not
            return True
        time.sleep(0.1)
    return False


def test_answers_come_from_another_process_which_keeps_what_it_knows():
    seen = []

    def number(question):
        seen.append(question)
        return len(seen), os.getpid()

    with Forked(number) as process:
        (first, one), (second, other) = process("a"), process("b")
    assert (first, second) == (1, 2)
    assert one == other != os.getpid()
    assert seen == []
    assert ended(one)


def test_a_process_starts_with_the_first_question_alone(monkeypatch):
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a process was started"))
    with Forked(len):
        pass


def kill(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("end", "words"), [
    (lambda: kill(signal.SIGKILL), "SIGKILL"),
    (lambda: kill(signal.SIGTERM), "SIGTERM"),
    (lambda: os._exit(3), "exit code 3"),
    (lambda: sys.exit(3), "exit code 1"),
    (lambda: kill(signal.SIGRTMIN + 1), f"signal {signal.SIGRTMIN + 1}"),
])  # fmt: skip
def test_after_the_end_of_a_process_another_one_goes_on(end, words):
    def own_number(question):
        if question == "end":
            end()
        return os.getpid()

    with Forked(own_number) as process:
        first = process("")
        with pytest.raises(EndedError) as error:
            process("end")
        second = process("")
    assert str(error.value) == words
    assert first != second
    assert ended(first)
    assert ended(second)


def test_a_segmentation_fault_is_one_by_name():
    code = """
import ctypes
from planner.support.forked import EndedError, Forked

with Forked(ctypes.string_at) as process:
    try:
        process(1)
    except EndedError as error:
        print(error, process.__class__.__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("SIGSEGV Forked\n", "")


def test_an_error_of_the_function_is_raised_with_its_traceback_and_ends_nothing():
    def inverse(x):
        return os.getpid(), 1 / x

    with Forked(inverse) as process:
        first, _ = process(1)
        with pytest.raises(RuntimeError, match=r"in inverse[^$]*ZeroDivisionError"):
            process(0)
        assert process(2) == (first, 0.5)


def test_a_process_has_cpu_time_for_each_answer(monkeypatch):
    monkeypatch.setattr(forked, "CPU_LIMIT_S", 1)

    def busy(limit_s):
        begin_s = time.process_time()
        while time.process_time() - begin_s < limit_s:
            pass
        return limit_s

    with Forked(busy) as process:
        assert [process(0.7), process(0.7)] == [0.7, 0.7]  # each has a second
        with pytest.raises(EndedError, match="SIGXCPU after 1 s of CPU time"):
            process(LONG_S)


def test_a_process_that_stands_still_is_ended(monkeypatch):
    monkeypatch.setattr(forked, "LOOK_S", 0.01)
    monkeypatch.setattr(forked, "STILL_LOOKS", 20)
    with Forked(time.sleep) as process, pytest.raises(EndedError, match="no progress in 0 s"):
        process(LONG_S)


def test_a_process_that_computes_does_not_stand_still(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(forked, "LOOK_S", 0.01)
    monkeypatch.setattr(forked, "STILL_LOOKS", 2)
    monkeypatch.setattr(forked, "_ticks", lambda process: next(ticks))
    with Forked(time.sleep) as process:
        assert process(0.3) is None
    assert next(ticks) > 3


def test_where_the_system_does_not_fork_the_function_runs_here(monkeypatch):
    monkeypatch.setattr(forked, "FORKS", False)
    with Forked(lambda question: os.getpid()) as process:
        assert process("") == os.getpid()


def test_where_no_process_can_be_had_the_function_runs_here(monkeypatch):
    def full():
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", full)
    with Forked(lambda question: os.getpid()) as process:
        assert process("") == os.getpid()


def test_printing_does_not_wait_for_a_thread_that_prints_here(monkeypatch):
    """Its lock stays with a thread that the fork does not have."""
    reader, writer = os.pipe()
    size = 2**20  # more than the pipe takes
    monkeypatch.setattr(forked, "LOOK_S", 0.05)
    monkeypatch.setattr(forked, "STILL_LOOKS", 40)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        thread = threading.Thread(target=print, args=("x" * size,))
        thread.start()
        assert os.read(reader, 1) == b"x"  # so it prints by now
        try:
            with Forked(lambda text: print(text, flush=True)) as process:
                assert process("") is None
        finally:
            monkeypatch.undo()
            while size > 1:
                size -= len(os.read(reader, size - 1))
            thread.join()
    os.close(reader)


SCRIPT = """
import os, sys, time
from pathlib import Path
from planner.support.forked import Forked

def endless(path):
    Path(path + ".part").write_text(str(os.getpid()))
    os.rename(path + ".part", path)
    while True:
        pass

with Forked(endless) as process:
    process(sys.argv[1])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(tmp_path, number):
    """Ctrl-C reaches both processes; other signals only the first."""
    file = tmp_path / "process"
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(file)], cwd=ROOT, start_new_session=True,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        while not file.exists():
            assert script.poll() is None
            time.sleep(0.05)
        if number == signal.SIGINT:
            os.killpg(script.pid, number)
        else:
            script.send_signal(number)
        _, errors = script.communicate(timeout=60)
        assert script.returncode == -number
        assert ended(int(file.read_text()))
        assert errors.count("Traceback") == (number == signal.SIGINT)  # this one's, of Python
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()
