"""The command line as a user meets it: help, the three commands, mistakes."""

import json
import os
import re
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import cli
from planner.artefacts.files import read_plan, shipped
from planner.commands import terminal as printing
from planner.reports.tables import Column, table
from planner.solvers.registry import SOLVERS, portfolio
from tests.support.commands import run

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(cli.main.commands)

TOPOLOGY = """
format: planner-topology/1
name: pair
device: cpu
levels: [{name: process, count: 2, bandwidth: 1 GB/s, latency: 50 us}]
"""


def mlp(path, layers=4, width=16, batch=2):
    """A chain of MatMul and Relu with weights drawn from a fixed seed."""
    import numpy as np

    rng = np.random.default_rng(0)
    nodes, weights, x = [], [], "x"
    for i in range(layers):
        weights.append(
            numpy_helper.from_array(
                rng.normal(size=(width, width)).astype(np.float32) / width**0.5, f"w{i}"
            )
        )
        nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [f"h{i}"], name=f"matmul{i}"))
        nodes.append(helper.make_node("Relu", [f"h{i}"], [f"r{i}"], name=f"relu{i}"))
        x = f"r{i}"
    graph = helper.make_graph(
        nodes[:-1],
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, width])],
        [helper.make_tensor_value_info(f"h{layers - 1}", TensorProto.FLOAT, [batch, width])],
        weights,
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a model and a topology of two devices."""
    monkeypatch.chdir(tmp_path)
    mlp(tmp_path / "model.onnx")
    (tmp_path / "pair.yaml").write_text(TOPOLOGY)
    return tmp_path


# ------------------------------------------------------------------------------ help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example_and_stands_in_the_readme(command):
    text = run(command, "--help").output
    assert f"planner {command}" in text
    assert f"planner {command}" in (ROOT / "README.md").read_text()


def test_every_option_is_explained_or_explains_itself():
    plain = {"objective", "schedule", "optimizer", "steps", "loss", "device", "seed"}
    for command in cli.main.commands.values():
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert parameter.help or parameter.name in plain, parameter.name


def test_help_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "import cli\n"
        "CliRunner().invoke(cli.main, ['--help'])\n"
        "print(sorted({'torch', 'numba', 'numpy', 'onnx', 'rich', 'networkx', 'pydantic'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "start",
    [
        ["-m", "planner"],
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "planner"],
    ],
    ids=["python", "torchrun"],
)
def test_the_package_is_the_command_beside_a_cli_of_the_user(tmp_path, start):
    (tmp_path / "cli.py").write_text("raise RuntimeError('the one of the user')")
    done = subprocess.run(
        [sys.executable, *start, "topology", "list"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    assert done.stdout == run("topology", "list").stdout


def test_the_help_of_solve_names_all_solvers():
    lines = cli.main.commands["solve"].epilog.splitlines()
    named = [line.split()[0] for line in lines[2:] if line[2] != " "]  # others go on with a summary
    assert named == list(SOLVERS)


# ------------------------------------------------------------------------------ the commands


def test_profile_then_solve_then_launch(folder):
    assert "wrote profiles/model.json" in run("profile", "model.onnx").output
    solved = run("solve", "--gpus", "2", "--topology", "pair.yaml", "--solver", "single")
    assert "profile profiles/model.json, the newest in profiles/" in solved.output
    assert "wrote strategy.json and strategy.onnx" in solved.output
    assert "run it: planner launch strategy.json" in solved.output
    launched = run("launch", "strategy.json", "--steps", "2")
    assert "Predicted and measured" in launched.output
    assert "2 steps, loss" in launched.output


def test_the_loss_is_told_recorded_and_overridden(folder):
    profiled = run("profile", "model.onnx", "--loss", "l1")
    assert "loss: l1 of " in profiled.output
    found = json.loads(run("profile", "model.onnx", "--loss", "l1", "--json").stdout)
    assert [one["function"] for one in found["losses"]] == ["l1"]
    run("solve", "--gpus", "2", "--topology", "pair.yaml", "--solver", "single")
    launched = run("launch", "strategy.json", "--steps", "1")
    assert "loss: l1 of " in launched.output
    launched = run("launch", "strategy.json", "--steps", "1", "--loss", "auto")
    assert "(chosen automatically)" in launched.output
    wrong = run("profile", "model.onnx", "--output", "profile.json", code=1).output
    assert "--output profile.json: expected an output of the model" in wrong
    wrong = run("launch", "strategy.json", "--loss", "l1", "--loss", "mse", code=2).output
    assert "once for each output as OUTPUT=VALUE" in wrong


def test_ranks_get_the_losses_of_their_launcher(folder, monkeypatch):
    started = []
    monkeypatch.setattr(
        "planner.api.start_launch",
        lambda path, nproc, options, **_: started.append(options) or 0,
    )
    options = ["--loss", "a=l1", "--loss", "b=mine:f", "--class-dim", "-1"]
    run("launch", "strategy.json", "--nproc", "2", *options)
    (given,) = started
    assert given[given.index("--loss") :][:6] == options


def test_commands_in_hints_can_be_pasted_into_a_shell(folder):
    Path("model.onnx").rename("my model.onnx")
    run("profile", "my model.onnx", "-o", "p.json")
    solved = run("solve", "--profile", "p.json", "--topology", "pair.yaml", "-o", "my plan.json")
    assert "run it: torchrun --nproc-per-node 2" in solved.output
    assert "planner launch 'my plan.json'" in solved.output
    mlp(Path("my model.onnx"), layers=3)
    wrong = run("solve", "--profile", "p.json", "--topology", "pair.yaml", code=1).output
    assert "planner profile 'my model.onnx'" in " ".join(wrong.split())


def test_a_strategy_without_a_model_is_not_said_to_run(folder):
    run("profile", "model.onnx", "-o", "p.json")
    Path("model.onnx").unlink()
    solved = run("solve", "--profile", "p.json", "--topology", "pair.yaml").output
    assert "no annotated model, because the model is not at hand" in solved
    assert "to run the strategy, solve again with --model FILE.onnx" in " ".join(solved.split())
    assert "run it" not in solved


def test_solve_prints_one_json_object_with_the_promised_fields(folder):
    run("profile", "model.onnx")
    done = run("solve", "--topology", "pair.yaml", "--json")
    found = json.loads(done.stdout)
    promised = {
        "status", "solver", "iteration_s", "bottleneck_s", "throughput", "bubble_fraction",
        "lower_bound_s", "gap", "space_bound_s", "peak_bytes", "num_stages", "stages", "solve_s",
        "reproducible", "strategy", "partition", "compared",
    }  # fmt: skip
    assert promised <= set(found)
    assert found["strategy"] == "strategy.json"
    assert found["partition"] == "strategy.onnx"
    assert len(found["peak_bytes"]) == 2
    assert found["iteration_s"] == min(
        row["iteration_s"] for row in found["compared"] if row["iteration_s"]
    )
    of_stages = {
        "devices", "prefetch_bytes", "process_bytes", "host_bytes", "num_operators", "forward_s",
        "backward_s",
    }  # fmt: skip
    assert set(found["stages"][0]) == of_stages


def test_launch_prints_one_json_object_as_its_last_line(folder):
    run("profile", "model.onnx")
    run("solve", "--topology", "pair.yaml", "--solver", "single")
    found = json.loads(
        run("launch", "strategy.json", "--steps", "3", "--json").output.splitlines()[-1]
    )
    assert found["steps"] == 3
    assert len(found["loss"]) == 3
    assert {"measured_iteration_s", "predicted_iteration_s", "peak_bytes"} <= set(found)


def test_several_devices_outside_torchrun_are_told_both_ways(folder):
    run("profile", "model.onnx")
    run("solve", "--topology", "pair.yaml", "--solver", "even")
    message = run("launch", "strategy.json", code=1).output
    assert "torchrun --nproc-per-node 2 --no-python planner launch strategy.json" in message
    assert "planner launch strategy.json --nproc 2" in message


def test_two_processes_give_the_same_bytes_and_never_import_torch(folder):
    run("profile", "model.onnx")
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "import cli\n"
        "done = CliRunner().invoke(cli.main, ['solve', '--topology', 'pair.yaml'])\n"
        "assert done.exit_code == 0, done.output\n"
        "print('torch' in sys.modules)"
    )
    written = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert done.stdout == "False\n"
        written.append([(folder / f"strategy.{end}").read_bytes() for end in ("json", "onnx")])
    assert written[0] == written[1]


def test_no_file_names_this_machine(folder):
    run("profile", "model.onnx")
    run("solve", "--topology", "pair.yaml")
    for name in ("profiles/model.json", "strategy.json", "strategy.onnx"):
        assert str(folder).encode() not in (folder / name).read_bytes()


def test_what_a_number_of_microbatches_or_a_global_batch_means(folder):
    run("profile", "model.onnx")  # two samples in a microbatch
    run("solve", "--topology", "pair.yaml")
    assert read_plan(Path("strategy.json")).strategy.num_microbatches == 8
    run("solve", "--topology", "pair.yaml", "--global-batch", "6")
    assert read_plan(Path("strategy.json")).strategy.num_microbatches == 3
    wrong = run("solve", "--topology", "pair.yaml", "--global-batch", "5", code=1)
    assert "--global-batch 5 is no multiple of the profile's microbatch of 2" in wrong.output


# ------------------------------------------------------------------------------ mistakes


def unwritten(folder):
    """No file but those of the user's: nothing half written."""
    return sorted(p.name for p in folder.iterdir()) == ["model.onnx", "pair.yaml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["profile", "missing.onnx"], "missing.onnx"),
        (["profile", "pair.yaml"], "pair.yaml"),
        (["profile", "model.onnx", "--dim", "rows=3"], "rows"),
        (["solve"], "profiles: there is no profile; run: planner profile MODEL.onnx"),
        (["solve", "--profile", "model.json"], "model.json: there is no such file"),
        (["solve", "--profile", "pair.yaml"], "pair.yaml"),
        (["launch", "strategy.json"], "strategy.json: there is no such file"),
    ],
)
def test_a_mistake_is_one_message_and_no_file(folder, arguments, said):
    result = run(*arguments, code=1)
    assert said in result.output
    assert "Traceback" not in result.output
    assert unwritten(folder)


