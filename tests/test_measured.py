"""Published iterations as rows, the planner's predictions of them, and their marks."""

import itertools
from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from planner.artefacts.options import Optimizer
from planner.artefacts.profile import stash_bytes
from planner.costs.transfers import allreduce_s, transfer_s
from planner.costs.update import state_copies
from tests.bench import truth
from tests.support.measured import page
from tests.support.measured.assumptions import (
    DROPPED,
    LEVELS,
    RECOMPUTE,
    UNFUSED,
    network,
    rate_bytes_per_s,
)
from tests.support.measured.bounds import least_s
from tests.support.measured.clusters import cluster
from tests.support.measured.marks import mark, read_marks, worse, write_marks
from tests.support.measured.networks import Kind, Network, model
from tests.support.measured.predict import LeftOut, Predicted, planned, predict
from tests.support.measured.profiles import computed, profile
from tests.support.measured.rows import FOLDER, PUBLISHED, Row, rows
from tests.support.measured.sample import sampled
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
    assert own.flops == {dtype: pytest.approx(0.8 * peak) for dtype, peak in usual.flops.items()}


def test_hosts_with_a_third_of_the_links_take_three_times_as_long():
    usual, fewer = cluster(ROW), cluster(replace(ROW, source="bloom"))
    for devices in ((0, 1), tuple(range(8))):
        whole_s, third_s = (allreduce_s(one, devices, 10**9) for one in (usual, fewer))
        assert third_s == pytest.approx(3 * whole_s)
    assert transfer_s(fewer, [0], [1], 10**9) == pytest.approx(
        3 * transfer_s(usual, [0], [1], 10**9), rel=1e-3
    )


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


def test_layers_without_fused_attention_keep_what_korthikanti_s_formula_says(tmp_path):
    """s b h (34 + 5 a s / h) bytes a layer, if nothing runs again (arXiv:2205.05198, equation 1);
    here 36 and 4, for what stands for a Dropout keeps its input and no mask.
    """
    s, b, h, a = 64, 2, 256, 4
    kept = {}
    for layers in (2, 3):
        network = replace(GPT, layers=layers, dtype="float16", fused=False, dropped=True)
        own = computed(network, b, "float16", ROW.device, folder=tmp_path)
        kept[layers] = stash_bytes(own, range(len(own.graph.operators)))
    assert kept[3] - kept[2] == pytest.approx(s * b * h * (34 + 5 * a * s / h), rel=0.05)


def test_scores_are_read_and_written_where_attention_is_not_fused(tmp_path):
    """The first product writes two bytes a score, softmax and dropout read and write two each, and
    the second product reads two: 12 in the forward.
    """
    wide = replace(GPT, sequence=2048, heads=16, kv_heads=16, dtype="float16")
    moved = {}
    for fused in (True, False):
        own = computed(
            replace(wide, fused=fused, dropped=not fused), 2, "float16", ROW.device, folder=tmp_path
        )
        moved[fused] = sum(one.bytes_moved for one in own.operators)
    scores = GPT.layers * 2 * 16 * 2048**2
    assert moved[False] - moved[True] == pytest.approx(12 * scores, rel=0.05)


def test_parameters_have_the_row_s_type_and_float32_copies(tmp_path):
    own = profile(ROW, tmp_path)
    assert {one.dtype for one in own.graph.parameters if one.trainable} == {"float16"}
    assert state_copies(own.parameter_dtype, Optimizer.ADAM) * 2 == 4 + 4 + 4
    assert not own.casts_once
    megatron = profile(replace(ROW, source="mt-nlg", dtype="bfloat16"), tmp_path)
    trained = [one for one in megatron.graph.parameters if one.trainable]
    assert all(one.gradient_bytes == 2 * one.bytes for one in trained)
    autocast = profile(replace(ROW, source="llm-foundry"), tmp_path)
    assert {one.dtype for one in autocast.graph.parameters if one.trainable} == {"float32"}
    assert autocast.casts_once and autocast.parameter_dtype is None
    assert (autocast.fused_loss, autocast.launch_blocking) == (True, False)
    bloom = profile(replace(ROW, source="bloom"), tmp_path)
    assert (bloom.fused_loss, bloom.launch_blocking) == (False, True)


def test_systems_without_fused_attention_are_named_once(table):
    sources = {row.source for row in table}
    assert DROPPED < UNFUSED < sources


