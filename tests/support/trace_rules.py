"""The rules of the Chrome trace format ("Trace Event Format", Google, 2016) for the parts that the
planner's traces use, and further ones of Perfetto.
"""

import json
from itertools import groupby
from math import isfinite

NEEDED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}
METADATA = {
    "process_name": "name", "thread_name": "name",
    "process_sort_index": "sort_index", "thread_sort_index": "sort_index",
}  # fmt: skip


def broken(trace):
    """The rules that a trace breaks, a line each; empty for a sound one."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    events = trace["traceEvents"]
    problems = [problem for event in events for problem in _fields(event)]
    return problems or [*_threads(events), *_slices(events), *_arrows(events), *_counters(events)]


def _fields(event):
    phase = event.get("ph")
    if phase not in NEEDED:
        yield f"unknown phase {phase!r}"
        return
    missing = NEEDED[phase] - event.keys()
    if missing:
        yield f"{phase}: {sorted(missing)} missing"
        return
    for name in ("pid", "tid"):
        if not isinstance(event.get(name, 0), int):
            yield f"{phase}: {name} is {event[name]!r}"
    for name in ("ts", "dur"):
        value = event.get(name, 0)
        if not isinstance(value, int | float) or not isfinite(value) or value < 0:
            yield f"{phase}: {name} is {value!r}"
    if phase == "M" and set(event["args"]) != {METADATA.get(event["name"])}:
        yield f"M: {event['name']} with {event['args']}"
    if phase == "f" and event["bp"] != "e":
        yield f"f: bp is {event['bp']!r}"


def _threads(events):
    """Every process and thread is named once, and threads of different processes differ."""
    named = [(e["pid"], e.get("tid")) for e in events if e["ph"] == "M" and "_name" in e["name"]]
    if len(set(named)) < len(named):
        yield "a process or thread is named twice"
    threads = [tid for _, tid in named if tid is not None]
    if len(set(threads)) < len(threads):
        yield "a thread is in two processes"
    for event in events:
        if event["ph"] != "M" and (event["pid"], event.get("tid")) not in named:
            yield f"{event['ph']}: {event['name']} is on a thread without a name"


def _by_thread(events):
    slices = [e for e in events if e["ph"] == "X"]
    where = lambda e: (e["pid"], e["tid"])  # noqa: E731
    for thread, some in groupby(sorted(slices, key=where), key=where):
        yield thread, sorted(some, key=lambda e: (e["ts"], -e["dur"]))


def _slices(events):
    """Slices of a thread lie beside or in each other."""
    for thread, slices in _by_thread(events):
        open_until = []
        for one in slices:
            end = round(one["ts"] + one["dur"], 3)
            while open_until and open_until[-1] <= one["ts"]:
                open_until.pop()
            if open_until and end > open_until[-1]:
                yield f"{thread}: {one['name']} overlaps the one before it in part"
            open_until.append(end)


def _arrows(events):
    """Each arrow has one start and one end, not before it, each of them in a slice."""
    ends = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            key = event["cat"], event["name"], event["id"]
            if key in ends[event["ph"]]:
                yield f"arrow {key} has two ends {event['ph']}"
            ends[event["ph"]][key] = event
    if ends["s"].keys() != ends["f"].keys():
        yield f"arrows with one end: {sorted(ends['s'].keys() ^ ends['f'].keys())[:3]}"
    inside = dict(_by_thread(events))
    for key in ends["s"].keys() & ends["f"].keys():
        start, end = ends["s"][key], ends["f"][key]
        if end["ts"] < start["ts"]:
            yield f"arrow {key} ends before it starts"
        for one in (start, end):
            around = inside.get((one["pid"], one["tid"]), ())
            if not any(e["ts"] <= one["ts"] <= round(e["ts"] + e["dur"], 3) for e in around):
                yield f"arrow {key} has an end in no slice"


def _counters(events):
    """Counters go forward in time, and their values are not negative."""
    last = {}
    for event in events:
        if event["ph"] == "C":
            key = event["pid"], event["name"]
            if event["ts"] < last.get(key, 0.0):
                yield f"{key}: goes back in time"
            last[key] = event["ts"]
            for value in event["args"].values():
                if not isinstance(value, int | float) or value < 0:
                    yield f"{key}: counts {value!r}"
