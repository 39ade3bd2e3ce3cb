"""Runs under torchrun: the cases of split_worker.py on one GPU, where nccl refuses several ranks.

    torchrun --nproc-per-node 4 tests/support/one_gpu.py FOLDER [CASE ...]

What nccl would do goes through gloo and pinned memory, in a stream of the group, as nccl has one,
and it ends late: whoever reads a tensor without waiting for its stream reads what was there before.
The same holds for collectives that begin before what they read is computed.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from planner.commands.errors import ranks_leave_at_once
from planner.launcher import device_part
from planner.launcher.mesh import lines
from planner.launcher.mesh.queue import StreamQueue
from planner.launcher.rendezvous import begin_generation
from tests.support.split_worker import BESIDE, CASES, run_case

DEVICE = "cuda:0"
LATE_CYCLES = 500_000
"""About a quarter of a millisecond, in which the host posts some 10 kernels."""


class Post(NamedTuple):
    """As dist.P2POp."""

    op: object
    tensor: torch.Tensor
    peer: int
    group: object


class LateQueue(StreamQueue):
    """A queue whose computations are late."""

    def start(self, function, *given):
        if torch.cuda.current_stream() != self._stream:
            torch.cuda._sleep(LATE_CYCLES)
        return super().start(function, *given)


class LateWork:
    """What gloo does with a tensor in the host's memory.

    Args:
        stream: of its group.
        work: of gloo; None once it has ended.
        into: filled from `host` in the stream; None for a tensor that is sent.
    """

    def __init__(self, stream, work, host, into):
        self._stream, self._work, self._host, self._into = stream, work, host, into
        self._ended = False

    def wait(self):
        if self._work is not None:
            self._work.wait()
        if self._into is not None:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(LATE_CYCLES)
                self._into.copy_(self._host, non_blocking=True)
            self._into.record_stream(self._stream)
        torch.cuda.current_stream().wait_stream(self._stream)
        self._ended = True

    def is_completed(self):
        return self._ended


class Staged:
    """Functions of torch.distributed for tensors on the GPU; others stay as they are."""

    def __init__(self):
        self._streams = {}
        self._new_group, self._isend, self._irecv = dist.new_group, dist.isend, dist.irecv
        self._all_reduce = dist.all_reduce

    def install(self):
        lines._GATHER = partial(self._collective, lines._GATHER)
        lines._SCATTER = self._reduce_scatter
        dist.all_to_all_single = partial(self._collective, dist.all_to_all_single)
        dist.all_reduce, dist.new_group = self.all_reduce, self.new_group
        dist.isend, dist.irecv = self.isend, self.irecv
        dist.P2POp, dist.batch_isend_irecv = Post, self.batch

    def new_group(self, *ranks, backend=None, **options):
        return self._new_group(*ranks, backend="gloo", **options)

    def all_reduce(self, tensor, *, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if tensor.is_cpu:
            return self._all_reduce(tensor, op=op, group=group, async_op=async_op)
        stream, host = self._down(tensor, group)
        work = LateWork(
            stream, self._all_reduce(host, op=op, group=group, async_op=True), host, tensor
        )
        return work if async_op else work.wait()

    def isend(self, tensor, peer, group=None, tag=0):
        if tensor.is_cpu:
            return self._isend(tensor, peer, group=group, tag=tag)
        stream, host = self._down(tensor, group)
        return LateWork(stream, self._isend(host, peer, group=group, tag=tag), host, None)

    def irecv(self, tensor, peer, group=None, tag=0):
        if tensor.is_cpu:
            return self._irecv(tensor, peer, group=group, tag=tag)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        work = self._irecv(host, peer, group=group, tag=tag)
        return LateWork(self._stream(group), work, host, tensor)

    def batch(self, posts):
        return [one.op(one.tensor, one.peer, group=one.group) for one in posts]

    def _stream(self, group):
        """The stream of a group, behind what this process has posted to the current one."""
        stream = self._streams.setdefault(id(group), torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        return stream

    def _down(self, tensor, group):
        stream, host = self._stream(group), torch.empty_like(tensor, device="cpu", pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        stream.synchronize()
        return stream, host

    def _collective(self, original, out, given, group=None):
        stream, host = self._down(given, group)
        come = torch.empty_like(out, device="cpu", pin_memory=True)
        original(come, host, group=group)
        LateWork(stream, None, come, out).wait()

    def _reduce_scatter(self, out, given, group=None):
        """Not by gloo's own, which not all versions have."""
        stream, host = self._down(given, group)
        self._all_reduce(host, group=group)
        rank = dist.get_rank(group)
        own = host.view(-1, out.numel())[rank].clone().pin_memory()
        LateWork(stream, None, own.view_as(out), out).wait()


def main(folder, names):
    torch.set_num_threads(1)
    Staged().install()
    device_part.queue_on = LateQueue
    rank, found, every = int(os.environ["RANK"]), {}, CASES | BESIDE
    for name in names or every:
        begin_generation(name)
        begin_s = time.monotonic()
        found[name] = run_case(every[name], folder, rank, DEVICE)[0]
        (folder / f"{rank}.json").write_text(json.dumps(found))
        if rank == 0:
            print(f"{name}: {time.monotonic() - begin_s:.1f} s", flush=True)


if __name__ == "__main__":
    with ranks_leave_at_once():
        main(Path(sys.argv[1]), sys.argv[2:])
