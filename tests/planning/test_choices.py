"""Problems of the iopddl contest: files, edges of any width, the command, published instances."""

import copy
import gzip
import itertools
import json
import math

import pytest

import planner
from planner.artefacts.formats.iopddl import read_contest
from planner.planning.choices import choice_program
from planner.solvers.program.problem import cost_of, peak_bytes
from planner.support.errors import FileError
from tests.support.commands import run
from tests.support.reference import REFERENCE

EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}
LONG = ("--time-limit", "3600 s")  # since this process began


def changed(place, value):
    """The example with one value replaced, by the path of its place."""
    plain = copy.deepcopy(EXAMPLE)
    inside = plain["problem"]
    for key in place[:-1]:
        inside = inside[key]
    if value is None:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    return plain


def written(folder, plain, name="a.json"):
    path = folder / name
    text = json.dumps(plain)
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_the_example_of_the_contest_costs_445(tmp_path, name):
    path = str(written(tmp_path, EXAMPLE, name))
    done = run("solve", "--cost-model", "iopddl", "--profile", path, *LONG, "--json")
    assert json.loads(done.stdout) == {
        "cost_model": "iopddl", "name": "example", "status": "optimal", "cost": 445,
        "lower_bound": 445, "gap": 0.0, "assignment": [0, 0, 2, 1, 0], "reproducible": True,
    }  # fmt: skip
    done = run("solve", "--cost-model", "iopddl", "--profile", path, *LONG)
    assert done.stdout == (
        "example: optimal\ncost 445, lower bound 445, gap 0.0000 %\n"
        "strategies of the nodes:\n  0 0 2 1 0\n"
    )


def test_a_long_assignment_is_cut_for_people(tmp_path):
    count = 401
    nodes = {"intervals": [[0, 1]] * count, "costs": [[1]] * count, "usages": [[1]] * count}
    problem = {"name": "long", "nodes": nodes, "edges": {"nodes": [], "costs": []}}
    path = str(written(tmp_path, {"problem": problem | {"usage_limit": 1000}}))
    lines = run("solve", "--cost-model", "iopddl", "--profile", path, *LONG).stdout.splitlines()
    assert lines[3:] == [*["  " + " ".join("0" * 40)] * 10, "  and of 1 more, which --json shows"]
    done = run("solve", "--cost-model", "iopddl", "--profile", path, *LONG, "--json")
    assert json.loads(done.stdout)["assignment"] == [0] * count


def test_what_cannot_fit_is_no_plan(tmp_path):
    path = str(written(tmp_path, changed(("usage_limit",), 49)))
    done = run("solve", "--cost-model", "iopddl", "--profile", path, *LONG, "--json", code=3)
    plain = json.loads(done.stdout)
    assert (plain["status"], plain["cost"], plain["assignment"]) == ("infeasible", None, None)
    done = run("solve", "--cost-model", "iopddl", "--profile", path, *LONG, code=3)
    assert done.stdout == "example: infeasible\nno assignment keeps the limit of usage\n"