@pytest.mark.parametrize(("operator", "domain", "version"), [("Wobble", "com.acme", 3)])
def test_an_unknown_operator_is_named_with_version_and_nodes(folder, operator, domain, version):
    model = onnx.load("model.onnx")
    model.graph.node[1].op_type = operator
    model.graph.node[1].domain = domain
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, version))
    onnx.save(model, "model.onnx")
    message = run("profile", "model.onnx", code=1).output
    for said in (operator, domain, str(version), "relu0"):
        assert said in message
    assert unwritten(folder)


def test_an_unbound_dimension_says_what_to_give(folder):
    mlp("model.onnx", batch="batch")
    assert "--batch" in run("profile", "model.onnx", "--device", "T4", code=1).output
    run("profile", "model.onnx", "--device", "T4", "--batch", "3")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("1 GB/s", "'1'", "levels[0].bandwidth: expected a rate such as '300 GB/s', got '1'"),
        ("1 GB/s", "1 GB", "levels[0].bandwidth: expected a rate such as '300 GB/s', got '1 GB'"),
        ("50 us", "50", "levels[0].latency: expected a time such as '5 us', got '50'"),
        ("device: cpu", "device: abacus", "unknown device type 'abacus'; known: "),
        ("count: 2, ", "", "levels[0].count: missing"),
        ("name: pair", "name: pair\nspeed: 3", "speed: unknown field"),
        ("planner-topology/1", "planner-topology/9", "expected 'planner-topology/1'"),
        ("levels: [", "levels: [[", "this is no YAML"),
    ],
)
def test_a_wrong_topology_says_which_field(folder, old, new, said):
    run("profile", "model.onnx")
    (folder / "pair.yaml").write_text(TOPOLOGY.replace(old, new))
    message = run("solve", "--topology", "pair.yaml", code=1).output
    assert said in message
    assert "pair.yaml" in message


