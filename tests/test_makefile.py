import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "DESIGN.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKE = shutil.which("make")

pytestmark = pytest.mark.skipif(MAKE is None, reason="make is not installed")


def made(*arguments):
    """What make prints."""
    done = subprocess.run(
        [MAKE, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )  # fmt: skip
    return done.stdout


def listed():
    """The targets of `make help`, and what is said of each."""
    return dict(line.split(maxsplit=1) for line in made("help").splitlines())


def test_help_says_of_each_benchmark_what_it_measures():
    benchmarks = {name: text for name, text in listed().items() if name.startswith("bench-")}
    assert "bench-start" in benchmarks
    for name, text in benchmarks.items():
        path = ROOT / f"tests/bench/{name.removeprefix('bench-')}.py"
        assert path.read_text().startswith(f'"""{text}\n')
        assert text.endswith(".")


def test_a_benchmark_runs_modules_that_are_there():
    targets = [name for name in listed() if name.startswith("bench-")]
    runs = re.findall(r"for run in (.*); do", made("-n", *targets))
    assert len(runs) == len(targets)
    for run in runs:
        for words in shlex.split(run):
            assert (ROOT / f"tests/bench/{words.split()[0]}.py").is_file()
    given = made("-n", "bench-split", "ARGS=--gpus 8")
    assert 'for run in "split --gpus 8"; do' in given


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_targets_that_a_page_names_are_there(page):
    named = set(re.findall(r"`make ([a-z][a-z-]*)(?: [^`]*)?`", page.read_text()))
    assert named <= listed().keys()
