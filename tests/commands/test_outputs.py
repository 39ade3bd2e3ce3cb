"""Every output of every command: nothing foreign is overwritten, nothing half is left."""

import os
import shutil
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from planner import api
from planner.api.outputs import check_outputs
from planner.artefacts.files import format_in
from planner.model.export.write import write_model
from planner.model.record import METADATA_KEY
from planner.model.wire import metadata_of
from planner.reports.topology import probe_comments
from planner.support.errors import FileError, OptionError
from tests.commands.test_cli import mlp
from tests.support.commands import run
from tests.test_writing import SPECIAL, full_disk, make_special, names
from tests.training.test_checkpoint_folder import make as make_checkpoint

PAIR = """
format: planner-topology/1
name: pair
device: T4
levels: [{name: gpu, count: 2, bandwidth: 1 GB/s, latency: 50 us}]
"""
SOLVE = ("solve", "--topology", "pair.yaml", "--solver", "single", "--profile", "p.json")
PROFILE = ("profile", "model.onnx", "--device", "T4")
SIMULATE = ("simulate", "s.json", "--topology", "pair.yaml", "--profile", "p.json")
COMPARE = ("compare", "--topology", "pair.yaml", "--solver", "single", "--profile", "p.json")
IMPORT = ("topology", "import", "hostfile", "--device", "T4", "--inside", "1 GB/s",
          "--between", "1 Gbps")  # fmt: skip
# The command that writes a file, and the file that it has written in `made`.
OUTPUTS = {
    "profile": ((*PROFILE, "-o"), "p.json"),
    "solve": ((*SOLVE, "-o"), "s.json"),
    "compare": ((*COMPARE, "--csv"), "rows.csv"),
    "simulate, trace": ((*SIMULATE, "--trace"), "t.json"),
    "simulate, svg": ((*SIMULATE, "--svg"), "i.svg"),
    "compare-trace": (("compare-trace", "t.json", "t.json", "-o"), "both.json"),
    "topology show": (("topology", "show", "pair.yaml", "--svg"), "pair.svg"),
    "topology import": ((*IMPORT, "-o"), "imported.yaml"),
    "convert, planner": (("convert", "p.json", "--to", "planner"), "q.json"),
    "convert, pipedream": (("convert", "p.json", "--to", "pipedream"), "p.txt"),
    "convert, strategy": (("convert", "s.json", "--profile", "p.json"), "s.txt"),
}
# Refused before they begin; written in other tests.
SLOW = {
    "launch": (("launch", "s.json", "--trace"), "t.json"),
    "topology probe": (("topology", "probe", "-o"), None),
    "export": (("export", "nets:net", "-o"), "exported.onnx"),
    "weights": (("weights", "run", "-o"), "trained.onnx"),
    "weights, state dict": (("weights", "run", "--state-dict"), "trained.pt"),
}
ALL = {**OUTPUTS, **SLOW}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a file of every kind, as the commands write them."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        mlp(folder / "model.onnx")
        Path("pair.yaml").write_text(PAIR)
        Path("hostfile").write_text("a slots=2\n")
        for command, name in OUTPUTS.values():
            run(*command, name)
    make_checkpoint(folder / "run", 3, model="../model.onnx", index=b"")
    return folder