def test_all_mistakes_of_a_file_are_told_at_once(folder):
    run("profile", "model.onnx")
    (folder / "pair.yaml").write_text(
        TOPOLOGY.replace("1 GB/s", "fast").replace("50 us", "soon").replace("count: 2", "cnt: 2")
    )
    message = run("solve", "--topology", "pair.yaml", code=1).output
    assert len(re.findall(r"levels\[0\]", message)) == 4


def test_an_unknown_topology_lists_the_presets(folder):
    run("profile", "model.onnx")
    message = run("solve", "--topology", "nowhere", code=1).output
    assert "no such topology" in message
    assert "p3" in message.split("presets")[1]


def test_more_gpus_than_there_are(folder):
    run("profile", "model.onnx")
    message = run("solve", "--gpus", "3", "--topology", "pair.yaml", code=1).output
    assert "topology pair has 2 devices, --gpus asks for 3" in message


def test_a_profile_of_another_model(folder):
    run("profile", "model.onnx")
    mlp(folder / "model.onnx", layers=3)
    message = run("solve", "--topology", "pair.yaml", code=1).output
    assert re.search(r"made for model \w{12}, but model.onnx is \w{12}; run: planner prof", message)
    assert not (folder / "strategy.json").exists()


def test_a_model_that_fits_nowhere_exits_with_3_and_says_what_is_short(folder):
    run("profile", "model.onnx")
    arguments = ["solve", "--topology", "pair.yaml", "--reserve", "0 B", "--device-memory"]
    message = run(*arguments, "1 KiB", code=3).output
    assert "no strategy fits" in message
    assert message.count("alone take") == 1
    assert message.count("does not fit") == len(portfolio())
    assert message.split("possible changes: ")[1] == (
        "more --device-memory, a model exported with a smaller batch than 2, more devices\n"
    )
    found = json.loads(run(*arguments, "1 KiB", "--json", code=3).stdout)
    assert found["status"] == "infeasible"
    assert "alone take" in found["reason"]
    assert found["strategy"] is None
    # Parameters fit, but no stage with its activations does.
    tight = json.loads(run(*arguments, "5 KiB", "--json", code=3).stdout)
    assert "the limit is 5 KiB" in tight["reason"]
    assert tight["shortage"] == tight["reason"]
    (inter,) = [row for row in tight["compared"] if row["solver"] == "inter-op"]
    assert inter["reason"] == "the devices do not make up equal parts of at least two"
    others = [row for row in tight["compared"] if row["solver"] != "inter-op"]
    assert all(row["shortage"] == row["reason"] for row in others)
    assert not (folder / "strategy.json").exists()


