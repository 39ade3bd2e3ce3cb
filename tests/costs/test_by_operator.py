"""All operators together cost what the stages do, and each collective belongs to its operator."""

import numpy as np
import pytest

from planner.artefacts.options import Recompute
from planner.artefacts.strategy import ScheduleName, Stage, Strategy, used_devices
from planner.costs.by_operator import BACKWARD, FORWARD, ONCE, operator_costs
from planner.costs.evaluate import evaluate
from planner.costs.stage_pass import collective_steps, gather_s, stage_pass
from planner.costs.update import step_s
from planner.planning.judge import judge_unchanged
from planner.resharding.over_replicas import over_replicas
from planner.solvers.registry import SOLVERS
from planner.solvers.sharded.options import Megatron, Zero
from tests.support.split import megatron, mlp, one_stage, with_stage, zero
from tests.support.split_models import MODELS, loaded
from tests.support.split_models import megatron as megatron_blocks
from tests.support.split_profiles import FAST, problem, profiled

PLANS = [
    ("data-parallel", ()),
    ("even", ()),
    ("zero", (Zero(zero_stage=1),)),
    ("zero", (Zero(zero_stage=2),)),
    ("zero", (Zero(zero_stage=3),)),
    ("megatron", (Megatron(tensor_degree=2, data_degree=2),)),
    ("megatron", (Megatron(tensor_degree=2, pipeline_degree=2),)),
    ("intra-op", ()),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_operator")
    return {name: loaded(make(folder / f"{name}.onnx")) for name, make in MODELS.items()}


def mean(strategy, by_device):
    """Of the used devices."""
    used = used_devices(strategy)
    return sum(by_device(device) for device in used) / len(used)


def runs(strategy, stage, device):
    """Microbatches of an iteration that a device runs."""
    (replica,) = (r for r, group in enumerate(stage.groups) if device in group)
    return len(range(replica, strategy.num_microbatches, stage.num_replicas))


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.FULL, Recompute.SELECTIVE])
@pytest.mark.parametrize(("solver", "switches"), PLANS)
@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_operators_together_cost_what_the_judge_counts(models, name, solver, switches, recompute):
    """Nothing runs beside computations, so that a pass takes what its parts take."""
    given = problem(
        profiled(models[name]), 4, 4, recompute=recompute, overlap=False, switches=switches
    )
    strategy = SOLVERS[solver](given, 1.0).strategy
    if strategy is None:
        pytest.skip(f"{solver} has no plan of {name}")
    found, priced = operator_costs(given, strategy), evaluate(given, strategy)

    def passes(device):
        return sum(
            runs(strategy, stage, device)
            * (priced.costs.forward_s[s, device] + priced.costs.backward_s[s, device])
            for s, stage in enumerate(strategy.stages)
            if device in stage.devices
        )

    def once(device):
        sums = zip(priced.program.sums, priced.costs.sum_s, strict=True)
        return priced.costs.step_s[device] + sum(t for one, t in sums if device in one.devices)

    inside = found.compute_s.sum() + found.collective_s[[FORWARD, BACKWARD]].sum()
    assert inside == pytest.approx(mean(strategy, passes))
    outside = found.optimizer_s.sum() + found.collective_s[ONCE].sum()
    assert outside == pytest.approx(mean(strategy, once))
    state = [(priced.needs[s].static.state, stage) for s, stage in enumerate(strategy.stages)]
    held = sum(size * len(stage.devices) for size, stage in state) / len(used_devices(strategy))
    assert found.optimizer_s.sum() == pytest.approx(step_s(given, held, FAST))
    assert found.held_bytes[2].sum() == pytest.approx(sum(size for size, _ in state))


