"""SIGTERM asks a training with a folder for checkpoints to save and to end, on all ranks."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import planner
from planner.artefacts.strategy import ScheduleName
from planner.launcher.failures import requests
from planner.launcher.failures.requests import AGAIN_S, EndRequest
from planner.support.errors import FileError, OptionError, Preempted
from planner.training.checkpoints.folder import find
from planner.training.checkpoints.writer import WRITER, FolderLock
from planner.training.options import Checkpoints
from tests.launcher.test_launch import write_case
from tests.support.launch_worker import Case
from tests.support.mode_runs import net, profile_of, write_strategy
from tests.support.own_loops import SAMPLES, batches
from tests.training.test_checkpoints import assert_same, names

ROOT = Path(__file__).resolve().parents[2]
CLI = str(ROOT / "cli.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
STEPS = 60
NOTE = "the training saves and ends after a step of all ranks"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A strategy for one process, and one of an asynchronous schedule."""
    folder = tmp_path_factory.mktemp("preemption")
    net(folder / "net.onnx")
    profile = profile_of(folder / "net.onnx")
    write_strategy(folder / "flow.json", profile, (1,), schedule=ScheduleName.PIPEDREAM)
    return write_strategy(folder / "alone.json", profile, (1,), optimizer="adam")


def signalled(path, kept, number=signal.SIGTERM, at=3, steps=8, **how):
    """A training of this process that a signal asks to end after a step."""

    def progress(done, total, loss):
        if done == at:
            signal.raise_signal(number)

    with pytest.raises(Preempted) as end:
        planner.launch(path, steps=steps, checkpoint=kept, progress=progress, **how)
    return str(end.value)


# --------------------------------------------------------------------------------- one process


def test_sigterm_saves_after_the_next_step_and_the_rest_is_as_if_nothing_had_been(alone, tmp_path):
    usual = signal.getsignal(signal.SIGTERM)
    said = signalled(alone, tmp_path / "kept")
    assert said == (
        f"{tmp_path / 'kept'}: step-00000004 of 8 steps is written, as a signal asked; go on with"
        f" --resume {tmp_path / 'kept'}"
    )
    assert names(tmp_path / "kept") == ["step-00000004"]
    assert signal.getsignal(signal.SIGTERM) is usual
    rest = planner.launch(alone, steps=8, checkpoint=tmp_path / "kept", resume=tmp_path / "kept")
    whole = planner.launch(alone, steps=8, checkpoint=tmp_path / "whole")
    assert rest.loss == whole.loss[4:]
    assert_same(tmp_path / "kept" / "step-00000008", tmp_path / "whole" / "step-00000008")


def test_a_signal_in_the_last_step_changes_nothing(alone, tmp_path):
    done = []

    def progress(step, total, loss):
        done.append(step)
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    report = planner.launch(alone, steps=3, checkpoint=tmp_path / "kept", progress=progress)
    assert report.steps == 3 and done == [1, 2, 3]
    assert names(tmp_path / "kept") == ["step-00000003"]