@pytest.fixture
def folder(made, tmp_path, monkeypatch):
    """A copy of it to work in."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    """The files in a folder; links as what they are."""
    return {
        path: path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def refused(folder, *arguments):
    """What a command says that changes no file."""
    before = contents(folder)
    said = run(*arguments, code=1).output
    assert contents(folder) == before
    assert said.startswith("Error: "), said
    return said


# ------------------------------------------------------------------------------ foreign files


@pytest.mark.parametrize("name", ALL)
def test_a_foreign_file_is_not_overwritten(folder, name):
    command, _ = ALL[name]
    for foreign in ("notes.json", "notes.svg", "notes.yaml", "notes.txt"):
        Path(foreign).write_text("what I found out\n")
        said = refused(folder, *command, foreign)
        assert f"{foreign}: expected a" in said
        assert "got another file; choose another name, or delete it" in said


@pytest.mark.parametrize("name", ALL)
def test_neither_the_model_nor_a_name_of_one_is_taken(folder, name):
    command, _ = ALL[name]
    for target in ("model.onnx", "other.onnx"):
        if name in ("export", "weights") and target == "other.onnx":
            continue
        said = refused(folder, *command, target)
        assert "model itself" in said or "expected a" in said


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_planners_own_file_is_overwritten(folder, name):
    command, own = OUTPUTS[name]
    Path(own).chmod(0o640)
    Path("link").symlink_to(own)
    before = Path(own).read_bytes()
    run(*command, own)
    run(*command, "link")
    assert Path("link").is_symlink()
    assert Path(own).stat().st_mode & 0o777 == 0o640
    if name not in ("compare", "solve"):  # these have the time that the search took
        assert Path(own).read_bytes() == before


def kind(name):
    """What tells kinds of files in `made` apart."""
    return Path(name).suffix, format_in(Path(name))


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_of_another_kind_is_not_overwritten(folder, name):
    command, own = OUTPUTS[name]
    others = [other for _, other in OUTPUTS.values() if kind(other) != kind(own)]
    assert len(others) >= len(OUTPUTS) - 3
    for other in others:
        said = refused(folder, *command, other)
        assert "expected a" in said or "itself" in said  # it is read


@pytest.mark.parametrize("name", ALL)
def test_what_is_no_file_is_refused(folder, name):
    command, _ = ALL[name]
    make_special(folder)
    for special in SPECIAL:
        said = refused(folder, *command, special)
        assert "cannot be written: it is" in said or "is a folder" in said
        assert os.path.lexists(special)
    assert Path("pipe").is_fifo()


def test_no_model_beside_a_strategy_is_overwritten_but_an_annotated_one(folder, monkeypatch):
    mlp(folder / "b.onnx", layers=2)
    with monkeypatch.context() as without_search:
        without_search.delattr(api, "solve")  # the answer comes before the search
        assert "b.onnx: expected an annotated model" in refused(folder, *SOLVE, "-o", "b.json")
    run(*SOLVE, "-o", "s.json")
    assert "planner.strategy_hash" in metadata_of(Path("s.onnx"))


def test_no_picture_beside_a_graph_is_overwritten_but_our_own(folder):
    Path("g.dot").write_text("digraph mine { a -> b; }\n")
    command = ("convert", "s.json", "g.txt", "--profile", "p.json")
    assert "g.dot: expected a picture for Graphviz" in refused(folder, *command)


def test_a_graph_that_was_measured_elsewhere_is_only_annotated(folder):
    figures = "forward_compute_time=1.000, backward_compute_time=2.000, activation_size=8.0"
    Path("vgg.txt").write_text(f"node1 -- Relu -- {figures}, parameter_size=0.000\n")
    run("convert", "vgg.txt", "vgg.json")
    run(*SOLVE[:-1], "vgg.json", "-o", "vgg-plan.json")
    assert "expected a graph.txt" in refused(folder, "convert", "vgg.json", "vgg.txt")
    run("convert", "vgg-plan.json", "vgg.txt")
    assert figures in Path("vgg.txt").read_text()


def test_no_calibration_is_written_over_a_foreign_file(folder):
    Path("p.calibration.json").write_text("{}")
    said = refused(folder, "calibrate", "t.json", "--profile", "p.json")
    assert "p.calibration.json: expected a calibration" in said


def export(path):
    """Writes a file as `planner export` does, without the export."""
    model = ir.load("model.onnx")
    model.metadata_props[METADATA_KEY] = "{}"
    write_model(model, Path(path))


def test_an_exported_model_may_be_exported_again_and_no_other(folder):
    export("exported.onnx")
    check_outputs({"exported model": Path("exported.onnx")}, {})
    mlp(folder / "other.onnx")
    for other in ("s.onnx", "other.onnx"):  # one is annotated, one was exported by others
        assert "expected an exported model" in refused(folder, "export", "nets:net", "-o", other)


def test_weights_of_an_exported_model_replace_no_foreign_file(folder, monkeypatch):
    monkeypatch.setattr("planner.model.export.write.MAX_FILE_BYTES", 1)
    Path("net.onnx.data").write_bytes(b"mine")
    with pytest.raises(
        FileError, match=r"net\.onnx\.data: is not the data of an exported model net"
    ):
        export("net.onnx")
    Path("net.onnx.data").unlink()
    export("net.onnx")
    export("net.onnx")
    assert onnx.load("net.onnx").graph.initializer
    Path("link.onnx").symlink_to("net.onnx")
    with pytest.raises(FileError, match=r"link\.onnx: is a link"):
        export("link.onnx")


def test_a_topology_by_hand_is_not_overwritten(folder):
    assert "pair.yaml: expected a topology" in refused(folder, *IMPORT, "-o", "pair.yaml")
    probed = type("Probed", (), {"backend": "gloo", "torch": "2", "inferred": None})
    probed.inferred = type("Inferred", (), {"classes": (), "topology": None})
    probed.inferred.topology = type("Topology", (), {"devices": ()})
    comment = probe_comments(probed, "2026-01-01")[0]
    Path("probed.yaml").write_text(f"# {comment}\n")
    check_outputs({"topology": Path("probed.yaml")}, {})


# ------------------------------------------------------------------------------ inputs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*SIMULATE, "--trace", "s.json"), "s.json is the strategy itself"),
        ((*SIMULATE, "--svg", "p.json"), "p.json is the profile itself"),
        ((*SIMULATE, "--svg", "pair.yaml"), "pair.yaml is the topology itself"),
        (("simulate", "s.json", "--svg", "p.json"), "is the strategy's profile itself"),
        (("launch", "s.json", "--trace", "model.onnx"), "is the strategy's model itself"),
        (("launch", "s.json", "--trace", "p.json"), "is the strategy's profile itself"),
        (("compare-trace", "t.json", "both.json", "-o", "both.json"), "is the measured trace"),
        (("profile", "p.json", "--device", "V100-SXM2-16GB", "-o", "p.json"), "is the model"),
        ((*SOLVE, "-o", "hard.json"), "hard.json is the profile itself"),
        ((*SOLVE, "-o", "soft.json"), "soft.json is the profile itself"),
        (("convert", "p.json", "hard.json"), "would be overwritten by itself"),
        ((*SIMULATE, "--trace", "new", "--svg", "sub/../new"), "would be one file"),
        ((*SIMULATE, "--trace", "new", "--svg", "dangling"), "would be one file"),
    ],
)
def test_no_input_is_overwritten_by_any_path(folder, arguments, said):
    Path("sub").mkdir()
    os.link("p.json", "hard.json")
    Path("soft.json").symlink_to("p.json")
    Path("dangling").symlink_to("new")
    run(*SOLVE, "-o", "s.json")  # which names the model and the profile
    assert said in refused(folder, *arguments)


def test_weights_beside_a_model_are_not_overwritten(folder):
    onnx.save(onnx.load("model.onnx"), "big.onnx", save_as_external_data=True, location="big.data",
              size_threshold=0)  # fmt: skip
    assert "big.data: expected a profile" in refused(
        folder, "profile", "big.onnx", "--device", "T4", "-o", "big.data"
    )


# ------------------------------------------------------------------------------ disks and folders


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_full_disk_changes_nothing(folder, name):
    command, own = OUTPUTS[name]
    with full_disk(free_bytes=8):
        for target in (own, "new/folder/" + own):
            said = refused(folder, *command, target)
            assert "cannot be written: File too large" in said
            assert own in said.replace(".onnx", ".json")
    assert not Path("new").exists()


def test_a_full_disk_leaves_strategy_and_model_as_they_were(folder):
    run(*SOLVE, "-o", "s.json")
    half = (Path("s.json").stat().st_size + Path("s.onnx").stat().st_size) // 2
    small = min(Path("s.json").stat().st_size, Path("s.onnx").stat().st_size)
    assert small < half  # one of the two can be written, and must not be
    with full_disk(free_bytes=half):
        refused(folder, *SOLVE[:4], "even", *SOLVE[5:], "-o", "s.json")


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_missing_parent_is_made_and_a_file_in_its_place_said(folder, name):
    command, own = OUTPUTS[name]
    run(*command, f"new/folder/{own}")
    assert Path("new/folder", own).is_file()
    assert not [one for one in names(folder) if "/." in one or one.startswith(".")]
    assert f"{own} is no folder" in refused(folder, *command, f"{own}/x.json")


@pytest.mark.parametrize("name", ALL)
def test_a_folder_that_takes_no_files_is_refused(folder, name, monkeypatch):
    sealed = (folder / "sealed").resolve()
    sealed.mkdir(0o500)
    may = os.access
    # Root may write everywhere, but not on a disk that is mounted read-only.
    monkeypatch.setattr(os, "access", lambda path, how: Path(path) != sealed and may(path, how))
    command, _ = ALL[name]
    assert "takes no files of yours" in refused(folder, *command, "sealed/x.json")


def test_a_name_that_no_file_can_have_is_no_other_file(tmp_path):
    check_outputs({"trace": tmp_path / "x"}, {"model": Path("a\0b"), "profile": Path("a" * 9000)})


def test_two_outputs_of_one_kind_of_file_are_told_apart(tmp_path):
    with pytest.raises(OptionError, match="a trace and a picture would be one file"):
        check_outputs({"trace": tmp_path / "x", "picture": tmp_path / "x"}, {})
