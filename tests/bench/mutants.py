"""Whether `make test` sees a fault that is put into the package (40 of them: an hour or more).

Faults are put in one at a time, drawn by a seed from all comparisons, signs and statements, and the
tests are run on each.

    python -m tests.bench.mutants [--count N] [--seed S] [--only ROOM] [--list] [--room-alone]

A comparison becomes its opposite or loses or gains equality, a sign becomes the other one, and a
statement is left out. The tests of a mutant's own folder are asked first, then those of its room,
each with `-x`. Those that live there meet all tests that are not slow, together, and then each
alone those that failed. Tests run in a copy of the checkout, whose sources are first on the path.
Ends with a line per survivor.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
SYMBOLS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+",
    ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
}  # fmt: skip
STATEMENTS = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Continue, ast.Break)
LIMIT_S = 3600
"""Of all tests on one mutant, which may never end."""


@dataclass(frozen=True)
class Mutant:
    """A fault in a file of the package.

    Attributes:
        path: of the file, from the root.
        line: where it is, from 1 on.
        what: the change, in words.
        text: the file with the fault.
    """

    path: str
    line: int
    what: str
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.what}"


def sites(path):
    """(line, number, kind) of all places of a file where a fault can be put."""
    tree = ast.parse((ROOT / path).read_text())
    return [(node.lineno, i, kind) for i, (node, kind) in enumerate(_places(tree))]


def _places(tree):
    """(node, kind) of the places, in an order that a second parse has too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            yield node, "comparison"
        elif _has_sign(node):
            yield node, "sign"
        if isinstance(node, ast.FunctionDef | ast.For | ast.While | ast.If | ast.With):
            for statement in node.body:
                if isinstance(statement, STATEMENTS) and not _says_nothing(statement):
                    yield statement, "statement"


def _has_sign(node):
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub)
    return isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SIGNS


def _says_nothing(statement):
    """Docstrings and `...`."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def mutant(path, number):
    """The mutant of a place: the text is as it was but for the place itself."""
    text = (ROOT / path).read_text()
    tree = ast.parse(text)
    node, kind = list(_places(tree))[number]
    old = ast.get_source_segment(text, node)
    if kind == "statement":
        new, what = "pass", f"without: {' '.join(old.split())[:70]}"
    elif isinstance(node, ast.Compare):
        new_op = COMPARISONS[type(node.ops[0])]
        what = f"{SYMBOLS[type(node.ops[0])]} becomes {SYMBOLS[new_op]} in {_short(old)}"
        node.ops[0] = new_op()
        new = f"({ast.unparse(node)})"
    elif isinstance(node, ast.UnaryOp):
        new, what = f"({ast.unparse(node.operand)})", f"without the sign of {_short(old)}"
    else:
        new_op = SIGNS[type(node.op)]
        what = f"{SYMBOLS[type(node.op)]} becomes {SYMBOLS[new_op]} in {_short(old)}"
        node.op = new_op()
        new = ast.unparse(node) if isinstance(node, ast.AugAssign) else f"({ast.unparse(node)})"
    return Mutant(path, node.lineno, what, _replaced(text, node, new))


def _short(code):
    return " ".join(code.split())[:70]


def _replaced(text, node, new):
    """The text with a node replaced; positions of nodes are in bytes of their lines."""
    lines = text.encode().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    end = lines[node.end_lineno - 1][node.end_col_offset :]
    after = end + b"".join(lines[node.end_lineno :])
    return (before + new.encode() + after).decode()


def drawn(count, seed, only=""):
    """Mutants, each place as likely as any other."""
    tracked = subprocess.run(
        ["git", "ls-files", "planner"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    files = [
        path for path in tracked if path.endswith(".py") and path.startswith(f"planner/{only}")
    ]
    everywhere = [(path, number) for path in files for _, number, _ in sites(path)]
    chosen = random.Random(seed).sample(everywhere, min(count, len(everywhere)))
    return [mutant(path, number) for path, number in chosen], len(everywhere)


@contextmanager
def faulty(mutants, folder):
    """The checkout in a folder with the faults."""
    before = {one.path: (folder / one.path).read_text() for one in mutants}
    try:
        for one in mutants:
            (folder / one.path).write_text(one.text)
        yield
    finally:
        for path, text in before.items():
            (folder / path).write_text(text)


def killed_nearby(one, folder):
    """The first test of its folder, or of its room, that sees a mutant; None if none does."""
    with faulty([one], folder):
        for tests in reversed(_near(one.path, folder)):
            if failed := _first_failure(folder, [tests]):
                return failed
    return None


def killed_anywhere(mutants, folder):
    """(mutant, the first of all tests that sees it, or None) for mutants that live in their rooms.

    Those of different files share one run of all tests, and each then meets, alone, the tests that
    failed there.
    """
    left = list(mutants)
    while left:
        together = list({one.path: one for one in left}.values())
        left = [one for one in left if one not in together]
        with faulty(together, folder):
            failed = _failures(folder)
        for one in together:
            with faulty([one], folder):
                yield one, (failed and _first_failure(folder, failed)) or None


def _failures(folder):
    """The names of all tests that fail, by pytest's own record."""
    record = folder / ".pytest_cache" / "v" / "cache" / "lastfailed"
    record.unlink(missing_ok=True)
    _run(folder, [])
    return [*json.loads(record.read_text())] if record.exists() else []


def _near(path, folder):
    """The folders of tests that a file of the package has to itself, its room's first."""
    parts = path.split("/")[1:-1]
    folders = ["/".join(["tests", *parts[:depth]]) for depth in range(1, len(parts) + 1)]
    return [each for each in folders if (folder / each).is_dir()]


def _first_failure(folder, tests):
    """The first test that fails; "" if all pass. One that does not end has failed."""
    try:
        done = _run(folder, ["-x", *tests])
    except subprocess.TimeoutExpired:
        return "no end"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if lines:
        return lines[0].split(" - ")[0]
    return "" if done.returncode in (0, 5) else f"exit code {done.returncode}"


def _run(folder, arguments):
    """pytest, without slow tests, on the checkout in a folder."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-n", "2", "--dist", "loadfile",
         *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="ROOM")
    parser.add_argument("--list", action="store_true", help="only say which they are")
    parser.add_argument("--room-alone", action="store_true", help="ask no tests of other rooms")
    given = parser.parse_args()
    mutants, places = drawn(given.count, given.seed, given.only)
    print(f"{len(mutants)} mutants of {places} places, seed {given.seed}", flush=True)
    if given.list:
        print(*mutants, sep="\n")
        return
    alive = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        folder = Path(place) / "checkout"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
        for path in subprocess.run(
            ["git", "diff", "--name-only", "HEAD"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        ).stdout.split():  # fmt: skip
            if (ROOT / path).exists():
                shutil.copy(ROOT / path, folder / path)
        for number, one in enumerate(mutants, 1):
            begin_s = time.monotonic()
            by = killed_nearby(one, folder)
            alive += [one] if by is None else []
            took_s = time.monotonic() - begin_s
            print(f"{number}. {one}: {by or 'lives in its room'} ({took_s:.0f} s)", flush=True)
        if not given.room_alone:
            found = dict(killed_anywhere(alive, folder))
            for one, by in found.items():
                print(f"{one}: {by or 'SURVIVES'}", flush=True)
            alive = [one for one, by in found.items() if by is None]
    print(f"{len(alive)} of {len(mutants)} survive")
    print(*alive, sep="\n")


if __name__ == "__main__":
    main()
