"""Some epochs of the convergence benchmark: `planner launch` beside PyTorch's own loops."""

import pytest
import torch

import planner
from tests.support.convergence.curves import apart, of_log
from tests.support.convergence.networks import TASKS
from tests.support.convergence.replay import ages, replayed
from tests.support.convergence.rivals import RIVALS, feeding_of, train, trained_by
from tests.support.convergence.samples import STEPS_PER_EPOCH
from tests.support.convergence.ways import WAYS, Way, by_forks, exported, launched, planned

EPOCHS, TOLERANCE = 2, 1e-9
SAMPLES = "tests.support.convergence.samples"
DIGITS = TASKS["digits"]
EQUAL = {"data-parallel": "ddp", "pipeline": "loop", "placement": "loop", "pipedream": "replay"}
"""What each way has to equal."""


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The network with batch normalization and dropout as an ONNX file, in a folder of its own."""
    return exported("digits", tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def by_torch(made):
    """PyTorch's loop over the module itself."""
    return train(DIGITS, RIVALS["loop"], EPOCHS, feeding_of(DIGITS, RIVALS["loop"], made))


def assert_alike(own, other):
    assert apart(own.losses, other.losses) < TOLERANCE
    assert apart(own.judged_losses, other.judged_losses) < TOLERANCE
    assert own.accuracies == pytest.approx(other.accuracies)


def test_forty_steps_with_batch_normalization_and_dropout_are_those_of_pytorchs_loop(
    made, by_torch
):
    (path,) = planned("digits", made, {"alone": Way("single", num_ranks=1)}).values()
    planner.launch(
        path, data=f"{SAMPLES}:{DIGITS.trained}", epochs=EPOCHS, log_file=made.with_suffix(".log"),
        eval_data=f"{SAMPLES}:{DIGITS.judged}", eval_every=STEPS_PER_EPOCH,
        learning_rate=DIGITS.learning_rate, lr_schedule="cosine",
    )  # fmt: skip
    own = of_log(made.with_suffix(".log"))
    assert len(own.losses) == 40 and own.losses[-1] < own.losses[0] / 2
    assert_alike(own, by_torch)


def test_two_processes_with_a_stage_each_train_as_pytorchs_loop_does(made, by_torch):
    (path,) = planned("digits", made, {"pipeline": WAYS["pipeline"]}).values()
    assert_alike(launched(DIGITS, WAYS["pipeline"], path, EPOCHS, by_forks), by_torch)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_way_trains_as_pytorch_does(task, tmp_path):
    model = exported(task, tmp_path)
    paths = planned(task, model)
    feeding = feeding_of(TASKS[task], RIVALS["loop"], model)
    rivals = {name: trained_by(name, task, EPOCHS, tmp_path) for name in ("loop", "ddp")}
    rivals["replay"] = replayed(TASKS[task], EPOCHS, feeding, ages(paths["pipedream"], model))
    for name, path in paths.items():
        assert_alike(launched(TASKS[task], WAYS[name], path, EPOCHS), rivals[EQUAL[name]])
