"""Computed profiles of the networks, kept in a folder: those of large networks take seconds."""

import hashlib
import tempfile
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import planner
from planner.artefacts.graph import with_parameters_in
from planner.artefacts.profile import SHORT_PARAMETERS, Profile
from tests.support.measured import assumptions, networks
from tests.support.measured.assumptions import EAGER, Ran
from tests.support.measured.networks import Network
from tests.support.measured.rows import Row

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".cache" / "truth"
ROOMS = ("support", "artefacts", "model", "operators", "profilers")
"""Of the package, those that a computed profile depends on."""
BUILDERS = (
    "tests/support/experts.py", "tests/support/models.py", "tests/support/thesis_models.py",
)  # fmt: skip
"""Beside `networks`, the files that build the models."""


def profile(row: Row, folder: Path = FOLDER) -> Profile:
    """The profile of a row's microbatch on its type of device: that in the folder, if the code that
    computed it was the same, or else one that is put there.

    Args:
        row: one with a network.
        folder: made if it does not exist.
    """
    own = computed(
        assumptions.network(row),
        row.microbatch,
        row.dtype,
        row.device,
        ran=assumptions.ran(row),
        folder=folder,
    )
    if own.dtype == "float32" or own.casts_once:
        return own
    # Float16 parameters take as much as bfloat16 ones, and have float32 copies, too.
    gradients = "float32" if row.source in assumptions.FLOAT32_GRADIENTS else None
    graph = with_parameters_in(own.graph, own.dtype, gradients)
    return replace(own, graph=graph, parameter_dtype=SHORT_PARAMETERS)


def computed(
    network: Network,
    batch: int,
    dtype: str,
    device: str,
    *,
    ran: Ran = EAGER,
    folder: Path = FOLDER,
) -> Profile:
    """The profile of a network at a size of the microbatch, as `profile` has it of a row's.

    Args:
        batch: samples of a microbatch.
        dtype: of the computation.
        device: its type.
        ran: how a step ran.
        folder: made if it does not exist.
    """
    key = repr((network, batch, dtype, device, ran, _version()))
    path = folder / f"{network.kind}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.json"
    if path.exists():
        return planner.read_profile(path)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / f"{network.kind}.onnx"
        file.write_bytes(networks.model(network).SerializeToString())
        own = planner.profile(
            file,
            device=device,
            dtype=None if dtype == network.dtype else dtype,
            batch=batch,
            dims=network.dims,
            **asdict(ran),
        )
    folder.mkdir(parents=True, exist_ok=True)
    planner.write_profile(own, path)
    return own


@cache
def _version() -> str:
    """A hash of the code that profiles depend on."""
    files = [Path(networks.__file__), *(ROOT / name for name in BUILDERS)]
    files += [path for room in ROOMS for path in sorted((ROOT / "planner" / room).rglob("*.py"))]
    files += [ROOT / "topologies" / "devices.yaml"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
