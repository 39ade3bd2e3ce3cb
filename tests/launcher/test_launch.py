import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from planner import launch, start_launch
from planner.artefacts.files import read_plan, write_plan
from planner.artefacts.losses import losses
from planner.artefacts.options import Optimizer
from planner.artefacts.strategy import GradientSum
from planner.launcher import job, rendezvous
from planner.launcher.failures.monitor import _signal_message, torchrun_command
from planner.launcher.gradients import GradientBuckets
from planner.launcher.rendezvous import LaunchAgreement
from planner.launcher.source import read_model
from planner.launcher.stage import StageModule
from planner.launcher.updates import make_optimizer
from planner.operators import to_torch
from planner.operators.losses import LossValue, criterion
from planner.reports.launch import launch_json, launch_tables, loss_lines
from planner.schedules.actions import Compute, Direction
from planner.simulator.traces.read import read_trace
from planner.support.errors import FileError, LaunchError, OptionError
from planner.training import trainer
from planner.training.data.samples import _checked
from tests.support.launch_worker import (
    CASES,
    LENGTH,
    WORDS,
    Case,
    load_model,
    make_model,
    make_plan,
)
from tests.support.ranks import forked

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
LIMITS = {"float64": 1e-6, "float32": 1e-4}

# What cli.py does, as far as it matters here: options as JSON, one message, an exit code. Clocks of
# the ranks are far apart, and go at different speeds.
CLI = f"""
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from planner.support.errors import PlannerError, Stopped
from planner.launcher import clocks
from planner.launcher.failures import rank as ranks
ranks.enter()
from planner import launch
from planner.launcher.stage import StageModule
from planner.operators import to_torch
say = lambda line: print(line, file=sys.stderr)
rank = int(os.environ.get("RANK", 0))
clocks.now_s = lambda: 1000 * rank + (1 + 1e-4 * rank) * time.perf_counter()
options = json.loads(sys.argv[3])
trace = options.pop("trace", None)
try:
    found = launch(Path(sys.argv[2]), trace=trace and Path(trace), report=say, **options)
except PlannerError as error:
    is_end = isinstance(error, Stopped)
    with ranks.current_rank().reporter_lock(of_an_end=is_end) as is_reporter:
        if is_reporter:
            say(f"Error: {{error}}")
    sys.stderr.flush()
    # As the command line does: while Python ended, gloo's threads would abort it.
    ranks.current_rank().leave(ranks.LEFT if is_end else 1)
if found:
    print(json.dumps({{
        "loss": found.loss, "steps": found.steps, "peak": found.peak_bytes,
        "iteration_s": found.measured_iteration_s, "comparable": found.comparable,
        "stages": [[s.measured.forward_s, s.measured.backward_s] for s in found.stages],
        "busy": [[d.rank, d.compute_s, d.communication_s, d.idle_s] for d in found.devices],
        "timeline_s": found.timeline.iteration_s, "transfers": len(found.timeline.transfers),
    }}))
sys.stdout.flush()
if ranks.current_rank():
    ranks.current_rank().leave(0)  # as the command line does: a rank that idles is done
"""
START = """
import sys
from pathlib import Path
import planner
from planner.support.errors import PlannerError
from planner.launcher.failures import monitor
monitor.CLI = Path("cli.py").absolute()
try:
    sys.exit(planner.start_launch("strategy.json", int(sys.argv[1]), sys.argv[2:]))
except PlannerError as error:
    sys.exit(f"Error: {error}")
"""


def write_case(folder, case, **changes):
    """strategy.json and its model in a folder; gives the strategy's path."""
    make_model(folder / "net.onnx", case.dtype)
    plan = make_plan(case, load_model(folder / "net.onnx"), **changes)
    write_plan(plan, folder / "strategy.json")
    (folder / "cli.py").write_text(CLI)
    return folder / "strategy.json"


def start(folder, nproc, **options):
    """`planner launch strategy.json --nproc N` in a process of its own."""
    command = [sys.executable, "-c", START, str(nproc), json.dumps(options)]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False
    )


