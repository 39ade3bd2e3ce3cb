"""Plans by module: rows, their sums, and the tables and JSON of `--by-module`."""

import json
from dataclasses import replace

import numpy as np
import pytest

from planner.artefacts.files import write_profile
from planner.artefacts.options import Recompute
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.commands.terminal import draw
from planner.costs.by_operator import operator_costs
from planner.planning.portfolio import compare
from planner.reports.by_module import _lines, iteration_line, modules_json, modules_table
from planner.reports.modules import module_costs, modules_of
from planner.solvers.registry import SOLVERS
from planner.solvers.sharded.options import Megatron
from tests.support.commands import PAIR, run
from tests.support.split import mlp, one_stage
from tests.support.split_models import gpt, loaded, megatron
from tests.support.split_profiles import problem, profiled

BLOCKS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return loaded(gpt(tmp_path_factory.mktemp("modules") / "gpt.onnx", blocks=BLOCKS))


@pytest.fixture(scope="module")
def profile(model):
    """With the paths that PyTorch's exporter would write."""
    made, paths, at = profiled(model), [], "net.embed"
    for operator in made.graph.operators:
        held = [name for name in operator.parameters if name[0].isdigit()]
        for name in held:
            part = f"norm{name[2]}" if name[1] in "gc" else None
            inner = "mlp" if name[1:2] in "ud" else "attn"
            at = f"net.h.{name[0]}.{part or inner}"
        if "words" in operator.parameters and paths:
            at = "net.head"
        paths.append(at)
    return replace(made, modules=tuple(paths))


def split_by(profile, sharding, count=2):
    given = problem(profile, count, 2, recompute=Recompute.NONE)
    return given, one_stage(profile, sharding, [tuple(range(count))], 2)


def test_layers_that_are_alike_are_one_row(model, profile):
    rows = module_costs(*split_by(profile, megatron(model, 2)))
    found = {row.module: row for row in rows}
    assert list(found) == [
        "net.embed", "net.h.0-2.norm1", "net.h.0-2.attn", "net.h.0-2.norm2", "net.h.0-2.mlp",
        "net.head",
    ]  # fmt: skip
    assert found["net.h.0-2.mlp"].split == ((2, ("columns", "rows", "whole")),)
    assert "heads" in found["net.h.0-2.attn"].split[0][1]
    assert found["net.head"].split == ((2, ("whole",)),)
    assert found["net.h.0-2.norm1"].share == (1.0, 1.0, 1.0)
    assert found["net.head"].share is None  # the table is the embedding's


def test_a_layer_that_is_split_otherwise_has_a_row_of_its_own(model, profile):
    sharding = megatron(model, 2)
    other = {
        one.name
        for one, module in zip(profile.graph.operators, profile.modules, strict=True)
        if module == "net.h.1.mlp"
    }
    rules = {name: rule for name, rule in sharding.rules.items() if name not in other}
    lies = {name: one for name, one in sharding.parameters.items() if name[:2] not in ("1u", "1d")}
    rows = module_costs(*split_by(profile, replace(sharding, rules=rules, parameters=lies)))
    of_mlp = {row.module: row.split for row in rows if row.place == ("net.h.", ".mlp")}
    assert of_mlp == {
        "net.h.0,2.mlp": ((2, ("columns", "rows", "whole")),), "net.h.1.mlp": ((2, ("whole",)),)
    }  # fmt: skip


@pytest.mark.parametrize("solver", ["data-parallel", "even", "zero", "megatron", "intra-op"])
def test_rows_together_have_what_all_operators_cost(profile, solver):
    given = problem(profile, 4, 4, recompute=Recompute.NONE)
    strategy = SOLVERS[solver](given, 1.0).strategy
    rows, whole = module_costs(given, strategy), operator_costs(given, strategy)
    every = sorted(v for row in rows for v in row.operators)
    assert every == [*range(len(profile.operators))]
    for name in ("compute_s", "optimizer_s", "parameter_bytes"):
        total = sum(getattr(row.costs, name) for row in rows)
        assert total == pytest.approx(getattr(whole, name).sum())
    for name in ("collective_s", "received_bytes", "held_bytes"):
        total = sum(getattr(row.costs, name) for row in rows)
        assert np.allclose(total, getattr(whole, name).sum(axis=1))


def test_without_names_of_modules_parameters_give_them():
    assert modules_of(mlp()) == ("w0", "w1", "w1", "w2")
    assert modules_of(replace(mlp(), modules=("h.0.mlp.up",) * 4)) == ("h.0.mlp",) * 4
    # A parameter is of another module, and a layer without parameters has no parts.
    assert modules_of(replace(mlp(), modules=("w0", "h.0", "h.0", "head"))) == (
        "w0", "h.0", "h.0", "head"
    )  # fmt: skip


def test_layers_without_parts_have_those_of_their_parameters():
    plain = mlp()
    named = {"w0": "h.0.norm", "w1": "h.0.up.weight", "w2": "h.0.down"}
    operators = tuple(
        replace(one, parameters=tuple(named[name] for name in one.parameters))
        for one in plain.graph.operators
    )
    parameters = tuple(replace(one, name=named[one.name]) for one in plain.graph.parameters)
    graph = replace(plain.graph, operators=operators, parameters=parameters)
    found = modules_of(replace(plain, graph=graph, modules=("h.0",) * 4))
    assert found == ("h.0.norm", "h.0.up", "h.0.up", "h.0.down")


def compared(profile, *solvers, **options):
    given = problem(profile, 4, 4, recompute=Recompute.NONE, **options)
    return compare(given, solvers, 1.0, full_time=True)


