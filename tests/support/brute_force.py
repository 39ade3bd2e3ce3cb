"""The antichain solver's answer by trying everything: slow, plain, and written without its kernels.

Every chain of downsets, every width and warm-up depth of every stage, in every order of devices,
priced by the closed forms of time and memory from what `costs` says of sets of operators.
"""

import math
from functools import cache

from planner.artefacts.graph import consumers, producers, tensors_by_name
from planner.artefacts.options import Objective, Recompute
from planner.artefacts.strategy import ScheduleName
from planner.artefacts.topology import device_type
from planner.costs.actions import link_share, sum_factor
from planner.costs.closed_form import exposed_sum_s, extend, sum_launches
from planner.costs.operators import launch_s, operator_times, slowdowns
from planner.costs.passes import block_workspace_bytes
from planner.costs.stage_memory import (
    limit_bytes,
    memory_of,
    search_bytes,
    search_recompute_bytes,
    static_bytes,
)
from planner.costs.stage_pass import sums_overlap_compute
from planner.costs.transfers import ring_allreduce_s, ring_links, slowest_link
from planner.costs.update import step_s
from planner.solvers.antichain.devices import numbers_of_devices, orders_of
from planner.solvers.graphs.downsets import downsets, members


def asynchronous(training):
    return training.schedule is ScheduleName.PIPEDREAM


def steady(training):
    """Whether the objective is that of a flow without end."""
    return asynchronous(training) and training.objective is not Objective.LATENCY


def least_objective_s(problem):
    """The least closed form over all pipelines that fit; infinite if none does."""
    found = math.inf
    for order in orders_of(problem):
        for count in numbers_of_devices(problem):
            found = min(found, _Trial(problem, order[:count]).best())
    return found


