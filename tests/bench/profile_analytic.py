"""How well the analytic profile explains measured ones, once the device's two constants are
fitted, for `make bench-profile`.
"""

from collections.abc import Mapping
from pathlib import Path

from planner.artefacts.profile import Profile
from planner.model.load import ReadOptions, load
from planner.profilers.analytic import RooflineFit, fit_constants
from planner.profilers.facts import facts


def rows(
    models: Mapping[str, Path], measured: Mapping[str, Profile]
) -> list[tuple[str, float, float, float]]:
    """Per model: its name, the rank correlation of computed and measured times, and the median
    and the 90th percentile of |log(computed / measured)|, over operators that take at least a
    thousandth of the step.

    Args:
        models: ONNX files by name.
        measured: profiles of some of these models, by the same names, all of one device.
    """
    fits = ((name, fitted(models[name], profile)) for name, profile in measured.items())
    return [(name, fit.rank_correlation, fit.median_error, fit.p90_error) for name, fit in fits]


def fitted(path: Path, profile: Profile) -> RooflineFit:
    """The two constants that explain a model's measured profile best."""
    return fit_constants(facts(load(path, ReadOptions(dimensions=profile.dimensions))), profile)
