"""The benchmark's placement problems, drawn from a seed. Written down before the first run:

- seeds 0 to 9; 100 operators; 2, 4 or 8 equal devices, every pair equally linked, latency 10 us
- operators in layers of 1 to 6 (uniform); each reads 1 to 3 outputs of the two layers before, and
  an output that none reads is read by an operator of the next layer
- forward 1 to 9 ms (uniform), backward 1.5 to 2.5 times that (uniform)
- communication-to-computation ratio 0.5: the mean transfer takes half as long as the mean forward;
  a tensor has 0.2 to 1.8 times the mean (uniform)
- parameters of 1 to 99 MB per operator (uniform), Adam; memory slack 1.5: all devices together have
  1.5 times the memory that one device would need for everything
"""

import random
from dataclasses import replace

from planner.artefacts.options import Objective, Optimizer
from planner.solvers.placement.coplacement import kept_bytes
from planner.solvers.placement.problem import placement_problem_of
from tests.support.builders import cluster, graph_of, problem_of, profile_of, unit_type

SEEDS = range(10)
NUM_OPERATORS = 100
WIDTH = (1, 6)
RATIO = 0.5
SLACK = 1.5
BANDWIDTH = 10e9
LATENCY_S = 10e-6


def layered(rng, size):
    """Predecessor lists of a DAG in layers."""
    layers, feeds = [[]], []
    while len(feeds) < size:
        width = min(rng.randint(*WIDTH), size - len(feeds))
        first = len(feeds)
        near = [v for layer in layers[-2:] for v in layer]
        for _ in range(width):
            chosen = rng.sample(near, min(rng.randint(1, 3), len(near)))
            feeds.append(sorted(chosen))
        read = {u for us in feeds for u in us}
        for u in layers[-1]:
            if u not in read:
                v = rng.randrange(first, len(feeds))
                feeds[v] = sorted({*feeds[v], u})
        layers.append(list(range(first, len(feeds))))
    return feeds


def problem_from(seed, num_devices, num_operators=NUM_OPERATORS):
    """The benchmark's problem of a seed, for the latency of one microbatch."""
    rng = random.Random(seed)
    feeds = layered(rng, num_operators)
    forward = [rng.uniform(1e-3, 9e-3) for _ in feeds]
    backward = [time_s * rng.uniform(1.5, 2.5) for time_s in forward]
    mean_bytes = (RATIO * sum(forward) / len(forward) - LATENCY_S) * BANDWIDTH
    tensors = [int(mean_bytes * rng.uniform(0.2, 1.8)) for _ in feeds]
    parameters = [int(rng.uniform(1e6, 99e6)) for _ in feeds]
    profile = profile_of(graph_of(feeds, tensors, parameters), forward, backward)
    problem = problem_of(
        profile,
        cluster([unit_type(memory=10**13)] * num_devices, BANDWIDTH, LATENCY_S),
        num_microbatches=1,
        objective=Objective.LATENCY,
        optimizer=Optimizer.ADAM,
    )
    need = sum(kept_bytes(placement_problem_of(problem)).values())
    memory = int(SLACK * need / num_devices)
    return replace(problem, options=replace(problem.options, device_memory_bytes=memory))
