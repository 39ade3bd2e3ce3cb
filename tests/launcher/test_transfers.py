"""Tensors between two devices that share a queue instead of a network."""

import weakref
from collections import deque
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from planner.artefacts.graph import Tensor
from planner.launcher.executor import Executor
from planner.launcher.transfers import (
    Boxes,
    CompletionThread,
    Exchange,
    in_a_row,
    laid_out,
    order_of,
)
from planner.schedules.actions import Compute, Direction, Receive, Send

B, F = Direction.BACKWARD, Direction.FORWARD


class Wire:
    """Both ends of a channel. What is received is what was sent, in the order of posting."""

    torch_device = "cpu"

    def __init__(self):
        self.sent, self.expected = [], []

    def send(self, tensor, device):
        assert tensor.is_contiguous() and device == 1
        self.sent.append(tensor)

    def receive(self, buffer, device):
        assert device == 0
        self.expected.append(buffer)
        return buffer

    def finish(self, buffer):
        at = next(i for i, one in enumerate(self.expected) if one is buffer)
        buffer.copy_(self.sent[at])
        return 1.0


def send(microbatch=0, direction=F, tensor="t"):
    return Send(direction, 0, microbatch, tensor, 1)


def receive(microbatch=0, direction=F, tensor="t"):
    return Receive(direction, 1, microbatch, tensor, 0)


def crossed(tensor):
    """A tensor behind the wire, and the wire."""
    wire = Wire()
    here, there = Exchange(wire), Exchange(wire)
    here.send(send(), tensor)
    arrival = there.expect(receive(), tensor.shape, tensor.dtype)
    found, ended_s = there.take(arrival, tensor.shape)
    assert ended_s == 1.0
    return found, wire


