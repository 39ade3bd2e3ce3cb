"""Whether another state of the code plans the same (40 minutes).

The strategies are those of all shipped profiles on all shipped topologies, for 8 devices, or all
where there are fewer.

    python -m tests.bench.strategies solve FOLDER [--root CHECKOUT] [--time-limit LIMIT]
                                                  [--above GAP --of OTHER]
    python -m tests.bench.strategies same BEFORE AFTER
    python -m tests.bench.strategies within FOLDER LONGER [--by SHARE]

`solve` writes a strategy or, where there is none, the message, per profile and topology; what is
there already is kept, so that it can be interrupted. `--above` leaves out the cases whose plan in
another folder is that close to its lower bound. `same` compares two such folders field by field,
but for the format's number, the profile's path, and fields that only the later one has. Sentences
for people (`TEXTS`) are compared apart, because better words are no other plan. `within` says which
plans are slower by more than a share than those that a longer limit found, and than their bound
allows.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_DEVICES = 8
# Lines of case, wall time and CPU time of its command, in s.
SECONDS = "seconds.csv"
TEXTS = ("notes", "space")
# Fields that say which state wrote the file, and where its checkout is.
ELSEWHERE = ("format", "profile_path")


def solve(root, folder, options=(), wanted=lambda name: True):
    """Plans with the checkout at `root`, each case in a process of its own.

    Args:
        options: more options of the command.
        wanted: says of the name of a strategy file whether it is asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    topologies = [path for path in sorted((root / "topologies").glob("*.yaml"))
                  if path.stem != "devices"]  # fmt: skip
    for profile in sorted((root / "profiles").glob("*.json")):
        for topology in topologies:
            target = (folder / f"{profile.stem}--{topology.stem}.json").resolve()
            done = target.exists() or target.with_suffix(".err").exists()
            if wanted(target.name) and not done:
                said, wall_s, cpu_s = _solve_one(root, profile, topology, target, options)
                with (folder / SECONDS).open("a") as file:
                    print(target.stem, f"{wall_s:.2f}", f"{cpu_s:.2f}", sep=",", file=file)
                print(f"{target.stem} {said}, {wall_s:.2f} s, {cpu_s:.2f} s of CPU", flush=True)


def _solve_one(root, profile, topology, target, options):
    """What became of a case, its wall time and its CPU time, child processes included, in s."""
    command = [sys.executable, "cli.py", "solve", "--profile", f"profiles/{profile.name}",
               "--topology", f"topologies/{topology.name}", "-o", str(target),
               *options]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root)}
    for count in (["--gpus", str(NUM_DEVICES)], []):
        begin_s, before_s = time.monotonic(), children_s()
        done = subprocess.run(
            [*command, *count], cwd=root, env=environment, capture_output=True, text=True
        )
        wall_s, cpu_s = time.monotonic() - begin_s, children_s() - before_s
        # Fewer devices than asked for: then all of them.
        if done.returncode == 0 or "devices" not in done.stderr:
            break
    if done.returncode:
        target.with_suffix(".err").write_text(done.stdout + done.stderr)
        return f"exit code {done.returncode}", wall_s, cpu_s
    return "planned", wall_s, cpu_s


