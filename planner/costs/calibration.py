"""What a calibration makes of a profile's times; `planner/calibration.py` has the formulas."""

from statistics import fmean

import numpy as np

from planner.calibration import Calibration, Deviation
from planner.profiles import Profile
from planner.support.arrays import Floats


def whole_share(profile: Profile) -> float:
    """w: the time of the whole step over the sum of its operators; 1 where it was not measured."""
    if profile.whole_step is None:
        return 1.0
    whole_s = fmean((profile.whole_step.before_s, profile.whole_step.after_s))
    return whole_s / sum(one.forward_s + one.backward_s for one in profile.operators)


def calibrated_s(
    calibration: Calibration, profile: Profile, forward_s: Floats, backward_s: Floats
) -> tuple[Floats, Floats]:
    """Times of all operators in a run.

    Args:
        forward_s, backward_s: (N,) measured alone, on a device of the calibration's type.
    """
    scale = whole_share(profile) if calibration.whole else 1.0
    known = {one.type: one for one in calibration.deviations}
    own = [
        known.get(operator.type, Deviation("", 0.0, 0.0)) for operator in profile.graph.operators
    ]
    lost = first_output_bytes(profile)
    return (
        scale * forward_s * (calibration.forward + np.array([one.forward for one in own]))
        + lost * calibration.loss_forward_s_per_byte,
        scale * backward_s * (calibration.backward + np.array([one.backward for one in own]))
        + lost * calibration.loss_backward_s_per_byte,
    )


def first_output_bytes(profile: Profile) -> Floats:
    """(N,) bytes of the model's first output that each operator makes: of the loss's input."""
    output = profile.graph.outputs[0]
    size = next(one.bytes for one in profile.graph.tensors if one.name == output)
    return np.array(
        [size if output in operator.outputs else 0 for operator in profile.graph.operators],
        dtype=float,
    )
