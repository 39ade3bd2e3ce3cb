"""Every command of the README and of the pages in docs/ runs, and prints what the README shows.

The README runs first, in an empty folder. Each page then runs in the folder that it names: a copy
of that one, an empty one with the README's `nets.py`, or an empty one. A block whose first line is
a comment with a name is that file. docs/api.md runs in an empty folder (tests/api/test_api.py).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click import Group

import cli
from tests.clusters.test_imports import CUBE
from tests.planning.test_other_cost_models import DNN_FILE, PIPER_FILE

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

NOT_RUN = {
    "make setup": "makes an environment; the tests run in one",
    ". .venv/bin/activate": "changes the shell",
}
"""Lines that are not run, and why."""

NOT_RUN_LANGUAGES = {
    "csv": "a table, which is written as a file",
    "sh": "for several hosts; tests/launcher/test_hosts_page.py checks the options",
    "text": "a list, or an error as it is printed",
}
"""Languages of blocks that are not run, and why. A yaml block without a name is not run either."""

OTHER_PROGRAMS = {
    # torchrun
    "--nnodes", "--node-rank", "--nproc-per-node", "--no-python", "--master-addr", "--max-restarts",
    "--shutdown-timeout", "--signals-to-handle",
    # benchmarks of tests/bench
    "--again", "--checks", "--cluster", "--hosts", "--only", "--per-device", "--record", "--rows",
    "--scaling", "--source", "--write",
    # SLURM
    "--requeue", "--signal",
}  # fmt: skip
"""Options that the text names and that are not the planner's."""

EXAMPLE = "[README's example](../README.md#from-a-module-to-a-trained-model)"
GOES_ON, WITH_NETS = f"in the folder of the {EXAMPLE}", f"with the `nets.py` of the {EXAMPLE}"
"""What a page says of the folder in which its commands run; if neither, the folder is empty."""

TIME_LIMIT_S = 300.0


# ------------------------------------------------------------------------------ pages


def blocks(page):
    """(language, text) of every block of a page."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(text):
    """The commands of a block, without what stands behind them."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        command = re.split(r"\s+#\s", line)[0].strip()
        if command:
            yield command


def shown(text):
    """(command, lines that are shown of its output) for each command of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, *lines = part.splitlines()
        yield command, [line for line in lines if line != "..."]


def calls(page):
    """(command, lines shown of its output) for each command line of a page."""
    for language, text in blocks(page):
        if language == "console":
            yield from shown(text)
        if not language:
            yield from ((command, []) for command in commands(text))


def file_of(text):
    """The name of the file that a block is, from its first line; None where it is no file."""
    name = re.match(r"# ([\w.-]+\.\w+)\n", text)
    return name and name[1]


def options_of(words, group=cli.main):
    """All names of options of a command, which may be one of a group."""
    command = group.commands[words[0]]
    if isinstance(command, Group):
        return options_of(words[1:], command)
    return {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {
        "--help"
    }


def every_option(group=cli.main):
    """The options of all commands."""
    for name, command in group.commands.items():
        yield from (
            every_option(command) if isinstance(command, Group) else options_of([name], group)
        )


def test_the_lines_that_are_not_run_are_there():
    assert NOT_RUN.keys() <= {command for command, _ in calls("README.md")}
    languages = {language for page in PAGES for language, _ in blocks(page)}
    assert languages == {"", "console", "python", "yaml", *NOT_RUN_LANGUAGES}


def test_only_known_programs_are_called():
    lines = {command for page in PAGES for command, _ in calls(page)} - NOT_RUN.keys()
    assert {shlex.split(line)[0] for line in lines} == {"planner", "torchrun"}


@pytest.mark.parametrize("page", PAGES)
def test_every_option_in_a_command_is_one_of_that_command(page):
    for line, _ in calls(page):
        _, called, ours = line.partition("planner ")
        if called:
            words = shlex.split(ours)
            given = {word.partition("=")[0] for word in words if word.startswith("-")}
            assert given <= options_of(words), line


def test_every_option_in_the_text_is_one_of_the_planner_s():
    texts = [re.sub(r"^```.*?^```$", "", (ROOT / p).read_text(), flags=re.S | re.M) for p in PAGES]
    named = {name for text in texts for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    assert named - {*every_option()} == OTHER_PROGRAMS


# ------------------------------------------------------------------------------ running


BROUGHT = {
    "bert_l-3.json": json.dumps(DNN_FILE).encode,
    "bert32a100.json": json.dumps(PIPER_FILE).encode,
    "topo.txt": CUBE.encode,
}
"""Files that a user brings, made when a line first names them. The page says which they are."""


def run(command, folder):
    """Runs a command with this interpreter's programs; its exit code and output."""
    for name in BROUGHT.keys() & {*command}:
        (folder / name).write_bytes(BROUGHT[name]())
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    return done.returncode, done.stdout


