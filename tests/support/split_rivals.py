"""Megatron's block on two ranks beside the same by hand; tests/bench/overhead.py starts the ranks.

It stands apart from the benchmarks, because a script's folder comes first among the places that
modules are looked for, and one of theirs is called as one of Python's.
"""

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from planner.launcher.device_part import StagePlace, local_parameters
from planner.launcher.mesh.lines import Mesh, ProcessGroupAxis
from tests.bench.overhead import LIMIT_RATIO, modules, smallest_s
from tests.support import split_models
from tests.support.split_models import gpt, loaded, megatron
from tests.support.split_plans import stage_of


class _Copy(torch.autograd.Function):
    """f of Megatron-LM."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _Sum(torch.autograd.Function):
    """g of Megatron-LM."""

    @staticmethod
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Block(nn.Module):
    """The block of `gpt` on one of two ranks, by hand, with its parts of the same parameters."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def forward(self, tokens):
        v, heads = self.values, split_models.HEADS // 2
        h = functional.embedding(tokens, v["words"]) + v["places"]
        x = _Copy.apply(functional.layer_norm(h, h.shape[-1:], v["0g1"], v["0c1"]))
        batch, length, _ = x.shape

        def part(name):
            made = x @ v[f"0{name}"] + v[f"0{name}b"]
            return made.view(batch, length, heads, -1).transpose(1, 2)

        q, k, values = part("q"), part("k"), part("v")
        scores = q @ k.transpose(2, 3) * (k.shape[-1] ** -0.5) + v["mask"]
        mixed = torch.softmax(scores, -1) @ values
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        h = h + (_Sum.apply(mixed @ v["0o"]) + v["0ob"])
        x = _Copy.apply(functional.layer_norm(h, h.shape[-1:], v["0g2"], v["0c2"]))
        x = functional.gelu(x @ v["0u"] + v["0ub"])
        return (h + _Sum.apply(x @ v["0d"])) @ v["head"]


def on_two_ranks():
    """Prints how long the block takes beside the one by hand."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    split_models.BATCH, split_models.LENGTH, split_models.WIDTH = 8, 128, 256
    split_models.HEADS, split_models.WORDS = 8, 64
    with tempfile.TemporaryDirectory() as folder:
        model = loaded(gpt(Path(folder) / "block.onnx", tied=False))
        group = ProcessGroupAxis(dist.new_group([0, 1]), [0, 1], rank, nullcontext)
        mesh = Mesh((2,), rank, [group])
        _, split, inputs = modules(model, mesh)
    stage = stage_of(model, megatron(model, 2))
    place = StagePlace(stage, 0, mesh, stage, mesh)
    values = local_parameters(model, [one.name for one in model.graph.parameters], place, "cpu")
    block = Block(values)

    def run(made):
        made.sum().backward()

    ours, theirs = split(*inputs)[0], block(*inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    best = smallest_s([lambda: run(split(*inputs)[0]), lambda: run(block(*inputs))], 12, 4)
    if rank == 0:
        ratio = best[0] / best[1]
        print(
            f"block of width 256 on two ranks: {best[0] * 1e3:.2f} ms, by hand"
            f" {best[1] * 1e3:.2f} ms, {ratio:.3f} times; limit {LIMIT_RATIO}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    on_two_ranks()
