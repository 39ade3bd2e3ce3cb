"""The oldest versions of dependencies that are allowed."""

import inspect
import tomllib
from pathlib import Path

import numpy as np
import onnx_ir
import pydantic
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLOORS = [*map(Requirement, PROJECT["dependencies"])]
FLOORS += map(Requirement, PROJECT["optional-dependencies"]["test"])


def test_the_tested_versions_are_allowed_ones():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    for floor in FLOORS:
        if floor.name in tested:
            assert floor.specifier.contains(tested[floor.name]), floor


@pytest.mark.parametrize(
    ("name", "first", "last_without"),
    [
        ("onnx-ir", "0.2.1", "0.2.0"),
        ("pydantic", "2.12", "2.11.10"),
        ("ortools", "9.15", "9.14.6206"),
    ],
)
def test_versions_without_what_is_relied_on_are_refused(name, first, last_without):
    (floor,) = [one for one in FLOORS if one.name == name]
    assert floor.specifier.contains(first)
    assert not floor.specifier.contains(last_without)


def test_external_data_outside_of_the_folder_is_refused(tmp_path):
    """What onnx-ir is relied on for."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(16))
    (folder / "link").symlink_to(tmp_path / "secret")
    for location in ("../secret", "link", str(tmp_path / "secret")):
        with pytest.raises(ValueError):
            onnx_ir.ExternalTensor(
                location, 0, 16, onnx_ir.DataType.FLOAT, shape=onnx_ir.Shape([4]), name="w",
                base_dir=folder,
            ).numpy()  # fmt: skip
    (folder / "weights").write_bytes(np.ones(4, np.float32).tobytes())
    inside = onnx_ir.ExternalTensor(
        "weights", 0, 16, onnx_ir.DataType.FLOAT, shape=onnx_ir.Shape([4]), name="w",
        base_dir=folder,
    )  # fmt: skip
    assert inside.numpy().tolist() == [1.0] * 4


def test_fields_can_be_left_out_by_a_condition():
    """What pydantic is relied on for, besides what has been there for long."""
    assert "exclude_if" in inspect.signature(pydantic.Field).parameters
