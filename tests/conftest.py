"""Settings that all tests share."""

from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("planner", derandomize=True, deadline=None, max_examples=100)
settings.load_profile("planner")


def pytest_addoption(parser):
    parser.addoption("--golden", action="store_true", help="write the golden files anew")


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
    from planner.model.definitions import FOREIGN
    from planner.operators import OPERATORS

    before = [(table, dict(table)) for table in (OPERATORS, FOREIGN)]
    yield
    for table, entries in before:
        table.clear()
        table.update(entries)


@pytest.fixture
def golden(request):
    """Compares text with a file under tests/golden, or writes it with --golden."""

    def check(name, text):
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--golden"):
            path.write_text(text)
        assert path.read_text() == text, f"{name} changed; if that is meant: make golden"

    return check