def test_selective_recomputation_is_of_the_scores(tmp_path):
    network = replace(GPT, layers=8, sequence=512)
    row = replace(ROW, source="nemo-launcher", network=network, microbatch=4, batch=64)
    none, selective, full = (
        predict(replace(row, recompute=words), tmp_path) for words in ("none", "selective", "full")
    )
    assert none.total_bytes > selective.total_bytes > full.total_bytes
    assert none.iteration_s < selective.iteration_s < full.iteration_s
    (stage, _) = planned(replace(row, recompute="selective"), tmp_path).plan.strategy.stages
    assert len(stage.recomputed) == 4
    assert [name.split("_")[0] for name in stage.recomputed[0]] == [
        "h.0.MatMul", "h.0.Softmax", "h.0.LeakyRelu", "h.0.MatMul",
    ]  # fmt: skip


def test_nothing_is_selected_where_attention_is_fused(tmp_path):
    none, selective = (predict(replace(ROW, recompute=words), tmp_path)
                       for words in ("none", "selective"))  # fmt: skip
    assert (none.iteration_s, none.total_bytes) == (selective.iteration_s, selective.total_bytes)


def test_selective_recomputation_per_operator_keeps_attention_and_the_gate(tmp_path):
    llama = Network(Kind.LLAMA, 2, 256, 4, 2, 704, 1000, 64)
    row = replace(ROW, network=llama, degrees=(1, 1, 8), sharing="FSDP", dtype="bfloat16",
                  recompute="selective per operator")  # fmt: skip
    (stage,) = planned(row, tmp_path).plan.strategy.stages
    again = {name for some in stage.recomputed for name in some}
    kept = [name for name in stage.operators if name.startswith("layers.1.") and name not in again]
    assert [name.split("_")[0] for name in kept] == ["layers.1.Attention", "layers.1.MatMul"]
    assert len(stage.recomputed) == 3 * llama.layers


def test_stages_have_the_same_number_of_layers_however_long_the_logits_take(tmp_path):
    row = replace(ROW, network=replace(GPT, layers=6, vocabulary=50_000), degrees=(2, 2, 2))
    plan = planned(row, tmp_path).plan
    layers = [{name.split(".")[1] for name in stage.operators if name.startswith("h.")}
              for stage in plan.strategy.stages]  # fmt: skip
    assert layers == [{"0", "1", "2"}, {"3", "4", "5"}]


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


def test_the_bound_over_kernels_is_that_of_the_batch_s_flops(tmp_path):
    """6 FLOPs for each weight of a product and token, half of attention's, on 8 A100."""
    row = replace(ROW, network=replace(GPT, width=2048, inner=8192, heads=16, kv_heads=16))
    tokens = row.batch * GPT.sequence
    weights = GPT.layers * 12 * 2048**2 + GPT.vocabulary * 2048
    attention = 0.5 * GPT.layers * 12 * tokens * GPT.sequence * 2048
    least = (6 * tokens * weights + attention) / (8 * 312e12)
    moved = 4 * 4 * (weights + GPT.sequence * 2048) / (8 * 2.039e12)
    assert least_s(row, tmp_path) == pytest.approx(max(least, moved), rel=0.02)
    longer = replace(row, batch=64 * row.batch)
    assert least_s(longer, tmp_path) == pytest.approx(64 * least, rel=0.02)


def test_a_row_in_a_format_without_a_peak_has_no_bound_over_kernels(tmp_path):
    assert least_s(replace(ROW, lacks="float8, async TP"), tmp_path) is None
    assert least_s(replace(ROW, lacks="TF32"), tmp_path) is None
    assert least_s(replace(ROW, network=None), tmp_path) is None


@pytest.mark.parametrize(
    ("source", "tensor", "microbatch", "masked"),
    [("bloom", 2, 1, True), ("bloom", 2, 2, False), ("bloom", 1, 1, False), ("made", 2, 1, False)],
)
def test_scores_are_masked_by_themselves_where_matrices_are_no_multiple_of_four(
    source, tensor, microbatch, masked
):
    """There are 4 heads."""
    row = replace(ROW, source=source, degrees=(tensor, 1, 1), microbatch=microbatch)
    ran = network(row)
    assert ran.masked == masked
    more = Counter(node.op_type for node in model(ran).graph.node)
    more -= Counter(node.op_type for node in model(replace(ran, masked=False)).graph.node)
    assert more == (Counter(Cast=4, Mul=2, LeakyRelu=2) if masked else Counter())


