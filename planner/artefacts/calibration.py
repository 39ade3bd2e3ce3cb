"""`Calibration`: corrections of profile and topology that runs on a type of device have shown.

Of an operator of type t that makes n bytes of the outputs with a loss (0 for nearly all), measured
alone in f s forward and b s backward with the losses of its outputs, a run is believed to take

    forward:  w f (forward + deviation_t) + n loss_forward_s_per_byte
    backward: w b (backward + deviation_t) + n loss_backward_s_per_byte

where w is how much faster the whole step was than its operators one by one, because these find
their inputs and weights in no cache. The times in which the host starts kernels have the factor
`host`, too. Each computation takes `launch_s` more. Posting a transfer keeps the device for
`post_s` and `copy_s_per_byte` per byte, in which its processor copies. The route then takes its
latency and the time of a share `wire` of the bytes. Factors correct the times of sums of gradients
and of steps. Each collective inside a stage takes `collectives` times as long
as the topology says, and `collective_s` more, in which devices wait for each other. None of it
belongs to one stage or one model, so that it holds for models that were not run.
"""

from dataclasses import dataclass, field
from statistics import fmean

from planner.artefacts.graph import LEFT_OUT_AS_DEFAULT
from planner.artefacts.profile import MAX_SECONDS, Profile

MAX_FACTOR = 1e6
"""No correction is larger; times with it stay far from the largest floats."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How much more an operator type takes than all do, as a share of its time alone."""

    type: str
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Corrections; without arguments, none.

    Attributes:
        device_type: that they are for; "" for none.
        runs: how many were fitted.
        models: of how many models.
        whole: whether times are scaled to the whole step that the profile measured.
        forward, backward: factors of all operators.
        deviations: by type, ascending.
        loss_forward_s_per_byte, loss_backward_s_per_byte: what a loss takes more, per byte of the
            output that it is computed from.
        host: factor of the times in which the host starts kernels, beside those of all operators.
        launch_s: of each computation.
        post_s: of each send or receive.
        copy_s_per_byte: of each send or receive, per byte.
        wire: share of a transfer's bytes that goes over its route after it was posted.
        sums, steps: factors of their times.
        collectives: factor of the times of collectives inside a stage.
        collective_s: of each of them.

    Raises:
        ValueError: if a figure is too large or has the wrong sign.
    """

    device_type: str = ""
    runs: int = 0
    models: int = 0
    whole: bool = False
    forward: float = 1.0
    backward: float = 1.0
    deviations: tuple[Deviation, ...] = ()
    loss_forward_s_per_byte: float = 0.0
    loss_backward_s_per_byte: float = 0.0
    host: float = field(default=1.0, metadata=LEFT_OUT_AS_DEFAULT)
    launch_s: float = 0.0
    post_s: float = 0.0
    copy_s_per_byte: float = 0.0
    wire: float = 1.0
    sums: float = 1.0
    steps: float = 1.0
    collectives: float = field(default=1.0, metadata=LEFT_OUT_AS_DEFAULT)
    collective_s: float = field(default=0.0, metadata=LEFT_OUT_AS_DEFAULT)

    def __post_init__(self) -> None:
        factors = ("forward", "backward", "host", "sums", "steps", "collectives")
        others = ("loss_forward_s_per_byte", "loss_backward_s_per_byte", "launch_s", "post_s",
                  "copy_s_per_byte", "wire", "collective_s")  # fmt: skip
        wrong = [
            f"{name}: expected a number above 0 and at most {MAX_FACTOR:.0e}, got"
            f" {getattr(self, name)}"
            for name in factors
            if not 0 < getattr(self, name) <= MAX_FACTOR
        ]
        wrong += [
            f"{name}: expected a number of at least 0 and at most {MAX_SECONDS:.0e}, got"
            f" {getattr(self, name)}"
            for name in others
            if not 0 <= getattr(self, name) <= MAX_SECONDS
        ]
        wrong += [
            f"deviations[{i}]: expected factors above 0 and at most {MAX_FACTOR:.0e}, got those of"
            f" {one.type!r}"
            for i, one in enumerate(self.deviations)
            for factors_of in [(self.forward + one.forward, self.backward + one.backward)]
            if not 0 < min(factors_of) <= max(factors_of) <= MAX_FACTOR
        ]
        if wrong:
            raise ValueError("\n".join(wrong))


UNCALIBRATED = Calibration()


@dataclass(frozen=True, slots=True)
class CalibrationFile:
    """The content of the file beside a profile.

    Attributes:
        profiles: content hashes of the profiles in that file.
        calibration: for them.
        error_before: mean of |predicted - measured| / measured over the runs without it.
        error_after: the same with it, of runs that were left out of the fit in turn.
        left_out: unit that was left out at a time: "model" or "run".
    """

    profiles: tuple[str, ...]
    calibration: Calibration
    error_before: float
    error_after: float
    left_out: str


def whole_share(profile: Profile) -> float:
    """w: the time of the whole step over the sum of its operators; 1 where it was not measured."""
    if profile.whole_step is None:
        return 1.0
    whole_s = fmean((profile.whole_step.before_s, profile.whole_step.after_s))
    return whole_s / sum(one.forward_s + one.backward_s for one in profile.operators)
