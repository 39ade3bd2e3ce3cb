"""Real commands on damaged, hostile and odd files: one message, or a right answer, nothing else.
`make fuzz` runs all cases; `python -m tests.fuzz --only CASE` one of them.
"""

import os
import signal
import time
from random import Random

import pytest

from tests.fuzz.__main__ import described
from tests.fuzz.bugs import BUGS
from tests.fuzz.checks import problems, snapshot
from tests.fuzz.mutations.lines import mutated_lines
from tests.fuzz.mutations.octets import octets
from tests.fuzz.mutations.trees import mutated_json, mutated_yaml
from tests.fuzz.pool import Job, run_all
from tests.fuzz.runner import LIMITS, Limits, Outcome, run
from tests.fuzz.suites import ORDER, SUITES, suite_of
from tests.fuzz.texts import GRAPH_TXT, PIPER, TOPOLOGIES

WORKERS = min(2, os.cpu_count() or 1)
FINE = Outcome(code=0, signal=None, timed_out=False, seconds=0.1, stdout=b"done\n", stderr=b"")
REFUSED = Outcome(
    code=1, signal=None, timed_out=False, seconds=0.1, stdout=b"", stderr=b"Error: x\n"
)


def wrong_in(numbers, workers):
    """The cases with problems, described."""
    jobs = [Job(0, number) for number in numbers]
    return [described(report) for report in run_all(jobs, workers) if report.problems]


def test_the_first_100_cases_have_no_problem():
    assert wrong_in(range(100), 1) == []


@pytest.mark.slow
def test_5000_cases_have_no_problem():
    assert wrong_in(range(100, 5000), WORKERS) == []


@pytest.mark.slow
def test_each_suite_finds_a_mistake_that_is_put_into_the_package():
    found = set()
    jobs = (
        Job(1, number, Limits(seconds=5), name)
        for number in range(3000)
        for name, bug in BUGS.items()
        if suite_of(number) == bug.suite and name not in found
    )
    for report in run_all(jobs, WORKERS):
        if any(BUGS[report.job.bug].found in one for one in report.problems):
            found.add(report.job.bug)
    assert found == set(BUGS)
    assert {bug.suite for bug in BUGS.values()} == set(SUITES) == set(ORDER)


# ------------------------------------------------------------------------------ mutations


@pytest.mark.parametrize(
    ("mutation", "content"),
    [
        (mutated_json, PIPER),
        (mutated_yaml, TOPOLOGIES["cards"]),
        (mutated_lines, GRAPH_TXT),
        (octets, GRAPH_TXT),
    ],
)
def test_mutations_follow_from_the_seed_and_differ(mutation, content):
    made = [mutation(Random(seed), content.encode()) for seed in range(40)]
    assert made == [mutation(Random(seed), content.encode()) for seed in range(40)]
    assert len({one for one, _ in made}) > 30
    assert sum(one != content.encode() for one, _ in made) > 35


# ------------------------------------------------------------------------------ checks


def of(outcome, folder, *arguments, before=None):
    after = snapshot(folder)
    return problems(outcome, arguments, after if before is None else before, after, folder)


def with_(outcome, **changes):
    return Outcome(**{name: getattr(outcome, name) for name in outcome.__slots__} | changes)


def test_a_success_and_a_refusal_are_fine(tmp_path):
    assert of(FINE, tmp_path) == of(REFUSED, tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"timed_out": True, "code": None, "signal": 9}, "hangs"),
        ({"code": None, "signal": 11}, "ended by signal 11"),
        ({"code": 70}, "exit code 70"),
        ({"stderr": b""}, "no message"),
        ({"stderr": b"a\n" * 100}, "a message of 100 lines, 200 characters"),
        ({"stderr": b"Error: \x1b[31m\n"}, "control character '\\x1b' in the message"),
        ({"stderr": b"Error: \xff\n"}, "message is not UTF-8"),
        ({"stderr": b"Error: Unable to allocate 9 GiB\n"}, "no memory: Unable to allocate"),
        (
            {
                "stderr": b"Traceback (most recent call last):\n"
                b'  File "planner/artefacts/files.py", line 1, in read\n    boom\n'
                b"KeyError: 'a'\n"
            },
            "traceback: KeyError: 'a' in planner/artefacts/files.py read",
        ),
    ],
)
def test_a_bad_end_is_a_problem(tmp_path, changes, problem):
    assert of(with_(REFUSED, **changes), tmp_path) == [problem]


def test_files_left_and_inputs_changed_are_problems(tmp_path):
    (tmp_path / "in").write_text("a")
    before = snapshot(tmp_path)
    (tmp_path / "out").write_text("b")
    assert of(FINE, tmp_path, before=before) == []
    assert of(REFUSED, tmp_path, before=before) == ["left out after a failure"]
    (tmp_path / "in").write_text("other")
    assert of(FINE, tmp_path, before=before) == ["changed its input in"]


def test_no_number_and_no_json_in_results_are_problems(tmp_path):
    (tmp_path / "a.json").write_text('{"a": NaN}')
    (tmp_path / "b.yaml").write_text("a: inf\nb: info\n")
    (tmp_path / "c.json").write_text("{")
    found = of(FINE, tmp_path, before={})
    assert found[:2] == ["a.json: NaN is no JSON", "inf in b.yaml"]
    assert found[2].startswith("c.json: Expecting property name")
    assert of(with_(FINE, stdout=b'{"a": Infinity}'), tmp_path, "--json") == [
        "--json: Infinity is no JSON"
    ]
    assert of(with_(FINE, stdout=b"gap nan %"), tmp_path) == ["nan in the output"]


def test_pictures_and_texts_that_a_name_has_broken_are_problems(tmp_path):
    (tmp_path / "a.svg").write_text("<svg><text>a<b</text></svg>")
    (tmp_path / "b.yaml").write_text("name: a\x1b[31m\n")
    found = of(FINE, tmp_path, before={})
    assert found[0].startswith("a.svg: not well-formed")
    assert found[1:] == ["control character '\\x1b' in b.yaml"]


# ------------------------------------------------------------------------------ the process


@pytest.fixture
def command(tmp_path):
    """Runs a command of the planner, after something has happened in its process."""
    folder, aside = tmp_path / "case", tmp_path / "aside"
    folder.mkdir()
    aside.mkdir()

    def ask(*arguments, limits=LIMITS, before=None):
        return run(arguments, folder, aside, limits, before)

    return ask


def test_a_command_runs_in_a_process_of_its_own(command):
    outcome = command("--help")
    assert outcome.code == 0 and b"[OPTIONS] COMMAND" in outcome.stdout
    assert command("nothing").code == 2


def test_a_command_that_takes_too_long_is_killed(command):
    outcome = command("--help", limits=Limits(seconds=1), before=lambda: time.sleep(30))
    assert outcome.timed_out and outcome.signal == signal.SIGKILL


def test_a_command_that_takes_too_much_memory_has_a_memory_error(command):
    outcome = command("--help", before=lambda: bytearray(20 * 2**30))
    assert outcome.code == 70 and b"MemoryError" in outcome.stderr
