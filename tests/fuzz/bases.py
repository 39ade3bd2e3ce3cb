"""Valid files of all kinds, by name, made by the planner's own commands; the same bytes each time.

Making them runs most commands once, which loads and compiles what they need, so that the processes
forked later have it.
"""

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from tests.fuzz import models, texts


@cache
def bases() -> Mapping[str, bytes]:
    """All files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        _inputs(Path())
        _profiles()
        _strategies()
        _traces()
        _warm_up()
        return {
            str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()
        }


def run(*arguments: str) -> None:
    """Runs a command here, silently; it has to succeed."""
    import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main(list(arguments), prog_name="planner")
        except SystemExit as end:
            code = end.code
    if code:
        sys.exit(f"planner {' '.join(arguments)}\n{out.getvalue()}{err.getvalue()}")


def _inputs(folder: Path) -> None:
    """What people write."""
    for name in models.TEXTS:
        proto = models.model(name)
        (folder / f"{name}.onnx").write_bytes(proto.SerializeToString(deterministic=True))
    proto = models.model("mlp")
    (folder / "m.data").write_bytes(models.outside(proto, "m.data"))
    (folder / "outside.onnx").write_bytes(proto.SerializeToString(deterministic=True))
    for name, text in texts.TOPOLOGIES.items():
        (folder / f"{name}.yaml").write_text(text)
    for name, text in texts.CLUSTERS.items():
        (folder / f"{name}.cluster").write_text(text)
    (folder / "train.yaml").write_text(texts.CONFIG)
    (folder / "graph.txt").write_text(texts.GRAPH_TXT)
    (folder / "dnn.json").write_text(texts.DNN_PARTITIONING)
    (folder / "piper.json").write_text(texts.PIPER)


def _profiles() -> None:
    from planner.artefacts.calibration import Calibration, CalibrationFile, Deviation
    from planner.artefacts.files import (
        artefact_hash,
        calibration_path,
        read_profile,
        write_calibration,
        write_profile,
    )
    from planner.artefacts.profile import Contention, Source, WholeStep

    computed = ("--engine", "analytic", "--device", "T4")
    run("profile", "mlp.onnx", *computed, "--batch", "2", "-o", "mlp.json")
    run("profile", "cnn.onnx", *computed, "--batch", "1,2", "-o", "sizes.json")
    run("profile", "branches.onnx", *computed, "-o", "branches.json")
    plain = read_profile(Path("mlp.json"))
    # A measured profile would have other times each time.
    measured = replace(
        plain, source=Source.MEASURED, whole_step=WholeStep(1e-4, 1.1e-4),
        contention=Contention(4, {2: 1.1, 3: 1.3, 4: 1.5}),
    )  # fmt: skip
    write_profile(measured, Path("measured.json"))
    corrections = Calibration(
        device_type="T4", runs=2, models=1, forward=1.1, backward=0.9,
        deviations=(Deviation("MatMul", 0.1, -0.1),), launch_s=1e-5, post_s=1e-5,
    )  # fmt: skip
    known = CalibrationFile((artefact_hash(measured),), corrections, 0.2, 0.1, "run")
    write_calibration(known, calibration_path(Path("measured.json")))


def _strategies() -> None:
    plan = ("solve", "--topology", "levels.yaml", "--model", "mlp.onnx", "--profile", "mlp.json")
    run(*plan, "--gpus", "2", "--solver", "even", "--microbatches", "4", "-o", "two.json")
    run(*plan, "--gpus", "2", "--solver", "data-parallel", "--optimizer", "adam", "-o", "same.json")
    run(*plan, "--gpus", "1", "--solver", "single", "--microbatches", "2", "-o", "one.json")


def _traces() -> None:
    for name in ("two", "same"):
        run("simulate", f"{name}.json", "--profile", "mlp.json", "--topology", "levels.yaml",
            "--trace", f"{name}.predicted", "--svg", f"{name}.svg", "--gantt")  # fmt: skip
        trace = json.loads(Path(f"{name}.predicted").read_text())
        plan = json.loads(Path(f"{name}.json").read_text())
        del plan["format"]
        trace["otherData"]["plan"] = plan
        Path(f"{name}.measured").write_text(json.dumps(trace))


def _warm_up() -> None:
    """What the commands above do not load."""
    run("inspect", "mlp.onnx", "--batch", "2")
    quick = ("--no-cache", "--no-contention", "--repetitions", "1", "--budget", "1ms")
    for engine in ("torch", "onnxruntime"):
        run("profile", "mlp.onnx", "--batch", "2", "--engine", engine, *quick, "-o", "warm.json")
    run("launch", "one.json", "--steps", "1", "--trace", "warm.trace")
    run("solve", "--profile", "mlp.json", "--topology", "levels.yaml", "--time-limit", "1s")
    run("solve", "--profile", "dnn.json", "--cost-model", "dnn-partitioning")
    run("solve", "--profile", "piper.json", "--cost-model", "piper")
    run("solve", "--profile", "graph.txt", "--topology", "levels.yaml", "--cost-model", "pipedream")
    run("compare-trace", "two.predicted", "two.measured")
    run("convert", "two.json", "warm.txt", "--profile", "mlp.json")
    for name in texts.TOPOLOGIES:
        run("topology", "show", f"{name}.yaml", "--svg", "warm.svg")
    for path in Path().glob("warm.*"):
        path.unlink()