def test_possible_changes_are_none_that_the_question_has_already(folder):
    mlp(folder / "model.onnx", batch="batch")
    run("profile", "model.onnx", "--batch", "2")
    asked = ("--optimizer", "adam", "--recompute", "none", "--reserve", "99 TiB")
    message = run("solve", "--topology", "pair.yaml", *asked, code=3).output
    assert message.split("possible changes: ")[1] == (
        "a smaller --reserve, devices with more memory, --optimizer sgd or momentum,"
        " --recompute auto, a smaller --batch than 2 when profiling, more devices\n"
    )


def test_usage_errors_exit_with_2(folder):
    assert "such as '80 GiB'" in run("solve", "--device-memory", "8", code=2).output
    nothing = run("solve", "--device-memory", "0 GiB", code=2).output
    assert "expected a size above 0 such as \"8 GiB\", got '0 GiB'" in nothing
    run("solve", "--schedule", "zigzag", code=2)
    run("profile", code=2)


def test_an_unknown_solver_lists_the_known_ones(folder):
    run("profile", "model.onnx")
    message = run("solve", "--topology", "pair.yaml", "--solver", "magic", code=1).output
    assert f"unknown solver 'magic'; known: {', '.join(SOLVERS)}" in message


PROFILES = sorted(path.name for path in shipped("profiles").glob("*.json"))
# The profiles of a model on other types of devices differ in their times alone.
QUICK = [
    name
    if name.partition("-")[2] in ("", "a100.json")
    else pytest.param(name, marks=pytest.mark.slow)
    for name in PROFILES
]