# --------------------------------------------------------------------------------- gradients


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    """Relative errors of gradients by case, of all ranks, from one start of torchrun."""
    folder = tmp_path_factory.mktemp("gradients")
    for dtype in LIMITS:
        make_model(folder / f"{dtype}.onnx", dtype)
    forked(ROOT / "tests/support/launch_worker.py", 4, folder, timeout_s=300)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return {name: [rank[name] for rank in ranks] for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_one_process(errors, name):
    used = CASES[name].num_devices
    assert [bool(found) for found in errors[name]] == [rank < used for rank in range(4)]
    worst = {what: error for found in errors[name] for what, error in found.items()}
    assert {what.split(",")[0] for what in worst} == {"words", "w1", "w2", "b2", "more", "loss"}
    assert max(e for found in errors[name] for e in found.values()) <= LIMITS[CASES[name].dtype]


# ------------------------------------------------------------------------- a launch as a whole


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Ten steps of a strategy for three devices, in four processes."""
    folder = tmp_path_factory.mktemp("launched")
    write_case(folder, Case((2, 1), 5))
    options = {"steps": STEPS, "learning_rate": 0.3, "trace": str(folder / "trace.json")}
    done = start(folder, 4, **options)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout), done.stderr


def test_loss_decreases_on_fixed_data(launched):
    _, found, _ = launched
    assert found["steps"] == STEPS == len(found["loss"])
    assert all(later < earlier for earlier, later in pairwise(found["loss"]))


def test_trains_as_one_process_does(launched, tmp_path):
    _, found, _ = launched
    alone = launch(write_case(tmp_path, Case((1,), 5)), steps=STEPS, learning_rate=0.3)
    assert found["loss"] == pytest.approx(alone.loss, rel=1e-9)


@pytest.mark.parametrize("case", [
    Case((1, 1, 1), 5, devices=(0, 0, 0)), Case((), 5, placement=(0,), fine=True),
    Case((1, 1), 5, recompute=True, devices=(0, 0)),
])  # fmt: skip
def test_several_stages_on_one_device_train_as_one_does(tmp_path, case):
    (tmp_path / "one").mkdir()
    whole = launch(write_case(tmp_path / "one", Case((1,), 5)), steps=3, learning_rate=0.3)
    found = launch(write_case(tmp_path, case), steps=3, learning_rate=0.3)
    assert found.loss == pytest.approx(whole.loss, rel=1e-9)


def test_extra_ranks_say_that_they_idle(launched):
    assert launched[2] == "rank 3 idles: the strategy needs 3 of the ranks\n"


def test_report_has_times_of_every_stage_and_device(launched):
    _, found, _ = launched
    assert found["comparable"]
    assert len(found["stages"]) == 2 and all(t > 0 for times in found["stages"] for t in times)
    assert [rank for rank, *_ in found["busy"]] == [0, 1, 2]
    for _, *parts in found["busy"]:
        assert sum(parts) == pytest.approx(found["timeline_s"]) and min(parts) >= 0
    assert all(peak > 50e6 for peak in found["peak"])


def test_trace_has_every_transfer(launched):
    folder, found, _ = launched
    # per microbatch h1, ids2, mask, mean, turned go on, and the gradients of the floats come back
    assert found["transfers"] == 5 * (5 + 3)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "s" for event in events) == 5 * (5 + 3)


def test_a_trace_tells_all_times_on_one_clock(launched):
    """The clocks differ by 1000 s; what is left is less than an iteration."""
    folder, found, _ = launched
    timeline = read_trace(folder / "trace.json").timeline
    computed = {(e.device, e.action): e for e in timeline.events}
    slack_s = 0.1 * timeline.iteration_s
    assert timeline.iteration_s < 2 * found["iteration_s"]
    for event in timeline.events:
        assert 0 <= event.start_s <= event.end_s <= timeline.iteration_s + 1e-9
    for transfer in timeline.transfers:
        stage = 0 if transfer.direction is Direction.FORWARD else 1
        made = computed[transfer.source, Compute(transfer.direction, stage, transfer.microbatch)]
        used = computed[
            transfer.target, Compute(transfer.direction, 1 - stage, transfer.microbatch)
        ]
        assert made.end_s - slack_s <= transfer.start_s <= transfer.end_s <= used.start_s + slack_s


def test_a_failing_rank_ends_the_launch_with_its_message_alone(tmp_path):
    write_case(tmp_path, Case((1, 1), 4))
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def data(step, microbatch, inputs):\n"
        "    if (step, microbatch) == (2, 3): raise KeyError('no such sentence')\n"
        "    shape, dtype = inputs['ids']\n"
        "    return {'ids': torch.ones(shape, dtype=dtype)}, torch.zeros(shape, dtype=dtype)\n"
        "def data_of_one_rank(step, microbatch, inputs):\n"
        "    import os\n"
        "    if os.environ['RANK'] == '1': return data(step, microbatch, inputs)\n"
        "    return data(0, microbatch, inputs)\n"
    )
    done = start(tmp_path, 2, data="mine:data_of_one_rank")
    assert done.returncode == 1
    message = "--data mine:data_of_one_rank: step 2, microbatch 3: KeyError: 'no such sentence'"
    assert done.stderr.splitlines() == [f"Error: {message}"]


# -------------------------------------------------------------------------------- one process


@pytest.fixture
def alone(tmp_path):
    return write_case(tmp_path, Case((1,), 3))


@pytest.fixture
def seat(monkeypatch):
    def sit(rank, world_size):
        values = {
            "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "localhost",
        }  # fmt: skip
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        # The others are not there to shake hands.
        monkeypatch.setattr(
            trainer,
            "meet_others",
            lambda plan, *_: LaunchAgreement("", restarted=False, ranks=plan.ranks),
        )

    return sit


@pytest.mark.parametrize("optimizer", Optimizer)
def test_one_device_trains_without_torchrun(tmp_path, optimizer):
    path = write_case(tmp_path, Case((1,), 3), optimizer=optimizer.value)
    steps = []
    found = launch(path, steps=5, progress=lambda *done: steps.append(done))
    assert found.loss[-1] < found.loss[0]
    assert steps == [(done, 5, None) for done in (1, 2, 3, 4, 5)]
    assert found.comparable and found.notes == ()


def test_commands_are_shown_as_a_shell_takes_them():
    assert torchrun_command(Path("my plan.json"), 2).endswith("launch 'my plan.json'")


def test_a_loss_that_is_not_finite_is_noted_and_null_in_json(alone, monkeypatch):
    nothing = lambda loss: lambda output, target: LossValue(output.sum() * torch.nan)  # noqa: E731
    monkeypatch.setattr("planner.launcher.mesh.losses.criterion", nothing)
    found = launch(alone, steps=2)
    said = "the loss is not finite: look for weights that are not, or lower --lr"
    assert found.notes == (said,)
    assert loss_lines(found)[-1].endswith("loss not finite -> not finite")
    assert launch_json(found)["loss"] == [None, None]


def test_memory_is_compared_without_the_reserve(alone):
    found = launch(alone, steps=1)
    device = found.devices[0]
    memory = replace(device.predicted.memory, reserve_bytes=1 << 40)
    predicted = replace(device.predicted, memory=memory)
    table = launch_tables(replace(found, devices=(replace(device, predicted=predicted),)))[1]
    assert "without reserve" in table.heads[-1]
    assert "TiB" not in table.rows[0][-1]


def test_outside_torchrun_both_ways_are_shown(tmp_path):
    path = write_case(tmp_path, Case((2, 1)))
    with pytest.raises(LaunchError) as error:
        launch(path)
    assert f"torchrun --nproc-per-node 3 --no-python planner launch {path}\n" in str(error.value)
    assert str(error.value).endswith(f"planner launch {path} --nproc 3")


def test_too_small_a_world_is_told_how_many_it_needs(tmp_path, seat):
    path = write_case(tmp_path, Case((2, 1)))
    seat(0, 2)
    with pytest.raises(LaunchError) as error:
        launch(path)
    assert "uses 3 devices, torchrun started 2 processes" in str(error.value)
    assert f"run: torchrun --nproc-per-node 3 --no-python planner launch {path}" in str(error.value)


def test_ranks_beyond_the_strategy_do_nothing(alone, seat):
    seat(3, 4)
    said = []
    assert launch(alone, report=said.append) is None
    assert said == ["rank 3 idles: the strategy needs 1 of the ranks"]


def test_another_model_is_refused_with_both_hashes(tmp_path):
    path = write_case(tmp_path, Case((1,)), model_hash="0123456789abcdef")
    with pytest.raises(FileError) as error:
        launch(path)
    found = load_model(tmp_path / "net.onnx").hash[:12]
    assert f"made for model 0123456789ab, but {tmp_path / 'net.onnx'} is {found}" in str(
        error.value
    )
    assert "run: planner profile" in str(error.value)


def test_model_option_goes_before_the_plan(tmp_path, alone):
    (tmp_path / "net.onnx").rename(tmp_path / "moved.onnx")
    with pytest.raises(LaunchError, match=r"net\.onnx, which is not there; give --model FILE"):
        launch(alone)
    assert launch(alone, model=tmp_path / "moved.onnx", steps=1).steps == 1


def test_a_plan_without_a_model_asks_for_one(tmp_path):
    path = write_case(tmp_path, Case((1,)), model_path=None)
    with pytest.raises(LaunchError, match="names no model; give --model FILE"):
        launch(path)


def test_trains_what_the_plan_says(tmp_path):
    path = write_case(tmp_path, Case((1,)), train=("w1", "frozen"))
    plan = read_plan(path)
    model = read_model(plan, path, None, hashes=True)
    assert {p.name for p in model.graph.parameters if p.trainable} == {"w1", "frozen"}


def test_a_replica_without_a_microbatch_is_refused(tmp_path, seat):
    path = write_case(tmp_path, Case((3, 1), 2))
    seat(0, 4)
    with pytest.raises(FileError, match="more replicas than there are microbatches"):
        launch(path)


def test_a_schedule_that_hangs_is_refused(tmp_path, monkeypatch, alone):
    monkeypatch.setattr(job, "dry_run", lambda program, meshes: "device 0 waits at 0F0")
    with pytest.raises(LaunchError, match="would hang: device 0 waits at 0F0"):
        launch(alone)


def test_another_type_of_device_is_not_comparable(tmp_path):
    path = write_case(tmp_path, Case((1,)))
    plan = read_plan(path)
    prediction = plan.prediction
    devices = tuple(replace(d, type="V100-SXM2-16GB") for d in prediction.devices)
    write_plan(replace(plan, prediction=replace(prediction, devices=devices)), path)
    found = launch(path, steps=2, device="cpu")
    assert not found.comparable
    assert found.notes == ("not comparable: planned for V100-SXM2-16GB, run on cpu (ranks 0)",)


def test_other_threads_than_the_profile_are_noted(alone):
    assert launch(alone, steps=2, threads=2).notes == (
        "profiled with 1 thread, run with 2 per rank (--threads)",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps: expected a whole number of at least 1, got 0"),
        ({"threads": 0}, "--threads: expected a whole number from 1 to 1024, got 0"),
        ({"learning_rate": -1.0}, "--lr: expected a finite number of at least 0, got -1.0"),
        ({"learning_rate": float("nan")}, "--lr: expected a finite number"),
        ({"learning_rate": float("inf")}, "--lr: expected a finite number"),
        ({"loss": "hinge"}, "--loss: expected one of auto, cross-entropy"),
        ({"device": "tpu"}, "--device: expected one of auto, cpu, cuda, got 'tpu'"),
        ({"data": "nothing"}, "--data: expected module:function, got 'nothing'"),
        ({"data": "no_such_module:f"}, "ModuleNotFoundError"),
        ({"data": "json:no_such_function"}, "AttributeError"),
    ],
)
def test_bad_options_are_one_message(alone, options, message):
    with pytest.raises((OptionError, LaunchError)) as error:
        launch(alone, **options)
    assert message in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_where_there_is_none_is_refused(alone):
    with pytest.raises(LaunchError, match="torch finds 0; use --device cpu"):
        launch(alone, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_gpu_trains_as_a_cpu_does(alone):
    found = launch(alone, device="cuda", learning_rate=0.3)
    assert found.loss == pytest.approx(launch(alone, device="cpu", learning_rate=0.3).loss)
    assert found.peak_bytes[0] > 0 and not found.comparable


# --------------------------------------------------------------------------------------- data


def use_data(monkeypatch, tmp_path, function):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("planner.launcher.options.function_named", lambda *_: function)
    monkeypatch.setattr("planner.training.data.datasets.function_named", lambda *_: function)


def test_data_comes_from_a_function(alone, tmp_path, monkeypatch):
    asked = []

    def data(step, microbatch, inputs):
        asked.append((step, microbatch))
        assert inputs == {"ids": ((2, LENGTH), torch.int64)}
        ids = torch.full((2, LENGTH), step, dtype=torch.int64)
        return {"ids": ids}, ids + 1

    use_data(monkeypatch, tmp_path, data)
    launch(alone, steps=2, data="mine:data")
    assert asked == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_integers_of_a_narrower_type_are_taken_for_tokens_and_classes(
    alone, tmp_path, monkeypatch, dtype
):
    ids = torch.arange(2 * LENGTH).reshape(2, LENGTH)
    use_data(monkeypatch, tmp_path, lambda *_: ({"ids": ids}, ids))
    expected = launch(alone, steps=2, data="mine:data").loss
    use_data(monkeypatch, tmp_path, lambda *_: ({"ids": ids.to(dtype)}, ids.to(dtype)))
    assert launch(alone, steps=2, data="mine:data").loss == expected


def test_numbers_that_a_type_does_not_have_are_refused():
    for narrow, wide in ((torch.int64, torch.int32), (torch.int8, torch.uint8)):
        with pytest.raises(LaunchError, match=f"expected .* {wide}, got .* {narrow}"):
            _checked("data", torch.ones(2, dtype=narrow), (2,), wide)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (({}, 0), "input 'ids': expected a tensor of shape (2, 3) and torch.int64, got NoneType"),
        (({"ids": torch.ones(3, 3)}, 0), "got shape (3, 3) and torch.float32"),
        (
            ({"ids": torch.ones(2, 3).long()}, torch.ones(2)),
            "target of 'logits': expected a tensor of",
        ),
        (None, "step 0, microbatch 0: expected ({input: tensor}, target), got NoneType"),
        ((1, 2), "expected ({input: tensor}, target), got (int, int)"),
        (
            ({"ids": torch.zeros(2, 3).long()}, torch.full((2, 3), -1)),
            "mine:data: step 0, microbatch 0: target of 'logits': expected class indices",
        ),
        (
            ({"ids": torch.full((2, 3), WORDS)}, torch.zeros(2, 3).long()),
            "at 0F0 of step 0: IndexError: index out of range",
        ),
    ],
)
def test_bad_data_is_one_message(alone, tmp_path, monkeypatch, made, message):
    use_data(monkeypatch, tmp_path, lambda step, microbatch, inputs: made)
    with pytest.raises(LaunchError) as error:
        launch(alone, data="mine:data")
    assert message in str(error.value)


# -------------------------------------------------------------------------------------- parts


def test_gradients_are_views_into_one_buffer_per_sum_and_dtype():
    def parameter(*shape, dtype=torch.float32):
        return torch.nn.Parameter(torch.zeros(shape, dtype=dtype))

    parameters = {
        "own": parameter(2), "a": parameter(2, 3), "b": parameter(4),
        "c": parameter(5, dtype=torch.float64), "tied": parameter(6),
    }  # fmt: skip
    sums = (
        GradientSum((0, 1), ("a", "b", "c"), 0),
        GradientSum((0, 1, 2), ("tied",), 0),
        GradientSum((1, 2), ("elsewhere",), 0),
    )
    gradients = GradientBuckets(parameters, sums, SimpleNamespace(device=0))
    assert [(b.numel(), b.dtype) for b in gradients.buffers(0)] == [
        (10, torch.float32), (5, torch.float64),
    ]  # fmt: skip
    parameters["b"].sum().backward()
    assert gradients.buffers(0)[0].tolist() == [0] * 6 + [1] * 4
    gradients.buffers(1)[0].fill_(7)
    assert parameters["tied"].grad.tolist() == [7] * 6
    gradients.clear()
    assert all(p.grad.abs().sum() == 0 for p in parameters.values())


def test_a_device_that_trains_nothing_has_no_optimizer():
    assert make_optimizer(Optimizer.ADAM, [], None) is None


def test_auto_runs_on_what_the_plan_was_made_for(monkeypatch):
    seat = rendezvous.ProcessRank(1, 2, 1, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rendezvous.choose_device("auto", seat, 2, frozenset({"cpu"})) == "cpu"
    assert rendezvous.choose_device("auto", seat, 2, frozenset({"V100"})) == "cuda:1"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert rendezvous.choose_device("auto", seat, 2, frozenset({"V100"})) == "cpu"


def test_nproc_below_the_devices_starts_nothing(tmp_path):
    path = write_case(tmp_path, Case((2, 1)))
    with pytest.raises(LaunchError, match=r"uses 3 devices, --nproc is 2; run: .* --nproc 3"):
        start_launch(path, 2)


def test_recomputation_keeps_no_output(tmp_path):
    make_model(tmp_path / "net.onnx", "float32")
    model = load_model(tmp_path / "net.onnx")
    module = to_torch(model)
    ids, target = torch.ones(2, LENGTH).long(), torch.zeros(2, LENGTH).long()
    for recompute in (False, True):
        (chosen,) = losses(model.graph)
        stage = StageModule(module, model.graph, recompute, {"logits": criterion(chosen)})
        _, (loss, _) = stage.forward(0, {"ids": ids}, {"logits": target}, {"logits": 2})
        assert (stage._stash[0].forward_pass is None) == recompute
        stage.backward(0, {})
        assert stage._stash == {} and loss > 0


def test_a_killed_rank_is_named(monkeypatch):
    assert _signal_message(2, 9) == "rank 2 was ended by SIGKILL; it may have been out of memory"
