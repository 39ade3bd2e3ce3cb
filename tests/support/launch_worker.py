"""Runs under torchrun: the gradients of partitioned runs against the whole model in one process.

    torchrun --nproc-per-node 4 tests/support/launch_worker.py FOLDER

Each rank writes FOLDER/RANK.json: {case: {parameter: relative error}}. Cases and the model are
also what tests/launcher/test_launch.py uses. All cases run in one start.
"""

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.nn import functional

from planner.artefacts.losses import losses
from planner.artefacts.plan import (
    Certificate,
    DevicePrediction,
    MemoryParts,
    Plan,
    Prediction,
    StagePrediction,
)
from planner.artefacts.strategy import (
    BUCKET_BYTES,
    ScheduleName,
    Stage,
    Strategy,
    crossings,
    used_devices,
    violations,
)
from planner.commands.errors import ranks_leave_at_once
from planner.launcher.batch import StepBatches
from planner.launcher.device_part import as_it_crosses, make_part
from planner.launcher.executor import Executor, StepSize, TrainingStep
from planner.launcher.gradients import GradientBuckets
from planner.launcher.groups import Groups
from planner.launcher.job import TrainingJob
from planner.launcher.options import Loop
from planner.launcher.rendezvous import begin_generation
from planner.launcher.totals import loss_totals
from planner.launcher.transfers import boxes_of
from planner.model.load import ReadOptions, load
from planner.operators import parameters, synthetic, to_torch
from planner.operators.running import autocast
from planner.profilers.measured import measure
from planner.schedules.actions import AllReduce, Compute, waiting_for_sends
from planner.schedules.dry_run import dry_run
from planner.schedules.orders import default_warmups
from planner.schedules.program import program
from planner.solvers.placement.stages import pieces, segments
from planner.training.data.batching import BatchSizeHistory
from planner.training.data.feeds import make_feed, reader_of

BATCH, LENGTH, WIDTH, WORDS = 2, 3, 4, 7

# The operators by stage. h1 skips stage 1; ids2, mask, mean (of rank 0) and turned (not contiguous)
# cross; `words` is tied between stages 0 and 2, `mixed` is made for stages 1 and 2.
NODES = {
    0: [
        ("Gather", ["words", "ids"], "h0", {}),
        ("MatMul", ["h0", "w1"], "a1", {}),
        ("Tanh", ["a1"], "h1", {}),
        ("Add", ["ids", "one"], "ids2", {}),
        ("Greater", ["h1", "zero"], "mask", {}),
        ("ReduceMean", ["h1"], "mean", {"keepdims": 0}),
        ("Transpose", ["h1"], "turned", {"perm": [0, 2, 1]}),
    ],
    1: [
        ("Transpose", ["turned"], "back", {"perm": [0, 2, 1]}),
        ("MatMul", ["back", "w2"], "a2", {}),
        ("Add", ["a2", "b2"], "c2", {}),
        ("Tanh", ["c2"], "h2", {}),
        ("Mul", ["h2", "h1"], "mixed", {}),
    ],
    2: [
        ("Where", ["mask", "mixed", "h1"], "chosen", {}),
        ("Gather", ["more", "ids2"], "extra", {}),
        ("Add", ["chosen", "extra"], "sum", {}),
        ("MatMul", ["sum", "frozen"], "a3", {}),
        ("Mul", ["a3", "mean"], "h3", {}),
        ("Transpose", ["words"], "tied", {"perm": [1, 0]}),
        ("MatMul", ["h3", "tied"], "logits", {}),
    ],
}  # fmt: skip