def solved(name, preset, *options):
    """What `planner solve` says of a shipped profile, on two devices, and on eight if it was
    computed for a type of device: two do not hold the largest.
    """
    arguments = ["--profile", str(shipped("profiles") / name), "--topology", preset]
    devices = "8" if "-" in name else "2"
    return json.loads(run("solve", *arguments, "--gpus", devices, *options, "--json").stdout)


@pytest.mark.parametrize("name", QUICK)
def test_every_shipped_profile_solves(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert solved(name, "p3dn" if "-" in name else "p3", "--time-limit", "2s")["gap"] >= 0


@pytest.mark.parametrize("name", PROFILES)
def test_every_shipped_profile_has_plain_plans_on_every_kind_of_device(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for preset in ("p3dn",) if "-" in name else ("p3", "p3-8xlarge", "local"):
        assert solved(name, preset, "--solver", "even", "--solver", "data-parallel")["gap"] >= 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["profile", "model.onnx", "-o", "sub/../model.onnx"], "is the model itself"),
        (["solve", "-o", "profiles/model.json"], "is the profile itself"),
        (["solve", "-o", "pair.yaml"], "is the topology itself"),
        (["solve", "-o", "model.json"], "model.onnx is the model itself"),
        (["solve", "-o", "plan.ONNX"], "expected a name such as plan.json"),
        (["solve", "-o", "."], "is a folder"),
        (["launch", "model.onnx", "--trace", "model.onnx"], "this is a binary file"),
    ],
)
def test_no_output_overwrites_what_is_read(folder, monkeypatch, arguments, said):
    (folder / "sub").mkdir()
    run("profile", "model.onnx")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr("planner.profilers.engines.measure", lambda *_, **__: pytest.fail())
    monkeypatch.setattr("planner.planning.portfolio.compare", lambda *_: pytest.fail())
    more = ["--topology", "pair.yaml"] if arguments[0] == "solve" else []
    assert said in run(*arguments, *more, code=1).output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("number", ["²", "0", "-1", "x", ""])
def test_a_dimension_needs_a_number(folder, number):
    said = run("profile", "model.onnx", "--dim", f"N={number}", code=2).output
    assert f"N: expected a whole number of at least 1, got '{number}'" in said


def test_a_dimension_is_bound_once(folder):
    message = run("profile", "model.onnx", "--dim", "N=3", "--dim", "N=4", code=2).output
    assert "N is given more than once" in message


def test_ranks_get_options_that_are_zero(folder, monkeypatch):
    got = []
    monkeypatch.setattr(
        "planner.api.start_launch", lambda _, __, more, **how: got.extend(more) or 0
    )
    monkeypatch.delenv("RANK", raising=False)
    run("launch", "s.json", "--nproc", "2", "--lr", "0", "--seed", "0", "--json")
    assert got[got.index("--lr") + 1] == "0.0"
    assert got[got.index("--seed") + 1] == "0"
    assert "--json" in got and "--trace" not in got


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["profile", "model.onnx"], "planner.model.load.load"),
        (["solve"], "planner.api.lookup.newest_profile"),
        (["launch", "strategy.json"], "planner.artefacts.files.read_plan"),
    ],
)
def test_control_c_is_one_word_and_exits_with_130(folder, monkeypatch, arguments, where):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(where, interrupted)
    assert run(*arguments, code=130).output == "stopped\n"