def children_s():
    """CPU time of all child processes that have ended, in s."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def same(before, after):
    """Prints what differs; whether nothing but sentences does."""
    names = {path.name for folder in (before, after) for path in folder.iterdir()} - {SECONDS}
    differing, sentences, new_fields, cut = {}, set(), set(), 0
    for name in sorted(names):
        one, other = before / name, after / name
        if not one.exists() or not other.exists():
            differing[name] = [f"only in {before if one.exists() else after}"]
        elif one.suffix == ".json":
            old, new = json.loads(one.read_text()), json.loads(other.read_text())
            cut += not (old["reproducible"] and new["reproducible"])
            differing[name] = []
            for path, a, b in _differences(old, new):
                if path in ELSEWHERE:
                    continue
                if a is None:
                    new_fields.add(path)
                elif path.split(".")[-1] in TEXTS:
                    sentences |= {(x, y) for x, y in _paired(a, b) if x != y}
                else:
                    differing[name].append(f"{path}: {a:.60} -> {b:.60}")
    for name, lines in differing.items():
        for line in lines:
            print(f"{name}: {line}")
    for old, new in sorted(sentences):
        print(f"another sentence: {old}\n              now: {new}")
    count = sum(bool(lines) for lines in differing.values())
    print(f"{len(names)} cases, {count} differ, {cut} cut by the brake, {len(sentences)} sentences")
    print(f"new fields: {', '.join(sorted(new_fields)) or 'none'}")
    return not count


def gap_of(path):
    """The gap of a plan to its lower bound; inf where there is none."""
    return json.loads(path.read_text())["certificate"]["gap"] if path.exists() else math.inf


def within(folder, longer, share):
    """Prints the plans that are slower, by more than a share, than those of a longer limit; whether
    there is none. Plans that close to their lower bound need no longer limit.
    """
    slower, count, proved = 0, 0, 0
    for path in sorted(folder.glob("*.json")):
        own, other = json.loads(path.read_text()), longer / path.name
        if own["certificate"]["gap"] <= share:
            proved += 1
        elif other.exists():
            count += 1
            plans = own, json.loads(other.read_text())
            figures = [one["prediction"]["iteration_s"] for one in plans]
            more = figures[0] / figures[1] - 1
            if more > share:
                slower += 1
                print(f"{path.stem}: {figures[0]:.6g} s, {figures[1]:.6g} s with the longer limit,"
                      f" {100 * more:.1f} % more")  # fmt: skip
    print(f"{proved} plans within {100 * share:g} % of their bounds; of {count} others {slower} are"
          f" slower by more than {100 * share:g} %")  # fmt: skip
    return not slower


def _paired(old, new):
    """The sentences of a text or of a list of them, in JSON, by their place."""
    lists = [value if isinstance(value, list) else [value] for value in map(json.loads, (old, new))]
    return zip_longest(*lists, fillvalue="")


def _differences(old, new, path=""):
    """(path, before, after) of all values that differ, as JSON; before is None where the field is
    new.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{path}.{key}" if path else key
            if key not in old:
                yield inner, None, json.dumps(new[key])
            elif key not in new:
                yield inner, json.dumps(old[key]), "nothing"
            else:
                yield from _differences(old[key], new[key], inner)
    elif (
        isinstance(old, list)
        and isinstance(new, list)
        and len(old) == len(new)
        and path.split(".")[-1] not in TEXTS
    ):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            yield from _differences(a, b, f"{path}[{i}]")
    elif type(old) is not type(new) or old != new:
        yield path, json.dumps(old), json.dumps(new)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("solve")
    one.add_argument("folder", type=Path)
    one.add_argument("--root", type=Path, default=ROOT)
    one.add_argument("--time-limit")
    one.add_argument("--above", type=float)
    one.add_argument("--of", type=Path)
    one = commands.add_parser("same")
    one.add_argument("before", type=Path)
    one.add_argument("after", type=Path)
    one = commands.add_parser("within")
    one.add_argument("folder", type=Path)
    one.add_argument("longer", type=Path)
    one.add_argument("--by", type=float, default=0.01)
    given = parser.parse_args()
    if given.command == "solve":
        options = ("--time-limit", given.time_limit) if given.time_limit else ()
        if given.above is not None and given.of is None:
            parser.error("--above needs --of")

        def wanted(name):
            return given.above is None or given.above < gap_of(given.of / name) < math.inf

        solve(given.root.resolve(), given.folder, options, wanted)
    elif given.command == "within":
        sys.exit(not within(given.folder, given.longer, given.by))
    elif not same(given.before, given.after):
        sys.exit(1)


if __name__ == "__main__":
    main()
