"""Memory of a rank that loads its part of a model: the part, and next to nothing else."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.artefacts.files import write_plan
from planner.model.annotated import write_partition
from planner.model.load import load
from tests.model.annotated.test_annotated import plan_for
from tests.support.large_models import MIB, load_part, name_of, write_chain

ROOT = Path(__file__).resolve().parents[2]
ABOVE_BYTES = 300_000_000


def planned(folder, num_layers, width, *, external=False, annotated=True):
    """A chain in two stages, on two devices."""
    folder.mkdir()
    write_chain(folder / "net.onnx", num_layers, width, external=external)
    model = load(folder / "net.onnx")
    plan = replace(plan_for(model), train=tuple(map(name_of, range(num_layers))))
    write_plan(plan, folder / "strategy.json")
    if annotated:
        write_partition(model, plan, folder / "strategy.onnx")
    return folder


def loaded(folder, rank):
    """What a process of its own says of loading the part of a rank."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.large_models", str(folder), str(rank)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("external", [False, True])
def test_each_rank_has_its_own_matrices_of_a_chain(tmp_path, external):
    folder = planned(tmp_path / "chain", 5, 600, external=external)
    found = [load_part(folder, rank) for rank in (1, 0)]  # devices are in falling order
    assert [one["names"] for one in found] == [
        [name_of(0), name_of(1)], [name_of(2), name_of(3), name_of(4)]
    ]  # fmt: skip
    assert [one["first"] for one in found] == [[0, 1], [2, 3, 4]]


@pytest.fixture
def roomy(tmp_path):
    """A folder for large files, which pytest would keep."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("annotated", [True, False])
@pytest.mark.parametrize("external", [False, True])
def test_a_rank_takes_its_share_of_2_gb_and_little_else(roomy, external, annotated):
    """The other process has imported the same modules, and has a part of 1 KB."""
    nothing = planned(roomy / "small", 4, 8, external=external, annotated=annotated)
    # 31 matrices of 64 MiB: 2.08 GB, where a message of protobuf has at most 2.147 GB.
    folder = planned(roomy / "large", 31, 4096, external=external, annotated=annotated)
    if annotated:
        assert (folder / "strategy.onnx").stat().st_size < MIB
    for rank in (0, 1):
        before, found = loaded(nothing, rank), loaded(folder, rank)
        above = found["peak_bytes"] - before["peak_bytes"] - found["share_bytes"]
        print(
            f"external {external}, annotated {annotated}, rank {rank}: share"
            f" {found['share_bytes'] / MIB:.0f} MiB, above it {above / MIB:.1f} MiB, of imports"
            f" {before['peak_bytes'] / MIB:.0f} MiB; prepared in {found['prepare_s']:.2f} s (of"
            f" imports and all else {before['prepare_s']:.2f} s), read in {found['read_s']:.2f} s"
        )
        assert above <= ABOVE_BYTES
