"""ONNX's backend node tests through the planner: the smallest of each operator, and all of them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.bench.conformance import BEGIN, END, FILE, reason, rows, standard, text, way
from tests.support.conformance import Outcome, cases, run, slope

MIN_SUPPORTED = 184  # of the standard operators that are not deprecated
MIN_TESTED = 165  # operators with a test that can pass


@cache
def smallest():
    """Of each operator, the case with the fewest numbers; without those that cannot pass."""
    found = {}
    for case in cases():
        known = reason(Outcome(case, "refused")) is not None
        if way(case.type) == "none" or "_expanded" in case.name or known:
            continue
        values = (*case.inputs.values(), *case.outputs.values())
        arrays = [one for v in values for one in (v if isinstance(v, list) else [v])]
        size = sum(map(np.size, arrays))
        if case.type not in found or size < found[case.type][0]:
            found[case.type] = size, case
    return {name: case for name, (_, case) in sorted(found.items())}


def test_as_many_operators_are_supported_as_are_asked_for():
    assert sum(way(name) != "none" for name in standard()) >= MIN_SUPPORTED


def test_the_smallest_case_of_each_operator_passes_and_so_do_its_gradients(tmp_path):
    problems = []
    for name, case in smallest().items():
        outcome = run(case, tmp_path)
        if outcome.status != "passed":
            problems.append(f"{name}: {case.name}: {outcome.status}: {outcome.message}")
        elif (found := slope(outcome, tmp_path)) is not None and found.status == "differs":
            problems.append(f"{name}: {case.name}: {found.message}")
    assert len(smallest()) >= MIN_TESTED
    assert not problems


def test_a_wrong_result_is_noticed(tmp_path):
    case = smallest()["Relu"]
    wrong = {name: value + 1 for name, value in case.outputs.items()}
    outcome = run(replace(case, outputs=wrong), tmp_path)
    assert (outcome.status, outcome.message) == ("failed", "y: differs by 1")


@pytest.mark.slow
def test_the_table_is_that_of_these_tests_and_explains_every_failure(tmp_path):
    found = rows(tmp_path)
    outcomes = [outcome for row in found.values() for outcome in row.outcomes]
    assert [o.case.name for o in outcomes if o.status != "passed" and reason(o) is None] == []
    assert [key for key, row in found.items() for s in row.slopes if s.status == "differs"] == []
    assert FILE.read_text().split(BEGIN)[1].split(END)[0] == text(found)
