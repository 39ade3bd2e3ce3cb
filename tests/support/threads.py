"""A mesh whose devices are threads of one process: lines that meet at barriers."""

from threading import Barrier, BrokenBarrierError, Thread

import torch

from planner.launcher.mesh.lines import Mesh, line_of


class Table:
    """Where the devices of a line put what the others take.

    Attributes:
        count: how often each kind of collective ran, by its name.
    """

    def __init__(self, size):
        self.slots, self.barrier, self.count = [None] * size, Barrier(size, timeout=60), {}

    def all(self, kind, rank, value):
        if rank == 0:
            self.count[kind] = self.count.get(kind, 0) + 1
        self.slots[rank] = value
        self.barrier.wait()
        every = list(self.slots)
        self.barrier.wait()
        return every


class ThreadLine:
    """A line of threads, as `planner.launcher.mesh.lines.ConversionGroup`."""

    def __init__(self, table, rank):
        self.table, self.rank, self.size = table, rank, len(table.slots)

    def _every(self, kind, tensor):
        assert tensor.is_contiguous()
        return self.table.all(kind, self.rank, tensor.clone())

    def all_gather(self, part):
        return torch.stack(self._every("all-gather", part))

    def all_to_all(self, parts):
        return torch.stack([one[self.rank] for one in self._every("all-to-all", parts)])

    def all_reduce(self, own):
        return sum(self._every("all-reduce", own.detach().contiguous()))

    def all_reduce_max(self, own):
        return torch.stack(self._every("max", own.detach().contiguous())).amax(0)

    def exchange(self, before, after):
        every = self.table.all("exchange", self.rank, (before.clone(), after.clone()))
        front = every[self.rank - 1][1] if self.rank else torch.zeros_like(after)
        last = self.rank == self.size - 1
        return front, torch.zeros_like(before) if last else every[self.rank + 1][0]

    def reduce_scatter(self, parts):
        return sum(one[self.rank] for one in self._every("reduce-scatter", parts))


def meshes(sizes):
    """A mesh for each device, and the tables of all lines."""
    tables, found = {}, []
    count = 1
    for size in sizes:
        count *= size
    for index in range(count):
        lines = []
        for axis in range(len(sizes)):
            line = line_of(sizes, index, axis)
            table = tables.setdefault(line, Table(len(line)))
            lines.append(ThreadLine(table, line.index(index)))
        found.append(Mesh(sizes, index, lines))
    return found, tables


def on_all(sizes, work):
    """What work(mesh) gives on each device of a mesh, and how often each collective ran in the
    first line of each axis.
    """
    found, tables = meshes(sizes)
    results, failures = [None] * len(found), []

    def run(i):
        try:
            results[i] = work(found[i])
        except BrokenBarrierError:
            pass
        except BaseException as error:
            failures.append(error)
            for table in tables.values():
                table.barrier.abort()

    threads = [Thread(target=run, args=(i,)) for i in range(len(found))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if failures:
        raise failures[0]
    assert all(not table.barrier.broken for table in tables.values())
    counts = [tables[line_of(sizes, 0, axis)].count for axis in range(len(sizes))]
    return results, counts
