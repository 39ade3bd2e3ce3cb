"""Threads of gloo that watch sockets."""

import os
import threading
from pathlib import Path

import pytest

from planner.launcher.mesh import sockets
from planner.launcher.mesh.sockets import NAME, patient_sockets, thread_names
from tests.support.ranks import under_torchrun

WORKER = """
import os, time
import torch.distributed as dist
from planner.launcher.mesh.sockets import NAME, patient_sockets, thread_names

def named(count):
    while True:
        found = {one for one, name in thread_names().items() if name == NAME}
        if len(found) == count:
            return found
        time.sleep(0.01)

# No thread is waited for before the next one is made: they name themselves later.
dist.init_process_group("gloo")
for _ in range(20):
    dist.new_group([0])
    with patient_sockets():
        dist.new_group([0])
print(sum(os.sched_getscheduler(one) == os.SCHED_BATCH for one in named(41)))
dist.destroy_process_group()
"""

on_linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="a policy of Linux")


@on_linux
def test_threads_of_groups_for_collectives_are_patient_and_others_are_not(tmp_path):
    # If gloo's threads get another name, this fails.
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    assert under_torchrun(script, 1).split("\n")[0] == "20"


@pytest.fixture
def threads(monkeypatch):
    """Lets the system have these threads, of which a read of the list takes the next row."""

    def give(*rows):
        left = [*rows]
        me = {threading.get_native_id(): "python"}
        monkeypatch.setattr(
            sockets, "thread_names", lambda: me | (left.pop(0) if left[1:] else left[0])
        )
        asked = []
        monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
        monkeypatch.setattr(os, "sched_setscheduler", lambda one, *_: asked.append(one))
        return asked

    return give


@on_linux
def test_threads_are_waited_for_until_they_have_named_themselves(threads):
    # The first is of a group that was made before.
    asked = threads(
        {-1: "python"}, {-1: NAME}, {-1: NAME, -2: "python", -3: "python"},
        {-1: NAME, -2: NAME, -3: "python"}, {-1: NAME, -2: NAME, -3: "pt_gloo_runloop"},
    )  # fmt: skip
    with patient_sockets():
        pass
    assert asked == [-2]


@on_linux
def test_a_thread_without_a_name_of_its_own_is_not_waited_for_for_ever(threads, monkeypatch):
    monkeypatch.setattr(sockets, "NAMING_S", 0.01)
    asked = threads({}, {}, {-1: "python", -2: NAME})
    with patient_sockets():
        pass
    assert asked == [-2]


@on_linux
def test_where_the_policy_is_forbidden_nothing_happens(threads, monkeypatch):
    asked = threads({}, {-1: NAME})

    def forbidden(thread, *_):
        asked.append(thread)
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with patient_sockets():
        pass
    assert asked == [-1]


def test_without_a_list_of_threads_there_are_none(monkeypatch):
    monkeypatch.setattr(sockets, "_THREADS", Path("/no/such/folder"))
    assert thread_names() == {}
