"""How the tests of a run share a machine."""

import fcntl

import pytest

from tests.conftest import LONGEST, TESTS, locked


def test_the_longest_files_are_there():
    assert [name for name in LONGEST if not (TESTS / name).is_file()] == []


def test_other_tests_may_run_beside_a_test_but_no_serial_one():
    with locked("room", fcntl.LOCK_SH | fcntl.LOCK_NB):
        pass
    with (
        pytest.raises(BlockingIOError),
        locked("room", fcntl.LOCK_EX | fcntl.LOCK_NB),
    ):
        pass


@pytest.mark.serial
def test_no_test_runs_beside_a_serial_one():
    with (
        pytest.raises(BlockingIOError),
        locked("room", fcntl.LOCK_SH | fcntl.LOCK_NB),
    ):
        pass
