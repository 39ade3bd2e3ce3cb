"""Commands that a signal ends, that run at the same time, and whose cache takes no more: files are
old or new and whole, nothing is left over, and one line says what happened.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from planner.artefacts.files import read_plan, read_profile, write_profile
from planner.clusters.yaml.write import write_topology
from planner.model.load import read_proto
from planner.simulator.traces.write import write_trace
from planner.support.caches import without_checksum
from tests.commands.test_cli import TOPOLOGY, mlp
from tests.simulator.traces.test_calibrate import TRUE, measured_by, problem_with, run_of
from tests.support.builders import cluster, unit_type

ROOT = Path(__file__).parents[2]
SAID = {signal.SIGINT: "stopped\n", signal.SIGTERM: "stopped by SIGTERM\n"}
LATEST_S = 60.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for handlers in /proc")


def parsed_json(path):
    assert isinstance(json.loads(path.read_bytes()), dict)


def parsed_text(path):
    content = path.read_text()
    assert content.count("\n") > 3
    assert content.endswith("\n")


# Command -> how it makes old files, how it makes new ones, and how its files are read.
RUNS = {
    "profile": (
        "profile model.onnx --batch 2 --no-contention --repetitions 1 -o profiles/own.json",
        "profile model.onnx --batch 2 --no-contention --repetitions 2 -o profiles/own.json",
        {"profiles/own.json": read_profile},
    ),
    "solve": (
        "solve --profile profiles/own.json --topology pair.yaml --microbatches 2"
        " --solver data-parallel --time-limit 2s -o strategy.json",
        "solve --profile profiles/own.json --topology pair.yaml --microbatches 4"
        " --time-limit 2s -o strategy.json",
        {"strategy.json": read_plan, "strategy.onnx": read_proto},
    ),
    "convert": (
        "convert profiles/chain.json graph.txt",
        "convert profiles/own.json graph.txt",
        {"graph.txt": parsed_text},
    ),
    "calibrate": (
        "calibrate run2.json --profile profiles/chain.json --topology runs.yaml",
        "calibrate run2.json run3.json --profile profiles/chain.json --topology runs.yaml",
        {"profiles/chain.calibration.json": parsed_json},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, profiles, topologies and traces, and an empty folder for temporary files."""
    path = tmp_path_factory.mktemp("signals")
    (path / "tmp").mkdir()
    mlp(path / "model.onnx")
    (path / "pair.yaml").write_text(TOPOLOGY)
    problem = problem_with(1)
    profile = replace(problem.profile, device_type="T4")
    write_profile(profile, path / "profiles" / "chain.json")
    topology = cluster([unit_type("T4", bandwidth=1e10)] * 2, bandwidth=1e9, latency=1e-4)
    problem = replace(problem, profile=profile, topology=topology)
    write_topology(problem.topology, path / "runs.yaml", [])
    for cut in (2, 3):
        one = run_of(problem, cut, replace(TRUE, device_type="T4"))
        names = {d: f"gpu{d}" for d in (0, 1)}
        write_trace(one.timeline, names, path / f"run{cut}.json", measured_by(one.plan))
    return path


def environment():
    """The variables of this process, without those that say where kernels are kept or which rank
    it is.
    """
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "NUMBA_CACHE_DIR")}


def started(folder, text, **variables):
    """A command of the planner in a session of its own, with its own cache."""
    own = {"XDG_CACHE_HOME": str(folder / "cache"), "TMPDIR": str(folder / "tmp"), **variables}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "cli.py"), *text.split()],
        cwd=folder, env={**environment(), **own}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def done(folder, text, **variables):
    """What a command printed on standard error; it must succeed."""
    process = started(folder, text, **variables)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


def ours_by_now(process):
    """Waits until the program has begun, which handles SIGTERM; Python itself does not."""
    bit = 1 << (signal.SIGTERM - 1)
    while process.poll() is None:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        if int(caught.split()[1], 16) & bit:
            return
        time.sleep(0.001)


