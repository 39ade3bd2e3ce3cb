"""Published iterations as rows, and the planner's predictions of them."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from planner.costs.transfers import allreduce_s, transfer_s
from tests.bench import truth
from tests.support.measured.assumptions import LEVELS, RECOMPUTE, rate_bytes_per_s
from tests.support.measured.clusters import cluster
from tests.support.measured.networks import Kind, Network, model
from tests.support.measured.predict import LeftOut, Predicted, predict
from tests.support.measured.rows import FOLDER, Row, rows
from tests.support.measured.scores import score

GPT = Network(Kind.GPT, 2, 256, 4, 4, 1024, 1000, 64)
ROW = Row(
    source="made",
    name="one",
    network=GPT,
    device="A100-SXM4-80GB",
    num_devices=8,
    per_host=8,
    degrees=(2, 2, 2),
    sharing="",
    microbatch=2,
    batch=16,
    recompute="none",
    dtype="float16",
    network_rate="",
    iteration_s=1.0,
)


@pytest.fixture(scope="module")
def table():
    """All rows."""
    if not FOLDER.is_dir():
        pytest.skip(f"{FOLDER} is not there; set PLANNER_REFERENCE")
    return rows()


@pytest.mark.parametrize(
    ("network", "billions"),
    [
        # Meta's model cards; Brown et al. 2020; BigScience's card of BLOOM; Devlin et al. 2018.
        (Network(Kind.LLAMA, 32, 4096, 32, 8, 14_336, 128_256, 8192), 8.03),
        (Network(Kind.LLAMA, 32, 4096, 32, 32, 11_008, 32_000, 4096), 6.74),
        (Network(Kind.LLAMA, 80, 8192, 64, 8, 28_672, 128_256, 8192), 70.6),
        (Network(Kind.GPT, 96, 12_288, 96, 96, 49_152, 50_257, 2048), 175.0),
        (Network(Kind.GPT, 70, 14_336, 112, 112, 57_344, 250_880, 2048), 176.2),
        (Network(Kind.BERT, 24, 1024, 16, 16, 4096, 30_522, 512), 0.335),
        (Network(Kind.RESNET50), 0.0256),
    ],
    ids=str,
)
def test_networks_have_as_many_parameters_as_their_authors_say(network, billions):
    proto = model(network)
    read = {name for node in proto.graph.node for name in node.input}
    sizes = [prod(one.dims) for one in proto.graph.initializer if one.name in read]
    assert sum(sizes) / 1e9 == pytest.approx(billions, rel=0.01)


def test_devices_of_several_hosts_have_a_card_each():
    row = replace(ROW, num_devices=16, degrees=(1, 1, 16), network_rate="200 Gbps per GPU")
    whole = cluster(row)
    assert [len(whole.hosts), len(whole.devices)] == [2, 16]
    assert transfer_s(whole, [0], [8], 25e9) == pytest.approx(1.0, rel=1e-4)
    # Both ways of a ring, on 0.9 of 8 cards; inside a host as shipped.
    expected_s = 2 * 15 / 16 * 10**9 / (0.9 * 8 * 25e9)
    assert allreduce_s(whole, tuple(range(16)), 10**9) == pytest.approx(expected_s)
    assert allreduce_s(whole, tuple(range(8)), 10**9) == pytest.approx(2 * 7 / 8 / 229)


def test_cards_of_a_source_have_their_own_memory():
    (own,) = cluster(replace(ROW, source="torchtitan", device="H100-SXM")).device_types
    (usual,) = cluster(replace(ROW, device="H100-SXM")).device_types
    assert own.memory_bytes == 96 * 10**9 > usual.memory_bytes
    assert own.memory_bandwidth_bytes_per_s < usual.memory_bandwidth_bytes_per_s
    assert own.flops == usual.flops


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("50 Gbps per GPU", 6.25e9),
        ("4 x 200 Gbps per host", 12.5e9),
        ("measured 10.6 GB/s over hosts", 10.6e9),
        ("", 25e9),
    ],
)
def test_networks_are_told_in_words(words, rate):
    assert rate_bytes_per_s(replace(ROW, network_rate=words)) == pytest.approx(rate)
    with pytest.raises(ValueError, match="expected a rate per GPU or host, got 'fast'"):
        rate_bytes_per_s(replace(ROW, network_rate="fast"))


def test_a_row_is_predicted_with_its_plan(tmp_path):
    whole, parts, again = (
        predict(replace(ROW, **changed), tmp_path)
        for changed in ({}, {"sharing": "FSDP"}, {"recompute": "full"})
    )
    assert len(list(tmp_path.iterdir())) == 1  # they have one profile
    assert all(isinstance(one, Predicted) and one.fits for one in (whole, parts, again))
    assert parts.total_bytes < whole.total_bytes
    assert again.iteration_s > whole.iteration_s > whole.bound_s


def test_a_row_that_does_not_fit_has_a_time(tmp_path):
    wide = replace(GPT, width=16_384, heads=128, kv_heads=128, inner=65_536)
    one = predict(replace(ROW, network=wide, num_devices=1, degrees=(1, 1, 1)), tmp_path)
    assert not one.fits
    assert one.total_bytes > 80e9
    assert one.iteration_s > 0


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"lacks": "float8"}, "float8"),
        ({"network": None}, "adapters of a rank that is not published"),
        ({"degrees": (16, 1, 1)}, "--tensor-degree 16: expected a divisor of the 8 devices"),
    ],
)
def test_a_row_that_cannot_be_expressed_is_left_out_with_its_reason(changed, reason, tmp_path):
    one = predict(replace(ROW, **changed), tmp_path)
    assert isinstance(one, LeftOut)
    assert reason in one.reason


def predicted(measured_s, predicted_s, *, batch=16, memory=None, fits=True):
    """A prediction of a made row."""
    row = replace(ROW, iteration_s=measured_s, batch=batch, memory_bytes=memory)
    return Predicted(row, predicted_s, 0.9, 10, 12, fits)


def test_scores_are_those_worked_out_by_hand():
    some = [
        predicted(1.0, 1.1, memory=10.0),  # chosen of the first question
        predicted(0.8, 1.2, memory=6.0, fits=False),  # the fastest
        predicted(0.81, 1.5),  # as good as the one before: no pair with it
        predicted(2.0, 1.0, batch=32),  # another question
    ]
    one = score(some)
    assert (one.rows, one.unfit, one.below_bound) == (4, 1, 2)
    assert one.mape == pytest.approx((0.1 + 0.5 + 0.69 / 0.81 + 0.5) / 4)
    assert one.bias == pytest.approx((0.1 + 0.5 + 0.69 / 0.81 - 0.5) / 4)
    assert (one.in_order, one.pairs) == (0, 2)
    assert one.regret == pytest.approx(0.25)
    assert one.memory == pytest.approx((12 / 10 + 12 / 6) / 2)


def test_memory_that_was_allocated_is_compared_without_the_reserve():
    one = predicted(1.0, 1.0, memory=5.0)
    assert one.memory_ratio == pytest.approx(12 / 5)
    assert replace(one, row=replace(one.row, allocated=True)).memory_ratio == pytest.approx(10 / 5)


def test_tables_have_a_line_for_each_source_and_for_each_row():
    some = [predicted(1.0, 1.1, memory=10e9, fits=False), predicted(0.5, 0.5)]
    some[1] = replace(some[1], row=replace(some[1].row, source="other", known=False))
    lines = [line.split(" | ") for line in truth.scores(some).splitlines()[2:]]
    assert [line[0] for line in lines] == ["| made", "| other", "| all", "| known"]
    assert lines[2][1:4] == ["2", "5.0 %", "+5.0 %"]
    assert lines[0] == ["| made", *lines[3][1:]]
    (first, second) = truth.each(some).splitlines()[2:]
    assert "| 2, 2, 2 | - | none | 1.1 | 1 | +10.0 % | 0.0 | 10.0 | no |" in first
    assert second.endswith("| 0.5 | 0.5 | +0.0 % | 0.0 | - | yes |")


@pytest.mark.reference
def test_every_row_says_what_a_prediction_needs(table):
    for row in table:
        assert row.iteration_s > 0
        if row.lacks or row.network is None:
            continue
        tensor, pipeline, data = row.degrees
        assert tensor * pipeline * data == row.num_devices, row.name
        assert row.batch % (row.microbatch * data) == 0, row.name
        assert row.recompute in RECOMPUTE
        assert row.sharing in LEVELS
        assert len(cluster(row).devices) == row.num_devices


@pytest.mark.reference
def test_every_line_of_the_tables_is_a_row(table):
    counts = Counter(row.source for row in table)
    expected = {"llm-foundry": 10, "vtrain-multi": 37, "vtrain-single": 360, "megatron-lm": 6}
    assert {name: counts.pop(name) for name in expected} == expected
    assert counts.total() == 172
    assert len({(row.source, row.name) for row in table}) == len(table)
