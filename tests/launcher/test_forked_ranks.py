"""Ranks that tests fork: each has a seat, and an error of one is the test's."""

import pytest

from tests.support.ranks import forked

SCRIPT = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # one that ended while the other connects would be an error there
if len(sys.argv) > 1:
    if dist.get_rank() == 1:
        raise ValueError("no such " + sys.argv[1])
    time.sleep(600)
print(dist.get_rank(), dist.get_world_size(), os.getcwd(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_each_rank_runs_the_script_in_its_seat(script):
    printed = forked(script, 2, folder=script.parent)
    assert sorted(printed.splitlines()) == [f"{rank} 2 {script.parent}" for rank in (0, 1)]


def test_an_error_of_a_rank_is_told_and_ends_the_others(script):
    with pytest.raises(AssertionError, match="rank 1 has ended with 1") as error:
        forked(script, 2, "folder")
    assert "ValueError: no such folder" in str(error.value)


def test_ranks_that_do_not_end_are_ended(tmp_path):
    (tmp_path / "sleep.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(AssertionError, match="2 ranks run after 1 s"):
        forked(tmp_path / "sleep.py", 2, timeout_s=1)
