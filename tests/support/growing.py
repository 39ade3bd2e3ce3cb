"""A small profile that is good for microbatches of any size, with kernels written by hand."""

from dataclasses import replace

from planner.artefacts.growth import Growing, GrowingKernel, Growth, Rates, Work
from planner.artefacts.profile import ROOFLINE, Source
from planner.profilers.roofline.grown import grown
from tests.costs.test_split_bounds import RULES
from tests.support.split import mlp

WIDTH, HIDDEN = 16, 64
LAUNCH_S = 2e-3
"""What every microbatch pays once for every operator and pass, however small it is."""


def _kernel(per_sample):
    """A product that takes `LAUNCH_S` and so many ms per sample."""
    return GrowingKernel(Work.PRODUCT, (2 * per_sample, 3 * per_sample), (2, 3))


def growing(size=1, per_sample=(1, 4, 2, 4)):
    """The profile of a scale, two products and what is between them, of a size and any other one.

    Args:
        per_sample: time of each operator's forward, in ms; a backward takes twice as long.
    """
    profile = mlp(shape=(size, WIDTH, HIDDEN))
    growth = Growth(
        rates=Rates(LAUNCH_S, {Work.PRODUCT: 1e3}, {Work.PRODUCT: 1e12}),
        classes=tuple(
            Growing((_kernel(time),), (_kernel(2 * time),), rules=tuple(RULES[one.name]))
            for time, one in zip(per_sample, profile.graph.operators, strict=True)
        ),
        operators=(0, 1, 2, 3),
        single=(0, 1, 2, 3),
        steps=((1, 0), (0,), (0, 0)),
        tensors=(0,) * len(profile.graph.tensors),
        parameters=(1, 2, 2),
        dimensions={},
    )
    profile = replace(profile, source=Source.ANALYTIC, engine=ROOFLINE)
    own = grown(profile, growth, size)
    rules = grown(profile, growth, size + 1).operators
    operators = zip(own.operators, rules, strict=True)
    return replace(
        own,
        operators=tuple(replace(one, rules=other.rules) for one, other in operators),
        growth=growth,
    )
