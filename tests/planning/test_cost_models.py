"""Who takes which option: a cost model, and a solver that is asked. Others refuse it, from Python
and on the command line.
"""

import pytest

import cli
from planner.artefacts.options import Search, Training, WhatIf
from planner.planning.cost_models import (
    COST_MODELS,
    TAKEN_BY,
    asked_solvers,
    check_cost_model,
    solvers_with,
)
from planner.solvers.manual import Manual
from planner.solvers.netsplit.options import NetSplit, Pesto
from planner.solvers.registry import SOLVERS, automatic, portfolio
from planner.solvers.sharded.options import Megatron
from planner.support.errors import OptionError
from tests.support.commands import run

FILES = ("--profile", "gpt2", "--topology", "p3", "--gpus", "2")
GIVEN = {
    "--solver": {"solvers": ("pipedream",)},
    "--microbatches": {"training": Training(microbatches=2)},
    "--microbatch-size": {"training": Training(microbatch_size=2)},
    "--schedule gpipe": {"training": Training(schedule="gpipe")},
    "--schedule pipedream": {"training": Training(schedule="pipedream")},
    "--objective latency": {"training": Training(objective="latency")},
    "--recompute full": {"training": Training(recompute="full")},
    "--recompute selective": {"training": Training(recompute="selective")},
    "--set": {"what_if": WhatIf(set=("links.nic.latency=1us",))},
    "--drop": {"what_if": WhatIf(drop=("gpu0",))},
    "--add-host": {"what_if": WhatIf(add_host=("host0",))},
    "--sensitivity": {"sensitivity": True},
    "--refine": {"refine": True},
    "--pin": {"search": Search(pins=(("a", "gpu0"),))},
    "--exact": {"search": Search(exact=True)},
    "--bandwidth": {"bandwidth": "25 GiB/s"},
    "--relaxed": {"search": Search(switches=(NetSplit(relaxed=True),))},
    "--cuts": {"search": Search(switches=(Manual(cuts=("a",)),))},
    "--pesto-printed": {"search": Search(switches=(Pesto(pesto_printed=True),))},
}
P, D = ("planner",), ("planner", "pipedream")
TAKEN = {
    "--solver": D, "--microbatches": (*D, "piper"), "--microbatch-size": D, "--schedule gpipe": P,
    "--schedule pipedream": D, "--objective latency": P, "--recompute full": (*D, "piper"),
    "--recompute selective": D,
    "--set": D, "--drop": D, "--add-host": D, "--sensitivity": D, "--refine": P, "--pin": P,
    "--exact": (*P, "dnn-partitioning", "piper"), "--bandwidth": ("piper",), "--relaxed": P,
    "--cuts": P, "--pesto-printed": P,
}  # fmt: skip


@pytest.mark.parametrize("cost_model", COST_MODELS)
@pytest.mark.parametrize("flag", GIVEN)
def test_an_option_is_taken_under_its_cost_models_alone(flag, cost_model):
    if cost_model in TAKEN[flag]:
        check_cost_model(cost_model, **GIVEN[flag])
        return
    models = " or ".join(TAKEN[flag])
    with pytest.raises(OptionError, match=f"{flag} is for --cost-model {models}, not for"):
        check_cost_model(cost_model, **GIVEN[flag])


def test_placements_alone_have_a_seed_and_an_engine_under_dnn_partitioning():
    engine, contiguous = NetSplit(engine="cp-sat"), NetSplit(engine="cp-sat", contiguous=False)
    check_cost_model("dnn-partitioning", search=Search(seed=1, switches=(contiguous,)))
    for search in (Search(seed=1), Search(switches=(engine,))):
        with pytest.raises(OptionError, match="or for dnn-partitioning with --no-contiguous"):
            check_cost_model("dnn-partitioning", search=search)


def test_pipedreams_cost_model_asks_its_own_solver_alone():
    with pytest.raises(OptionError, match="asks only the solver pipedream"):
        check_cost_model("pipedream", solvers=("heft",))


def test_no_option_is_refused_where_none_is_given():
    for cost_model in COST_MODELS:
        check_cost_model(cost_model)
    with pytest.raises(OptionError, match="unknown cost model 'mine'; known: planner, pipedream"):
        check_cost_model("mine")


def test_the_table_names_options_of_solve():
    names = {parameter.name for parameter in cli.main.commands["solve"].params}
    assert {name for name in TAKEN_BY if not name.startswith("--")} <= names


def test_an_option_of_one_solver_is_taken_where_this_solver_is_asked():
    tensors = Search(switches=(Megatron(tensor_degree=2),))
    assert asked_solvers(None, portfolio(), tensors) == portfolio()
    assert asked_solvers(["megatron"], portfolio(), tensors) == ("megatron",)
    for solvers, usual in ((["single"], portfolio()), (None, portfolio(rules=False))):
        with pytest.raises(OptionError, match="--tensor-degree is for the solver megatron, which"):
            asked_solvers(solvers, usual, tensors)
    with pytest.raises(OptionError, match="for the solvers pesto and netsplit, neither of which"):
        asked_solvers(["antichain"], portfolio(), Search(seed=1))


def test_the_users_own_stages_are_asked_for_where_no_other_solver_is():
    cuts = Search(switches=(Manual(("a",)),))
    assert "manual" not in asked_solvers(None, automatic(), Search())
    assert asked_solvers(None, ("single",), cuts) == ("single", "manual")
    assert asked_solvers(("single", "manual"), (), cuts) == ("single", "manual")
    with pytest.raises(
        OptionError, match=r"--cuts is for the solver manual, .* add --solver manual"
    ):
        asked_solvers(("netsplit",), (), cuts)


def test_an_empty_list_of_solvers_is_refused():
    with pytest.raises(OptionError, match="solvers: expected at least one name, got none"):
        asked_solvers([], portfolio(), Search())


def test_every_solver_has_options_that_the_table_knows():
    for name, solver in SOLVERS.items():
        for field in solver.searches:
            assert name in solvers_with(field)
            assert hasattr(Search(), field)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        # As by default, and given all the same.
        (("--solver", "single", "--zero-stage", "3"), "--zero-stage is for the solver zero, which"),
        (("--solver", "heft", "--cuts", "a"), "--cuts is for the solver manual, which is not"),
        (("--pesto-printed",), "--pesto-printed is for the solver pesto, which is not asked; add"),
        (("--cost-model", "pipedream", "--relaxed"), "--relaxed is for --cost-model planner, not"),
        (("--cost-model", "piper", "--schedule", "1f1b"), "--schedule 1f1b is for --cost-model"),
        (("--cost-model", "piper", "-o", "s.json"), "-o is for --cost-model planner or pipedream"),
        (("--cost-model", "dnn-partitioning", "--no-calibration"), "--no-calibration is for"),
    ],
)
def test_the_command_line_refuses_what_nobody_would_take(given, said):
    assert said in " ".join(run("solve", *FILES, *given, code=1).output.split())


def test_compare_refuses_options_of_solvers_that_it_does_not_ask():
    said = run("compare", *FILES, "--solver", "single", "--relaxed", code=1).output
    assert "--relaxed is for the solver netsplit, which is not asked" in said
