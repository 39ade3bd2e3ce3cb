"""The interpreter of split operators beside plain modules, on a quiet machine (2 minutes).

    python -m tests.bench.overhead

1. A GPT block of tiny tensors, on lines on which nothing is sent: the module of Megatron's split
   beside the plain module, per operator and direction. Limit: 15 us.
2. Megatron's block on two gloo ranks beside the same block written by hand in PyTorch, with its f
   and g as functions of autograd (tests/support/split_rivals.py). Limit: 1.05 times its time.

Times are the smallest of some means, in turns, since the machine may do other things.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch

from planner.launcher.device_part import StagePlace, local_parameters
from planner.launcher.mesh.lines import Mesh
from planner.launcher.mesh.module import split_module
from planner.operators import parameters, synthetic, to_torch
from tests.support import split_models
from tests.support.ranks import ROOT, under_torchrun
from tests.support.split_models import gpt, loaded, megatron
from tests.support.split_plans import stage_of

LIMIT_US, LIMIT_RATIO = 15.0, 1.05


class Silent:
    """A line of two on which nothing is sent."""

    rank, size = 0, 2

    def all_reduce(self, own):
        return own.clone()


def smallest_s(works, rounds, calls):
    """Per work, the smallest mean of some calls, the works in turns."""
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            begun = time.perf_counter()
            for _ in range(calls):
                work()
            best[i] = min(best[i], (time.perf_counter() - begun) / calls)
    return best


def modules(model, mesh):
    """The plain module, and that of Megatron's split; each with inputs."""
    held = [one.name for one in model.graph.parameters]
    stage = stage_of(model, megatron(model, 2))
    values = local_parameters(model, held, StagePlace(stage, 0, mesh, stage, mesh), "cpu")
    split = split_module(model, stage, mesh, values, "cpu")
    plain = to_torch(model, values=parameters(model, held))
    inputs = synthetic.inputs(model, seed=0, microbatch=0)
    return plain, split, [inputs[name] for name in plain.input_names]


def overhead(folder):
    """Prints the time per operator above the plain module."""
    torch.set_num_threads(1)
    split_models.BATCH = split_models.LENGTH = split_models.HEADS = 2
    split_models.WIDTH = split_models.WORDS = 4
    model = loaded(gpt(folder / "tiny.onnx", tied=False))
    mesh = Mesh((2,), 0, [Silent()])
    plain, split, inputs = modules(model, mesh)
    count = len(model.graph.operators)
    ahead = smallest_s([lambda m=m: m(*inputs) for m in (plain, split)], 40, 60)

    def both(module):
        (output,) = module(*inputs)
        output.sum().backward()

    whole = smallest_s([lambda m=m: both(m) for m in (plain, split)], 40, 60)
    forward_us = (ahead[1] - ahead[0]) / count * 1e6
    backward_us = (whole[1] - whole[0]) / count * 1e6 - forward_us
    print(
        f"{count} operators, us per operator above the plain module:"
        f" forward {forward_us:+.2f}, backward {backward_us:+.2f}; limit {LIMIT_US}"
    )
    return max(forward_us, backward_us) <= LIMIT_US


def main():
    with tempfile.TemporaryDirectory() as folder:
        sound = overhead(Path(folder))
    print(under_torchrun(ROOT / "tests/support/split_rivals.py", 2).strip())
    sys.exit(0 if sound else 1)


if __name__ == "__main__":
    main()
