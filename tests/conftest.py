"""Settings that all tests share, and the order in which workers run them."""

import fcntl
import gc
import os
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from planner.support.caches import cache_root
from tests.support import exporter

settings.register_profile("planner", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("planner")

# Compiled kernels of all workers and processes, also of tests with a cache folder of their own.
os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_root()))

# The files that take longest, about in this order: then the workers end at about the same time.
LONGEST = (
    "commands/test_cli.py",
    "launcher/test_launch.py",
    "training/test_own_loop.py",
    "launcher/test_memory_tracker.py",
    "training/test_checkpoints.py",
    "test_fuzz.py",
    "planning/test_other_cost_models.py",
    "operators/gradients/test_check.py",
    "profilers/test_profilers.py",
    "clusters/test_probe.py",
    "profilers/rules/test_trials.py",
    "clusters/test_presets.py",
    "test_reference.py",
    "costs/test_split_bounds.py",
    "solvers/test_netsplit_repeats.py",
    "model/export/test_gradient_kinds.py",
    "launcher/mesh/test_runs.py",
    "launcher/asynchronous/test_drains.py",
    "launcher/asynchronous/test_replay.py",
    "training/test_datasets.py",
    "planning/test_never_worse.py",
)
TESTS = Path(__file__).parent
SHARED = "PLANNER_TESTS_FOLDER"


def pytest_addoption(parser):
    parser.addoption("--golden", action="store_true", help="write the golden files anew")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """The longest files first, then the other tests, then the examples in the package."""
    rank = {TESTS / name: number for number, name in enumerate(LONGEST)}
    last = {True: len(rank), False: len(rank) + 1}
    items.sort(key=lambda item: rank.get(item.path, last[item.path.is_relative_to(TESTS)]))


def pytest_configure(config):
    """Makes a folder that the workers of a run share: the first process makes it, workers find its
    name in the environment.
    """
    if SHARED not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="planner-tests-")
        os.environ[SHARED] = folder.name
        config.add_cleanup(lambda: os.environ.pop(SHARED))
        config.add_cleanup(folder.cleanup)


@contextmanager
def locked(name, kind):
    """Holds a lock of the workers of a run: `fcntl.LOCK_EX` alone, `fcntl.LOCK_SH` with others."""
    with Path(os.environ[SHARED], name).open("w") as file:
        fcntl.flock(file, kind)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Lets a test that is marked `serial` run while no other test does.

    Every test enters the room through the door. A serial test holds the door until the room is
    empty, so that other tests cannot keep it waiting for ever.
    """
    serial = item.get_closest_marker("serial") is not None
    with ExitStack() as room:
        with locked("door", fcntl.LOCK_EX):
            room.enter_context(locked("room", fcntl.LOCK_EX if serial else fcntl.LOCK_SH))
        return (yield)


def pytest_collection_finish():
    """Leaves the modules that are loaded by now out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup():
    """Speeds up all exports of a process but the first, which loads the exporter."""
    if exporter.REGISTRATION in sys.modules:
        exporter.read_operators_once()


@pytest.fixture(autouse=True)
def _no_contention(request, monkeypatch):
    """Leaves out the measurement of contention, which takes seconds, but for tests of it."""
    if "contention" not in request.node.name:
        monkeypatch.setattr(
            "planner.profilers.engines.machine_contention", lambda threads, *, cached: (None, "")
        )


@pytest.fixture
def unregistered():
    """Takes back the operators that a test registers."""
    from planner.artefacts.operator_types import OPERATOR_TYPES

    before = dict(OPERATOR_TYPES)
    yield
    OPERATOR_TYPES.clear()
    OPERATOR_TYPES.update(before)


@pytest.fixture
def golden(request):
    """Compares text with a file under tests/golden, or writes it with --golden."""

    def check(name, text):
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--golden"):
            path.write_text(text)
        assert path.read_text() == text, f"{name} changed; if that is meant: make golden"

    return check
