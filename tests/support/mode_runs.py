"""Models whose training differs from their evaluation, plans for them, and a PyTorch loop.

Under torchrun, which runs every `*.strategy.json` of a folder:

    torchrun --nproc-per-node 2 tests/support/mode_runs.py FOLDER STEPS

Rank r writes FOLDER/NAME.r.pt: losses (rank 0), parameters and running statistics by name.
Settings besides the steps are in FOLDER/NAME.settings.json, where it is there; 0 steps leave the
number to them.
"""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.distributed as dist
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import planner
from planner.artefacts.files import write_plan
from planner.artefacts.losses import losses as model_losses
from planner.artefacts.options import Optimizer as OptimizerName
from planner.artefacts.problem import Problem
from planner.artefacts.sharding import Sharding, rule_of
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.commands.errors import ranks_leave_at_once
from planner.launcher.updates import make_optimizer
from planner.model.load import ReadOptions, load
from planner.operators import randomness, synthetic
from planner.profilers.measured import measure
from planner.schedules.orders import default_warmups
from planner.training import trainer
from tests.support.accuracy_plans import planned
from tests.support.builders import asked, cluster, unit_type
from tests.support.ranks import forked

ROOT = Path(__file__).parents[2]

BATCH, SEED, MICROBATCHES = 4, 3, 4
RATIO = 0.3


