"""Compiled functions."""

import ast
import errno
import grp
import os
import pwd
import re
import sys
import time

import numba
import pytest

from planner.commands.errors import words_of_caches
from planner.support import caches, jit
from planner.support.brake import compile_clock, stopwatch
from planner.support.caches import private_folder
from planner.support.jit import compiled_before

PACKAGE_FILES = sorted(jit._PLANNER.rglob("*.py"))


def test_the_clock_counts_what_is_compiled_and_nothing_else():
    numba.njit(lambda x: x - 1)(1)
    compiling_s = compile_clock()
    assert compiling_s() == 0.0
    numba.njit(lambda x: x + 1)(1)
    first_s = compiling_s()
    assert first_s > 0.0
    sum(range(10**6))
    assert compiling_s() == first_s


def test_a_folder_without_compiled_kernels_is_told_from_one_with_them(own_folder):
    assert not compiled_before()
    (own_folder / "search.other").touch()
    assert not compiled_before()
    (own_folder / "search.kernel").touch()
    assert compiled_before()


def test_a_stopwatch_stands_still_while_functions_are_compiled():
    took_s, compiling_s = stopwatch(), compile_clock()
    begin_s = time.monotonic()
    numba.njit(lambda x: x + 2)(1)
    assert compiling_s() > 0.0
    assert took_s() <= time.monotonic() - begin_s - compiling_s() + 0.001


@pytest.mark.parametrize("rank", [None, "1"])
def test_compiling_is_said_once_and_by_one_rank(own_folder, rank, monkeypatch, capfd):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    jit._say_once.cache_clear()
    with words_of_caches():
        assert fresh()
        assert fresh(1.5, 2.5)
    said = "note: compiling the searches and the simulator, once per version: up to a minute\n"
    assert capfd.readouterr() == ("", said if rank is None else "")
    jit._say_once.cache_clear()
    with words_of_caches():
        assert not fresh()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A folder for compiled kernels that nobody has used."""
    folder = tmp_path / "kernels"
    monkeypatch.setattr(jit, "FOLDER", folder)
    jit._shelf.cache_clear()
    yield folder
    jit._shelf.cache_clear()


def add(x, y):
    return x + y


def fresh(x=1, y=2):
    """Whether a function had to be compiled in a new process, after checking its result."""
    jit._shelf.cache_clear()
    compiled = jit.njit(add)
    assert compiled(x, y) == x + y
    return not compiled.stats.cache_hits


def test_a_kernel_is_compiled_once_for_each_signature(own_folder):
    assert fresh()
    assert not fresh()
    assert fresh(0.5)
    assert not fresh(0.5)
    assert not fresh()
    assert len(list(own_folder.glob("*.kernel"))) == 2
    assert own_folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["empty", "cut", "one bit", "another kernel", "no content"])
def test_a_damaged_kernel_is_compiled_anew_and_said(own_folder, caplog, damage):
    assert fresh(0.5)
    other = next(own_folder.glob("*.kernel"))
    assert fresh()
    (path,) = set(own_folder.glob("*.kernel")) - {other}
    kept = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut": kept[: len(kept) // 2],
        "one bit": kept[:-9] + bytes([kept[-9] ^ 1]) + kept[-8:],
        "another kernel": other.read_bytes(),
        "no content": kept[: kept.index(b"\n") + 1],
    }
    path.write_bytes(damaged[damage])
    assert fresh()
    assert not fresh()
    (record,) = caplog.records
    assert f"{path}: expected an entry of the cache, but the entry is" in record.message


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="other systems have other access rights")
@pytest.mark.parametrize("where", ["kernels", "."])
def test_a_folder_that_others_can_write_to_is_not_read_or_written(
    own_folder, tmp_path, caplog, where
):
    assert fresh()
    path = tmp_path if where == "." else own_folder
    path.chmod(0o777)
    before = sorted(own_folder.iterdir())
    for entry in before:
        entry.write_bytes(b"not to be read")
    assert fresh()
    assert fresh()
    assert [one.read_bytes() for one in before] == [b"not to be read"]
    assert sorted(own_folder.iterdir()) == before
    assert f"{path}: expected a folder that only you can write to, got mode 777" in caplog.text
    assert f"run: chmod go-w {path}; compiled kernels are not kept" in caplog.text
    assert "others like it" not in caplog.text


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="other systems have other access rights")
def test_a_sticky_folder_above_is_no_danger_and_a_folder_of_another_user_is(tmp_path, own_folder):
    tmp_path.chmod(0o1777)
    assert private_folder(own_folder) == ""
    if os.geteuid() == 0:
        os.chown(own_folder, 12345, -1)
        assert "got one of user 12345" in private_folder(own_folder)


def test_a_group_of_the_user_alone_may_write(tmp_path):
    me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(os.getgid())
    alone = me.pw_gid == group.gr_gid and me.pw_name == group.gr_name and not group.gr_mem
    tmp_path.chmod(0o775)
    assert (private_folder(tmp_path) == "") is alone


def test_a_folder_that_cannot_be_made_costs_the_cache_only(own_folder, tmp_path, caplog):
    own_folder.write_text("in the way")
    assert fresh()
    assert fresh()
    assert f"{own_folder}: cannot be made: Not a directory; compiled kernels" in caplog.text


def test_a_full_disk_costs_the_cache_only(own_folder, caplog, monkeypatch):
    def full(path, content, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caches, "replace_file", full)
    assert fresh()
    assert fresh()
    assert not list(own_folder.iterdir())
    assert re.search(
        r"\.kernel: cannot be written: No space left on device; free some space, or set"
        r" NUMBA_CACHE_DIR to another folder; the next run compiles this again",
        caplog.text,
    )


def test_compiled_code_in_any_folder_and_what_it_imports_name_the_cache():
    names = {path.relative_to(jit._PLANNER).as_posix() for path in jit.sources()}
    assert names >= {
        "solvers/antichain/kernels.py",
        "solvers/piper/kernels.py",
        "schedules/event_loop.py",
        "solvers/graphs/downsets.py",
        "costs/closed_form.py",  # its functions are compiled into the antichain kernel
        "support/jit.py",
    }
    assert "planning/portfolio.py" not in names


def test_no_import_of_compiled_code_is_overlooked():
    """In whatever form it is written: a change of the module would leave kernels as they were."""
    known = set(jit.sources())
    for path in known:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for name in names:
                where = jit._PLANNER.parent.joinpath(*name.split("."))
                there = {where.with_suffix(".py"), where / "__init__.py"} & set(PACKAGE_FILES)
                assert there <= known, f"{path} imports {name}"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other cache folders")
def test_the_cache_is_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
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
