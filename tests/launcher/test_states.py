"""State that forward changes, and modes of modules: trained, evaluated, resumed and written as by
PyTorch's own loop.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import planner
from tests.support.gradient_kinds import KINDS, states
from tests.support.gradient_kinds.kind import Outcome
from tests.support.gradient_kinds.trial import (
    NUM_MICROBATCHES,
    batches,
    build,
    by_torch,
    called,
    feeding_of,
    joined,
    loss_of,
    within,
)
from tests.support.gradient_kinds.two_ranks import PLANS, trials

QUICK = ("moving-statistics", "counter", "memory", "spectral-state", "instance-norm-tracked")
"""Kinds that `make test` runs."""
NO_EVALUATION = {"batch-norm-hard", "unread-state"}
"""Kinds whose forward changes state in evaluation, too."""
DRAWN = {"dropout-hard"}
"""Kinds that draw in evaluation."""


@dataclass(frozen=True)
class Journey:
    """What comes of a training on one device.

    Attributes:
        losses: of the steps.
        evaluated: the loss in evaluation, or the refusal.
        state: by `trainer.state_dict`.
        written: by `planner weights --state-dict`.
        refused: of `planner weights -o`, which else has written trained.onnx.
    """

    losses: list[float]
    evaluated: float | str
    state: dict[str, Tensor]
    written: dict[str, Tensor]
    refused: str


def journey(name: str, *, recompute: bool = False, resume: bool = False) -> Journey:
    """Exports, plans, trains, evaluates and writes a kind, in the current folder."""
    kind = KINDS[name]
    steps = batches(name, kind, torch.float64)
    planner.export(*build(name, kind, torch.float64), "model.onnx")
    profile = planner.profile(
        planner.read_model("model.onnx", loss=kind.loss),
        repetitions=1, budget_s=0.0, cache=False, contention=False,
    )  # fmt: skip
    training = planner.Training(
        microbatches=NUM_MICROBATCHES, optimizer="sgd", recompute="full" if recompute else "none"
    )
    plan = planner.solve(profile, gpus=1, training=training, solvers=["single"]).plan
    assert plan is not None
    assert plan.strategy.stages[0].recompute is recompute
    planner.write_strategy(plan, "strategy.json", model="model.onnx")
    how = {"learning_rate": kind.rate["sgd"], "threads": 1}
    losses = []
    first = steps[: len(steps) // 2] if resume else []
    if first:
        with planner.trainer("strategy.json", checkpoint="half", **how) as trainer:
            losses += [trainer.step(joined(one)) for one in first]
            trainer.save()
        how["resume"] = "half"
    with planner.trainer("strategy.json", checkpoint="run", **how) as trainer:
        losses += [trainer.step(joined(one)) for one in steps[len(first) :]]
        state = trainer.state_dict()
        try:
            evaluated: float | str = trainer.evaluate([joined(steps[0][:1])])["loss"]
        except planner.PlannerError as error:
            evaluated = str(error)
        trainer.save()
    refused = ""
    try:
        planner.write_weights("run", "trained.onnx")
    except planner.PlannerError as error:
        refused = str(error)
    planner.write_weights("run", None, "trained.pt")
    return Journey(losses, evaluated, state, torch.load("trained.pt"), refused)


def trained_module(name: str) -> tuple[list[float], nn.Module]:
    """Losses of PyTorch's loop, and the module after it, in evaluation."""
    kind = KINDS[name]
    made = by_torch(name, kind, torch.float64, "sgd", feeding_of(kind))
    module, _ = build(name, kind, torch.float64)
    module.load_state_dict(made.state)
    return made.losses, module.eval()


def evaluated(name: str, module: nn.Module) -> float:
    """The loss of the first microbatch in evaluation."""
    kind = KINDS[name]
    inputs, targets = batches(name, kind, torch.float64)[0][0]
    with torch.no_grad():
        return float(loss_of(kind, called(module, inputs), targets))


def check_state(name: str, made: dict[str, Tensor], module: nn.Module, tolerance: float) -> None:
    """Parameters and buffers are those of the loop. What training does not change may be left out,
    and so may counts of batches that nothing reads.
    """
    wanted, before = module.state_dict(), build(name, KINDS[name], torch.float64)[0].state_dict()
    assert {*made} <= {*wanted}
    for key in {*wanted} - {*made}:
        assert key.endswith("num_batches_tracked") or torch.equal(wanted[key], before[key])
    for key, value in made.items():
        assert value.dtype == wanted[key].dtype
        torch.testing.assert_close(value, wanted[key], rtol=tolerance, atol=tolerance, msg=key)


def run_file(path: str, inputs: object) -> np.ndarray:
    """The first output of a file in ONNX Runtime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    feed = dict(zip(names, (one.numpy() for one in inputs), strict=True))
    return session.run(None, feed)[0]


def check(name: str, folder: Path, **how: bool) -> None:
    """A kind on one device beside PyTorch's loop."""
    kind, tolerance = KINDS[name], KINDS[name].within[torch.float64]
    with within(folder):
        made = journey(name, **how)
        losses, module = trained_module(name)
        assert made.losses == pytest.approx(losses, rel=tolerance)
        check_state(name, made.state, module, tolerance)
        check_state(name, made.written, module, tolerance)
        if name in NO_EVALUATION:
            assert "cannot be evaluated as the module: forward changes" in str(made.evaluated)
            assert "cannot be evaluated as the module: forward changes" in made.refused
            return
        assert not made.refused
        if name in DRAWN:
            return
        assert made.evaluated == pytest.approx(evaluated(name, module), rel=tolerance)
        inputs, _ = batches(name, kind, torch.float64)[0][0]
        with torch.no_grad():
            wanted = next(iter(called(module, inputs).values()))
        np.testing.assert_allclose(run_file("trained.onnx", inputs), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in states.KINDS],
)
def test_a_kind_is_trained_evaluated_and_written_as_by_pytorch(name, tmp_path):
    check(name, tmp_path)


@pytest.mark.parametrize(
    "name", ["codebook", pytest.param("spectral-state", marks=pytest.mark.slow)]
)
def test_recomputation_reads_the_state_of_the_first_pass_and_changes_nothing(name, tmp_path):
    check(name, tmp_path, recompute=True)


def test_a_resumed_training_goes_on_with_the_state(tmp_path):
    check("state-apart", tmp_path, resume=True)


@pytest.mark.slow
def test_kinds_in_a_pipeline_and_on_a_mesh(tmp_path):
    made = trials([*states.KINDS], tmp_path)
    assert made.keys() == {(name, plan) for name in states.KINDS for plan in PLANS}
    assert {key: one for key, one in made.items() if one.outcome is not Outcome.EQUAL} == {}


def test_some_kinds_in_a_pipeline_and_on_a_mesh(tmp_path):
    made = trials(["codebook", "spectral-state"], tmp_path)
    assert len(made) == 4
    assert {one.outcome for one in made.values()} == {Outcome.EQUAL}
