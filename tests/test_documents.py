"""Documents, docstrings and comments name files that are there; pages are found from one index."""

import re
from pathlib import Path

import pytest

from tests.test_layers import FLOORS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "planner"
DOCUMENTS = (".", "docs", "profiles", "topologies")
TEXTS = (
    *sorted(path for folder in DOCUMENTS for path in (ROOT / folder).glob("*.md")),
    *sorted(PACKAGE.rglob("*.py")),
    *sorted(path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)),
)
# Modules may stand without backticks; folders stand in them.
MODULE = re.compile(r"(?<![\w./-])[\w/-]+\.py\b(?![\w-])")
FOLDER = re.compile(r"`([\w/-]+/)`")

# Files that tests, or users, write.
WRITTEN = {
    "README.md": {"nets.py"},
    "docs/api.md": {"nets.py"},
    "docs/export.md": {"adversary.py", "gpt2.py", "nets.py", "reversal.py"},
    "docs/operators.md": {"mine.py"},
    "docs/profiles.md": {"nets.py"},
    "docs/training.md": {"grouped.py", "train.py"},
    "planner/operators/gradients/events.py": {"net.py"},
    "tests/operators/gradients/test_check.py": {"nets.py"},
    "tests/model/export/test_export.py": {"factories_of_tests.py"},
    "tests/bench/profile.py": {"training.py"},
    "tests/profilers/rules/test_trials.py": {"mine.py"},
    "tests/test_readme.py": {"nets.py"},
    "tests/commands/test_compare_run.py": {"alone.py", "endless.py"},
    "tests/launcher/test_launch.py": {"mine.py"},
    "tests/training/test_checkpoints.py": {"drawing.py"},
    "tests/training/test_preemption.py": {"mine.py"},
    "tests/launcher/mesh/test_launches.py": {"evals.py"},
    "tests/launcher/mesh/test_sockets.py": {"worker.py"},
    "tests/commands/test_signals.py": {"deaf.py"},
    "tests/launcher/test_ended_by_itself.py": {"leaves.py", "mine.py"},
    "tests/launcher/test_ending.py": {"mine.py"},
    "tests/launcher/test_forked_ranks.py": {"script.py", "sleep.py"},
    "tests/launcher/test_hangs.py": {"mine.py"},
    "tests/test_named.py": {
        "inside/named_nets.py",
        "inside/none.py",
        "named_nets.py",
        "named_neighbour.py",
        "named_star.py",
        "named_wrong.py",
        "none.py",
    },
    "tests/launcher/test_restarts.py": {"mine.py"},
    "tests/solvers/test_registry.py": {"toy.py"},
    "tests/profilers/test_contention.py": {"worker.py"},
    "tests/support/memory_runs.py": {"worker.py"},
    "tests/test_jit.py": {"a/b.py", "a/c.py", "solvers/deep/kernels.py", "solvers/kernels.py"},
}

PAGES = [path for path in TEXTS if path.suffix == ".md"]
INDEX = ROOT / "docs" / "README.md"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
MAX_README_BYTES = 13_000


def links(path):
    """(file, heading or "") of each link of a document to a file of the repository."""
    for name, heading in LINK.findall(path.read_text()):
        yield (path.parent / name).resolve() if name else path, heading


def headings(path):
    """The headings of a document, as links write them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        yield re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def name_of(path):
    """The path of a file of the repository, as texts write it."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_has_one_title_and_headings_below_it(path):
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    first, *others = re.findall(r"^(#+) ", text, re.MULTILINE)
    assert first == "#"
    assert "#" not in others


def test_the_design_is_short():
    # What explains one file stands in that file.
    assert (ROOT / "DESIGN.md").stat().st_size <= 25 * 1024


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_every_file_and_folder_that_a_text_names_is_there(path):
    text = path.read_text()
    names = {*MODULE.findall(text), *FOLDER.findall(text)} - WRITTEN.get(name_of(path), set())
    # Seen from the folder of the text, from the package, or from the root of the repository.
    places = (path.parent, PACKAGE, ROOT)
    assert [n for n in sorted(names) if not any((place / n).exists() for place in places)] == []


def test_the_exceptions_are_needed():
    for name, files in WRITTEN.items():
        assert files <= set(MODULE.findall((ROOT / name).read_text())), name


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_to_a_heading_there(path):
    for target, heading in links(path):
        assert target.exists(), target
        assert not heading or heading in headings(target), (target, heading)


def test_the_readme_leads_to_the_index_and_the_index_to_every_page():
    assert INDEX in {target for target, _ in links(ROOT / "README.md")}
    assert {*INDEX.parent.glob("*.md")} - {INDEX} <= {target for target, _ in links(INDEX)}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= MAX_README_BYTES


def test_the_readme_lists_the_rooms_from_the_lowest_floor_up():
    rooms = re.findall(r"^\| `(\w+)/` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert rooms == [room for floor in FLOORS for room in floor]


def test_the_readme_counts_operators_as_their_page_does():
    page = (ROOT / "docs" / "operators.md").read_text()
    defined, supported = re.search(
        r"defines (\d+) operators .*? (\d+) are supported", page
    ).groups()
    assert f"{supported} of ONNX's {defined} operators" in (ROOT / "README.md").read_text()
