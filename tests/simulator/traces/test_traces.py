"""Traces on disk and side by side, and the clocks of the ranks."""

import json
from dataclasses import replace

import pytest

from planner.launcher import clocks
from planner.launcher.clocks import Clock, Reading, read_clock
from planner.reports.traces import trace_tables
from planner.schedules.actions import AllReduce, Compute, Direction, Step
from planner.simulator.timeline import Event, Timeline, Transfer
from planner.simulator.traces.comparison import compare_traces, overlay
from planner.simulator.traces.read import Trace, read_trace
from planner.simulator.traces.write import chrome_trace, write_trace
from planner.support.errors import FileError, OptionError
from tests.support.commands import run

NAMES = {0: "gpu0", 2: "gpu2"}
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def timeline(slow=1.0):
    """Two stages, a microbatch, a tensor with a strange name and its gradient, a sum, two steps."""
    events = (
        Event(0, Compute(FORWARD, 0, 0), 0.0, 0.001 * slow),
        Event(2, Compute(FORWARD, 1, 0), 0.004, 0.006),
        Event(2, Compute(BACKWARD, 1, 0), 0.006, 0.009),
        Event(2, AllReduce(0), 0.009, 0.014),
        Event(0, Compute(BACKWARD, 0, 0), 0.010, 0.012 + 0.001 * slow),
        Event(0, AllReduce(0), 0.013, 0.014),
        Event(0, Step(), 0.014, 0.015),
        Event(2, Step(), 0.014, 0.015),
    )
    transfers = (
        Transfer(0, 2, FORWARD, 0, "x:1/d", 0.001, 0.004, 4096),
        Transfer(2, 0, BACKWARD, 0, "x:1/d", 0.009, 0.010, 4096),
    )
    return Timeline(0.015, events, transfers, {0: ((0.0, 10), (0.001, 30))})


def approx(found):
    """Times are written to the ns."""
    return [
        (*(getattr(one, name) for name in one.__slots__ if not name.endswith("_s")),
         pytest.approx(one.start_s, abs=2e-9), pytest.approx(one.end_s, abs=2e-9))
        for one in found
    ]  # fmt: skip


def test_a_written_trace_reads_back(tmp_path):
    written = timeline()
    write_trace(written, NAMES, tmp_path / "trace.json")
    found = read_trace(tmp_path / "trace.json")
    assert found.names == NAMES and found.plan is None
    assert found.timeline.iteration_s == written.iteration_s
    assert found.timeline.memory == written.memory
    for side in ("events", "transfers"):
        before, after = getattr(written, side), getattr(found.timeline, side)
        assert [
            tuple(getattr(one, name) for name in one.__slots__ if not name.endswith("_s"))
            for one in after
        ] == [values[:-2] for values in approx(before)]
        assert [(one.start_s, one.end_s) for one in after] == [v[-2:] for v in approx(before)]


