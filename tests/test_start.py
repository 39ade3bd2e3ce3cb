"""What commands load: nothing that takes long and that they do not use."""

import subprocess
import sys
from pathlib import Path

import pytest
from onnx import ModelProto

from planner.model.record import ANNOTATION_KEY
from tests.support.models import cached

ROOT = Path(__file__).parent.parent
HEAVY = {
    "google.protobuf", "gurobipy", "llvmlite", "multiprocessing", "networkx", "numba", "numpy",
    "onnx", "onnx.reference", "onnx_ir", "onnxruntime", "onnxscript", "ortools", "platformdirs",
    "pydantic", "rich", "ruamel.yaml", "scipy", "sympy", "torch", "torch.distributed.checkpoint",
}  # fmt: skip
SHOWN = {"numpy", "rich"}
READ = {*SHOWN, "pydantic", "ruamel.yaml"}
GPT2 = ["--profile", str(ROOT / "profiles/gpt2.json"), "--gpus", "1", "--topology", "p3"]
LIST = f"print('loaded', *sorted(set({sorted(HEAVY)!r}) & set(sys.modules)), file=sys.stderr)"


def loaded(code, folder, *arguments):
    """The heavy modules that a new interpreter has loaded when some code has ended."""
    done = subprocess.run(
        [sys.executable, "-c", f"import atexit, sys\natexit.register(lambda: {LIST})\n{code}",
         *map(str, arguments)],
        cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split()[1:])


def command(folder, *arguments):
    return loaded("import cli; cli.start()", folder, *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("start")


def test_help_loads_nothing(folder):
    assert command(folder, "--help") == set()
    assert command(folder, "solve", "--help") == set()


def test_the_list_of_topologies_is_read_from_yaml(folder):
    assert command(folder, "topology", "list") == READ


def test_an_inspected_model_takes_onnx_alone(folder):
    path = cached("squeezenet", folder)
    assert command(folder, "inspect", path) == {*SHOWN, "google.protobuf", "onnx"}


def test_a_plan_for_one_device_takes_neither_onnx_nor_a_compiler(folder):
    annotated = ModelProto()
    annotated.metadata_props.add(key=ANNOTATION_KEY, value="of an older plan")
    (folder / "plan.onnx").write_bytes(annotated.SerializeToString())
    assert command(folder, "solve", *GPT2, "-o", "plan.json") == READ
    assert command(folder, "simulate", "plan.json") == READ


def test_a_rank_takes_neither_sympy_nor_what_writes_checkpoints_before_it_needs_them(folder):
    code = "import planner.training.launch, planner.training.loop"
    assert not loaded(code, folder) & {
        "onnx_ir", "sympy", "torch.distributed.checkpoint", "numba", "scipy", "onnxruntime",
    }  # fmt: skip