# mask, mean, mixed and extra are branches beside the others.
BRANCHES = (0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Case:
    """Replicas of each stage, and how they run. Two stages: the last two are one.

    With a placement, operator v of the model runs on the device that stands at v in it, repeated as
    long as needed; the stages are the segments or the pieces of that.
    """

    widths: tuple[int, ...]
    num_microbatches: int = 4
    schedule: ScheduleName = ScheduleName.ONE_F_ONE_B
    recompute: bool = False
    dtype: str = "float64"
    shorter: str | None = None  # what autocast computes in
    devices: tuple[int, ...] = ()  # of stages with one replica, where some share one
    placement: tuple[int, ...] = ()
    fine: bool = False  # whether the placement is cut into pieces
    bucket_bytes: int = BUCKET_BYTES

    @property
    def num_devices(self):
        own = sum(self.widths) - len(self.devices)  # of stages that share none
        return own + len({*self.devices, *self.placement})


NUMBERS = (None, 2, 1, None)
"""Microbatches of each iteration; None is all of them."""

CASES = {
    "pipeline": Case((1, 1)),
    "pipeline in float32": Case((1, 1), dtype="float32"),
    "gpipe": Case((1, 1, 1), 4, ScheduleName.GPIPE),
    "skipping tensor": Case((1, 1, 1), 6),
    "replicated in front": Case((2, 1)),
    "replicated behind": Case((1, 2)),
    "M not divisible": Case((2, 1), 5),
    "M not divisible, gpipe": Case((1, 3), 5, ScheduleName.GPIPE),
    "1 then 3": Case((1, 3), 7),
    "3 then 1": Case((3, 1), 7),
    "2 then 2": Case((2, 2), 5),
    "2 in the middle": Case((1, 2, 1), 5),
    "2 in front, 3 stages": Case((2, 1, 1), 5),
    "2 behind, 3 stages, float32": Case((1, 1, 2), 5, dtype="float32"),
    "recompute": Case((1, 1, 1), 5, recompute=True),
    "recompute, replicated, gpipe": Case((1, 2), 5, ScheduleName.GPIPE, True),
    "autocast": Case((1, 2, 1), 5, dtype="float32", shorter="bfloat16"),
    "autocast, recompute": Case((1, 1), dtype="float32", recompute=True, shorter="bfloat16"),
    "three stages on two devices": Case((1, 1, 1), devices=(0, 1, 0)),
    "three stages on two devices, gpipe": Case((1, 1, 1), 3, ScheduleName.GPIPE, devices=(1, 0, 1)),
    "two stages on one device": Case((1, 1), 3, devices=(0, 0)),
    "two stages on one device, before another": Case((1, 1, 1), 5, devices=(0, 0, 1)),
    "a replicated stage before two on one device": Case((2, 1, 1), 5, devices=(0, 0)),
    "branches on different devices": Case((), placement=BRANCHES),
    "branches in pieces": Case((), placement=BRANCHES, fine=True),
    "branches in pieces, gpipe": Case((), 3, ScheduleName.GPIPE, placement=BRANCHES, fine=True),
    "operators anywhere": Case((), 5, placement=(0, 1, 0, 2, 1)),
    "operators anywhere, in pieces": Case((), 5, placement=(2, 0, 1, 0, 2, 3, 1), fine=True),
    "operators anywhere, recompute": Case((), 5, recompute=True, placement=(0, 1, 1, 2)),
    "operators anywhere, autocast": Case(
        (), dtype="float32", shorter="bfloat16", placement=(0, 1, 1, 0, 1), fine=True
    ),
    "data parallel": Case((4,), 6),
    "data parallel in float32": Case((3,), 7, dtype="float32"),
    "data parallel in buckets": Case((3,), 7, bucket_bytes=1),
    "replicated in buckets": Case((1, 2), 5, bucket_bytes=1),
    "replicated in buckets, gpipe, recompute": Case(
        (2, 1), 5, ScheduleName.GPIPE, True, bucket_bytes=128
    ),
}


def make_model(path, dtype):
    """The model of `NODES` as an ONNX file."""
    random = np.random.default_rng(0)
    number = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}[dtype]
    weights = {
        "words": (WORDS, WIDTH), "w1": (WIDTH, WIDTH), "w2": (WIDTH, WIDTH), "b2": (WIDTH,),
        "more": (WORDS + 1, WIDTH), "frozen": (WIDTH, WIDTH),
    }  # fmt: skip
    values = {n: random.standard_normal(s).astype(dtype) for n, s in weights.items()}
    values |= {"one": np.int64(1), "zero": np.array(0, dtype)}
    graph = helper.make_graph(
        [
            helper.make_node(type_, inputs, [output], f"op_{output}", **attributes)
            for stage in NODES.values()
            for type_, inputs, output, attributes in stage
        ],
        "net",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N", LENGTH])],
        [helper.make_tensor_value_info("logits", number, ["N", LENGTH, WORDS])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def load_model(path):
    return load(path, ReadOptions(dimensions={"N": BATCH}, freeze=["frozen"]))


def stage_parts(case, model):
    """Devices and operators of each stage of `NODES`."""
    num_stages, kept = len(case.widths), {op.name for op in model.graph.operators}
    first, parts = sum(case.widths), []
    shared = [(d,) for d in case.devices]
    for s, width in enumerate(case.widths):
        members = [t for t in NODES if min(t, num_stages - 1) == s]
        names = [f"op_{node[2]}" for t in members for node in NODES[t]]
        devices = tuple(range(first - 1, first - 1 - width, -1))
        # Shared devices are those of the last stages.
        if s >= num_stages - len(shared):
            devices = shared[s - num_stages]
        parts.append((devices, tuple(name for name in names if name in kept)))
        first -= width
    return parts


def placed_parts(case, model):
    """The same of a placement of operators."""
    names = [operator.name for operator in model.graph.operators]
    device_of = [case.placement[v % len(case.placement)] for v in range(len(names))]
    if case.fine:
        found = pieces(model.graph, device_of, range(len(names)))
    else:
        found = segments(model.graph, device_of)
    return [((device,), tuple(names[v] for v in inside)) for device, inside in found]


def make_plan(case, model, parts=None, **changes):
    """A plan with devices in falling order, so that ranks and devices differ.

    Args:
        parts: devices and operators of each stage; None takes those of the case.
    """
    if parts is None:
        parts = placed_parts(case, model) if case.placement else stage_parts(case, model)
    where = [devices for devices, _ in parts]
    warmups = default_warmups(
        [len(devices) for devices in where], case.num_microbatches, schedule=case.schedule,
        devices=where,
    )  # fmt: skip
    stages = tuple(
        Stage.whole(operators, devices, warmup, case.recompute)
        for (devices, operators), warmup in zip(parts, warmups, strict=True)
    )
    num_stages = len(stages)
    strategy = Strategy(stages, case.schedule, case.num_microbatches)
    devices = used_devices(strategy)
    plan = Plan(
        strategy=strategy,
        prediction=Prediction(
            iteration_s=1.0, bottleneck_s=1.0, latency_s=1.0, throughput=1.0, bubble_fraction=0.0,
            closed_form_s=1.0,
            stages=(StagePrediction(0.1, 0.2),) * num_stages,
            devices=tuple(
                DevicePrediction(d, f"cpu{d}", "cpu", 0.5, 0.1, 0.4, MemoryParts()) for d in devices
            ),
        ),
        certificate=Certificate("iteration", 1.0, 0.0, None, ""),
        solver="manual", status="feasible", reproducible=True,
        ranks=(devices[-1], *devices[:-1]),
        crossings=crossings(strategy, graph_in(model, case.shorter)),
        model_path=model.path.name, model_hash=model.hash,
        train=tuple(p.name for p in model.graph.parameters if p.trainable),
        profile_hash="", topology="test", topology_hash="", dimensions=model.dimensions,
        microbatch_size=BATCH, dtype=case.shorter or case.dtype, optimizer="sgd", threads=1,
        seed=3, notes=(),
        versions={},
    )  # fmt: skip
    return replace(plan, **changes)


def graph_in(model, dtype):
    """The model's graph with the types of elements that autocast gives its tensors."""
    if dtype is None:
        return model.graph
    options = {"dtype": dtype, "repetitions": 1, "budget_s": 0.0, "cached": False}
    return measure(model, model_path=None, **options).graph


class Capture:
    """Stands for an optimizer's step: keeps the gradients of one iteration."""

    def __init__(self, trained, buckets):
        self.trained, self.buckets = trained, buckets
        self.found = []

    def step(self, index, loss, *counts):
        self.found.append({name: p.grad.clone() for name, p in self.trained.items()})
        self.buckets.clear()
        return loss


def whole_gradients(model, num_microbatches, seed, shorter):
    """One process over the same microbatches: the loss is their sum, divided by M."""
    values = parameters(model, [p.name for p in model.graph.parameters])
    module = to_torch(model, values=values)
    loss = 0.0
    for m in range(num_microbatches):
        ids = synthetic.inputs(model, seed=seed, microbatch=m)["ids"]
        (chosen,) = losses(model.graph)
        target = synthetic.target(chosen, seed=seed, microbatch=m)
        with autocast("cpu", shorter):
            (logits,) = module(ids)
        logits = logits.float() if shorter else logits
        loss = loss + functional.cross_entropy(logits.reshape(-1, WORDS), target.reshape(-1))
    (loss / num_microbatches).backward()
    return {name: p.grad for name, p in values.items() if p.requires_grad}, loss.item()


def run_case(case, folder, rank):
    """Relative errors of gradients on this rank, in iterations of all microbatches and of fewer;
    {} if it has no part.
    """
    model = load_model(folder / f"{case.dtype}.onnx")
    plan = make_plan(case, model)
    if rank >= len(plan.ranks):
        return {}
    assert violations(plan.strategy, model.graph, max(plan.ranks) + 1) == ()
    with mock.patch("planner.artefacts.strategy.BUCKET_BYTES", case.bucket_bytes):
        lists = program(plan.strategy, model.graph, plan.prediction.stages)
    assert dry_run(lists) is None
    job = TrainingJob(plan, model, lists, losses(model.graph), "cpu")
    groups = Groups(plan.ranks, rank, lists, "cpu")
    part = make_part(job, groups)
    gradients = GradientBuckets(part.trained, lists.sums, groups)
    gradients.follow(lists.lists[groups.device])
    capture = Capture(part.trained, gradients)
    boxes = boxes_of(plan.strategy, as_it_crosses(model.graph, plan), groups.device)
    executor = Executor(part.stages, boxes, gradients, groups, waiting_for_sends(lists.code))
    computed = (one for one in lists.lists[groups.device] if isinstance(one, Compute))
    mine, loop = sorted({one.microbatch for one in computed}), Loop()
    feed = make_feed(job, part, loop, mine)
    data = next(feed.steps(0, BatchSizeHistory.begun(case.num_microbatches, 1)))
    batches, reads = dict(zip(mine, data.batches, strict=True)), reader_of(job, part).reads
    totals = loss_totals(job, part)
    size = StepSize(case.num_microbatches, sum(groups.gather(reads)))
    errors = {}
    for i, number in enumerate(NUMBERS):
        count = case.num_microbatches if number is None else number
        here = {m: one for m, one in batches.items() if m < count or not reads}
        step = StepBatches(count if reads else None, here)
        work = TrainingStep(i, step, capture, totals, size, groups)
        record = executor.run(lists.lists[groups.device], work, step=i)
        assert work.is_whole == (count == case.num_microbatches)
        check_overlap(case, record.events)
        expected, loss = whole_gradients(model, count, plan.seed, case.shorter)
        errors |= {
            f"{name}, iteration {i}": relative(capture.found[i][name], expected[name])
            for name in part.trained
        }
        total = sum(groups.gather(work.loss))
        errors[f"loss, iteration {i}"] = abs(total * count - loss) / abs(loss)
    groups.close()
    return errors


def check_overlap(case, events):
    """The first of several buckets is summed while the last backward runs, if there is one."""
    starts = {action: start for action, start, _ in events if isinstance(action, AllReduce)}
    backs = [end for a, _, end in events if isinstance(a, Compute) and a.direction == "B"]
    if case.bucket_bytes == 1 and len(starts) > 1 and backs:
        assert min(starts.values()) < max(backs)


def relative(found, expected):
    assert expected.norm() > 1e-3, "a gradient of zero proves nothing"
    return ((found - expected).norm() / expected.norm()).item()


def main(folder):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found = {}
    for name, case in CASES.items():
        begin_generation(name)  # or a case would meet the addresses of the last one
        found[name] = run_case(case, folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]))
        sys.exit(0)