def slice_of(plain, kind="compute"):
    """The last slice of a kind in a trace."""
    return [one for one in plain["traceEvents"] if one.get("cat") == kind and one["ph"] == "X"][-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.pop("otherData"), "expected a trace of the planner"),
        (lambda plain: plain["otherData"].update(format="x/1"), "expected a trace of the planner"),
        (lambda plain: plain["otherData"].update(iteration_s="1"), r"iteration_s: .* got '1'"),
        (lambda plain: plain.update(traceEvents={}), "traceEvents: expected a list"),
        (lambda plain: plain["traceEvents"].append({"ph": "M"}), r"traceEvents\[\d+\]: no 'name'"),
        (lambda plain: plain["traceEvents"].append(7), r"traceEvents\[\d+\]: "),
        (
            lambda plain: plain["traceEvents"].append(
                {"ph": "X", "cat": "compute", "name": "0X0", "pid": 1, "tid": 1, "ts": 0, "dur": 1}
            ),
            "'0X0' is no action",
        ),
        (
            lambda plain: plain["traceEvents"].append(
                {"ph": "X", "cat": "sums", "name": "0F0", "pid": 1, "tid": 1, "ts": 0, "dur": 1}
            ),
            "'0F0' is in a track of sums",
        ),
        (
            lambda plain: plain["traceEvents"].append(
                {"ph": "X", "cat": "compute", "name": "O", "pid": 9, "tid": 1, "ts": 0, "dur": 1}
            ),
            "process 9 has no name",
        ),
        (lambda plain: plain["otherData"].update(iteration_s=float("nan")), "iteration_s: .* nan"),
        (
            lambda plain: plain["otherData"].update(iteration_s=10**400),
            "iteration_s: .* got a number",
        ),
        (
            lambda plain: slice_of(plain).update(ts=10**400),
            "ts: expected a time in us, got a number",
        ),
        (lambda plain: slice_of(plain).update(dur=float("inf")), "dur: expected a time in us"),
        (
            lambda plain: slice_of(plain).update(pid=10**400),
            "pid: expected 0 to 2147483647, got a number",
        ),
        (lambda plain: slice_of(plain).update(pid="1"), "pid: expected 0 to 2147483647, got '1'"),
        (lambda plain: slice_of(plain).update(name="9" * 400 + "F0"), "is no action"),
        (lambda plain: slice_of(plain, "transfer").update(args={"bytes": -1}), "bytes: expected"),
        (lambda plain: slice_of(plain, "transfer").update(name="9999999999:x"), "is no transfer"),
        (lambda plain: slice_of(plain, "transfer").update(tid=77), "track 77 of process 1 has no"),
        (
            lambda plain: plain["traceEvents"].append(plain["traceEvents"][0]),
            "expected one process",
        ),
        (lambda plain: plain["otherData"].update(note="\ud800"), "surrogates not allowed"),
    ],
)
def test_a_wrong_trace_is_one_message(tmp_path, change, message):
    plain = chrome_trace(timeline(), NAMES)
    change(plain)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(FileError, match=message) as error:
        read_trace(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)


def test_an_iteration_of_next_to_no_time_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    write_trace(timeline(), NAMES, path)
    plain = json.loads(path.read_text())
    plain["otherData"]["iteration_s"] = 1e-320
    path.write_text(json.dumps(plain))
    with pytest.raises(
        FileError, match="iteration_s: expected a time of 1 ns to 1e9 s, got 1e-320"
    ):
        read_trace(path)


def test_a_strategy_is_no_trace(tmp_path):
    (tmp_path / "strategy.json").write_text('{"format": "planner-strategy/1"}')
    with pytest.raises(FileError, match="make one with: planner launch"):
        read_trace(tmp_path / "strategy.json")
    (tmp_path / "none.json").write_text("{")
    with pytest.raises(FileError, match="this is no JSON"):
        read_trace(tmp_path / "none.json")


def test_predicted_and_measured_stand_side_by_side():
    found = compare_traces(Trace(timeline(), NAMES, None), Trace(timeline(2.0), NAMES, None))
    assert [(one.what, one.count) for one in found.stages] == [
        ("stage 0 forward", 1), ("stage 0 backward", 1), ("stage 1 forward", 1),
        ("stage 1 backward", 1),
    ]  # fmt: skip
    first = found.stages[0]
    assert (first.predicted_s, first.measured_s) == pytest.approx((0.001, 0.002))
    assert first.error == pytest.approx(-0.5)
    assert [(one.what, one.bytes) for one in found.links] == [
        ("gpu0 to gpu2", 4096), ("gpu2 to gpu0", 4096),
    ]  # fmt: skip
    # From when the last member has come.
    assert found.sums[0].predicted_s == pytest.approx(0.001)
    assert [one.what for one in found.steps] == ["step on gpu0", "step on gpu2"]


def test_a_time_that_was_measured_as_0_has_no_error():
    nothing = replace(timeline(), iteration_s=0.0)
    found = compare_traces(Trace(timeline(), NAMES, None), Trace(nothing, NAMES, None))
    assert trace_tables(found)[0].rows[0][-1] == "-"
    heads = [shown.heads for shown in trace_tables(found)]
    assert heads[0] == ("", "count", "predicted", "measured", "error")
    assert heads[-1] == ("", "predicted", "measured", "error")


