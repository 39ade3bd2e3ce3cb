"""Columns: a figure of rows in tables, JSON and CSV."""

import csv
import json

from planner.reports.tables import Column, chosen, csv_text, first_rows, json_row, json_rows, table

COLUMNS = (
    Column("name", lambda row: row[0], "name", left=True),
    Column("time_s", lambda row: row[1], "time", "{:.1f} s".format, gives_way=1),
    Column("", lambda row: 2 * row[1], "twice"),
    Column("hidden", lambda row: row[0].upper()),
)


def test_a_figure_is_raw_by_its_key_and_text_under_its_head():
    shown = table("T", [("a", 0.25)], COLUMNS)
    assert shown.heads == ("name", "time", "twice")
    assert shown.rows == (("a", "0.2 s", "0.5"),)
    assert json_row(("a", 0.25), COLUMNS) == {"name": "a", "time_s": 0.25, "hidden": "A"}
    assert csv_text([("a", 0.25)], chosen(COLUMNS, "time_s name")) == "time_s,name\n0.25,a\n"


def test_keys_keep_their_order():
    (row,) = json_rows([("a", 1)], chosen(COLUMNS, "hidden time_s name"))
    assert json.dumps(row) == '{"hidden": "A", "time_s": 1, "name": "a"}'


def test_a_row_without_a_figure_has_an_empty_cell():
    late = [column.of(lambda row: row if row[1] > 1 else None) for column in COLUMNS]
    assert table("T", [("a", 1), ("b", 2)], late).rows == (("", "", ""), ("b", "2.0 s", "4"))
    assert csv_text([("a", 1)], chosen(late, "time_s name")) == "time_s,name\n,\n"
    assert json_row(("a", 1), chosen(late, "time_s")) == {"time_s": None}


def test_a_sparse_column_without_figures_is_left_out():
    columns = [*COLUMNS[:1], Column("", lambda row: row[1], "of some", sparse=True)]
    assert table("T", [("a", None), ("b", None)], columns).heads == ("name",)
    assert table("T", [("a", None), ("b", 3)], columns).rows == (("a", ""), ("b", "3"))


def test_control_codes_are_escaped_in_tables_and_csv_but_not_in_json():
    row = ("a\x1b[2J\n", 1)
    assert table("T\x07", [row], COLUMNS).title == "T\\x07"
    assert table("T", [row], COLUMNS).rows[0][0] == "a\\x1b[2J\\n"
    assert json_row(row, COLUMNS)["name"] == row[0]
    (read,) = csv.DictReader(csv_text([row], COLUMNS[:1]).splitlines(keepends=True))
    assert read["name"] == "a\\x1b[2J\n"


def test_a_table_without_a_column_keeps_the_others_and_the_mark():
    whole = table("T", [("a", 1), ("b", 2)], COLUMNS, 1)
    assert whole.only([COLUMNS[2], COLUMNS[0]]).heads == ("name", "twice")
    assert whole.only([COLUMNS[2], COLUMNS[0]]).rows == (("a", "2"), ("b", "4"))
    assert whole.only([COLUMNS[2], COLUMNS[0]]).marked == 1


def test_each_part_of_a_table_has_its_names_and_at_least_one_figure():
    whole = table("T", [("a", 1), ("b", 2)], COLUMNS)

    def parts(num_columns):
        fitting = whole.parts(lambda part: len(part.columns) <= num_columns)
        return [(part.title, part.heads) for part in fitting]

    assert parts(3) == [("T", ("name", "time", "twice"))]
    assert parts(1) == parts(2) == [("T", ("name", "time")), ("", ("name", "twice"))]
    assert [*whole.only(COLUMNS[:1]).parts(lambda part: False)] == [whole.only(COLUMNS[:1])]


def test_a_long_table_says_where_the_other_rows_are():
    title, rows = first_rows("Parts", range(30), "modules")
    assert title == "Parts (the first 24 of 30 modules; --json has all)"
    assert list(rows) == list(range(24))
    assert first_rows("Parts", range(24), "modules") == ("Parts", range(24))
