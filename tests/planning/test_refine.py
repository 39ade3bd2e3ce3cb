"""Parts of operators that are measured again, against a machine whose times are known."""

from dataclasses import replace
from math import prod

import pytest

from planner.artefacts.files import artefact_hash, write_profile
from planner.artefacts.formats.any import read_any_profiles
from planner.artefacts.graph import parameters_by_name, tensors_by_name
from planner.artefacts.problem import Result, Status
from planner.artefacts.profile import PartTime, Source
from planner.costs.bounds import lower_bound_s
from planner.planning import refine as refining
from planner.planning.judge import judge, judge_unchanged
from planner.planning.portfolio import Answer, Answers, comparison
from planner.planning.refine import refine
from planner.profilers.parts import MeasuredParts
from planner.profilers.parts.measure import local_shapes
from planner.reports.changes import refinement_json, refinement_lines
from tests.support.builders import cluster, problem_of, unit_type
from tests.support.split import DATA, HIDDEN, ROWS, WIDTH, megatron, mlp, one_stage, sharding

WORK = {"scale": ROWS * WIDTH, "gelu": ROWS * HIDDEN, "up": ROWS * WIDTH * HIDDEN}
WORK["down"] = WORK["up"]


def machine_s(kind, work):
    """A time that does not fall in proportion: elementwise operators hardly gain from a part."""
    return 1e-3 + 1e-6 * work if kind == "MatMul" else 2e-3 + 1e-7 * work**1.1


def whole_s(operator):
    return machine_s(operator.type, WORK[operator.name])


def part_s(graph, v, part):
    """By the sizes of what the part makes and, of a product, of what it adds up."""
    operator, shapes = graph.operators[v], local_shapes(graph, v, part)
    work = prod(shapes[operator.outputs[0]])
    if operator.type == "MatMul":
        work *= shapes[operator.inputs[0]][-1]
    return machine_s(operator.type, work)


def profiled():
    """The model, as that machine runs it whole."""
    some = mlp()
    tensors, parameters = tensors_by_name(some.graph), parameters_by_name(some.graph)
    operators = tuple(
        replace(
            cost,
            forward_s=whole_s(operator),
            backward_s=2 * whole_s(operator),
            output_bytes=sum(tensors[name].bytes for name in operator.outputs),
            parameter_bytes=sum(parameters[name].bytes for name in operator.parameters),
        )
        for cost, operator in zip(some.operators, some.graph.operators, strict=True)
    )
    measured = {"source": Source.MEASURED, "device_type": "cpu", "engine": "torch"}
    return replace(some, operators=operators, **measured)


class Machine:
    """Measures parts; counts them."""

    def __init__(self):
        self.asked = []

    def __call__(self, profile, wanted):
        costs = list(profile.operators)
        for v, parts in wanted.items():
            for part in parts:
                self.asked.append((costs[v].name, part))
                share = part_s(profile.graph, v, part) / whole_s(profile.graph.operators[v])
                kept = tuple(one for one in costs[v].parts if one.part != part)
                costs[v] = replace(costs[v], parts=(*kept, PartTime(*part, share, share)))
        count = sum(map(len, wanted.values()))
        return MeasuredParts(replace(profile, operators=tuple(costs)), count, 0)


CPU = replace(unit_type(bandwidth=1e18), name="cpu")
BY_DATA = sharding((4,), DATA, inputs={"x": ("S0",)}, outputs={"y": ("S0",)})


def attempts(shardings, microbatches=1):
    """Solvers called a, b, ..., each with a plan of one stage on four devices."""
    profile = profiled()
    topology = cluster([CPU] * 4, 1e15, 0.0)
    problem = problem_of(profile, topology, microbatches, measured_on=CPU)
    made = []
    for name, one in zip("abc", shardings, strict=False):
        groups = [(0, 1, 2, 3)] if one is not None else [(0,)]
        result = Result(Status.FEASIBLE, one_stage(profile, one, groups, microbatches))
        made.append(Answer(name, result, judge(problem, name, result)[0], 0.0))
    return Answers(problem, lower_bound_s(problem), None, tuple(made))


def forward_s(profile, parts):
    """Of a stage whose operators run so, or whole."""
    return sum(
        part_s(profile.graph, v, ((4,), (parts[o.name],))) if o.name in parts else whole_s(o)
        for v, o in enumerate(profile.graph.operators)
    )


def test_the_judge_uses_the_times_of_parts():
    machine = Machine()
    asked = attempts([megatron(4)])
    profile = asked.problem.profile
    (made,), done = refine([asked], machine)
    lines = {"up": "R,S1->S1", "gelu": "S1->S1", "down": "S1,S0->P"}
    due = forward_s(profile, lines)
    (row,) = comparison([made]).rows
    assert row.plan.prediction.stages[0].forward_s == pytest.approx(due)
    assert row.plan.prediction.stages[0].backward_s == pytest.approx(2 * due)
    by_share = whole_s(profile.graph.operators[0]) + sum(
        max(whole_s(profile.graph.operators[v]) / 4, min(map(whole_s, profile.graph.operators)))
        for v in (1, 2, 3)
    )
    assert done.before.prediction.stages[0].forward_s == pytest.approx(by_share)
    assert by_share < 0.99 * due
    assert {name for name, _ in machine.asked} == {"up", "gelu", "down"}
    assert (done.rounds, done.num_operators, done.num_timed) == (1, 3, 3)
    assert done.after == row.plan
    assert done.same_s == row.plan.prediction.iteration_s


