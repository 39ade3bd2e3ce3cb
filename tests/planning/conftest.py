"""A folder to plan in."""

from dataclasses import replace

import pytest

from planner.artefacts.files import write_profile
from tests.support.builders import graph_of, profile_of

PAIR = """
format: planner-topology/1
name: pair
device: T4
levels: [{name: gpu, count: 2, bandwidth: 10 GB/s, latency: 5 us}]
"""


def chain_of_three(time_s):
    """A profile, told apart from others by its times."""
    return replace(profile_of(graph_of([[], [0], [1]]), [time_s] * 3), device_type="T4")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A profile that is not in ./profiles, where another one is the newest."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.yaml").write_text(PAIR)
    for name in ("profiles", "elsewhere", "plans"):
        (tmp_path / name).mkdir()
    write_profile(chain_of_three(1e-3), tmp_path / "elsewhere" / "mine.json")
    write_profile(chain_of_three(2e-3), tmp_path / "profiles" / "newest.json")
    return tmp_path