def test_other_signals_ask_if_the_user_names_them(alone, tmp_path):
    signalled(alone, tmp_path / "kept", signal.SIGUSR1, save_signal="SIGUSR1")
    assert names(tmp_path / "kept") == ["step-00000004"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    with pytest.raises(OptionError, match="--save-signal USR1: expected a folder"):
        planner.launch(alone, steps=1, save_signal="USR1")
    with pytest.raises(OptionError, match="--save-signal: expected one of USR1, USR2, HUP, got"):
        Checkpoints(save_signal="KILL")


def test_an_asynchronous_training_ends_where_the_pipeline_is_empty(alone, tmp_path):
    path = alone.with_name("flow.json")
    signalled(path, tmp_path / "kept", at=1, checkpoint_every=3)
    assert names(tmp_path / "kept") == ["step-00000003"]
    how = {"steps": 6, "checkpoint_every": 3}
    planner.launch(path, checkpoint=tmp_path / "kept", resume=tmp_path / "kept", **how)
    planner.launch(path, checkpoint=tmp_path / "whole", **how)
    assert_same(tmp_path / "kept" / "step-00000006", tmp_path / "whole" / "step-00000006")


def test_no_time_is_spent_on_an_evaluation(alone, tmp_path):
    evaluated = []
    where = "tests.support.datasets"
    how = {"data": f"{where}:samples", "eval_data": f"{where}:samples", "eval_every": 4}
    log = tmp_path / "log.jsonl"
    signalled(alone, tmp_path / "kept", log_file=log, **how)
    evaluated = [line for line in log.read_text().splitlines() if "evaluation" in line]
    assert names(tmp_path / "kept") == ["step-00000004"] and not evaluated


def test_a_loop_of_the_user_asks_whether_to_stop(alone, tmp_path):
    given, losses = batches(6), []
    with planner.trainer(alone, checkpoint=tmp_path / "kept") as trainer:
        for step, batch in enumerate(given):
            losses.append(trainer.step(batch))
            if trainer.should_stop:
                trainer.save()
                break
            if step == 1:
                signal.raise_signal(signal.SIGTERM)
                assert not trainer.should_stop  # before all ranks have met
    assert names(tmp_path / "kept") == ["step-00000003"]
    with planner.trainer(alone, resume=tmp_path / "kept") as trainer:
        losses += [trainer.step(batch) for batch in given[trainer.steps_done :]]
    with planner.trainer(alone) as trainer:
        assert trainer.batch_size == SAMPLES
        assert losses == [trainer.step(batch) for batch in given]


# --------------------------------------------------------------------------------- the request


@pytest.fixture
def request_at(monkeypatch):
    """A request, and the clock that it reads."""
    now = [100.0]
    monkeypatch.setattr(requests.time, "monotonic", lambda: now[0])
    return EndRequest(), now


def test_a_copy_of_sigterm_is_the_same_request_and_a_later_one_is_none(request_at, capfd):
    request, now = request_at
    assert not request.takes(signal.SIGTERM, "thread")  # no training can save
    with request.awaited(None, is_rank=True):
        assert request.takes(signal.SIGTERM, "thread") and request.is_made
        now[0] += AGAIN_S / 2
        assert request.takes(signal.SIGTERM, "thread")
        now[0] += AGAIN_S
        assert request.takes(signal.SIGTERM, "handler")  # the first one, heard late
        assert not request.takes(signal.SIGTERM, "thread")
        assert not request.takes(signal.SIGUSR1, "handler")
    assert capfd.readouterr().err == f"note: SIGTERM: {NOTE}\n"


def test_sigterm_after_a_save_signal_is_a_request_too(request_at):
    request, now = request_at
    with request.awaited("USR1", is_rank=True):
        assert request.takes(signal.SIGUSR1, "handler")
        now[0] += 2 * AGAIN_S
        assert request.takes(signal.SIGTERM, "thread")
        assert request.takes(signal.SIGUSR1, "handler")


def test_under_torchrun_its_limit_is_named(request_at, capfd, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    request, _ = request_at
    with request.awaited(None, is_rank=True):
        request.takes(signal.SIGTERM, "thread")
    assert "torchrun kills it after --shutdown-timeout (30 s" in capfd.readouterr().err


def test_a_second_signal_has_its_usual_effect(request_at):
    request, now = request_at
    heard, usual = [], signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with request.awaited(None, is_rank=False):
            signal.raise_signal(signal.SIGTERM)
            assert heard == []
            now[0] += AGAIN_S
            signal.raise_signal(signal.SIGTERM)
            assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, usual)


def test_in_another_thread_signals_have_their_usual_effect():
    request, usual = EndRequest(), signal.getsignal(signal.SIGTERM)

    def run():
        with request.awaited("USR1", is_rank=False):
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [usual] and not request.signals


# --------------------------------------------------------------------------------- the folder

WRITES = """
import sys, time
from pathlib import Path
from planner.training.checkpoints.writer import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


def test_a_second_training_is_kept_out_of_a_folder_until_the_first_one_ends(alone, tmp_path):
    kept = tmp_path / "kept"
    first = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(kept)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "ready\n"
        with pytest.raises(FileError) as error:
            planner.launch(alone, steps=1, checkpoint=kept)
        assert str(error.value).startswith(f"{kept}: process {first.pid} on host ")
        assert str(error.value).endswith(
            "writes checkpoints there; name another folder, or end that training first"
        )
    finally:
        first.kill()
        first.communicate()
    assert names(kept) == [WRITER]
    planner.launch(alone, steps=1, checkpoint=kept)
    assert names(kept) == ["step-00000001"]


def test_a_lock_on_a_file_that_its_owner_has_removed_is_none(tmp_path, monkeypatch):
    """The owner removes the file between the moments at which another one opens and locks it."""
    opened, times = os.open, []

    def open_and_lose(path, *how):
        file = opened(path, *how)
        times.append(path)
        if len(times) == 1:
            Path(path).unlink()
        return file

    monkeypatch.setattr(os, "open", open_and_lose)
    lock = FolderLock(tmp_path)
    assert len(times) == 2 and names(tmp_path) == [WRITER]
    lock.release()
    assert names(tmp_path) == []


# --------------------------------------------------------------------------------- several ranks

# In step 3, rank 1 sends the signal; in all steps data takes a while.
DATA = """
import os, signal, time, torch

def data(step, microbatch, inputs):
    time.sleep(0.02)
    if (step, microbatch) == (3, 0) and os.environ["RANK"] == "1":
        {act}
    drawn = torch.Generator().manual_seed(100 * step + microbatch)
    shape, dtype = inputs["ids"]
    ids = torch.randint(7, shape, generator=drawn)
    return {{"ids": ids}}, ids
"""
TO_ITSELF = "os.kill(os.getpid(), signal.SIGTERM)"
TO_ITS_PARENT = "os.kill(os.getppid(), signal.{})"


def launched(folder, act, *options, before=None, steps=STEPS):
    """The exit code of a launch of two ranks, and the lines that it says."""
    write_case(folder, Case((1, 1), 4))
    (folder / "cli.py").unlink()
    (folder / "mine.py").write_text(DATA.format(act=act))
    start = [CLI, "launch", "strategy.json", "--steps", str(steps), "--data", "mine:data", *options]
    command = [sys.executable, *start, "--nproc", "2"] if before is None else [*before, *start]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


KEPT = ["--checkpoint", "kept"]


def last_line(folder):
    (name,) = names(folder / "kept")
    assert 4 <= find(folder / "kept").record.step < STEPS
    return f"kept: {name} of {STEPS} steps is written, as a signal asked; go on with --resume kept"


def test_one_rank_that_is_asked_makes_all_save_and_end(tmp_path):
    code, said = launched(tmp_path, TO_ITSELF, *KEPT)
    assert code == 143
    assert said == [last_line(tmp_path)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_launcher_passes_signals_on_and_waits_for_the_save(tmp_path, name):
    act, more = TO_ITS_PARENT.format(name), [] if name == "SIGTERM" else ["--save-signal", "USR1"]
    code, said = launched(tmp_path, act, *KEPT, *more)
    assert code == 143
    assert said == [f"note: {name}: {NOTE}", last_line(tmp_path)]
    step = find(tmp_path / "kept").record.step
    again = launched(tmp_path, "pass", *KEPT, "--resume", "kept", steps=step + 3)
    whole = launched(tmp_path, "pass", "--checkpoint", "whole", steps=step + 3)
    assert (again[0], whole[0]) == (0, 0)
    assert_same(tmp_path / "kept", tmp_path / "whole")


@pytest.mark.slow
def test_a_launcher_that_saves_nothing_ends_its_ranks(tmp_path):
    assert launched(tmp_path, TO_ITS_PARENT.format("SIGTERM")) == (143, ["stopped by SIGTERM"])


@pytest.mark.slow
def test_a_second_sigterm_ends_a_launcher_and_its_ranks_at_once(tmp_path):
    twice = f"{TO_ITS_PARENT.format('SIGTERM')}; time.sleep({2 * AGAIN_S})"
    twice += f"; {TO_ITS_PARENT.format('SIGTERM')}; time.sleep(600)"
    code, said = launched(tmp_path, twice, *KEPT)
    assert (code, said[-1]) == (143, "stopped by SIGTERM")
    assert [name for name in names(tmp_path / "kept") if name != WRITER] == []


@pytest.mark.slow
def test_ctrl_c_saves_nothing(tmp_path):
    assert launched(tmp_path, TO_ITS_PARENT.format("SIGINT"), *KEPT) == (130, ["stopped"])


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_a_launcher_with_its_code(tmp_path):
    write_case(tmp_path, Case((1, 1), 4))
    (tmp_path / "cli.py").unlink()
    act = f"os.environ['RANK'] == '1' and {TO_ITS_PARENT.format('SIGTERM')}; time.sleep(60)"
    (tmp_path / "mine.py").write_text(f"import os, signal, time\n{act}\n")
    done = subprocess.run(
        [sys.executable, CLI, "launch", "strategy.json", "--nproc", "2", "--data", "mine:data",
         *KEPT], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 143
    assert done.stderr == "stopped by a signal before a step could be saved\n"


@pytest.mark.slow
@pytest.mark.parametrize("act", [TO_ITSELF, TO_ITS_PARENT.format("SIGTERM")], ids=["rank", "agent"])
def test_under_torchrun_the_ranks_save_too(tmp_path, act):
    code, said = launched(tmp_path, act, *KEPT, before=TORCHRUN)
    assert code != 0
    assert last_line(tmp_path) in said
    agent = "; torchrun kills it after --shutdown-timeout (30 s, if it is not given)"
    assert (f"note: SIGTERM: {NOTE}{agent}" in said) == (act != TO_ITSELF)


WORKERS = """
import os, signal, torch
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 8 * 60

    def __getitem__(self, i):
        if i == 80 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getppid(), signal.SIGTERM)
        return torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)

def loader():
    return DataLoader(Samples(), batch_size=8, num_workers=1)
"""


@pytest.mark.slow
def test_workers_of_a_data_loader_outlive_the_request(tmp_path):
    """Slurm sends SIGTERM to them, too."""
    write_case(tmp_path, Case((1, 1), 4))
    (tmp_path / "cli.py").unlink()
    (tmp_path / "mine.py").write_text(WORKERS)
    done = subprocess.run(
        [sys.executable, CLI, "launch", "strategy.json", "--nproc", "2", "--data", "mine:loader",
         "--steps", str(STEPS), *KEPT],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()) == (143, [last_line(tmp_path)])