def test_another_plan_wins_if_it_is_better_by_the_times_of_parts():
    """By shares, all four operators in parts are faster than two whole ones; in truth elementwise
    operators gain nothing.
    """
    products = sharding((4,), {"down": ["S1,S0->P"]}, parameters={"w2": ("S0",)})
    asked = attempts([BY_DATA, products, None])
    before = {row.solver: row.plan.prediction.iteration_s for row in comparison([asked]).rows}
    assert before["a"] < before["b"] < before["c"]
    machine = Machine()

    def slow(profile, wanted):
        """Parts by rows are ten times as slow as the machine's others."""
        got = machine(profile, wanted)
        operators = tuple(
            replace(
                one,
                parts=tuple(
                    replace(p, forward=10 * p.forward, backward=10 * p.backward)
                    if p.rule[0].startswith("S0")
                    else p
                    for p in one.parts
                ),
            )
            for one in got.profile.operators
        )
        return replace(got, profile=replace(got.profile, operators=operators))

    (made,), done = refine([asked], slow)
    after = comparison([made]).best
    assert after.solver == "b"
    assert done.rounds == 2
    assert done.before.solver == "a"
    assert done.same_s > after.plan.prediction.iteration_s
    # The plan that is not split is as it was, and the third was never measured.
    assert comparison([made]).rows[2].plan.prediction.iteration_s == before["c"]
    assert len(machine.asked) == 4 + 1
    text = "\n".join(refinement_lines(done))
    assert "the b plan is better by measured parts" in text
    assert "2 plans refined" in text
    assert refinement_json(done)["solver_before"] == "a"


def test_times_of_parts_go_through_the_file_and_leave_the_hash(tmp_path):
    asked = attempts([megatron(4)])
    profile = asked.problem.profile
    _, done = refine([asked], Machine())
    (refined,) = done.into([profile])
    assert [len(one.parts) for one in refined.operators] == [0, 1, 1, 1]
    write_profile(refined, tmp_path / "one.json")
    assert read_any_profiles(tmp_path / "one.json") == (refined,)
    assert artefact_hash(refined) == artefact_hash(profile)
    write_profile(profile, tmp_path / "other.json")
    assert "parts" not in (tmp_path / "other.json").read_text()


def test_parts_are_measured_again_and_others_stay():
    asked = attempts([megatron(4)])
    other = PartTime((2,), ("S0,R->S0",), 0.7, 0.7)
    old = PartTime((4,), ("R,S1->S1",), 9.0, 9.0)
    operators = list(asked.problem.profile.operators)
    operators[1] = replace(operators[1], parts=(other, old))
    profile = replace(asked.problem.profile, operators=tuple(operators))
    asked = replace(asked, problem=replace(asked.problem, profile=profile))
    (made,), _ = refine([asked], Machine())
    known = {one.part: one for one in made.problem.profile.operators[1].parts}
    assert known[other.part] == other
    assert known[old.part].forward < 1


def test_nothing_to_measure_is_said():
    asked = attempts([None])
    made, done = refine([asked], Machine())
    assert made == (asked,)
    assert done.notes == (
        "--refine: nothing to measure: no operator of the best plan runs in parts",
    )
    asked = attempts([megatron(4)])
    plain = replace(asked.problem.profile, source=Source.ANALYTIC)
    asked = replace(asked, problem=replace(asked.problem, profile=plain))
    _, done = refine([asked], Machine())
    (line,) = refinement_lines(done)
    assert "nothing to measure: the profile's times are computed" in line


def test_rounds_end(monkeypatch):
    monkeypatch.setattr(refining, "MAX_ROUNDS", 1)
    asked = attempts([BY_DATA, megatron(4)])

    def slower(profile, wanted):
        costs = [
            replace(one, parts=tuple(PartTime(*part, 50.0, 50.0) for part in wanted.get(v, ())))
            for v, one in enumerate(profile.operators)
        ]
        return MeasuredParts(replace(profile, operators=tuple(costs)), 1, 0)

    _, done = refine([asked], slower)
    assert done.rounds == 1
    assert "1 plans were refined, no more" in done.notes[-1]


def test_parts_count_only_on_the_type_that_they_were_measured_on():
    asked = attempts([megatron(4)])
    (made,), _ = refine([asked], Machine())
    kind = replace(CPU, name="fast")
    problem = replace(made.problem, topology=cluster([kind] * 4, 1e15, 0.0))
    plain = replace(asked.problem, topology=problem.topology)
    strategy = asked.answers[0].verdict.strategy
    one, other = (judge_unchanged(some, strategy)[0].prediction for some in (problem, plain))
    assert one.stages == other.stages
