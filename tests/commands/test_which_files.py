"""Which files the commands take, write and overwrite."""

import io
import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper

from planner.artefacts.files import read_plan, read_profile, shipped, write_profile
from planner.commands import terminal as printing
from tests.commands.test_cli import ROOT, TOPOLOGY, mlp
from tests.support.commands import run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a model and a topology of two devices."""
    monkeypatch.chdir(tmp_path)
    mlp(tmp_path / "model.onnx")
    (tmp_path / "pair.yaml").write_text(TOPOLOGY)
    return tmp_path


def profile(name, *arguments):
    return run("profile", name, "--repetitions", "1", "--budget", "1ms", *arguments)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ((), "model"),
        (("--batch", "2"), "model"),
        (("--dtype", "float32"), "model"),
        (("--dtype", "bfloat16"), "model-bfloat16"),
        (("--engine", "analytic"), "model-analytic"),
        (("--device", "T4"), "model-T4"),
        (("--device", "T4", "--dtype", "float16"), "model-T4-float16"),
    ],
)
def test_a_profile_of_another_device_type_or_engine_has_a_name_of_its_own(folder, options, name):
    assert f"wrote profiles/{name}.json" in profile("model.onnx", *options).output
    assert [path.stem for path in Path("profiles").iterdir()] == [name]


def test_a_rescaled_profile_does_not_replace_the_one_that_it_is_made_from(folder):
    profile("model.onnx")
    run("profile", "profiles/model.json", "--device", "T4")
    assert read_profile(Path("profiles/model-T4.json")).device_type == "T4"
    assert read_profile(Path("profiles/model.json")).device_type == "cpu"


def test_a_profile_that_answers_another_question_is_not_overwritten_silently(folder):
    mlp(folder / "model.onnx", batch=2)
    profile("model.onnx")
    assert "overwritten" not in profile("model.onnx").stderr
    mlp(folder / "model.onnx", batch=4)
    assert (
        "note: profiles/model.json was a profile of another model and microbatch size, and is"
        " overwritten" in profile("model.onnx").stderr
    )


def test_a_strategy_of_another_topology_is_not_overwritten_silently(folder):
    profile("model.onnx")
    plan = ("solve", "--solver", "even")
    assert "overwritten" not in run(*plan, "--topology", "pair.yaml").stderr
    assert "overwritten" not in run(*plan, "--topology", "pair.yaml").stderr
    (folder / "fast.yaml").write_text(TOPOLOGY.replace("1 GB/s", "2 GB/s"))
    again = run(*plan, "--topology", "fast.yaml").stderr
    assert "strategy.json was a strategy of another topology, and is overwritten" in again


def test_a_profile_is_found_by_its_name(folder):
    profile("model.onnx")
    run("solve", "--profile", "model", "--topology", "pair.yaml", "--solver", "even")
    assert read_plan(Path("strategy.json")).profile_path == "profiles/model.json"
    missing = run("solve", "--profile", "modell", "--topology", "pair.yaml", code=1)
    assert "no profile of that name: profiles/ has model, and bert, " in missing.output


def test_a_profile_that_ships_is_found_by_its_name_anywhere(folder):
    assert not Path("profiles").exists()
    run("solve", "--profile", "gpt2", "--topology", "p3", "--gpus", "1", "--solver", "even")
    plan = read_plan(Path("strategy.json"))
    assert (Path("strategy.json").parent / plan.profile_path).samefile(
        shipped("profiles") / "gpt2.json"
    )
    profile("model.onnx", "-o", "profiles/gpt2.json")
    run("solve", "--profile", "gpt2", "--topology", "pair.yaml", "--solver", "even")
    assert read_plan(Path("strategy.json")).profile_path == "profiles/gpt2.json"


def test_a_converted_profile_is_not_taken_for_the_model(folder):
    profile("model.onnx")
    run("convert", "profiles/model.json", "model.txt")
    run("convert", "model.txt", "profiles/vgg.json")
    os.utime("profiles/model.json", (1, 1))
    solved = run("solve", "--topology", "pair.yaml", "--solver", "even")
    assert "profile profiles/model.json" in solved.output


def test_among_profiles_of_several_models_none_is_taken_by_its_age(folder):
    profile("model.onnx")
    mlp(folder / "other.onnx", layers=3)
    profile("other.onnx")
    several = run("solve", "--topology", "pair.yaml", code=1).output
    assert "profiles of several" in several
    assert "--profile" in several
    run("solve", "--topology", "pair.yaml", "--solver", "even", "--model", "model.onnx")
    assert read_plan(Path("strategy.json")).profile_path == "profiles/model.json"
    # A strategy knows its model, so its own profile is found without a path, too.
    plain = json.loads(Path("strategy.json").read_text())
    plain["profile_path"] = None
    Path("strategy.json").write_text(json.dumps(plain))
    run("simulate", "strategy.json", "--topology", "pair.yaml")


def test_of_several_profiles_of_one_model_the_newest_is_taken(folder):
    profile("model.onnx")
    one = read_profile(Path("profiles/model.json"))
    write_profile(replace(one, threads=2), Path("profiles/other.json"))
    os.utime("profiles/model.json", (1, 1))
    solved = run("solve", "--topology", "pair.yaml", "--solver", "even")
    assert "profile profiles/other.json, the newest" in solved.output


def said_of(*arguments):
    """What solve says of the profile that it takes."""
    lines = run("solve", "--solver", "even", *arguments).output.splitlines()
    return [
        line for line in lines if line.startswith(("profile ", "note: older", "note: no profile"))
    ]


def test_of_the_profiles_for_the_types_of_the_topology_the_newest_is_taken(folder):
    (folder / "v100s.yaml").write_text(TOPOLOGY.replace("cpu", "V100-SXM2-16GB"))
    profile("model.onnx")
    profile("model.onnx", "--device", "V100-SXM2-16GB")  # the newest of all
    cpu = ["profile profiles/model.json, the newest for cpu in profiles/"]
    assert said_of("--topology", "pair.yaml") == cpu
    name = "profiles/model-V100-SXM2-16GB.json"
    v100 = [f"profile {name}, the newest for V100-SXM2-16GB in profiles/"]
    os.utime(name, (1, 1))
    assert said_of("--topology", "v100s.yaml") == v100
    assert said_of("--topology", "v100s.yaml", "--profile", "model") == []


def test_a_profile_for_another_type_is_told_with_the_command_for_the_right_one(folder):
    mlp(folder / "model.onnx", batch="batch")
    profile("model.onnx", "--batch", "4", "--device", "T4")
    name = "profile profiles/model-T4.json, the newest in profiles/"
    told, note = said_of("--topology", "pair.yaml")
    assert told == name
    assert note == (
        "note: no profile of this model in profiles/ is for cpu: the one taken is for T4, and its"
        " times are rescaled; to make one: planner profile model.onnx --dim batch=4"
    )
    run(*note.split(": ")[-1].split()[1:], "--repetitions", "1", "--budget", "1ms")
    assert said_of("--topology", "pair.yaml")[0].startswith("profile profiles/model.json")
    (folder / "v100s.yaml").write_text(TOPOLOGY.replace("cpu", "V100-SXM2-16GB"))
    assert said_of("--topology", "v100s.yaml")[-1].endswith("--device V100-SXM2-16GB")


def test_older_profiles_of_the_type_that_differ_are_named(folder):
    profile("model.onnx")
    one = read_profile(Path("profiles/model.json"))
    write_profile(one, Path("profiles/same.json"))
    write_profile(replace(one, dtype="bfloat16", threads=2), Path("profiles/short.json"))
    for age, name in enumerate(("model", "same", "short")):
        os.utime(f"profiles/{name}.json", (age, age))
    assert said_of("--topology", "pair.yaml") == [
        "profile profiles/short.json, the newest in profiles/",
        "note: older profiles there differ: same (type float32; number of threads 1), model (type"
        " float32; number of threads 1); to take one, give --profile, such as --profile same",
    ]
    os.utime("profiles/same.json", (9, 9))
    Path("profiles/short.json").unlink()
    assert said_of("--topology", "pair.yaml") == [
        "profile profiles/same.json, the newest in profiles/"
    ]


def test_a_plan_may_be_written_anywhere_though_the_weights_lie_beside_the_model(folder):
    Path("weights").mkdir()
    onnx.save(
        onnx.load("model.onnx"),
        "big.onnx",
        save_as_external_data=True,
        location="weights/big.data",
        size_threshold=0,
    )
    profile("big.onnx")
    run("solve", "--topology", "pair.yaml", "--solver", "even", "-o", "plans/a.json")
    copy = onnx.load("plans/a.onnx")  # refuses data outside of the folder, and links
    for mine, other in zip(
        onnx.load("model.onnx").graph.initializer, copy.graph.initializer, strict=True
    ):
        assert (numpy_helper.to_array(mine) == numpy_helper.to_array(other)).all()
    run("solve", "--topology", "pair.yaml", "--solver", "even", "-o", "plans/b.json")
    Path("plans/weights/big.data").write_bytes(b"of another model")
    refused = run(
        "solve", "--topology", "pair.yaml", "--solver", "even", "-o", "plans/c.json", code=1
    )
    assert "plans/weights/big.data: is not the data of" in refused.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_takes_no_files_is_refused_before_the_work(folder):
    Path("sealed").mkdir(mode=0o500)
    assert "takes no files" in profile_refused("sealed/model.json")


def test_a_path_below_a_file_is_refused_before_the_work(folder, monkeypatch):
    monkeypatch.setattr("planner.api.profile", lambda *args, **kwargs: pytest.fail("it began"))
    assert "model.onnx is no folder" in profile_refused("model.onnx/profile.json")


def profile_refused(path):
    return run("profile", "model.onnx", "-o", path, code=1).output


# ------------------------------------------------------------------------------ the terminal


def test_a_command_that_is_broken_can_be_pasted():
    line = "run it: torchrun --nproc-per-node 2 --no-python planner launch strategy.json"
    shown = printing.wrapped(line, 40)
    assert max(map(len, shown.splitlines())) <= 40
    pasted = shown.removeprefix("run it: ").replace("\\\n", " ")
    assert "\n" not in pasted
    assert pasted.split() == line.removeprefix("run it: ").split()


def on_terminal(*arguments, columns, redirected):
    """Standard error, on a terminal, of a command whose standard output may be redirected."""
    ours, theirs = pty.openpty()
    with Path("out.txt").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "cli.py"), *arguments],
            stdout=out if redirected else theirs,
            stderr=theirs,
            env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm"},
        )
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the terminal has no more writers
                break
            if not part:
                break
            shown += part
    assert process.wait() == 0
    os.close(ours)
    return shown.decode()


def test_progress_is_shown_also_where_only_the_output_is_redirected(folder):
    options = ("--repetitions", "1", "--budget", "1ms", "--json")
    shown = on_terminal("profile", "model.onnx", *options, columns=80, redirected=True)
    assert "Profiling model.onnx" in shown
    assert json.loads(Path("out.txt").read_text())["profile"] == "profiles/model.json"


def test_a_bar_begins_anew_where_less_is_done_than_before(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    with printing.bar("Profiling") as tick:
        tick(4, 4, " a")
        tick(1, 4, " b")
    last = re.findall(r"Profiling b .*", shown.getvalue())[-1]
    assert "25%" in last
    assert "-:--:--" in last  # not 0:00:00, which is that of what is finished


def test_no_word_of_a_note_is_cut_on_a_narrow_terminal(folder):
    # A computed profile: notes on measurements depend on the load of the machine.
    profile("model.onnx", "--device", "T4")
    shown = on_terminal(
        "solve", "--topology", "pair.yaml", "--solver", "even", columns=60, redirected=False
    )
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n").splitlines()
    assert "note: no profile of this model in profiles/ is for cpu:" in lines
    assert any(line.startswith("run it: ") for line in lines)
    assert max(map(len, lines)) <= 60