LAYOUTS = {
    "in order": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(24.0).view(2, 4, 3).transpose(1, 2),
    "turned around": torch.arange(24.0).view(4, 3, 2).permute(2, 1, 0),
    "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a number": torch.tensor(3.0),
    "a row": torch.arange(5),
    "of size one": torch.arange(6.0).view(2, 1, 3).transpose(0, 1),
    "nothing": torch.zeros(2, 0, 3),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dense_tensor_lies_as_before_and_is_not_copied(name):
    tensor = LAYOUTS[name]
    found, wire = crossed(tensor)
    assert torch.equal(found, tensor)
    wide = [d for d, size in enumerate(tensor.shape) if size > 1]
    assert [found.stride(d) for d in wide] == [tensor.stride(d) for d in wide]
    assert wire.sent[-1].data_ptr() == tensor.data_ptr()


GAPS = {
    "every second": torch.arange(48.0).view(2, 3, 8)[:, :, ::2],
    "part, transposed": torch.arange(48.0).view(2, 3, 8)[:, :, :4].transpose(1, 2),
    "repeated": torch.arange(3.0).view(1, 3, 1).expand(2, 3, 4),
}


@pytest.mark.parametrize("name", GAPS)
def test_a_tensor_with_gaps_or_repetitions_arrives_dense(name):
    tensor = GAPS[name]
    found, wire = crossed(tensor)
    assert torch.equal(found, tensor)
    assert wire.sent[-1].numel() == found.numel() == found.untyped_storage().nbytes() // 4
    assert found.is_contiguous() == (name != "part, transposed")


def test_the_order_goes_ahead_once_for_each_tensor_and_direction():
    wire = Wire()
    here, there = Exchange(wire), Exchange(wire)
    tensor = LAYOUTS["transposed"]
    for microbatch in range(3):
        for direction in (F, B):
            here.send(send(microbatch, direction), tensor + microbatch)
            arrival = there.expect(receive(microbatch, direction), tensor.shape, tensor.dtype)
            assert torch.equal(there.take(arrival, tensor.shape)[0], tensor + microbatch)
    assert len(wire.sent) == 2 + 3 * 2


def test_several_may_be_expected_before_the_first_has_come():
    wire = Wire()
    here, there = Exchange(wire), Exchange(wire)
    tensor = LAYOUTS["turned around"]
    expected = [there.expect(receive(m), tensor.shape, tensor.dtype) for m in range(2)]
    for m in range(2):
        here.send(send(m), tensor * (m + 1))
    for m in range(2):
        assert torch.equal(there.take(expected[m], tensor.shape)[0], tensor * (m + 1))


def test_what_lies_differently_later_is_turned_into_what_was_said():
    wire = Wire()
    here, there = Exchange(wire), Exchange(wire)
    for m, tensor in enumerate((LAYOUTS["transposed"], LAYOUTS["in order"])):
        here.send(send(m), tensor)
        arrival = there.expect(receive(m), tensor.shape, tensor.dtype)
        arrived, _ = there.take(arrival, tensor.shape)
        assert torch.equal(arrived, tensor)
        assert arrived.stride() == LAYOUTS["transposed"].stride()


def test_a_part_is_copied_once_for_all_targets():
    sent = {}

    class World:
        """Keeps what is sent, by target."""

        def send(self, tensor, device):
            sent.setdefault(device, []).append(tensor)
            return SimpleNamespace(posted_s=0.0, is_over=lambda: True)

    executor = Executor({}, boxes(2), None, World())
    executor._sending = {(0, F): deque([[]])}
    executor._outputs = {"t": GAPS["every second"]}
    for device in (1, 2):
        executor._send(Send(F, 0, 0, "t", device))
    first, second = sent[1][-1], sent[2][-1]
    assert first.tolist() == GAPS["every second"].flatten().tolist()
    assert first.data_ptr() == second.data_ptr() != GAPS["every second"].data_ptr()


def boxes(*shape, tile=None):
    tensor = Tensor("t", shape, "float32", True)
    return Boxes({"t": tensor}, {} if tile is None else {(0, "t"): tile})


def test_a_part_of_a_tensor_is_cut_out_of_what_this_device_has():
    has = torch.arange(6.0).reshape(2, 3)  # rows 2 and 3 of 4
    sent = boxes(4, 3, tile=((2, 4), (0, 3))).cut(Send(F, 0, 0, "t", 1, ((3, 4), (1, 3))), has)
    assert sent.tolist() == [[4.0, 5.0]]


def test_parts_of_a_tensor_come_together_and_add_up_where_they_meet():
    arrived, described = {}, boxes(4, tile=((2, 4),))
    for box, value in ((((2, 3),), 1.0), (((3, 4),), 2.0), (((2, 4),), 10.0)):
        receive = Receive(B, 0, 0, "t", 1, box)
        shape = described.shape(receive)
        described.put(arrived, receive, torch.full(shape, value))
    assert arrived["t"].tolist() == [11.0, 12.0]


@pytest.mark.parametrize("waiting", [(), (B,)])
def test_a_backward_waits_for_what_the_second_one_before_it_sent(waiting):
    sent, finished = [], []

    class World:
        """Takes transfers that are over only when they are waited for."""

        def send(self, tensor, device):
            sent.append(SimpleNamespace(posted_s=0.0, is_over=lambda: False))
            return sent[-1]

        def finish(self, transfer):
            finished.append(sent.index(transfer))

    executor = Executor({}, boxes(2), None, World(), waiting)
    held = []
    for m in range(4):
        for direction in (F, B):
            executor._wait_for_sends(Compute(direction, 0, m))
            held.append((f"{direction}{m}", list(finished)))
            executor._outputs = {"t": torch.zeros(2)}
            executor._send(Send(direction, 0, m, "t", 1))
    # Of the sends, those of backwards are 1, 3, 5 and 7.
    assert dict(held)["B1"] == []
    assert dict(held)["B2"] == dict(held)["F3"] == ([1] if waiting else [])
    assert dict(held)["B3"] == ([1, 3] if waiting else [])


@pytest.mark.parametrize("error", [None, RuntimeError("no route")])
def test_a_buffer_is_gone_when_its_transfer_is_over(error):
    begin, there = Event(), []

    class Work:
        def __init__(self, tensor):
            self.tensor = tensor

        def wait(self):
            begin.wait(timeout=10)
            if error:
                raise error

    tensor = torch.zeros(3)
    known = weakref.ref(tensor)
    ended = CompletionThread().watch(Work(tensor), tensor)
    ended.add_done_callback(lambda _: there.append(known()))
    del tensor
    assert known() is not None
    begin.set()
    assert ended.exception(timeout=10) is error
    assert error or there == [None]


def test_a_row_and_its_order_are_the_tensor():
    tensor = LAYOUTS["turned around"]
    order = order_of(tensor)
    assert order == (2, 1, 0)
    row = in_a_row(tensor, order)
    assert row.tolist() == list(range(24))
    assert torch.equal(laid_out(row, tensor.shape, order), tensor)