class Net(nn.Module):
    """Two convolutions with batch normalization, noise as a VAE has it, dropout, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8, momentum=0.3)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        """Logits; the numbers are those that a launch draws for the nodes of `net`."""
        x = self.bn1(self.conv1(x)).relu()
        x = x + 0.5 * randomness.standard_normal("noise", x.shape, x.dtype)
        x = self.bn2(self.conv2(x)).relu().mean((2, 3))
        if self.training:
            x = x * randomness.dropout_mask("drop", x.shape, RATIO) / (1 - RATIO)
        return self.fc(x)


def net(path, dtype="float64", training=True, noise=True):
    """`Net` as an ONNX file, as exporters write it; gives the module."""
    torch.manual_seed(0)
    module = Net().to(getattr(torch, dtype))
    for norm in (module.bn1, module.bn2):  # or no two of them would differ
        for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
            nn.init.uniform_(tensor, 0.5, 1.5)
    kind = {"float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE}[dtype]
    held = {n: t.detach().numpy() for n, t in module.state_dict().items() if t.dim()}
    held |= {"ratio": np.float32(RATIO), "mode": np.array(training), "half": np.array(0.5, dtype)}

    def norm(name, x, momentum):
        inputs = [f"{name}.{one}" for one in ("weight", "bias", "running_mean", "running_var")]
        outputs = [name, f"{name}.mean", f"{name}.var"] if training else [name]
        options = {"momentum": momentum, "training_mode": int(training)}
        return helper.make_node(
            "BatchNormalization", [x, *inputs], outputs, f"{name}_op", **options
        )

    def node(kind, inputs, output, name=None, **attributes):
        return helper.make_node(
            kind, inputs.split(), [output], name or f"{output}_op", **attributes
        )

    nodes = [
        node("Conv", "x conv1.weight", "c1", pads=[1] * 4),
        norm("bn1", "c1", 0.9),
        node("Relu", "bn1", "r1"),
        node("RandomNormalLike", "r1", "normal", "noise"),
        node("Mul", "normal half", "scaled"),
        node("Add", "r1 scaled", "noisy") if noise else node("Identity", "r1", "noisy"),
        node("Conv", "noisy conv2.weight", "c2", pads=[1] * 4),
        norm("bn2", "c2", 0.7),
        node("Relu", "bn2", "r2"),
        node("GlobalAveragePool", "r2", "pooled"),
        node("Flatten", "pooled", "flat"),
        node("Dropout", "flat ratio mode", "dropped", "drop"),
        node("Gemm", "dropped fc.weight fc.bias", "logits", transB=1),
    ]
    graph = helper.make_graph(
        nodes, "net",
        [helper.make_tensor_value_info("x", kind, ["N", 3, 6, 6])],
        [helper.make_tensor_value_info("logits", kind, ["N", 5])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()],
    )  # fmt: skip
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return module


def profile_of(path, **options):
    """A quick profile of a model with a symbolic batch."""
    model = load(path, ReadOptions(batch=BATCH, **options))
    quick = {"repetitions": 1, "budget_s": 0.0, "cached": False}
    return replace(measure(model, model_path=path.name, **quick), warnings=())


def write_strategy(path, profile, widths, *, recompute=False, num_microbatches=MICROBATCHES,
                   devices=None, optimizer="sgd", schedule=ScheduleName.ONE_F_ONE_B,
                   vertical_sync=False, zero=0):  # fmt: skip
    """A strategy with a stage per width, cut into equally many operators; gives its path."""
    names = [operator.name for operator in profile.graph.operators]
    bounds = [len(names) * s // len(widths) for s in range(len(widths) + 1)]
    warmups = default_warmups(widths, num_microbatches, 0, schedule)
    stages, first = [], 0
    for s, width in enumerate(widths):
        own = tuple(range(first, first + width)) if devices is None else (devices[s],)
        inside = tuple(names[bounds[s] : bounds[s + 1]])
        whole = Stage.whole(inside, own, warmups[s], recompute)
        stages.append(replace(whole, over=width if zero else 1, zero=zero))
        first += width
    options = asked(num_microbatches, optimizer=OptimizerName(optimizer), seed=SEED)
    count = first if devices is None else max(devices) + 1
    problem = Problem(profile, cluster([unit_type("cpu")] * count, bandwidth=1e9), **options)
    strategy = Strategy(tuple(stages), schedule, num_microbatches, vertical_sync)
    write_plan(planned(problem, strategy), path)
    return path


CUT = {
    "Conv": "S0,R->S0", "BatchNormalization": "S0,R,R,R,R->S0 @moments", "Relu": "S0->S0",
    "GlobalAveragePool": "S0->S0", "Flatten": "S0->S0", "Gemm": "S0,R,R->S0",
}  # fmt: skip
"""Rules along samples by type; what draws numbers is whole."""


def along_samples(profile, size, prefetch=None):
    """One stage on a mesh that cuts the samples of each microbatch."""
    graph, devices = profile.graph, tuple(range(size))
    rules = {one.name: rule_of([CUT[one.type]]) for one in graph.operators if one.type in CUT}
    sharding = Sharding((size,), rules, {}, {"x": ("S0",)}, {"logits": ("S0",)})
    names = tuple(one.name for one in graph.operators)
    return Stage(names, (devices,), 1, False, sharding, prefetch=prefetch)


def write_along_samples(path, profile, size, prefetch=None):
    """The strategy of that stage."""
    problem = Problem(profile, cluster([unit_type("cpu")] * size, bandwidth=1e9),
                      **asked(MICROBATCHES, optimizer=OptimizerName.SGD, seed=SEED))  # fmt: skip
    stages = (along_samples(profile, size, prefetch),)
    strategy = Strategy(stages, ScheduleName.ONE_F_ONE_B, MICROBATCHES)
    write_plan(planned(problem, strategy), path)


def launched(path, steps, learning_rate=0.1, **how):
    """The report, and parameters and running statistics of this process after a launch.

    Args:
        how: other settings.
    """
    parts = []
    make_part = trainer.make_part

    def remembered(*given):
        parts.append(make_part(*given))
        return parts[-1]

    trainer.make_part = remembered
    try:
        report = planner.launch(path, steps=steps, learning_rate=learning_rate, **how)
    finally:
        trainer.make_part = make_part
    if not parts:  # of a rank that idles
        return report, {}, []
    (part,) = parts
    held = {name: value.detach().clone() for name, value in part.values.items()}
    running = [name for stage in part.stages.values() for name in stage.states]
    return report, held, running


def loop(module, path, steps, learning_rate=0.1, num_microbatches=MICROBATCHES, optimizer="sgd",
         own=lambda m: True, weight_decay=None, begin=lambda step_of: None,
         before=lambda: None, after=lambda: None):  # fmt: skip
    """Plain PyTorch: microbatches one after the other, gradients accumulated; gives the losses.

    Args:
        own: microbatches that the module sees; its losses and gradients are of these alone.
        begin: is called with the optimizer first.
        before, after: are called before and after each step of the optimizer.
    """
    model = load(path, ReadOptions(batch=BATCH))
    (chosen,) = model_losses(model.graph)
    step_of = make_optimizer(
        OptimizerName(optimizer), list(module.parameters()), learning_rate, weight_decay
    )
    begin(step_of)
    losses = []
    for step in range(steps):
        losses.append(0.0)
        for m in filter(own, range(num_microbatches)):
            x = synthetic.inputs(model, seed=SEED, microbatch=m)["x"]
            target = synthetic.target(chosen, seed=SEED, microbatch=m)
            with randomness.random_operators(SEED, step, m):
                loss = nn.functional.cross_entropy(module(x), target) / num_microbatches
            loss.backward()
            losses[-1] += loss.item()
        before()
        step_of.step()
        after()
        step_of.zero_grad()
    return losses


def run_all(folder, num_ranks, steps=0):
    """Runs every strategy of a folder in one start of torchrun, which writes NAME.RANK.pt there:
    losses, parameters, and names of running statistics.

    Args:
        steps: of each; 0 leaves them to the settings of each strategy.
    """
    forked(__file__, num_ranks, folder, steps)


def main(folder, steps):
    """Runs every strategy of a folder in the ranks that there are."""
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    start = dist.init_process_group
    for path in sorted(folder.glob("*.strategy.json")):
        dist.init_process_group = partial(start, store=dist.PrefixStore(path.name, store))
        settings = path.with_name(path.name.replace("strategy", "settings"))
        how = json.loads(settings.read_text()) if settings.exists() else {}
        report, held, running = launched(path, steps or None, **how)
        losses = None if report is None else report.loss
        torch.save((losses, held, running), folder / f"{path.name.partition('.')[0]}.{rank}.pt")


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]), int(sys.argv[2]))
        sys.exit(0)
