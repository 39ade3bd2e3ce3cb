"""Tables of measured iterations: good ones as rows, wrong ones with all that is wrong in them."""

import pytest

from planner.artefacts.measured import MeasuredRow, read_measured
from planner.artefacts.options import Optimizer, Recompute
from planner.support.errors import FileError

HEAD = "t,d,p,microbatch,batch,time"


@pytest.fixture
def reading(tmp_path):
    """Reads a table of some text."""

    def read(text):
        path = tmp_path / "runs.csv"
        path.write_text(text)
        return read_measured(path)

    return read


def test_a_line_is_a_run(reading):
    (row,) = reading(f"\ufeff{HEAD}\n2,4,1,8,64,372 ms\n")
    assert row == MeasuredRow(2, tensor=2, data=4, pipeline=1, microbatch=8, batch=64, time_s=0.372)
    assert row.num_devices == 8
    assert (row.recompute, row.optimizer) == (Recompute.NONE, Optimizer.ADAM)


@pytest.mark.parametrize(
    ("column", "cell"), [("time", "372 ms"), ("time_s", "0.372"), ("time_ms", "372")]
)
def test_a_time_has_its_unit_in_the_cell_or_in_the_column(reading, column, cell):
    (row,) = reading(f"t,d,p,microbatch,batch,{column}\n1,1,1,1,1,{cell}\n")
    assert row.time_s == pytest.approx(0.372)


def test_columns_come_in_any_order_and_empty_cells_are_as_no_column(reading):
    text = "batch, model,recompute,t,d,p,microbatch,over_replicas,sequence_parallel,time\n"
    first, second = reading(
        f"# runs\n{text}8, gpt2 ,full,1,2,1,2,3,yes,1 s\n\n# 8\n8,,,1,2,1,2,,,1 s\n"
    )
    assert (first.model, first.recompute, first.over_replicas) == ("gpt2", Recompute.FULL, 3)
    assert first.sequence_parallel
    assert second == MeasuredRow(6, 1, 2, 1, 2, 8, 1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty"),
        ("t,d,p,microbatch,time\n1,1,1,1,1 s\n", "there is no column batch; expected a line of"),
        (f"{HEAD},time_s\n", "expected one of the columns time, time_s, time_ms, got time, time_s"),
        (f"{HEAD},recomp\n", "unknown column 'recomp'; known: t, d, p"),
        (f"{HEAD},t\n", "column 't' is there 2 times"),
        (f"{HEAD}\n", "got 0"),
        (f"{HEAD}\n1,1,1,1\n", "line 2: expected 6 cells, got 4"),
        (f"{HEAD}\n1,1,1,1,1,372\n", "line 2: time: expected a time above 0 with its unit"),
        (f"{HEAD}\n1,1,1,1,1,0 s\n", "line 2: time: expected a time above 0, got '0 s'"),
        (f"{HEAD}\n1,1,1,1,1,-1 s\n", "line 2: time: expected a time above 0"),
        (f"{HEAD}_s\n1,1,1,1,1,nan\n", "line 2: time_s: expected a time above 0, got 'nan'"),
        (f"{HEAD}_s\n1,1,1,1,1,1e999\n", "line 2: time_s: expected a time above 0"),
        (f"{HEAD}\n1.5,1,1,1,1,1 s\n", "line 2: t: expected a whole number above 0, got '1.5'"),
        (f"{HEAD}\n1,0,1,1,1,1 s\n", "line 2: d: expected a whole number above 0, got '0'"),
        (f"{HEAD}\n1,2,1,4,12,1 s\n", "expected a multiple of d x microbatch, 2 x 4, got 12"),
        (f"{HEAD},recompute\n1,1,1,1,1,1 s,auto\n", "expected none, selective or full, got 'auto'"),
        (f"{HEAD},optimizer\n1,1,1,1,1,1 s,lamb\n", "optimizer: expected one of sgd, momentum"),
        (f"{HEAD},over_replicas\n1,1,1,1,1,1 s,4\n", "over_replicas: expected 0, 1, 2 or 3"),
        (f"{HEAD},sequence_parallel\n1,1,1,1,1,1 s,1\n", "expected yes or no, got '1'"),
        (f"{HEAD}\n1,1,1,1,1,\"{'x' * 200_000}\"\n", "field larger than field limit"),
    ],
)  # fmt: skip
def test_a_wrong_table_is_refused_with_what_is_expected(reading, text, said):
    with pytest.raises(FileError, match=r"runs\.csv: ") as error:
        reading(text)
    assert said in str(error.value)


def test_all_wrong_cells_are_named_at_once(reading):
    with pytest.raises(FileError) as error:
        reading(f"{HEAD}\n0,1,1,1,1,3\n1,1,1,1,1,1 s\n1,x,1,1,1,1 s\n")
    assert [line.split(": ")[1:3] for line in str(error.value).splitlines()] == [
        ["line 2", "t"], ["line 2", "time"], ["line 4", "d"],
    ]  # fmt: skip
