"""The queue of collectives on CPUs."""

import gc
import weakref
from functools import partial
from threading import Event, current_thread, main_thread

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from planner.launcher.mesh.queue import INLINE, StreamQueue, ThreadQueue
from planner.profilers.storages import watching


def test_functions_run_in_another_thread_in_the_order_in_which_they_were_posted():
    queue, ran, go = ThreadQueue(), [], Event()

    def work(number):
        go.wait(60)
        assert current_thread() is not main_thread()
        ran.append(int(number))
        return number + 1

    pending = [queue.start(work, torch.tensor(i)) for i in range(3)]
    assert not ran
    go.set()
    assert [int(one.wait()) for one in reversed(pending)] == [3, 2, 1]
    assert ran == [0, 1, 2]


def test_what_a_function_posts_runs_in_it():
    queue = ThreadQueue()
    assert queue.start(lambda: queue.start(lambda: "inside").wait()).wait() == "inside"


def test_without_a_queue_functions_run_at_once():
    ran = []
    pending = INLINE.start(ran.append, 1)
    assert ran == [1] and pending.wait() is None


def test_whoever_waits_raises_the_error_and_the_queue_goes_on():
    queue = ThreadQueue()

    def fail():
        raise RuntimeError("connection closed by peer")

    failed, after = queue.start(fail), queue.start(lambda: 7)
    assert after.wait() == 7
    with pytest.raises(RuntimeError, match="connection closed"):
        failed.wait()


def test_nothing_is_recorded_for_autograd():
    leaf = torch.ones(2, requires_grad=True)
    assert not ThreadQueue().start(lambda one: one * 2, leaf).wait().requires_grad


def test_what_was_given_and_made_is_not_held():
    queue, given = ThreadQueue(), torch.ones(3)
    pending = queue.start(lambda one: one * 2, given)
    made = pending.wait()
    storages = [StorageWeakRef(one.untyped_storage()) for one in (given, made)]
    del given, made
    assert all(one.expired() for one in storages)


def test_the_thread_ends_with_the_queue():
    queue = ThreadQueue()
    thread, known = queue._thread, weakref.ref(queue)
    queue.start(lambda: None).wait()
    del queue
    gc.collect()
    thread.join(60)
    assert known() is None and not thread.is_alive()


def test_while_memory_is_watched_all_of_it_is_seen():
    queue, ran = ThreadQueue(), []
    pending = queue.start(lambda: ran.append("before"))
    with watching("cpu", []) as watch:
        held = queue.start(lambda: (ran.append("watched"), torch.ones(1000, dtype=torch.uint8)))
        assert watch.now_bytes() == 1000
        _, made = held.wait()
        del made, _
        del held
    pending.wait()
    assert ran == ["before", "watched"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_stream_computes_what_the_other_one_waits_for():
    """Each stream reads what the other one has just made, without a wait of this process."""
    queue, one = StreamQueue("cuda"), torch.randn(2048, 2048, device="cuda")
    expected = one
    for _ in range(8):
        expected = (expected @ one).relu() / 64
        expected = expected @ one / 64
    made = one
    for _ in range(8):
        made = (made @ one).relu() / 64
        streams = []
        made = queue.start(partial(_times, one, streams), made).wait()
        assert streams[0] != torch.cuda.current_stream()
    assert torch.equal(made, expected)
    inside = queue.start(lambda: queue.start(torch.cuda.current_stream).wait()).wait()
    assert inside != torch.cuda.current_stream()


def _times(one, streams, other):
    streams.append(torch.cuda.current_stream())
    return other @ one / 64
