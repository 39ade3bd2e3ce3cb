"""The registry: a solver is a file and an entry."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import cli
from planner.artefacts.files import write_profile
from planner.artefacts.options import Search
from planner.artefacts.problem import Status, switches_of
from planner.planning.portfolio import compare
from planner.solvers.manual import Manual
from planner.solvers.netsplit.options import NetSplit
from planner.solvers.pipedream.options import PipeDream
from planner.solvers.registry import (
    MAX_PLACED_DEVICES,
    SOLVERS,
    own_options,
)
from planner.support.errors import OptionError
from planner.support.options import declared
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type

ROOT = Path(__file__).parents[2]

# A whole solver with options of its own: everything on one device of the user's choice.
TOY = """
from dataclasses import dataclass

from planner.artefacts.problem import switches_of
from planner.solvers.fit import first_that_fits, pipeline
from planner.support.options import Options, option


@dataclass(frozen=True, slots=True)
class Toy(Options):
    favourite_device: int = option("toy: the device to use.", 0, least=0, metavar="D")


def solve(problem, time_limit_s):
    device = switches_of(problem.search, Toy).favourite_device
    everything = range(len(problem.profile.operators))
    strategies = [pipeline(problem, [everything], [[device]], recompute=False)]
    return first_that_fits(problem, strategies, "one favourite device")
"""
# Where it is registered: one entry.
WITH_TOY = """
import sys
from planner.solvers import registry
import toy
registry.SOLVERS["toy"] = registry.Solver(
    "toy:solve", "one favourite device", toy.Toy, in_portfolio=True
)
import cli
cli.main(sys.argv[1:])
"""
TOPOLOGY = """
format: planner-topology/1
name: three
device: T4
levels: [{name: gpu, count: 3, bandwidth: 10 GB/s, latency: 5 us}]
"""


@pytest.fixture
def folder(tmp_path):
    """A folder with the toy, a profile and three devices."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "three.yaml").write_text(TOPOLOGY)
    profile = replace(profile_of(graph_of([[], [0]]), [1e-3, 1e-3]), device_type="T4")
    write_profile(profile, tmp_path / "p.json")
    return tmp_path


def run_with_toy(folder, *arguments, code=0):
    done = subprocess.run(
        [sys.executable, "-c", WITH_TOY, *arguments], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr if code else done.stdout


def test_a_solver_in_one_file_is_in_the_help_with_its_option(folder):
    text = run_with_toy(folder, "solve", "--help")
    words = " ".join(text.split())
    assert "--favourite-device D toy: the device to use. [default: 0]" in words
    assert "toy one favourite device" in words


def test_a_solver_in_one_file_is_asked_with_its_option_judged_and_in_the_table(folder):
    inputs = ["solve", "--profile", "p.json", "--topology", "three.yaml"]
    chosen = ["--solver", "toy", "--favourite-device", "2"]
    plan = json.loads(run_with_toy(folder, *inputs, *chosen, "--json"))
    assert [row["solver"] for row in plan["compared"]] == ["toy"]
    assert [stage["devices"] for stage in plan["stages"]] == [[2]]
    assert plan["iteration_s"] >= plan["lower_bound_s"] > 0
    assert "the best plan is toy's" in run_with_toy(folder, *inputs, *chosen)
    asked = json.loads(run_with_toy(folder, *inputs, "--json"))["compared"]
    assert asked[-1]["solver"] == "toy"  # in the portfolio, after the others


def test_an_option_of_a_solver_checks_its_values(folder):
    said = run_with_toy(folder, "solve", "--favourite-device", "-1", code=2)
    assert (
        "Invalid value for '--favourite-device': expected a whole number of at least 0, got '-1'"
        in said
    )


def test_no_two_options_of_a_command_have_one_name():
    for name in ("solve", "compare", "simulate"):
        flags = [flag for option in cli.main.commands[name].params for flag in option.opts]
        assert len(flags) == len(set(flags))


def test_every_solver_has_options_with_defaults_and_a_summary():
    for solver in SOLVERS.values():
        assert solver.summary
        if solver.options is not None:
            assert solver.options() == solver.options()
            assert declared(solver.options)


def test_options_that_are_as_by_default_are_left_out():
    values = {name: one.default for name, one in declared(NetSplit).items()}
    assert own_options(values) == ()
    assert own_options({**values, "relaxed": True}) == (NetSplit(relaxed=True),)
    assert own_options({"cuts": ("a",), "fewer_machines": True}) == (
        PipeDream(fewer_machines=True),
        Manual(("a",)),
    )


def test_options_hold_one_of_each_type_and_give_defaults_for_the_others():
    search = Search(switches=(NetSplit(gap=0.5),))
    assert switches_of(search, NetSplit).gap == 0.5
    assert switches_of(search, PipeDream) == PipeDream()
    with pytest.raises(OptionError, match="one of each type"):
        Search(switches=(NetSplit(), NetSplit(gap=0.5)))


def test_a_misspelt_option_of_a_solver_is_refused():
    with pytest.raises(OptionError, match="no solver has an option 'relaxd'; did you mean relaxed"):
        own_options({"relaxd": True})
    with pytest.raises(
        OptionError, match="no solver has an option 7; known: activation_compression"
    ):
        own_options({7: True})


def test_single_operators_are_placed_on_no_more_devices_than_the_time_allows():
    profile = profile_of(graph_of([[], [0], [1], [2]]), [1.0] * 4)
    over = problem_of(profile, cluster([unit_type()] * (MAX_PLACED_DEVICES + 1)))
    reason = "for at most 128 devices, and there are 129"
    for name in ("heft", "m-topo", "m-etf", "m-sct", "pesto", "netsplit"):
        answer = SOLVERS[name](over, 5.0)
        assert (answer.status, answer.strategy, answer.reason) == (Status.UNKNOWN, None, reason)
    rows = {row.solver: row for row in compare(over, full_time=True).rows}
    assert rows["netsplit"].reason == reason
    assert rows["antichain"].plan is not None
