"""Compiled functions."""

import numba

from planner.support.jit import compile_clock, compiled_before


def test_the_clock_counts_what_is_compiled_and_nothing_else():
    with compile_clock() as compiling_s:
        assert compiling_s() == 0.0
        numba.njit(lambda x: x + 1)(1)
        first_s = compiling_s()
        assert first_s > 0.0
        sum(range(10**6))
        assert compiling_s() == first_s


def test_a_folder_without_compiled_kernels_is_told_from_one_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "none"))
    assert not compiled_before()
    (tmp_path / "none" / "kernels").mkdir(parents=True)
    assert not compiled_before()
    (tmp_path / "none" / "kernels" / "search.nbi").touch()
    assert compiled_before()