def words_of(line):
    """The words of a line of output, numbers and units alike, without the mark of the best row."""
    line = re.sub(r"[-+]?\d[\d,.]*(e[-+]?\d+)?", "0", line.removesuffix("best").strip())
    return re.sub(r"0 (ns|us|ms|s)\b", "0 s", re.sub(r"0 [KMG]?i?B\b", "0 B", line)).split()


def is_like(line, printed):
    """Whether a line of output is the one that a page shows, which may leave words out.

    Which plan is best depends on the machine.
    """
    if line.startswith("the best plan is"):
        return printed.startswith("the best plan is")
    rest = iter(words_of(printed))
    return all(word in rest for word in words_of(line))


def test_a_line_is_like_another_one_with_other_numbers_and_more_words():
    assert is_like("  single  1  33.3 ms  111.5 %  best", " single   2   40 us   0.1 %   1.02 GiB")
    assert is_like("the best plan is even's, 3 % faster", "the best plan is single's")
    assert not is_like("  iteration   19.6 ms", "  iteration   predicted   19.6")
    assert not is_like("wrote net.onnx", "wrote net.json")


def failures(page, folder):
    """Runs all blocks of a page in their order; a text for each that fails."""
    for language, text in blocks(page):
        name = file_of(text)
        if name:
            (folder / name).write_text(text)
        if name or language in ("yaml", *NOT_RUN_LANGUAGES):
            continue
        if language == "python":
            todo = [(text, [])]
        else:
            todo = shown(text) if language else ((command, []) for command in commands(text))
        for line, lines in todo:
            if line in NOT_RUN:
                continue
            code, output = run(
                [sys.executable, "-c", line] if language == "python" else shlex.split(line), folder
            )
            if code:
                end = "\n".join(output.splitlines()[-8:])
                yield f"{line}\n  ended with {code}: {end}"
            for one in lines:
                if not any(is_like(one, printed) for printed in output.splitlines()):
                    yield f"{line}\n  printed no line such as: {one}"


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The folder in which the README has run, and what failed there."""
    folder = tmp_path_factory.mktemp("example")
    return folder, [*failures("README.md", folder)]


@pytest.mark.slow
def test_the_readme_runs_and_prints_what_it_shows(example):
    assert not example[1], "\n\n".join(example[1])


def prose(page):
    """The text of a page beside its blocks, in one line."""
    return " ".join(
        re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.S | re.M).split()
    )


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_the_files_are_that_its_reader_brings(page):
    named = {word for command, _ in calls(page) for word in shlex.split(command)} & BROUGHT.keys()
    assert all(f"`{name}`" in prose(page) for name in named)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES[1:] if p != "docs/api.md" and [*calls(p)]])
def test_a_page_runs_in_the_folder_that_it_names(page, example, tmp_path):
    text, folder = prose(page), tmp_path / "page"
    if GOES_ON in text:
        shutil.copytree(example[0], folder)
    else:
        folder.mkdir()
        if WITH_NETS in text:
            shutil.copy(example[0] / "nets.py", folder)
    assert not (failed := [*failures(page, folder)]), "\n\n".join(failed)
