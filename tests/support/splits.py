"""Rules checked on real parts in one process: forward and backward beside the whole operator.

Each device is a thread, and what devices tell each other goes over a board that all of them see.
Gradients follow the calculus of `planner.resharding.gradients`, and nothing here asks how a rule
was found.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from planner.artefacts.sharding import AxisRule, blocks_of, dim_of
from planner.operators.parts import MARKED, Cut, divided
from planner.resharding.gradients import gradient_part


class Board:
    """Where the devices of a line meet: all put something, then all see everything."""

    def __init__(self, size):
        self.barrier, self.slots, self.size = threading.Barrier(size), [None] * size, size

    def meet(self, rank, value):
        self.slots[rank] = value
        self.barrier.wait(60)
        every = list(self.slots)
        self.barrier.wait(60)
        return every


class SimulatedLine:
    """A `planner.operators.parts.MeshAxisGroup` of threads."""

    def __init__(self, board, rank):
        self.board, self.rank, self.size = board, rank, board.size

    def all_reduce(self, own):
        return torch.stack(self.board.meet(self.rank, own)).sum(0)

    def all_reduce_max(self, own):
        return torch.stack(self.board.meet(self.rank, own)).amax(0)

    def exchange(self, before, after):
        every = self.board.meet(self.rank, (before, after))
        front = every[self.rank - 1][1] if self.rank else torch.zeros_like(after)
        last = self.rank == self.size - 1
        return front, torch.zeros_like(before) if last else every[self.rank + 1][0]


def on_threads(size, work):
    """What `work(line)` gives on each device of a line."""
    board = Board(size)
    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(work, SimulatedLine(board, rank)) for rank in range(size)]
        return [one.result() for one in done]


# ---- tensors in parts


def shares(tensor, part, n, generator):
    """What each of n devices has of a tensor."""
    if part == "R":
        return [tensor] * n
    if part == "P":
        others = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
                  for _ in range(n - 1)]  # fmt: skip
        return [tensor - sum(others), *others]
    dim, blocks = dim_of(part), blocks_of(part)
    every = [torch.chunk(one, n, dim) for one in torch.chunk(tensor, blocks, dim)]
    return [torch.cat([one[k] for one in every], dim).contiguous() for k in range(n)]


def together(parts, part):
    """The tensor that the parts are; copies have to be equal."""
    if part == "R":
        for one in parts[1:]:
            torch.testing.assert_close(one, parts[0], rtol=1e-9, atol=1e-9, equal_nan=True)
        return parts[0]
    if part == "P":
        return torch.stack(list(parts)).sum(0)
    dim, blocks = dim_of(part), blocks_of(part)
    every = [torch.chunk(one, blocks, dim) for one in parts]
    return torch.cat([one[b] for b in range(blocks) for one in every], dim)


def divides(part, shape, n):
    """Whether n devices can have equal parts of a tensor."""
    dim = dim_of(part)
    return dim is None or (dim < len(shape) and shape[dim] % (n * blocks_of(part)) == 0
                           and shape[dim] > 0)  # fmt: skip


# ---- an operator


def run(call, tensors, made):
    args, kwargs = call.fill(dict(zip(call.reads, tensors, strict=True)).__getitem__)
    result = call.function(*args, **kwargs)
    every = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return [every[position] for position in made]


def check(kind, call, made, tensors, line, n, still=(), seed=0):
    """Raises unless an operator that runs by a rule on n devices makes the outputs of the whole one
    and, from the same gradients of its outputs, the gradients of its inputs.

    Args:
        kind: its ONNX type.
        made: positions of its outputs among the results of the call.
        tensors: what it reads, in the call's order; floats in double precision.
        line: the rule, its inputs in the same order.
        still: positions of tensors without gradients.

    Returns:
        The number of gradients compared.
    """
    generator = torch.Generator().manual_seed(seed)
    rule = AxisRule.parse(line)
    given, means = rule.inputs, [part == "A" for part in rule.outputs]
    results = ["P" if mean else part for part, mean in zip(rule.outputs, means, strict=True)]
    gradients_in = [gradient_part(rule, part) for part in given]
    gradients_out = [gradient_part(rule, part) for part in results]
    moving = [i for i, one in enumerate(tensors) if one.dtype == torch.float64 and i not in still]

    def leaves(some):
        return [one.detach().clone().requires_grad_(i in moving) for i, one in enumerate(some)]

    def slopes(inputs, outputs, weights):
        flowing = [(o, w) for o, w in zip(outputs, weights, strict=True) if o.requires_grad]
        return torch.autograd.grad(
            [o for o, _ in flowing], [inputs[i] for i in moving], [w for _, w in flowing],
            allow_unused=True, materialize_grads=True,
        ) if flowing and moving else ()  # fmt: skip

    inputs = leaves(tensors)
    outputs = run(call, inputs, made)
    weights = [
        torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype)
        if o.is_floating_point() else None
        for o in outputs
    ]  # fmt: skip
    expected = slopes(inputs, outputs, weights)
    local = [shares(t, p, n, generator) for t, p in zip(tensors, given, strict=True)]
    seeds = [
        [None] * n if w is None else shares(w, p, n, generator)
        for w, p in zip(weights, gradients_out, strict=True)
    ]
    marks = [one for one in rule.local if one.startswith("@")]
    names = [one for one in rule.local if not one.startswith("@")]
    own_call = replace(call, kwargs=divided(call.kwargs, names, n))

    def work(device):
        one = own_call
        if marks:
            dim = next(dim_of(part) for part in given if part.startswith("S"))
            function = MARKED[marks[0], kind]
            one = replace(one, function=function,
                          kwargs={**one.kwargs, "cuts": (Cut(device, dim),)})  # fmt: skip
        mine = leaves([share[device.rank] for share in local])
        mades = run(one, mine, made)
        mades = [o / n if mean else o for o, mean in zip(mades, means, strict=True)]
        return mades, slopes(mine, mades, [seed[device.rank] for seed in seeds])

    done = on_threads(n, work) if marks else [work(Rank(k, n)) for k in range(n)]
    for o, (whole, part) in enumerate(zip(outputs, results, strict=True)):
        _close(together([d[0][o].detach() for d in done], part), whole.detach())
    for k, i in enumerate(moving if expected else ()):
        _close(together([d[1][k] for d in done], gradients_in[i]), expected[k])
    return len(moving) if expected else 0


class Rank:
    """A device that needs no other one."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def _close(found, due):
    fine = 1e-9 if due.dtype == torch.float64 else 1e-5
    scale = max(1.0, float(due.abs().max())) if due.numel() and due.is_floating_point() else 1.0
    torch.testing.assert_close(found, due, rtol=fine, atol=fine * scale, equal_nan=True)
