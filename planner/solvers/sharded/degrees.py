"""The grid of degrees of Megatron-LM's plans, all (t, d, p) with t d p devices: t over which
operators are split, d copies, p stages.
"""

from collections.abc import Iterator, Sequence

from planner.artefacts.problem import Problem
from planner.solvers.sharded.layout import divisors, smallest_host
from planner.solvers.sharded.options import Megatron
from planner.support.errors import OptionError

MAX_STAGES = 64


def grid(problem: Problem, own: Megatron) -> tuple[tuple[int, int, int], ...]:
    """All points with the degrees that are given. A tensor degree divides the devices of the
    smallest host; one that is given may be of whole hosts. Where all three degrees are given, they
    may leave devices over.

    Raises:
        OptionError: if there is none.
    """
    count, host = len(problem.topology.devices), smallest_host(problem)
    most = min(MAX_STAGES, len(problem.profile.operators))
    tensor, data, pipeline = own.tensor_degree, own.data_degree, own.pipeline_degree
    of_hosts = _of_hosts(problem)
    if tensor and host % tensor and tensor not in of_hosts:
        or_hosts = f"; or of whole hosts, {_listed(of_hosts)}" if of_hosts else ""
        raise OptionError(
            f"--tensor-degree {tensor}: expected a divisor of the {_devices(host)} of a host,"
            f" {_listed(divisors(host))}{or_hosts}"
        )
    if pipeline and pipeline > most:
        raise OptionError(f"--pipeline-degree {pipeline}: expected at most {most} stages")
    tensors = (*divisors(host), *(n for n in of_hosts if n == tensor))
    points = tuple(_points(count, tensors, most, (tensor, data, pipeline)))
    if not points:
        named = {"tensor": tensor, "data": data, "pipeline": pipeline}
        given = " ".join(f"--{name}-degree {n}" for name, n in named.items() if n)
        raise OptionError(
            f"{given}: expected degrees that make up the {_devices(count)}, with a tensor degree"
            f" that divides the {_devices(host)} of a host and at most {most} stages"
        )
    return points


def _points(
    count: int,
    tensors: Sequence[int],
    most: int,
    given: tuple[int | None, int | None, int | None],
) -> Iterator[tuple[int, int, int]]:
    t, d, p = given
    if t and d and p:
        if t * d * p <= count:
            yield t, d, p
        return
    for t in tensors:
        for p in divisors(count):
            point = t, count // (t * p), p
            fits = all(one in (None, degree) for one, degree in zip(given, point, strict=True))
            if count % (t * p) == 0 and p <= most and fits:
                yield point


def _of_hosts(problem: Problem) -> list[int]:
    """The tensor degrees of several whole hosts, where all hosts have as many devices."""
    count, host = len(problem.topology.devices), smallest_host(problem)
    even = count == host * len({device.host for device in problem.topology.devices})
    return [n for n in divisors(count) if n > host and n % host == 0] if even else []


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
