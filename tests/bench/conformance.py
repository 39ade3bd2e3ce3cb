"""docs/operators.md: ONNX's backend node tests, by operator and version, as a table.

`make conformance` writes it: every test is loaded, converted and compared, and its gradients are
compared with finite differences.
"""

import tempfile
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import onnx
import torch

from planner.artefacts.operator_types import facts
from planner.model.expansion.control_flow import CONTROL_FLOW
from planner.model.expansion.inlining import INLINED_OPERATORS
from planner.model.expansion.sequences import SEQUENCE_OPERATORS
from tests.support.conformance import cases, run, slope

FILE = Path(__file__).parents[2] / "docs" / "operators.md"
BEGIN, END = "<!-- made by make conformance -->\n", "<!-- end -->\n"
MAX_SLOPES = 4  # gradients compared per operator and version

_NARROW = "floating point of 8 bits and less, and integers of 4 and 2 bits, are not trained"
_RANDOM = "other random numbers than numpy's"

EXPLAINED = {
    "test_bernoulli*": _RANDOM,
    "test_cast_*": _NARROW,
    "test_castlike_*": _NARROW,
    "test_dequantizelinear_*": _NARROW,
    "test_dft_inverse*": "an imaginary part of 0 in ONNX's double precision is 1e-6 in float32",
    "test_equal_string*": "texts are no tensors in torch",
    "test_quantizelinear_*": _NARROW,
    "test_scan_sum": "Scan of version 8, which has a batch, is another operator",
    "test_training_dropout*": _RANDOM,
}
"""Tests that do not pass, and why; beside those of operators that are refused."""


@dataclass(frozen=True)
class Row:
    """What became of the tests of an operator since one version.

    Attributes:
        outcomes: of its tests.
        slopes: comparisons of gradients.
    """

    outcomes: tuple
    slopes: tuple


def reason(outcome):
    """Why a test does not pass, if that is known; else None."""
    for pattern, why in EXPLAINED.items():
        if fnmatchcase(outcome.case.name, pattern):
            return why
    return facts(outcome.case.type).refused or None


def way(operator):
    """How the planner runs an operator."""
    if operator in INLINED_OPERATORS:
        return "inlined"
    if operator in CONTROL_FLOW or operator in SEQUENCE_OPERATORS:
        return "expanded"
    return "function" if facts(operator).function is not None else "none"


def standard():
    """The operators of ONNX's own domain that are not deprecated."""
    newest = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.domain:
            known = newest.get(schema.name)
            if known is None or known.since_version < schema.since_version:
                newest[schema.name] = schema
    return sorted(name for name, schema in newest.items() if not schema.deprecated)


def rows(folder):
    """Every test, by operator and version."""
    outcomes = defaultdict(list)
    for case in cases():
        outcomes[case.type, case.version].append(run(case, folder))
    return {
        key: Row(tuple(some), tuple(slopes(some, folder))) for key, some in sorted(outcomes.items())
    }


def slopes(outcomes, folder):
    """The gradients of the first tests that pass and are not too large."""
    found = []
    for outcome in outcomes:
        if len(found) == MAX_SLOPES or outcome.status != "passed":
            continue
        if "_expanded" not in outcome.case.name and (one := slope(outcome, folder)) is not None:
            found.append(one)
    return found


def line(key, row):
    """A row of the table."""
    count = Counter(outcome.status for outcome in row.outcomes)
    found = Counter(one.status for one in row.slopes)
    gradient = "agrees" if found["agrees"] else "none" if found["none"] else "-"
    gradient = "differs" if found["differs"] else gradient
    constants = {n for o in row.outcomes if o.status == "passed" for n in o.constants}
    remarks = dict.fromkeys(reason(o) or o.message for o in row.outcomes if o.status != "passed")
    remarks = [*remarks, f"constant: {', '.join(sorted(constants))}" if constants else ""]
    remark = "; ".join(filter(None, remarks)).replace("|", "/").replace("\n", " ")
    counts = [len(row.outcomes), *(count[one] for one in ("passed", "failed", "refused"))]
    cells = [*key, way(key[0]), *counts, gradient, remark]
    return f"| {' | '.join(map(str, cells))} |\n"


def text(found):
    """The generated part of the file."""
    types = standard()
    ways = Counter(map(way, types))
    outcomes = [outcome for row in found.values() for outcome in row.outcomes]
    count = Counter(outcome.status for outcome in outcomes)
    by_gradient = Counter(one.status for row in found.values() for one in row.slopes)
    known = len(types) - ways["none"]
    untested = [name for name in types if name not in {key[0] for key in found}]
    lines = [
        f"ONNX {onnx.__version__} defines {len(types)} operators that are not deprecated."
        f" {known} are supported: {ways['function']} by a function in torch,"
        f" {ways['expanded']} are expanded, {ways['inlined']} inlined by onnx. {ways['none']} are"
        " not:\n\n",
        "| operator | why it is not supported |\n|---|---|\n",
        *(f"| {name} | {facts(name).refused} |\n" for name in types if way(name) == "none"),
        f"\nOf {len(outcomes)} node tests, {count['passed']} pass, {count['failed']} fail and"
        f" {count['refused']} are refused with a message; every one that does not pass has its"
        f" reason in the table. Of {sum(by_gradient.values())} comparisons of gradients,"
        f" {by_gradient['agrees']} agree, {by_gradient['differs']} differ, and"
        f" {by_gradient['none']} find no path from a float input to a float output. ONNX has no"
        f" node test of {', '.join(untested)}.\n\n",
        "| operator | version | by | tests | passed | failed | refused | gradient | remarks |\n",
        "|---|---|---|---|---|---|---|---|---|\n",
        *(line(key, row) for key, row in found.items()),
    ]
    return "".join(lines)


def main():
    """Writes the file, and prints what is not explained."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rows(Path(folder))
    before, rest = FILE.read_text().split(BEGIN)
    FILE.write_text(before + BEGIN + text(found) + END + rest.split(END)[1])
    for outcome in (outcome for row in found.values() for outcome in row.outcomes):
        if outcome.status != "passed" and reason(outcome) is None:
            print(outcome.case.name, outcome.status, outcome.message)
    for key, row in found.items():
        for one in row.slopes:
            if one.status == "differs":
                print(*key, one.message)


if __name__ == "__main__":
    main()
