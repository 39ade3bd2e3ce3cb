"""The page about several hosts: its manifest can be read, its commands have only real options."""

import re
import shlex
from pathlib import Path

import yaml

from planner.commands.launch import launch

PAGE = (Path(__file__).parents[2] / "docs" / "hosts.md").read_text()


def blocks(language):
    """The code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def launches():
    """The options of each launch on the page."""
    for text in (*blocks("sh"), *blocks("yaml")):
        for line in text.replace("\\\n", " ").splitlines():
            if "planner launch" in line and "torchrun" in line:
                yield line, shlex.split(line.partition("planner launch")[2])


def test_the_manifest_is_yaml_with_all_that_a_job_needs():
    kinds = [one["kind"] for text in blocks("yaml") for one in yaml.safe_load_all(text)]
    assert {"Service", "Job"} <= set(kinds)


def test_every_option_on_the_page_is_one_of_launch():
    known = {name for option in launch.params for name in (*option.opts, *option.secondary_opts)}
    found = list(launches())
    assert len(found) >= 4
    for line, words in found:
        assert words[0] == "strategy.json", line
        given = [word for word in words[1:] if word.startswith("--")]
        assert set(given) <= known, line
