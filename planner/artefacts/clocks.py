"""The two clocks of a pass: that of a device, and that of the host that starts its kernels.

The host starts the kernels of one operator after the other, and waits for nothing meanwhile. The
device runs them in this order, and cannot have run what the host has not started:

    end of v = max(end of the one before + device time of v, sum of host times up to v)

Both clocks start with the pass. So a pass takes no less than the sum of the device's times, nor of
the host's, and no more than the sum of the longer one of each operator. It never takes the sum of
both.

A host that waits for each kernel (CUDA_LAUNCH_BLOCKING=1) has started nothing while the device
runs, so there the two clocks are one, and both times add up.
"""

import numpy as np

from planner.artefacts.profile import Profile
from planner.support.arrays import Floats


def clocks_s(profile: Profile) -> tuple[Floats, Floats]:
    """(2, N) times of the operators on the device, forward and backward, and the same of the host,
    in s; without losses.
    """
    device_s = [(one.forward_s, one.backward_s) for one in profile.operators]
    host_s = [(one.host_forward_s, one.host_backward_s) for one in profile.operators]
    return np.array(device_s).reshape(-1, 2).T, np.array(host_s).reshape(-1, 2).T


def ends_s(device_s: Floats, host_s: Floats) -> Floats:
    """When each operator of a pass ends, in s.

    Args:
        device_s: (n,) time of each on the device, in the order in which they run.
        host_s: (n,) time in which the host starts its kernels.

    Returns:
        (n,) ends; the last one is the time of the pass.

    >>> ends_s(np.array([1.0, 5.0, 1.0]), np.array([2.0, 2.0, 2.0])).tolist()
    [2.0, 7.0, 8.0]
    """
    done, started = device_s.cumsum(), host_s.cumsum()
    # The time by which an end is behind the device's own clock never shrinks.
    ends: Floats = done + np.maximum.accumulate(np.maximum(started - done, 0.0))
    return ends


def added_s(device_s: Floats, host_s: Floats) -> Floats:
    """(2, n) the time by which each operator makes the passes of all operators longer, in s.

    Operators in a row take at least the sum of theirs, for a pass that begins with them waits for
    nothing more than one that has come to them.

    Args:
        device_s: as of `pass_times_s`.
        host_s: as of `pass_times_s`.

    >>> added_s(np.array([[1.0, 5.0], [1.0, 2.0]]), np.array([[2.0, 2.0], [3.0, 3.0]])).tolist()
    [[2.0, 5.0], [3.0, 3.0]]
    """
    if not host_s.any():
        return device_s
    forward = np.diff(ends_s(device_s[0], host_s[0]), prepend=0.0)
    backward = np.diff(ends_s(device_s[1, ::-1], host_s[1, ::-1]), prepend=0.0)[::-1]
    added: Floats = np.maximum([forward, backward], 0.0)
    return added


def on_clocks_s(
    device_s: Floats, host_s: Floats, *, launch_blocking: bool
) -> tuple[Floats, Floats]:
    """What each of some operators, or parts of them, takes on both clocks.

    Args:
        device_s: as of `pass_times_s`.
        host_s: as of `pass_times_s`.
        launch_blocking: whether the host waits for each kernel; then all is on the device's clock.

    >>> both_s = np.array([[1.0, 5.0], [1.0, 2.0]]), np.array([[2.0, 2.0], [3.0, 3.0]])
    >>> pass_times_s(*on_clocks_s(*both_s, launch_blocking=True))
    (10.0, 9.0)
    """
    return (device_s + host_s, np.zeros_like(host_s)) if launch_blocking else (device_s, host_s)


def pass_times_s(device_s: Floats, host_s: Floats) -> tuple[float, float]:
    """The times of the forward and of the backward of operators, which runs in the reverse order.

    Args:
        device_s: (2, n) forward and backward of each on the device, in s.
        host_s: (2, n) the same of the host.

    >>> pass_times_s(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.0, 4.0], [3.0, 5.0]]))
    (4.0, 8.0)
    """
    if not device_s.size:
        return 0.0, 0.0
    forward, backward = ends_s(device_s[0], host_s[0]), ends_s(device_s[1, ::-1], host_s[1, ::-1])
    return float(forward[-1]), float(backward[-1])
