"""Compiled functions."""

import sys

import numba
import pytest

from planner.support import jit
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


def test_compiled_code_in_any_folder_and_what_it_imports_name_the_cache():
    names = {path.relative_to(jit._PLANNER).as_posix() for path in jit.sources()}
    assert names >= {
        "solvers/antichain/kernels.py",
        "peers/piper/kernels.py",
        "schedules/rules_kernels.py",
        "graphs/downsets.py",
        "costs/closed_form.py",  # its functions are compiled into the antichain kernel
        "support/jit.py",
    }
    assert "judging/portfolio.py" not in names


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other cache folders")
def test_the_cache_is_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert jit._cache_folder().parent == tmp_path / ".cache" / "planner"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert jit._cache_folder().parent == tmp_path / "elsewhere" / "planner"


def test_a_change_of_compiled_code_or_of_its_place_is_another_cache(tmp_path, monkeypatch):
    def folder(files):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setattr(jit, "_PLANNER", root)
        return jit._cache_folder().name

    kernel = "from planner.support.jit import njit\nfrom planner.a.b import C\n"
    files = {"solvers/deep/kernels.py": kernel, "a/b.py": "C = 1\n", "a/c.py": "D = 1\n"}
    first = folder(files)
    assert folder(files) == first
    assert folder({**files, "a/c.py": "D = 2\n"}) == first  # not compiled
    assert folder({**files, "a/b.py": "C = 2\n"}) != first
    assert folder({**files, "solvers/deep/kernels.py": kernel + "\n"}) != first
    moved = {"solvers/kernels.py": kernel, "a/b.py": "C = 1\n", "a/c.py": "D = 1\n"}
    assert folder(moved) != first