def test_an_output_that_cannot_be_written_is_one_line(folder):
    message = run("profile", "model.onnx", "-o", "pair.yaml/model.json", code=1).output
    assert re.fullmatch(r"Error: pair\.yaml.+\n", message)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(folder):
    run("profile", "model.onnx")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, str(ROOT / "cli.py"), "solve", "--topology", "pair.yaml"],
            cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "Error: No space left on device\n")


def test_an_annotated_model_of_an_earlier_strategy_is_noted(folder):
    run("profile", "model.onnx")
    run("solve", "--topology", "pair.yaml")
    (folder / "model.onnx").unlink()
    note = "note: strategy.onnx is of an earlier strategy; delete it"
    assert note in run("solve", "--topology", "pair.yaml").output
    done = run("solve", "--topology", "pair.yaml", "--json")
    assert json.loads(done.stdout)["partition"] is None
    assert note in done.stderr


def test_commands_to_run_are_quoted_for_a_shell(folder):
    run("profile", "model.onnx")
    done = run("solve", "--topology", "pair.yaml", "--solver", "even", "-o", "my plan.json")
    assert "planner launch 'my plan.json'\n" in done.output
    assert "planner launch 'my plan.json' --nproc 2\n" in done.output


@pytest.mark.parametrize("width", [160, 80, 60])
def test_a_narrow_table_breaks_no_number_and_no_name(capsys, monkeypatch, width):
    monkeypatch.setattr(printing, "PIPED_WIDTH", width)
    cells = ("data-parallel", "12.3 ms", "123 ms", "1234 ms", "does not fit into the memory")
    columns = (
        Column("", itemgetter(0), "solver", left=True),
        Column("", itemgetter(1), "iteration"),
        Column("", itemgetter(2), "peak memory", gives_way=2),
        Column("", itemgetter(3), "closed form of it all", gives_way=1),
        Column("", itemgetter(4), "why it is so", left=True),
    )
    printing.show(table("T", [cells], columns))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert {*["data-parallel", "12.3", "does", "not", "fit", "into", "the", "memory"]} <= {
        *shown.split()
    }
    assert "12.3 ms" in shown


def test_words_are_aligned_to_the_left_and_numbers_to_the_right(capsys):
    columns = (
        Column("", itemgetter(0), "n", left=True),
        Column("", itemgetter(1), "m"),
        Column("", itemgetter(2), "w", left=True),
    )
    printing.show(table("", [("a", 1, "x"), ("bbb", 100, "yyy")], columns))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "  n       m   w"
    assert lines[2:] == ["  a       1   x", "  bbb   100   yyy"]


def test_a_table_without_room_leaves_out_what_matters_least(capsys, monkeypatch):
    monkeypatch.setattr(printing, "PIPED_WIDTH", 30)
    columns = (
        Column("", itemgetter(0), "a", left=True),
        Column("", itemgetter(1), "b", gives_way=2),
        Column("", itemgetter(2), "c"),
        Column("", itemgetter(3), "d", gives_way=1),
    )
    printing.show(table("", [("x" * 12, "1" * 9, "2" * 9, "3" * 9)], columns))
    shown = capsys.readouterr().out
    assert "1" not in shown
    assert "2" * 9 in shown
    assert "3" not in shown
    assert "not shown, for lack of room: d, b" in shown