class _Trial:
    """One linear order of devices."""

    def __init__(self, problem, order):
        self.problem, self.order = problem, order
        graph = problem.profile.graph
        made = producers(graph)
        feeds = [[made[n] for n in o.inputs if n in made] for o in graph.operators]
        self.sets = [frozenset(members(mask)) for mask in downsets(feeds).masks]
        self.bytes_of = cache(self._bytes_of)
        self.cut = cache(self._cut)

    def best(self):
        everything = self.sets[-1]
        return self._grow(everything, 0, 0, 0, (0.0, 0.0, 0.0, 0.0), 0.0)

    def _grow(self, rest, k, r, warmup, value, weight_behind):
        """The least objective of all pipelines that run `rest` in front of what is there."""
        if not rest:
            total, *others = value
            if steady(self.problem.training):
                return others[0]
            return {
                Objective.ITERATION: total + sum(others),
                Objective.BOTTLENECK: value[1] + value[2],
                Objective.LATENCY: total,
            }[self.problem.training.objective]
        found = math.inf
        for before in (s for s in self.sets if s < rest):
            most = min(len(self.order) - k, self.problem.num_microbatches)
            for width in range(1, most + 1):
                if asynchronous(self.problem.training) and self.problem.num_microbatches % width:
                    continue
                for depth in self._depths(k, r, warmup, width):
                    longer = self._put_in_front(
                        before, rest, k, r, warmup, width, depth, value, weight_behind
                    )
                    if longer is not None:
                        found = min(found, self._grow(before, k + width, width, depth, *longer))
        return found

    def _depths(self, k, r, warmup, width):
        if asynchronous(self.problem.training):
            return {math.ceil((k + width) / width)}
        most = -(-self.problem.num_microbatches // width)
        if self.problem.training.schedule is ScheduleName.GPIPE:
            return {most}
        least = -(-warmup * r // width) + 1
        return {1} if k == 0 else {min(most, least), min(most, least + 1)}

    def _put_in_front(self, before, rest, k, r, warmup, width, depth, value, weight_behind):
        """The value with one more stage, or None if it does not fit."""
        problem, topology = self.problem, self.problem.topology
        inside = rest - before
        count = len(self.order)
        devices = self.order[count - k - width : count - k]
        need, entering, workspace = self.bytes_of(inside, before)
        crossing, messages, gradient_bytes, gradients = self.cut(rest)
        limit = (
            min(limit_bytes(problem, self.order, d) for d in devices)
            - self.problem.training.reserve
        )
        static = static_bytes(need.static.parameter, need.static.trainable, self.problem)
        inputs, returned = self._ends(inside)
        boundary = inputs + returned + crossing
        rounds = -(-self.problem.num_microbatches // width)
        if asynchronous(self.problem.training):
            static += (depth - 1) * need.static.trainable
            rounds = 10**9
        rest_of = (entering, gradient_bytes, workspace, depth, rounds)
        bytes_needed = {
            0: search_bytes(static, need.kept_bytes, *rest_of),
            1: search_recompute_bytes(static, need.kept_bytes, boundary, *rest_of),
        }
        allowed = {Recompute.NONE: [0], Recompute.FULL: [1]}.get(
            self.problem.training.recompute, [0, 1]
        )
        again = next((a for a in allowed if bytes_needed[a] <= limit), None)
        if again is None:
            return None
        forward = [self._time(d, inside, "forward_s") for d in devices]
        backward = [self._time(d, inside, "backward_s") for d in devices]
        starts = [slowdowns(problem, self.order)[d] * launch_s(problem, d) for d in devices]
        f = max(own + start for own, start in zip(forward, starts, strict=True))
        b = max(
            there + again * back + start
            for there, back, start in zip(backward, forward, starts, strict=True)
        )
        send = back = 0.0
        if k:
            behind = self.order[count - k : count - k + r]
            share = link_share(problem, self.order)
            latency, rate = slowest_link(topology, devices, behind)
            send = latency * messages + share * crossing / rate
            send += self._posting(devices, messages, crossing)
            latency, rate = slowest_link(topology, behind, devices)
            back = latency * gradients + share * gradient_bytes / rate
            back += self._posting(behind, gradients, gradient_bytes)
        in_front = self.cut(before) if before else (0, 0, 0, 0)
        others = self._posting(devices, messages + in_front[1], crossing + in_front[0])
        others_back = self._posting(devices, gradients + in_front[3], gradient_bytes + in_front[2])
        trained = need.static.trainable
        launch = max(launch_s(problem, d) for d in devices)
        tail = launch + max(
            slowdowns(self.problem, self.order)[d]
            * (problem.calibration.steps if self._is_own(d) else 1.0)
            * step_s(self.problem, trained, device_type(topology, d))
            for d in devices
        )
        if width > 1 and trained:
            links = ring_links(topology, tuple(sorted(devices)))
            whole = sum_factor(problem, self.order) * ring_allreduce_s(trained, width, *links)
            whole += launch * sum_launches(trained)
            beside = sums_overlap_compute(problem, self.order, devices)
            tail += exposed_sum_s(whole, trained, b - again * f, beside)
        weight = {
            Objective.ITERATION: rounds - 1.0,
            Objective.BOTTLENECK: 1 / width,
            Objective.LATENCY: 0.0,
        }[self.problem.training.objective]
        bottleneck = self.problem.training.objective is Objective.BOTTLENECK
        phases = (
            self.problem.training.schedule is ScheduleName.GPIPE
            and self.problem.training.objective is Objective.ITERATION
        )
        if steady(self.problem.training):
            total = value[0] + f + b + send + back
            in_flight = math.inf if bottleneck else depth
            # A forward, and a backward in the next stage behind it, which was so many rounds ahead.
            turn = depth - math.ceil((warmup - 1) * r / width) if k else 1
            pair = f + b + send + back + value[2] + tail
            period = max(
                f + others + b + others_back + tail,
                (total + tail) / in_flight,
                0.0 if bottleneck else pair / turn,
            )
            weight = (1 if bottleneck else self.problem.num_microbatches) / width
            worst = max(
                value[1], weight * period, max(weight, weight_behind) * max(send, back)
            )  # fmt: skip
            return (total, worst, f + b, 0.0), weight
        return (
            extend(*value, f, b, others, others_back, send, back, tail, rounds,
                   rounds if bottleneck else depth, 1, weight, weight_behind, phases, False),
            weight,
        )  # fmt: skip

    def _is_own(self, device):
        kind = self.problem.topology.devices[device].type
        return kind == self.problem.calibration.device_type

    def _posting(self, devices, messages, size_bytes):
        if not any(self._is_own(d) for d in devices):
            return 0.0
        known = self.problem.calibration
        return known.post_s * messages + known.copy_s_per_byte * size_bytes

    def _time(self, device, inside, which):
        times = getattr(operator_times(self.problem, device), which)
        return times[sorted(inside)].sum() * slowdowns(self.problem, self.order)[device]

    def _ends(self, inside):
        """Bytes of what a stage reads from outside, and of the model's outputs that it makes."""
        graph = self.problem.profile.graph
        tensors = tensors_by_name(graph)
        made = {n for v in inside for n in graph.operators[v].outputs}
        read = {n for v in inside for n in graph.operators[v].inputs} - made
        returned = made & set(graph.outputs)
        return sum(tensors[n].bytes for n in read), sum(tensors[n].bytes for n in returned)

    def _bytes_of(self, inside, before):
        """Memory of a stage, bytes that come from earlier stages, its operators' workspace."""
        profile = self.problem.profile
        graph = profile.graph
        tensors, made = tensors_by_name(graph), producers(graph)
        entering = {n for v in inside for n in graph.operators[v].inputs if made.get(n) in before}
        workspace = max(block_workspace_bytes(profile, [v]) for v in inside)
        return memory_of(profile, inside), sum(tensors[n].bytes for n in entering), workspace

    def _cut(self, rest):
        """Bytes and messages over the cut behind a downset, there and back."""
        graph = self.problem.profile.graph
        made, read_by, tensors = producers(graph), consumers(graph), tensors_by_name(graph)
        over = [
            tensors[n]
            for n, v in made.items()
            if v in rest and any(w not in rest for w in read_by[n])
        ]
        back = [t for t in over if t.gradient]
        return sum(t.bytes for t in over), len(over), sum(t.bytes for t in back), len(back)
