"""Every rule that discovery finds for ONNX's node tests, checked on real parts, forward and
backward: none is found that does not hold.

Numbers are fresh ones, of other seeds than those of the discovery; ONNX's have zeros.
"""

import pytest

from planner.model.load import load
from planner.profilers.rules.discover import operators_of
from planner.profilers.rules.trial import TooLargeError
from tests.support.conformance import cases, run, trainable
from tests.support.splits import check
from tests.test_conformance import smallest

EVERY = 5  # operator, in the fast test
SEED = 5
# Positions, among what an operator reads, of floats without a gradient in torch.
STILL = {
    "BatchNormalization": {3, 4},
    "NegativeLogLikelihoodLoss": {2},
    "SoftmaxCrossEntropyLoss": {2},
}


def checked(case, folder):
    """Problems, and how many rules and gradients were compared."""
    outcome = run(case, folder)
    if outcome.status != "passed":
        return [], 0, 0
    path = folder / "case.onnx"
    path.write_bytes(trainable(case, outcome.constants)[0].SerializeToString())
    problems, num_rules, num_gradients = [], 0, 0
    for one in operators_of(load(path))[:-1]:
        known = {}
        for split in one.discover(known):
            if split.rule.marks:
                continue  # tests/profilers/rules/test_parts.py
            num_rules += 1
            for n in (2, 3):
                if split.sizes is not None and n not in split.sizes:
                    continue
                try:
                    call, values, still = one.drawn(n, SEED)
                except TooLargeError:
                    continue
                try:
                    num_gradients += check(
                        one.own.type, call, one.made, values, split.line, n,
                        still={*still, *STILL.get(one.own.type, ())},
                    )  # fmt: skip
                except AssertionError as error:
                    reason = str(error).splitlines()[0]
                    problems.append(f"{case.name}: {split.line} on {n}: {reason}")
    return problems, num_rules, num_gradients


def totals(some, folder):
    problems, *numbers = zip(*(checked(case, folder) for case in some), strict=True)
    assert [one for part in problems for one in part] == []
    return map(sum, numbers)


def test_rules_of_the_smallest_cases_hold_forward_and_backward(tmp_path):
    num_rules, num_gradients = totals(list(smallest().values())[::EVERY], tmp_path)
    assert num_rules >= 50
    assert num_gradients >= 100


@pytest.mark.slow
def test_rules_of_all_cases_hold_forward_and_backward(tmp_path):
    plain = [case for case in cases() if "_expanded" not in case.name]
    num_rules, num_gradients = totals(plain, tmp_path)
    assert num_rules >= 2_500
    assert num_gradients >= 8_000


def test_a_rule_that_does_not_hold_is_noticed(tmp_path):
    case = smallest()["Relu"]
    path = tmp_path / "case.onnx"
    path.write_bytes(trainable(case, ())[0].SerializeToString())
    one = operators_of(load(path))[0]
    call, values, _ = one.drawn(2, SEED)
    assert check("Relu", call, one.made, values, "S0->S0", 2) == 1
    with pytest.raises(AssertionError):
        check("Relu", call, one.made, values, "P->P", 2)