@pytest.mark.parametrize("name", ["rank 0", "rank 0 on a host with a long name"])
@pytest.mark.parametrize("width", [28, 40, 60, 200])
def test_no_number_is_cut_however_narrow_the_terminal(name, width, capsys, monkeypatch):
    monkeypatch.setattr(printing, "PIPED_WIDTH", width)
    cells = ("12.3 ms / 45.6 ms", "1234567", "101.25 MiB", "7,654,321")
    columns = (
        Column("", itemgetter(0), "", left=True),
        *(Column("", itemgetter(i), f"{i}. figure") for i in range(1, len(cells) + 1)),
    )
    printing.show(table("T", [(name, *cells)], columns))
    shown = capsys.readouterr().out
    assert all(shown.count(cell) == 1 for cell in cells)
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("rank", [None, "1"])
def test_a_rank_leaves_without_pythons_clean_up_and_with_all_its_output(rank):
    code = (
        "import atexit, sys\n"
        "from planner.commands.errors import ranks_leave_at_once\n"
        "atexit.register(print, 'cleaned up')\n"
        "with ranks_leave_at_once():\n"
        "    print('said')\n"
        "    sys.exit(3)\n"
    )
    environment = {**os.environ} if rank is None else {**os.environ, "RANK": rank}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == ("said\ncleaned up\n" if rank is None else "said\n")


def test_of_thousands_of_mistakes_some_are_shown(folder):
    wrong = f"{'x' * 1200} slots=0\n"
    (folder / "hostfile").write_text(wrong * 3000)
    how = ("--from", "hostfile", "--device", "T4", "-o", "new.yaml")
    lines = run("topology", "import", "hostfile", *how, code=1).output.splitlines()
    assert len(lines) == 20 and lines[-2] == "and 2981 more lines"
    assert lines[0].startswith("Error: hostfile: line 1: expected HOST slots=N")
    assert max(map(len, lines)) < 1100


def test_ranks_get_flags_that_are_off_and_modules_of_operators(folder, monkeypatch):
    got = []
    monkeypatch.setattr(
        "planner.api.start_launch", lambda _, __, more, **how: got.extend(more) or 0
    )
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("PLANNER_OPERATORS", "")
    run("launch", "s.json", "--nproc", "2", "--no-shuffle", "--operators", "json")
    assert "--no-shuffle" in got and os.environ["PLANNER_OPERATORS"] == "json"
    got.clear()
    run("launch", "s.json", "--nproc", "2")
    assert "--shuffle" in got and "--no-shuffle" not in got


def test_activations_wait_in_the_hosts_memory_where_a_topology_links_it(folder):
    profile = str(ROOT / "profiles" / "gpt2-medium-a100.json")
    asked = ("--profile", profile, "--solver", "data-parallel", "--microbatch-size", "1")
    refused = run("solve", *asked, "--topology", "pair.yaml", "--offload", "yes", code=1).output
    assert "has no host_link" in refused and "Traceback" not in refused
    (folder / "linked.yaml").write_text(
        "format: planner-topology/1\nname: linked\n"
        "hosts: [{name: host0, host_link: {bandwidth: 12 GB/s, devices: 2}}]\n"
        "devices: [{name: gpu, count: 2, type: A100-SXM4-40GB, host: host0}]\n"
        "links: [{between: [gpu*, host0], bandwidth: 12 GB/s, latency: 5 us}]\n"
    )
    done = run("solve", *asked, "--topology", "linked.yaml", "--offload", "yes")
    assert "in host memory" in done.output
    plan = json.loads((folder / "strategy.json").read_text())
    (stage,) = plan["strategy"]["stages"]
    assert len(stage["offloaded"]) == 24 and not stage["recompute"]
    waiting = [one["memory"]["host_bytes"] for one in plan["prediction"]["devices"]]
    assert min(waiting) > 2**30
    shown = run("simulate", "strategy.json", "--topology", "linked.yaml", "--profile", profile)
    assert "in host memory" in shown.output