def test_plans_beside_each_other_have_a_line_under_each_module_and_one_of_all(profile):
    found = compared(
        profile, "data-parallel", "megatron", switches=(Megatron(tensor_degree=4),)
    )  # fmt: skip
    rows = {row.solver: module_costs(row.problem, row.plan.strategy) for row in found.rows}
    shown = modules_table(rows)
    labels = [row[0] for row in shown.rows]
    assert labels[:3] == ["embed", "  data-parallel", "  megatron"]
    assert labels[-3:] == ["all modules", "  data-parallel", "  megatron"]
    splits = {
        (heading, label.strip()): row[1]
        for at, (label, row) in enumerate(zip(labels, shown.rows, strict=True))
        for heading in [next(one for one in labels[at::-1] if not one.startswith(" "))]
    }
    assert splits["h.0-2.mlp", "data-parallel"] == "4 replicas"
    assert splits["h.0-2.mlp", "megatron"].startswith("columns,rows")
    for row in found.rows:
        line = iteration_line(row.plan, rows[row.solver])
        assert line.startswith(f"{row.solver}, 1 stage, ")
        assert "of passes and steps" in line


def test_small_modules_and_those_beyond_the_limit_are_one_line(profile, monkeypatch):
    monkeypatch.setattr("planner.reports.by_module.MAX_ROWS", 2)
    (row,) = compared(profile, "data-parallel").rows
    rows = module_costs(row.problem, row.plan.strategy)
    shown = modules_table({"data-parallel": rows})
    labels = [line[0] for line in shown.rows]
    assert labels == ["h.0-2.attn", "h.0-2.mlp", "others", "all modules"]
    *parts, every = [line.costs.total_s for line in _lines({"data-parallel": rows})]
    assert sum(parts) == pytest.approx(every)


def test_layers_that_lie_apart_are_counted(profile):
    (row, *_) = module_costs(*split_by(profile, None, 1))
    some = replace(row, before="h.", behind=".attn", layers=(0, 2, 4, 6, 8))
    assert (some.module, some.label) == ("h.0,2,4,6,8.attn", "h.*.attn, 5 layers")
    assert replace(some, layers=(0, 1, 2, 5)).label == "h.0-2,5.attn"


def test_the_table_of_one_plan_fits_100_columns(profile):
    from rich.console import Console

    (row,) = compared(profile, "megatron", switches=(Megatron(tensor_degree=4),)).rows
    shown = modules_table({"megatron": module_costs(row.problem, row.plan.strategy)})
    kept = shown.only([one for one in shown.columns if not one.gives_way])
    screen = Console(width=100)
    assert screen.measure(draw(kept, tall=True)).minimum <= 100
    assert [row[0] for row in shown.rows][-1] == "all modules"


def test_stages_of_a_pipeline_share_rows(profile):
    names = [one.name for one in profile.graph.operators]
    cut = profile.modules.index("net.h.1.norm1")
    stages = (Stage.whole(tuple(names[:cut]), [0], 2, False),
              Stage.whole(tuple(names[cut:]), [1], 1, False))  # fmt: skip
    given = problem(profile, 2, 2, recompute=Recompute.NONE)
    found = {
        one.module: one
        for one in module_costs(given, Strategy(stages, ScheduleName.ONE_F_ONE_B, 2))
    }
    assert found["net.h.0-2.attn"].stages == (0, 1)
    assert found["net.embed"].costs.collective_s[2] > 0  # tied to the head


@pytest.fixture
def folder(tmp_path, monkeypatch, profile):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.yaml").write_text(PAIR)
    (tmp_path / "profiles").mkdir()
    write_profile(replace(profile, device_type="T4"), tmp_path / "profiles" / "gpt.json")
    return tmp_path


def test_compare_and_simulate_show_modules(folder):
    given = ["--topology", "pair.yaml", "--solver", "megatron", "--tensor-degree", "2"]
    run("solve", *given, "-o", "plan.json")
    text = run("simulate", "plan.json", "--by-module", "--topology", "pair.yaml").output
    for said in ("h.0-2.mlp", "columns,rows", "all modules", "held: parts of parameters"):
        assert said in text
    of_plan = json.loads(
        run("simulate", "plan.json", "--by-module", "--json", "--topology", "pair.yaml").stdout
    )["modules"]
    of_mlp = next(one for one in of_plan if one["module"] == "net.h.0-2.mlp")
    assert of_mlp["layers"] == [0, 1, 2]
    assert of_mlp["split"][-1]["devices"] == 2
    assert of_mlp["forward_s"] > 0 < of_mlp["forward_bytes"]
    also = [*given, "--solver", "single", "--by-module"]
    text = run("compare", *also).output
    assert "  megatron" in text.split("all modules")[0]
    rows = json.loads(run("compare", *also, "--json").stdout)["compared"]
    assert [one["module"] for one in rows[0]["modules"]] == [one["module"] for one in of_plan]
    assert "modules" not in json.loads(run("compare", *given, "--json").stdout)["compared"][0]


def test_json_has_all_figures(model, profile):
    (first, *_) = modules_json(module_costs(*split_by(profile, megatron(model, 2))))
    assert first.keys() >= {
        "module", "layers", "stages", "replicas", "split", "parameter_bytes", "share", "compute_s",
        "optimizer_s", "forward_s", "backward_s", "once_s", "forward_bytes", "backward_bytes",
        "once_bytes",
    }  # fmt: skip
    assert first["share"] == {"parameters": 1.0, "gradients": 1.0, "optimizer_state": 1.0}
    json.dumps(first)
