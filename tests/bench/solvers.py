"""The solvers against the published programs, and at scale (10 minutes).

Some graphs are those that the published programs do not finish. The tables are those of
docs/solvers.md and docs/scaling.md, and its plot.

    python -m tests.bench.solvers                 # some minutes
    python -m tests.bench.solvers --scaling       # some minutes
    python -m tests.bench.solvers --only piper,profiles

Every case runs in a process of its own (`cases.py`). This one imports nothing large: Linux
counts what a parent occupies into the peak of its children.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from math import log
from pathlib import Path

from tests.support.loglog import figure, panel

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
# What the solvers promise: where the reference takes more than LONG_S, this many times less; where
# it takes less than SHORT_S, no more than that.
LONG_S, TIMES_LESS, SHORT_S = 3.0, 20.0, 1.0

WIDE = ("inception_v1", "inception_v2", "densenet121", "shufflenet", "nasnet-12")
# Graph, setting, devices, index of the question in `bench_cases.ASKED`.
EXACT = (
    ("inception_v1", "NVLink", 4, 0),
    ("inception_v1", "10 Gbps", 4, 0),
    ("inception_v1", "10 Gbps", 8, 1),
    ("inception_v1", "NVLink, 60 % of the memory", 4, 2),
    ("inception_v1", "NVLink, 60 % of the memory", 4, 0),
    ("shufflenet", "NVLink, 60 % of the memory", 8, 0),
)
EXACT_LIMIT_S = 60
LAYERS, HOSTS = (12, 50, 200), (1, 16, 128)


def case(*arguments, limit_s=LIMIT_S, **environment):
    """The object that a case prints; None if it was not done in time."""
    command = [sys.executable, "-m", "tests.bench.cases", *map(str, arguments)]
    print("  ", *arguments, flush=True)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True,
            timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


# -------------------------------------------------------------------------------- text


def table(head, rows):
    """A table in Markdown; the first column is text, the others are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def seconds(value):
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def span(values):
    low, high = (seconds(v) for v in (min(values), max(values)))
    return low if low == high else f"{low} .. {high}"


def percent(value, digits=2):
    # Adding 0 turns -0.0 into 0.0.
    return "-" if value is None else f"{round(100 * value, digits) + 0.0:.{digits}f} %"


def mebibytes(value):
    return f"{value / 2**20:.0f} MiB"


