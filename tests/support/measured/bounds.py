"""The bound that no kernels beat (`costs/peak_bound.py`), of a row.

It asks for the network, the batch and the devices alone, so rows have it whose plan the planner
cannot express. Rows in a number format that the device table lacks have none.
"""

from dataclasses import replace
from pathlib import Path

from planner.artefacts.options import Training
from planner.artefacts.problem import Problem
from planner.costs.peak_bound import peak_bound_s
from tests.support.measured.assumptions import optimizer
from tests.support.measured.clusters import cluster
from tests.support.measured.profiles import FOLDER, profile
from tests.support.measured.rows import Row

FORMATS_WITHOUT_A_PEAK = ("float8", "TF32")
"""By the words of `Row.lacks`."""


def least_s(row: Row, folder: Path = FOLDER) -> float | None:
    """The bound in s; None without a network, or in a format whose peak is not known.

    Args:
        folder: of computed profiles.
    """
    if row.network is None or any(name in row.lacks for name in FORMATS_WITHOUT_A_PEAK):
        return None
    training = Training(optimizer=optimizer(row))
    count = row.batch // row.microbatch
    # That of one host, because a topology has at most 4,096 devices; the bound falls with them.
    host = cluster(replace(row, num_devices=min(row.num_devices, row.per_host)))
    share = len(host.devices) / row.num_devices
    return share * peak_bound_s(Problem(profile(row, folder), host, count, training))
