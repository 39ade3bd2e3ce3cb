"""Threads of gloo that watch sockets."""

import os
from pathlib import Path

import pytest

from planner.launcher.split.sockets import patient_sockets, socket_threads
from tests.support.ranks import under_torchrun

WORKER = """
import os
import torch.distributed as dist
from planner.launcher.split.sockets import patient_sockets, socket_threads

dist.init_process_group("gloo")
first = socket_threads()
with patient_sockets():
    group = dist.new_group([0])
dist.new_group([0])
everyone = socket_threads()
policies = {one: os.sched_getscheduler(one) for one in everyone}
print(len(first), [sum(found == policy for found in policies.values())
                   for policy in (os.SCHED_OTHER, os.SCHED_BATCH)],
      all(policies[one] == os.SCHED_OTHER for one in first))
dist.destroy_process_group()
"""

on_linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")


@on_linux
def test_threads_of_groups_for_collectives_are_patient_and_others_are_not(tmp_path):
    # If gloo's threads get another name, this fails.
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    assert under_torchrun(script, 1).split("\n")[0] == "1 [2, 1] True"


@on_linux
def test_where_the_policy_is_forbidden_nothing_happens(monkeypatch):
    asked = []

    def forbidden(thread, *_):
        asked.append(thread)
        raise PermissionError

    seen = iter([frozenset(), frozenset({os.getpid()})])
    monkeypatch.setattr("planner.launcher.split.sockets.socket_threads", lambda: next(seen))
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with patient_sockets():
        pass
    assert asked == [os.getpid()]


def test_without_a_list_of_threads_there_are_none(monkeypatch):
    monkeypatch.setattr("planner.launcher.split.sockets._THREADS", Path("/no/such/folder"))
    assert socket_threads() == frozenset()