def put(path, name, text):
    """Replaces the text between the markers of a name."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, opening, rest = path.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (opening and closed):
        raise SystemExit(f"{path}: expected the lines {begin} and {end}; add them")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def machine():
    """The machine and the date, in a line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        named = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    versions = subprocess.run(
        [sys.executable, "-c", "import numba, numpy, planner; print(planner.__version__,"
         " numba.__version__, numpy.__version__)"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return (
        f"{model}, {os.cpu_count()} cores; {datetime.date.today()}; Python"
        f" {platform.python_version()}, planner {versions[0]}, numba {versions[1]}, numpy"
        f" {versions[2]}; load of the machine at the end {os.getloadavg()[0]:.1f}"
    )


# -------------------------------------------------------------------------------- references


def promise(row):
    """Whether a row keeps the solvers' promises."""
    if row["reference_s"] > LONG_S:
        return row["ours_s"] * TIMES_LESS <= row["reference_s"]
    return row["reference_s"] >= SHORT_S or row["ours_s"] <= SHORT_S


def references(rows, group):
    """A line for each group of rows."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in group), []).append(row)
    lines = []
    for key, some in groups.items():
        apart = [row["difference"] for row in some]
        worst = "no plan" if None in apart else f"{max(apart, key=abs):+.0e}"
        ratios = [row["reference_s"] / row["ours_s"] for row in some]
        lines.append(
            [
                " ".join(key), len(some), span([row["reference_s"] for row in some]),
                span([row["ours_s"] for row in some]), f"{min(ratios):.3g}", worst,
            ]
        )  # fmt: skip
    head = ["input", "rows", "reference, CPU s", "ours, CPU s", "least ratio", "objective apart"]
    return table(head, lines)


def verdict(rows):
    """The promises in words, and the rows that are closest to breaking them."""
    long = [row for row in rows if row["reference_s"] > LONG_S]
    short = [row for row in rows if row["reference_s"] < SHORT_S]
    broken = [row for row in rows if not promise(row)]
    lines = []
    if long:
        worst = min(long, key=lambda row: row["reference_s"] / row["ours_s"])
        lines.append(
            f"- {len(long)} rows where the reference takes over {LONG_S:g} s: at least"
            f" {worst['reference_s'] / worst['ours_s']:.0f} times less ({_named(worst)})"
        )
    if short:
        worst = max(short, key=lambda row: row["ours_s"])
        lines.append(
            f"- {len(short)} rows where it takes under {SHORT_S:g} s: at most"
            f" {seconds(worst['ours_s'])} s ({_named(worst)})"
        )
    lines.append(f"- {len(broken)} of {len(rows)} rows miss their target")
    return "\n".join([*lines, *(f"  - {_named(row)}" for row in broken)])


def _named(row):
    return (
        f"{row['instance']} {row['algorithm']}, {row['config']}: {seconds(row['reference_s'])} s"
        f" against {seconds(row['ours_s'])} s"
    )


def reference_part(path, name, group):
    answer = case(name)
    if not answer["rows"]:
        print(f"   skipped: no rows of {name}; set PLANNER_REFERENCE")
        return
    rows, peak = answer["rows"], mebibytes(answer["peak_bytes"])
    text = f"{references(rows, group)}\n\n{verdict(rows)}\n- peak memory {peak}"
    put(path, name, text)
    print(text)


def compile_part(path):
    lines = []
    for name in ("pipedream", "dnn-partitioning", "piper", "antichain"):
        with tempfile.TemporaryDirectory() as folder:
            fresh = {"XDG_CACHE_HOME": folder, "NUMBA_CACHE_DIR": f"{folder}/numba"}
            compiled, loaded = case("first", name, **fresh), case("first", name, **fresh)
        figures = (loaded["imports_s"], compiled["first_s"], loaded["first_s"])
        lines.append([name, *map(seconds, figures), mebibytes(loaded["peak_bytes"])])
    head = ["solver", "imports, CPU s", "first call ever", "first call of a process", "peak memory"]
    put(path, "compile", table(head, lines))


# -------------------------------------------------------------------------------- wide graphs


def wide_part(path):
    cases = [(name, case("wide", name)) for name in WIDE]
    shape, lines, worst = [], [], []
    for name, one in cases:
        if one is None:
            lines.append([name, f"not within {LIMIT_S} s", *["-"] * 8])
            continue
        count = one["downsets"]
        many = f"over {count - 1:,}" if count > 100_000 else f"{count:,}"
        shape.append([name, one["operators"], many, mebibytes(one["peak_bytes"])])
        for row in one["rows"]:
            cells = row["asked"]
            gaps = [percent(cell["gap"]) for cell in cells]
            stages = " ".join(str(cell.get("stages", "-")) for cell in cells)
            looked = " ".join(str(cell["downsets"]) for cell in cells)
            took = " ".join(seconds(cell["ours_s"]) for cell in cells)
            lines.append([name, row["setting"], row["devices"], looked, took, *gaps, stages])
            worst += [(cell["ours_s"], name) for cell in cells]
    head = ["graph", "operators", "downsets", "peak memory"]
    put(path, "wide-graphs", table(head, shape))
    head = ["graph", "setting", "devices", "downsets", "CPU s", "gap, M = 4", "gap, M = 32",
            "gap, bottleneck", "stages"]  # fmt: skip
    slowest = max(worst)
    put(path, "wide", f"{table(head, lines)}\n\nThe slowest took {seconds(slowest[0])} s.")


def exact_part(path):
    lines = []
    for name, setting, count, asked in EXACT:
        question = ("M = 4", "M = 32", "bottleneck")[asked]
        answer = case("exact", name, setting, count, asked, limit_s=EXACT_LIMIT_S)
        if answer is None:
            lines.append([name, setting, count, question, "-", f"over {EXACT_LIMIT_S}", "-"])
            continue
        some, everything = answer["default"], answer["exact"]
        apart = some["closed_s"] / everything["closed_s"] - 1
        lines.append(
            [
                name, setting, count, question, f"{seconds(some['ours_s'])}",
                f"{seconds(everything['ours_s'])}", percent(apart, 3),
            ]
        )  # fmt: skip
    head = ["graph", "setting", "devices", "asked", "default, CPU s", "`--exact`, CPU s",
            "default worse by"]  # fmt: skip
    put(path, "exact", table(head, lines))


def foreign_part(path):
    lines = []
    for name in WIDE:
        answer = case("wide-foreign", name)
        if answer is None:
            lines.append([name, "-", f"over {LIMIT_S}", *["-"] * 3])
            continue
        lines += [
            [
                name, row["devices"], seconds(row["ours_s"]), row["status"],
                f"{1e3 * row['load_s']:.2f}", f"{row['single_s'] / row['load_s']:.2f}",
            ]
            for row in answer["rows"]
        ]  # fmt: skip
    head = ["graph", "devices", "CPU s", "status", "largest load, ms", "times faster than one"]
    put(path, "wide-foreign", table(head, lines))


def profiles_part(path):
    lines = []
    for row in case("profiles")["rows"]:
        apart = row["closed_s"] / row["simulated_s"] - 1
        what = f"{row['profile']}, microbatch of {row['microbatch']}"
        lines.append(
            [
                what, row["operators"], row["devices"], row["downsets"], seconds(row["ours_s"]),
                row["status"], row["stages"], percent(row["gap"]), percent(apart),
            ]
        )  # fmt: skip
    head = ["profile", "operators", "devices", "downsets", "CPU s", "status", "stages", "gap",
            "closed form apart"]  # fmt: skip
    put(path, "profiles", table(head, lines))


PARTS = {
    "compile": compile_part,
    "pipedream": lambda path: reference_part(path, "pipedream", ("instance", "config")),
    "dnn-partitioning": lambda path: reference_part(path, "dnn-partitioning", ("instance",)),
    "piper": lambda path: reference_part(path, "piper", ("algorithm",)),
    "wide": wide_part,
    "exact": exact_part,
    "wide-foreign": foreign_part,
    "profiles": profiles_part,
}


# -------------------------------------------------------------------------------- scale


def whole_solve(profile, topology, folder):
    """`planner solve`: CPU s, wall s, peak bytes, and whether it found a plan."""
    command = [sys.executable, str(ROOT / "cli.py"), "solve", "--profile", str(profile),
               "--topology", str(topology), "--time-limit", "300s", "--json"]  # fmt: skip
    begin = time.monotonic()
    with Path(os.devnull).open("w") as nowhere:
        process = subprocess.Popen(command, cwd=folder, stdout=nowhere, stderr=nowhere)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - begin,
        "peak_bytes": 1024 * used.ru_maxrss,
        "planned": process.returncode == 0,
    }


def exponent(points):
    """b of the power law y = a x^b that fits best in the logarithms."""
    return statistics.linear_regression(*zip(*((log(x), log(y)) for x, y in points), strict=True))[
        0
    ]


def scaling(path, plot):
    """All points, as tables with growth and as a plot."""
    points = [(n, HOSTS[-1]) for n in LAYERS]
    points += [(LAYERS[-1], hosts) for hosts in HOSTS if (LAYERS[-1], hosts) not in points]
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = dict(zip(LAYERS, case("deep", folder, *LAYERS)["operators"], strict=True))
        case("cluster", folder, *HOSTS)
        for layers, hosts in points:
            files = folder / f"{layers}.json", folder / f"{hosts}.yaml"
            alone = case("scale", *files)
            if alone is None:
                raise SystemExit(f"{layers} layers on {hosts} hosts: not within {LIMIT_S} s")
            whole = whole_solve(*files, folder)
            rows.append((sizes[layers], 8 * hosts, alone, whole))
            print("     ", rows[-1], flush=True)
    by_operators = [row for row in rows if row[1] == 8 * HOSTS[-1]]
    by_devices = sorted(row for row in rows if row[0] == sizes[LAYERS[-1]])
    for marker, some, column in (("operators", by_operators, 0), ("devices", by_devices, 1)):
        put(path, marker, _scaling_table(some, column))
    plot.write_text(figure([*_panels(by_operators, 0), *_panels(by_devices, 1)]))


def _series(rows, column):
    """By name, the points over operators (column 0) or devices (1)."""
    return {
        "antichain, CPU s": [(row[column], row[2]["ours_s"]) for row in rows],
        "planner solve, CPU s": [(row[column], row[3]["cpu_s"]) for row in rows],
        "planner solve, s": [(row[column], row[3]["wall_s"]) for row in rows],
        "antichain, peak": [(row[column], row[2]["peak_bytes"]) for row in rows],
        "planner solve, peak": [(row[column], row[3]["peak_bytes"]) for row in rows],
    }


def _scaling_table(rows, column):
    series = _series(rows, column)
    lines = []
    for index, row in enumerate(rows):
        values = [points[index][1] for points in series.values()]
        shown = [*map(seconds, values[:3]), *map(mebibytes, values[3:])]
        lines.append([f"{row[0]:,}", f"{row[1]:,}", *shown, "yes" if row[3]["planned"] else "no"])
    grown = [f"x^{exponent(points):.2f}" for points in series.values()]
    return table(
        ["operators", "devices", *series, "plan"], [*lines, ["growth", "", *grown, ""]]
    )  # fmt: skip


def _panels(rows, column):
    what = ("operators", "devices")[column]
    fixed = f"{rows[0][1 - column]:,} {('operators', 'devices')[1 - column]}"
    series = _series(rows, column)
    memory = {name: [(x, y / 2**20) for x, y in series[name]]
              for name in ("antichain, peak", "planner solve, peak")}  # fmt: skip
    times = {name: series[name] for name in ("antichain, CPU s", "planner solve, CPU s")}
    yield panel(f"Time, {fixed}", what, "CPU s", times)
    yield panel(f"Memory, {fixed}", what, "MiB", memory)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--scaling", action="store_true", help="only how planning scales")
    parser.add_argument("--only", help=f"parts, such as piper,wide: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "solvers.md")
    options = parser.parse_args()
    if options.scaling:
        page = options.out.with_name("scaling.md")
        scaling(page, page.with_suffix(".svg"))
        put(page, "machine", machine())
        return
    wanted = options.only.split(",") if options.only else list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"unknown part {sorted(unknown)[0]}; known: {', '.join(PARTS)}")
    for name in wanted:
        print(name, flush=True)
        PARTS[name](options.out)
    put(options.out, "machine", machine())


if __name__ == "__main__":
    main()