def test_edges_of_one_and_of_three_nodes(tmp_path):
    plain = changed(("edges", "nodes"), [[1], [1, 2, 3]])
    costs = [[7, 3], [(5 * s) % 7 for s in range(12)]]
    plain["problem"]["edges"]["costs"] = costs
    problem = plain["problem"]
    answer = planner.solve_contest(written(tmp_path, plain))

    def cost(x):
        own = sum(row[s] for row, s in zip(problem["nodes"]["costs"], x, strict=True))
        return own + costs[0][x[1]] + costs[1][x[1] * 6 + x[2] * 2 + x[3]]

    program = choice_program(read_contest(tmp_path / "a.json"))
    every = list(itertools.product(range(1), range(2), range(3), range(2), range(1)))
    for x in every:  # the sixth node has the strategy that the others leave it
        wide = min(cost_of(program, (*x, s)) for s in range(12))
        assert wide == cost(x)
    fitting = [x for x in every if peak_bytes(program, (*x, 0)) <= 50]
    assert answer.choice.cost == min(map(cost, fitting)) == cost(answer.choice.picks)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("nodes",), None, "nodes.intervals: expected a list of lists, got nothing"),
        (("nodes", "usages"), [[1]], "nodes.usages: expected 5 rows as in nodes.costs, got 1"),
        (("nodes", "costs", 1), [55], "edges.costs[0]: expected 1 costs, got 2"),
        (("nodes", "usages", 1), [25], "nodes.usages[1]: expected 2 usages as costs, got 1"),
        (("nodes", "usages", 1), [25, -1], "nodes.usages[1]: expected no negative usage, got -1"),
        (("nodes", "costs", 0), [], "nodes.costs[0]: expected at least one strategy"),
        (("nodes", "costs", 0), [1.5], "nodes.costs[0]: expected integers of 64 bits, got 1.5"),
        (("nodes", "costs", 0), [True], "nodes.costs[0]: expected integers of 64 bits, got True"),
        (("nodes", "costs", 0), [2**63], "nodes.costs[0]: expected integers of 64 bits, got 9223"),
        (("nodes", "intervals", 0), [1], "nodes.intervals[0]: expected [from, to] with 0 <= from"),
        (("edges", "nodes", 0), [0, 5], "edges.nodes[0]: expected nodes 0 to 4, got [0, 5]"),
        (("edges", "nodes", 0), [1, 1], "edges.nodes[0]: expected different nodes, got [1, 1]"),
        (("edges", "costs", 1), [50], "edges.costs[1]: expected 3 costs, got 1"),
        (("edges", "costs"), [], "edges.costs: expected 5 rows, got 0"),
        (("usage_limit",), "50", "usage_limit[0]: expected integers of 64 bits, got '50'"),
        (("usage_limit",), -1, "usage_limit: expected at least 0, got -1"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, place, value, said):
    path = written(tmp_path, changed(place, value))
    with pytest.raises(FileError) as error:
        read_contest(path)
    assert str(error.value).startswith(f"{path}: ")
    assert said in str(error.value)


def test_usages_beyond_64_bits_are_refused(tmp_path):
    plain = changed(("nodes", "usages", 2), [2**62, 1, 1])
    with pytest.raises(FileError, match="usages with a sum below 2"):
        planner.solve_contest(written(tmp_path, plain))


def test_no_file_no_json_and_no_gz(tmp_path):
    with pytest.raises(FileError, match="there is no such file"):
        read_contest(tmp_path / "none.json")
    (tmp_path / "a").write_text("[")
    with pytest.raises(FileError, match="this is no JSON"):
        read_contest(tmp_path / "a")
    (tmp_path / "a").write_bytes(gzip.compress(b"{}" * 1000)[:-9])
    with pytest.raises(FileError, match=r"the packed file ends too early|cannot be unpacked"):
        read_contest(tmp_path / "a")
    (tmp_path / "a").write_text("[]")
    with pytest.raises(FileError, match="problem: expected a problem of the iopddl contest"):
        read_contest(tmp_path / "a")


def test_options_of_plans_are_refused(tmp_path):
    path = str(written(tmp_path, EXAMPLE))
    for given in (("--gpus", "2"), ("--microbatches", "4"), ("--optimizer", "adam"), ("--exact",)):
        done = run("solve", "--cost-model", "iopddl", "--profile", path, *given, code=1)
        assert f"{given[0]}" in done.output
        assert "not for iopddl" in " ".join(done.output.split())
    run("solve", "--cost-model", "iopddl", code=2)


@pytest.mark.reference
@pytest.mark.slow
@pytest.mark.parametrize(("name", "optimum"), [("B", 532_843), ("G", 217_039)])
def test_published_instances_are_proved(name, optimum):
    path = REFERENCE / "iopddl" / f"asplos-2025-iopddl-{name}.json.gz"
    if not path.is_file():
        pytest.skip("the contest's instances are not beside the project")
    answer = planner.solve_contest(path, time_limit_s=600).choice
    program = choice_program(read_contest(path))
    assert answer.status == "optimal"
    assert answer.cost == answer.bound == optimum == cost_of(program, answer.picks)
    assert peak_bytes(program, answer.picks) <= program.limit_bytes
    assert answer.gap == 0.0 < math.inf