def test_traces_of_different_strategies_are_refused():
    other = timeline()
    other = replace(other, events=(*other.events, Event(0, Compute(FORWARD, 0, 1), 1.0, 2.0)))
    with pytest.raises(OptionError, match="only the predicted one has 0F1 on gpu0"):
        compare_traces(Trace(other, NAMES, None), Trace(timeline(), NAMES, None))


def test_parts_of_runs_without_gaps_are_refused():
    steps = tuple(Event(0, Step(), float(i), i + 0.5) for i in range(2))
    part = Trace(replace(timeline(), events=steps), NAMES, None)
    with pytest.raises(OptionError, match="a trace of the schedule pipedream is a part of a run"):
        compare_traces(part, part)


def test_a_trace_with_a_missing_or_second_slice_is_refused():
    whole = timeline()
    for part, said in (
        (replace(whole, events=whole.events[1:]), "only the predicted one has 0F0 on gpu0"),
        (replace(whole, events=(*whole.events, whole.events[0])), "only the measured one has 0F0"),
        (replace(whole, transfers=whole.transfers[:1]), "only the predicted one has x:1/d"),
    ):
        with pytest.raises(OptionError, match=said):
            compare_traces(Trace(whole, NAMES, None), Trace(part, NAMES, None))
    with pytest.raises(OptionError, match="the predicted one is of gpu0, gpu2, the measured one"):
        compare_traces(Trace(whole, NAMES, None), Trace(whole, {0: "gpu0", 2: "gpu3"}, None))


def test_an_overlay_has_each_device_twice():
    both, names = overlay(Trace(timeline(), NAMES, None), Trace(timeline(2.0), NAMES, None))
    assert names == {
        0: "gpu0 predicted", 1: "gpu0 measured", 4: "gpu2 predicted", 5: "gpu2 measured",
    }  # fmt: skip
    assert len(both.events) == 2 * len(timeline().events)
    assert {(transfer.source, transfer.target) for transfer in both.transfers} == {
        (0, 4),
        (4, 0),
        (1, 5),
        (5, 1),
    }
    assert sorted(both.memory) == [0, 1]


def test_the_command_compares_and_overlays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, slow in (("predicted.json", 1.0), ("measured.json", 2.0)):
        write_trace(timeline(slow), NAMES, tmp_path / name)
    done = run("compare-trace", "predicted.json", "measured.json", "-o", "both.json", "--json")
    found = json.loads(done.output)
    assert found["stages"][0]["measured_s"] == pytest.approx(0.002)
    assert read_trace(tmp_path / "both.json").names[1] == "gpu0 measured"
    said = run("compare-trace", "predicted.json", "measured.json").output
    assert "stage 1 backward" in said and "-50.0 %" in said
    names = ("predicted.json", "measured.json")
    assert "would be overwritten" in run("compare-trace", *names, "-o", names[1], code=1).output


# --------------------------------------------------------------------------------------- clocks


def test_an_offset_is_read_off_the_shortest_round_trip(monkeypatch):
    """The rank's clock is 100 s ahead; ways back take longer, but once."""
    now = [0.0]
    back_s = iter([0.5, 0.01, 0.3])

    def ask():
        now[0] += 0.01
        answer_s = now[0] + 100.0
        now[0] += next(back_s)
        return answer_s

    monkeypatch.setattr(clocks, "now_s", lambda: now[0])
    found = read_clock(ask, exchanges=3)
    assert found.offset_s == pytest.approx(100.0)
    assert found.round_trip_s == pytest.approx(0.02)


def test_a_clock_that_drifts_is_told_on_rank_0s():
    """It is 1 s ahead at first and goes 1 % too fast."""
    start = Reading(1.0, 1.0, 0.0)
    clock = Clock(start, Reading(102.0, 2.0, 0.0))
    for true_s in (0.0, 50.0, 100.0):
        assert clock.on_rank_0(1.0 + 1.01 * true_s) == pytest.approx(true_s)
