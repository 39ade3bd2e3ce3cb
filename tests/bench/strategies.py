"""Whether another state of the code plans the same: the strategies of all shipped profiles on all
shipped topologies, for 8 devices, or all where there are fewer.

    python -m tests.bench.strategies solve FOLDER [--root CHECKOUT]
    python -m tests.bench.strategies same BEFORE AFTER

`solve` writes a strategy or, where there is none, the message, per profile and topology; what is
there already is kept, so that it can be interrupted. `same` compares two such folders field by
field, but for the format's number and fields that only the later one has. Sentences for people
(`TEXTS`) are compared apart, because better words are no other plan.
"""

import argparse
import json
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


def solve(root, folder, options=()):
    """Plans with the checkout at `root`, each case in a process of its own.

    Args:
        options: more options of the command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    topologies = [path for path in sorted((root / "topologies").glob("*.yaml"))
                  if path.stem != "devices"]  # fmt: skip
    for profile in sorted((root / "profiles").glob("*.json")):
        for topology in topologies:
            target = (folder / f"{profile.stem}--{topology.stem}.json").resolve()
            if not target.exists() and not target.with_suffix(".err").exists():
                said, wall_s, cpu_s = _solve_one(root, profile, topology, target, options)
                with (folder / SECONDS).open("a") as file:
                    print(target.stem, f"{wall_s:.2f}", f"{cpu_s:.2f}", sep=",", file=file)
                print(f"{target.stem} {said}, {wall_s:.2f} s, {cpu_s:.2f} s of CPU", flush=True)


def _solve_one(root, profile, topology, target, options):
    """What became of a case, its wall time and its CPU time, child processes included, in s."""
    command = [sys.executable, "cli.py", "solve", "--profile", f"profiles/{profile.name}",
               "--topology", f"topologies/{topology.name}", "-o", str(target), *options]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(root)}
    for count in (["--gpus", str(NUM_DEVICES)], []):
        begin_s, before_s = time.monotonic(), _children_s()
        done = subprocess.run(
            [*command, *count], cwd=root, env=environment, capture_output=True, text=True
        )
        wall_s, cpu_s = time.monotonic() - begin_s, _children_s() - before_s
        # Fewer devices than asked for: then all of them.
        if done.returncode == 0 or "devices" not in done.stderr:
            break
    if done.returncode:
        target.with_suffix(".err").write_text(done.stdout + done.stderr)
        return f"exit code {done.returncode}", wall_s, cpu_s
    return "planned", wall_s, cpu_s


def _children_s():
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
                if path == "format":
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
    print(f"{len(names)} cases, {count} differ, {cut} cut by the clock, {len(sentences)} sentences")
    print(f"new fields: {', '.join(sorted(new_fields)) or 'none'}")
    return not count


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
    one = commands.add_parser("same")
    one.add_argument("before", type=Path)
    one.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "solve":
        solve(given.root.resolve(), given.folder)
    elif not same(given.before, given.after):
        sys.exit(1)


if __name__ == "__main__":
    main()