def test_a_large_source_is_sampled_by_whole_questions():
    rows = [replace(ROW, name=f"{n}", batch=16 * (1 + n // 2)) for n in range(20)]
    small = [replace(ROW, source="small", name=f"{n}") for n in range(10)]
    chosen = sampled([*rows, *small], most=10)
    assert [row.name for row in chosen if row.source == "made"] == [
        "0", "1", "4", "5", "8", "9", "12", "13", "16", "17",
    ]  # fmt: skip
    assert [row for row in chosen if row.source == "small"] == small
    assert sampled([*rows, *small], most=20) == [*rows, *small]


DEGREES = itertools.count(100)


def predicted(measured_s, predicted_s, *, batch=16, memory=None, fits=True, degree=None):
    """A prediction of a made row, of a plan of its own unless the tensor degree says which."""
    degrees = (degree or next(DEGREES), *ROW.degrees[1:])
    row = replace(ROW, iteration_s=measured_s, batch=batch, memory_bytes=memory, degrees=degrees)
    return Predicted(row, predicted_s, 0.9, 0.805, 10, 12, fits)


def test_scores_are_those_worked_out_by_hand():
    some = [
        predicted(1.0, 1.1, memory=10.0),  # chosen of the first question
        predicted(0.8, 1.2, memory=6.0, fits=False),  # the fastest
        predicted(0.81, 1.5),  # as good as the one before: no pair with it
        predicted(2.0, 1.0, batch=32),  # another question
    ]
    one = score(some)
    assert (one.rows, one.unfit, one.below_bound, one.below_peak) == (4, 1, 2, 1)
    assert one.mape == pytest.approx((0.1 + 0.5 + 0.69 / 0.81 + 0.5) / 4)
    assert one.bias == pytest.approx((0.1 + 0.5 + 0.69 / 0.81 - 0.5) / 4)
    assert (one.in_order, one.pairs) == (0, 2)
    assert (one.questions, one.regret, one.largest_regret) == (1, *[pytest.approx(0.25)] * 2)
    assert one.memory == pytest.approx((12 / 10 + 12 / 6) / 2)


def test_a_plan_that_was_measured_twice_has_no_order_with_itself():
    twice = [predicted(1.0, 1.1, degree=1), predicted(1.2, 1.1, degree=1)]
    assert (score(twice).pairs, score(twice).regret) == (0, pytest.approx(0.0))
    one = score([*twice, predicted(1.01, 1.2, degree=2)])
    assert (one.pairs, one.in_order) == (1, 0)  # with the slow one
    assert one.regret == pytest.approx(1.1 / 1.01 - 1)


def test_memory_that_was_allocated_is_compared_without_the_reserve():
    one = predicted(1.0, 1.0, memory=5.0)
    assert one.memory_ratio == pytest.approx(12 / 5)
    assert replace(one, row=replace(one.row, allocated=True)).memory_ratio == pytest.approx(10 / 5)


def test_tables_have_a_line_for_each_source_and_for_each_row():
    some = [predicted(1.0, 1.1, memory=10e9, fits=False, degree=2), predicted(0.5, 0.5)]
    for i, changed in enumerate(({"source": "vtrain-multi"}, {"source": "other", "known": False})):
        some[i] = replace(some[i], row=replace(some[i].row, **changed))
    lines = [line.split(" | ") for line in page.sources(some).splitlines()[2:]]
    assert [line[0] for line in lines] == [
        "| vtrain-multi", "| other", "| published.csv", "| all", "| all, known",
    ]  # fmt: skip
    assert lines[3][1:4] == ["2", "5.0 %", "+5.0 %"]
    assert lines[0][1:] == lines[4][1:]
    assert lines[1][1:] == lines[2][1:]
    (first, second) = truth.each(some).splitlines()[2:]
    assert "| 2, 2, 2 | - | none | 1.1 | 1 | +10.0 % | 0.0 | 10.0 | no |" in first
    assert second.endswith("| 0.5 | 0.5 | +0.0 % | 0.0 | - | yes |")


def test_left_out_rows_are_all_named_by_their_reasons():
    rows = [replace(ROW, name=f"{n}: 2 x 256") for n in (2, 3, 4, 9)]
    other = replace(ROW, source="other", name="other-004: GPT")
    answers = [predicted(1.0, 1.1), *(LeftOut(row, "float8") for row in (*rows, other)),
               LeftOut(replace(other, name="other-005: MoE"), "MoE")]  # fmt: skip
    text = page.parts(answers, rows[:3])
    assert text["left-out"].splitlines() == [
        "- float8: made 2 to 4, 9; other 004", "- MoE: other 005",
    ]  # fmt: skip
    assert text["skipped"] == "made 2 to 4"
    assert text["refused"] == "None."
    assert "made one" not in text["bound"]
    assert "float32 copies of" in text["assumptions"]
    assert "- `UNFUSED`: bigscience-1.3B, bigscience-V100, bloom," in text["assumptions"]


def test_models_have_their_regret():
    some = [predicted(1.0, 1.1), predicted(0.8, 1.2), predicted(2.0, 1.0, batch=32)]
    (line,) = page.models(some).splitlines()[2:]
    assert "| made, 2 x 256, gpt | 8 A100-SXM4-80GB | 1 | 3 |" in line
    assert line.endswith("| 0 of 1 | 25.0 % | 25.0 % |")


def test_the_picture_has_a_point_for_each_prediction():
    some = [predicted(1.0, 1.1, memory=10e9), predicted(0.5, 3.0)]
    assert page.drawn(some).count("r='2.5'") == 3
    assert page.drawn(some[1:]).count("r='2.5'") == 1


GOOD = [predicted(1.0, 1.1), predicted(0.8, 0.9), predicted(0.5, 0.5, fits=False)]


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (GOOD, []),
        ([predicted(1.0, 1.0), *GOOD[1:]], []),  # better
        ([predicted(1.0, 1.2), *GOOD[1:]], ["error of known rows: 10.8 %, the mark is 7.5 %"]),
        ([GOOD[0], predicted(0.8, 0.85, fits=False), GOOD[2]],
         ["runs that ran and do not fit: 2, the mark is 1"]),
        ([predicted(1.0, 0.95), predicted(0.8, 0.96), GOOD[2]],
         ["error of known rows", "pairs in order: 2 of 3, the mark is 3 of 3"]),
        ([*GOOD[:2], LeftOut(GOOD[2].row, "no plan")],
         ["error of known rows", "rows without a prediction: 1, the mark is 0"]),
        (GOOD[:2], ["there are no marks for these rows"]),
    ],
)  # fmt: skip
def test_what_is_worse_than_the_marks_is_named(now, said, tmp_path):
    write_marks({"made": mark(GOOD)}, tmp_path / "marks.json")
    lines = worse({"made": mark(now)}, read_marks(tmp_path / "marks.json"))
    assert len(lines) == len(said)
    for line, text in zip(lines, said, strict=True):
        assert line.startswith("made: ")
        assert text in line


def test_a_source_without_marks_is_named():
    (line,) = worse({"made": mark(GOOD)}, {})
    assert line.startswith("made: there are no marks for these rows; record them with: make")


def test_marks_of_other_sources_stay(tmp_path):
    write_marks({"one": mark(GOOD)}, tmp_path / "marks.json")
    write_marks({"two": mark(GOOD[:2])}, tmp_path / "marks.json")
    assert read_marks(tmp_path / "marks.json") == {"one": mark(GOOD), "two": mark(GOOD[:2])}


def test_a_run_that_no_kernels_allow_is_a_failure_whatever_the_marks():
    (line,) = truth.failures([predicted(0.8, 1.0), predicted(0.81, 1.0)], None)
    assert line == "made, one: measured 0.8 s, but no kernels take less than 0.805 s"


@pytest.mark.reference
def test_marks_are_recorded_for_every_source(table):
    recorded = read_marks(truth.MARKS)
    sources = {row.source for row in table}
    assert recorded.keys() == {*sources, PUBLISHED, truth.ALL}
    for source in sources:
        own = [LeftOut(row, "") for row in sampled(table) if row.source == source]
        assert mark(own).rows == recorded[source].rows, source


@pytest.mark.slow
@pytest.mark.reference
def test_no_row_is_faster_than_any_kernels_allow(table):
    """All rows, also those whose plan the planner cannot express; it takes minutes at first."""
    bounds = {(row.source, row.name): (least_s(row), row.iteration_s) for row in table}
    known = {name: pair for name, pair in bounds.items() if pair[0] is not None}
    assert len(known) >= len(table) - 40
    assert [name for name, (least, measured) in known.items() if least > measured] == []


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