def in_session(session):
    """The processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, of, *_ = path.read_text().rpartition(")")[2].split()
            if int(of) == session and state != "Z":
                found.append(path.parent.name)
    return found


def all_files(folder):
    return {one for one in folder.rglob("*") if not one.is_relative_to(folder / "cache")}


def check_caches(folder):
    """Every file of the cache is an entry."""
    for path in (folder / "cache").rglob("*.*"):
        if path.is_file():
            assert path.suffix in (".entry", ".kernel"), path
            name = path.name if path.suffix == ".kernel" else f"{path.parent.name}/{path.name}"
            assert without_checksum(name, path.read_bytes())


def ended_by(folder, text, number, moment_s, files):
    """Runs a command, sends it a signal some time after it began, and checks all that is left.

    Args:
        files: the command's outputs, with their readers; they are there.
    """
    old, before = {name: (folder / name).read_bytes() for name in files}, all_files(folder)
    process = started(folder, text)
    ours_by_now(process)
    time.sleep(moment_s)
    process.send_signal(number)
    _, said = process.communicate(timeout=LATEST_S)
    assert process.returncode in (0, -9 if number == signal.SIGKILL else 128 + number), said
    assert "Traceback" not in said
    if process.returncode > 0:
        assert said.splitlines(keepends=True)[-1] == SAID[number]
        assert len(said.splitlines()) <= 3, said
    latest_s = time.monotonic() + 10.0
    while in_session(process.pid):
        assert time.monotonic() < latest_s
        time.sleep(0.05)
    assert all_files(folder) == before
    for name, read in files.items():
        if (folder / name).read_bytes() != old[name]:
            read(folder / name)
    check_caches(folder)
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_imports_is_one_line(number, folder):
    assert ended_by(folder, "convert profiles/chain.json no.txt", number, 0.0, {}) == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_command_runs_is_one_line(number, folder):
    os.mkfifo(folder / "endless.txt")
    try:
        text = "convert endless.txt profiles/none.json"
        assert ended_by(folder, text, number, 1.0, {}) == 128 + number
    finally:
        (folder / "endless.txt").unlink()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_command_imports_a_library_is_not_lost(number, tmp_path):
    """Modules that are imported may swallow an exception."""
    code = "import contextlib, pathlib, time\nwith contextlib.suppress(BaseException):\n"
    code += "    pathlib.Path('begun').touch()\n    time.sleep(30)\ntime.sleep(30)\n"
    (tmp_path / "deaf.py").write_text(code)
    process = started(tmp_path, "export deaf:net")
    while not (tmp_path / "begun").exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(number)
    assert process.communicate(timeout=LATEST_S) == ("", SAID[number])
    assert process.returncode == 128 + number


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_ten_signals_at_any_moment_leave_old_or_new_files(command, folder):
    draw = random.Random(command)
    first, again, files = RUNS[command]
    done(folder, RUNS["profile"][0])
    done(folder, first)
    begin_s = time.monotonic()
    done(folder, again)
    last_s = time.monotonic() - begin_s
    done(folder, first)
    codes = []
    for _ in range(10):
        number = draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        codes.append(ended_by(folder, again, number, draw.uniform(0.0, last_s), files))
        if codes[-1] == 0:
            done(folder, first)
    assert any(codes)
    said = done(folder, again)
    assert "Traceback" not in said
    assert "of the cache" not in said
    for name, read in files.items():
        read(folder / name)


@pytest.mark.slow
def test_two_solves_into_one_file(folder):
    done(folder, RUNS["profile"][0])
    one, other = ("2", "4")
    texts = [
        "solve --profile profiles/own.json --topology pair.yaml --solver data-parallel"
        f" --microbatches {number} -o both.json"
        for number in (one, other)
    ]
    done(folder, texts[0])
    before, valid = all_files(folder), [(folder / "both.json").read_bytes()]
    done(folder, texts[1])
    valid.append((folder / "both.json").read_bytes())
    for _ in range(3):
        processes = [started(folder, text) for text in texts]
        for process in processes:
            _, said = process.communicate(timeout=LATEST_S)
            assert process.returncode == 0, said
        assert (folder / "both.json").read_bytes() in valid
        read_proto(folder / "both.onnx")
        assert all_files(folder) == before


@pytest.mark.slow
def test_two_profiles_that_share_a_cache(folder):
    texts = [f"{RUNS['profile'][0].partition(' -o')[0]} --json -o {name}.json" for name in "ab"]
    processes = [started(folder, text, XDG_CACHE_HOME=str(folder / "cache")) for text in texts]
    kept = []
    for process in processes:
        out, said = process.communicate(timeout=LATEST_S)
        assert process.returncode == 0, said
        kept.append(json.loads(out)["effort"][0]["kept"])
    check_caches(folder)
    for name in "ab":
        read_profile(folder / f"{name}.json")
        (folder / f"{name}.json").unlink()
    process = started(folder, f"{texts[0]}")
    out, said = process.communicate(timeout=LATEST_S)
    assert process.returncode == 0, said
    effort = json.loads(out)["effort"][0]
    # On a busy machine nothing is kept, and all is measured again.
    assert effort["num_timed"] == 0 or not any(kept)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k,mode=700", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.slow
def test_a_solve_with_a_full_disk_for_the_cache_goes_on_and_says_so_once(folder, small_disk):
    text = "solve --profile profiles/chain.json --topology runs.yaml --time-limit 2s"
    said = done(folder, f"{text} -o full.json", XDG_CACHE_HOME=str(small_disk))
    read_plan(folder / "full.json")
    (folder / "full.json").unlink()
    assert said.count("warning: ") == said.count(f"{FULL}; free some space") == 1


FULL = "cannot be written: No space left on device"


def test_a_full_disk_for_the_cache_is_said_once_and_nothing_stops(folder, small_disk):
    (small_disk / "full").write_bytes(bytes(12 * 1024))
    cache = {"XDG_CACHE_HOME": str(small_disk)}
    code = (
        "from planner.commands.errors import words_of_caches\n"
        "from planner.support.jit import njit\n"
        "from planner.profilers.cache import Cache\n"
        "from planner.support.caches import cache_root\n"
        "with words_of_caches():\n"
        "    print(njit(lambda x: x + 1)(1))\n"
        "    cache = Cache(cache_root() / 'operators')\n"
        "    for number in range(5000):\n"
        "        cache.put_ratio(str(number), 1.0)\n"
        "    print(cache.problem)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**environment(), **cache}, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert result.stdout.startswith("2\n")
    assert FULL in result.stdout.splitlines()[1]
    assert f"warning: {small_disk}/planner/kernels-" in result.stderr
    note, warning = result.stderr.splitlines()
    assert note.startswith("note: compiling ")
    assert FULL in warning
    assert not [one for one in small_disk.rglob("*") if one.suffix == ".part"]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_in_a_destructor_is_not_lost(name, code):
    """Python swallows an exception that is raised there."""
    program = f"""
import os, signal, time
from planner.commands.signals import ended_by_signals, tidying_up
class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.{name})
        for _ in range(1000):
            pass
with ended_by_signals():
    try:
        with tidying_up():
            Held()
            time.sleep(20)
    except KeyboardInterrupt:
        raise SystemExit({code})
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert time.monotonic() - begin < 15
