"""An option of another cost model is refused, whichever function it is given to."""

import pytest

from planner.artefacts.options import Search, Training, WhatIf
from planner.planning.cost_models import COST_MODELS, ONLY_FOR, check_cost_model
from planner.solvers.manual import Manual
from planner.solvers.netsplit.options import NetSplit
from planner.support.errors import OptionError

GIVEN = {
    "solver": {"solvers": ("pipedream",)},
    "microbatch-size": {"training": Training(microbatch_size=2)},
    "set": {"what_if": WhatIf(set=("links.nic.latency=1us",))},
    "drop": {"what_if": WhatIf(drop=("gpu0",))},
    "add-host": {"what_if": WhatIf(add_host=("host0",))},
    "sensitivity": {"sensitivity": True},
    "refine": {"refine": True},
    "pin": {"search": Search(pins=(("a", "gpu0"),))},
    "schedule gpipe": {"training": Training(schedule="gpipe")},
    "no-contiguous": {"search": Search(switches=(NetSplit(contiguous=False),))},
    "bandwidth": {"bandwidth": "25 GiB/s"},
}


@pytest.mark.parametrize("cost_model", COST_MODELS)
@pytest.mark.parametrize("name", ONLY_FOR)
def test_an_option_is_taken_under_its_cost_models_alone(name, cost_model):
    if cost_model in ONLY_FOR[name]:
        check_cost_model(cost_model, **GIVEN[name])
        return
    models = " or ".join(ONLY_FOR[name])
    with pytest.raises(OptionError, match=f"--{name} is for --cost-model {models}, not for"):
        check_cost_model(cost_model, **GIVEN[name])


def test_options_of_solvers_that_need_them_are_for_the_planners_cost_model():
    search = Search(switches=(Manual(cuts=("a",)),))
    check_cost_model("planner", search=search)
    with pytest.raises(OptionError, match="--cuts is for --cost-model planner, not"):
        check_cost_model("piper", search=search)


def test_pipedreams_cost_model_asks_its_own_solver_alone():
    with pytest.raises(OptionError, match="asks only the solver pipedream"):
        check_cost_model("pipedream", solvers=("heft",))


def test_no_option_is_refused_where_none_is_given():
    for cost_model in COST_MODELS:
        check_cost_model(cost_model)
    with pytest.raises(OptionError, match="unknown cost model 'mine'; known: planner, pipedream"):
        check_cost_model("mine")