@pytest.mark.parametrize("schedule", ScheduleName)
@pytest.mark.parametrize("solver", ["single", "data-parallel", "even", "antichain"])
def test_devices_compute_as_long_as_in_the_simulator(models, solver, schedule):
    """Also where a stage steps after every microbatch of its replicas."""
    given = problem(profiled(models["cnn"]), 4, 8, recompute=Recompute.NONE, schedule=schedule)
    result = SOLVERS[solver](given, 1.0)
    verdict, _ = judge_unchanged(given, result.strategy)
    found, devices = operator_costs(given, result.strategy), verdict.prediction.devices
    computing_s = sum(one.compute_s for one in devices) / len(devices)
    assert found.compute_s.sum() + found.optimizer_s.sum() == pytest.approx(computing_s)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_with_overlap_collectives_count_in_full(stage):
    given = problem(mlp(), 2, 2)
    strategy = with_stage(one_stage(mlp(), zero(2, stage), [(0, 1)], 2), prefetch=10**6)
    (only,) = strategy.stages
    found, own = operator_costs(given, strategy), stage_pass(given, only, 0)
    assert found.compute_s.sum() == pytest.approx(2 * own.compute_s.sum())
    assert found.collective_s[FORWARD].sum() == pytest.approx(2 * own.collective_s[0].sum())
    assert found.collective_s[BACKWARD].sum() == pytest.approx(2 * own.collective_s[1].sum())
    sums = evaluate(given, strategy).costs.sum_s
    gathers = gather_s(given, over_replicas(only, given.profile.graph), (0, 1))
    assert found.collective_s[ONCE].sum() == pytest.approx(sum(sums) + gathers)
    steps = [step for side in collective_steps(given.profile, only) for step in side]
    ring = {"all-reduce": 1.0, "all-gather": 0.5, "reduce-scatter": 0.5}
    brought = sum(2 * ring.get(step.kind.value, 0.0) * step.bytes for step in steps)
    assert found.received_bytes[:2].sum() == pytest.approx(brought)


def test_a_sum_belongs_to_the_product_that_makes_summands_and_its_gradient_to_the_first_product():
    """Megatron's g is behind the second product, its f in front of the first one."""
    given = problem(mlp(), 2, 1)
    strategy = one_stage(mlp(), megatron(2), [(0, 1)])
    found = operator_costs(given, strategy)
    scale, up, gelu, down = range(4)
    assert np.flatnonzero(found.collective_s[FORWARD]).tolist() == [down]
    assert np.flatnonzero(found.collective_s[BACKWARD]).tolist() == [up]
    assert found.parameter_bytes.tolist() == [64, 4096, 0, 4096]
    assert found.held_bytes.tolist() == [[64, 2048, 0, 2048]] * 3
    # An all-reduce of 8 x 16 floats over two devices brings each as many bytes as it has.
    assert found.received_bytes[FORWARD, down] == 8 * 16 * 4
    assert found.received_bytes[BACKWARD, up] == 8 * 16 * 4
    assert found.optimizer_s[gelu] == 0 < found.optimizer_s[scale] < found.optimizer_s[up]


def test_state_in_parts_over_replicas_is_a_part_of_each_parameter():
    given = problem(mlp(), 2, 2)
    strategy = with_stage(one_stage(mlp(), None, [(0,), (1,)], 2), over=2, zero=1)
    found = operator_costs(given, strategy)
    assert found.held_bytes.tolist() == [
        [64, 4096, 0, 4096], [64, 4096, 0, 4096], [32, 2048, 0, 2048]
    ]  # fmt: skip
    # A reduce-scatter of gradients and an all-gather of parameters bring a half each.
    assert found.received_bytes[ONCE].tolist() == [64, 4096, 0, 4096]
    assert found.received_bytes[:2].sum() == 0


def test_sums_belong_to_the_products_whose_summands_they_add_up_and_not_to_readers(models):
    """The weights of a block that are cut by rows are o of attention and d of the MLP."""
    model = models["gpt"]
    profile = profiled(model)
    given = problem(profile, 2, 1)
    found = operator_costs(given, one_stage(profile, megatron_blocks(model, 2), [(0, 1)]))
    paid = np.flatnonzero(found.collective_s[FORWARD])
    assert [profile.graph.operators[v].parameters for v in paid] == [("0o",), ("0d",)]


def test_parameters_of_two_stages_on_one_device_are_stepped_once(models):
    """The table of the embedding is the head's, too."""
    profile = profiled(models["gpt"])
    names = [one.name for one in profile.graph.operators]
    halves = tuple(names[:9]), tuple(names[9:])
    stages = tuple(Stage.whole(half, [0], 1, recompute=False) for half in halves)
    given = problem(profile, 2, 1)
    together = operator_costs(given, Strategy(stages, ScheduleName.ONE_F_ONE_B, 1))
    alone = operator_costs(given, one_stage(profile, None, [(0,)]))
    assert together.optimizer_s.tolist() == alone.optimizer_s.tolist()
    assert together.parameter_bytes.tolist() == alone.parameter_bytes.tolist()
