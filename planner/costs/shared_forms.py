"""A stage whose replicas keep parts of it (`resharding/over_replicas.py`), in closed form, for
search. All functions are compiled by the solver that searches with them.

All R replicas share, at a level from 0 (none does) to 3. Parameters that are scalars, or that
several stages hold, are whole at every level. Of the others are

    stepped   bytes that are trained: their optimizer state is in parts from level 1 on, their
              gradients from 2 on
    cut       bytes that are in parts at level 3
    row       bytes of one row of each

A part of n bytes has whole rows: at most n / R and a row more. So bytes are no less than those of
`stage_memory.py`, and times no more than those of `stage_pass.py`, which count the rows.
"""

from planner.artefacts.strategy import BUCKET_BYTES, MAX_BUCKETS


def shared_static_bytes(
    level: int, held: float, trained: float, stepped: float, cut: float, row: float,
    replicas: int, moments: int,
) -> float:  # fmt: skip
    """Parameters, gradients and optimizer state on a device, in bytes.

    Args:
        level: at least 1.
        held: bytes of all parameters.
        trained: bytes of those that are trained.
        replicas: R.
        moments: optimizer state over the bytes of trained parameters.

    >>> [shared_static_bytes(level, 80.0, 80.0, 80.0, 80.0, 0.0, 4, 2) for level in (1, 2, 3)]
    [220.0, 140.0, 80.0]
    """
    part = min(stepped, stepped / replicas + row)
    size = held + (1 + moments) * (trained - stepped + part)
    if level == 1:  # gradients are added up whole, and scattered into buffers of their own
        size += stepped
    if level == 3:
        size -= cut - min(cut, cut / replicas + row)
    return size


def exchanged_bytes(
    level: int, stepped: float, row: float, largest: float, replicas: int
) -> float:  # fmt: skip
    """Bytes taken, at most, while gradients are scattered once per iteration (level 1: a bucket to
    send, one that comes, and the sum of its parts) and parameters gathered after the step (1 and 2:
    a part, and all of them).

    Args:
        largest: bytes of the largest parameter of the model.

    >>> [exchanged_bytes(level, 80.0, 0.0, 80.0, 4) for level in (1, 2, 3)]
    [180.0, 100.0, 0.0]
    """
    if level == 3:
        return 0.0
    bucket = min(stepped, max(BUCKET_BYTES, stepped / MAX_BUCKETS, largest))
    part = bucket / replicas + row
    gathered = part + bucket + replicas * row
    return max(gathered, 2 * bucket + part) if level == 1 else gathered
