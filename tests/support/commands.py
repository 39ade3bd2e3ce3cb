"""Runs a command of the planner as a user would, in a folder with files to work on."""

from dataclasses import replace

from click.testing import CliRunner

from cli import main
from planner.artefacts.files import write_profile
from tests.support.builders import graph_of, profile_of

PAIR = """
format: planner-topology/1
name: pair
device: T4
levels:
  - {name: gpu, count: 2, bandwidth: 10 GB/s, latency: 5 us}
  - {name: host, count: 2, bandwidth: 1 Gbps, latency: 50 us}
"""


def run(*arguments, code=0):
    """The result of `planner ARGUMENTS`, which must end with the given code."""
    result = CliRunner().invoke(main, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def chain_on_two_hosts(folder):
    """Writes a profile of a chain of six operators on a T4, and a topology, pair.yaml, of two hosts
    of two T4.
    """
    (folder / "pair.yaml").write_text(PAIR)
    (folder / "profiles").mkdir()
    graph = graph_of([[], [0], [1], [2], [3], [4]], [1000] * 6, [10**6] * 6)
    profile = replace(profile_of(graph, [0.01] * 6), device_type="T4")
    write_profile(profile, folder / "profiles" / "chain.json")
