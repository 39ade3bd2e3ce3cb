"""Files are written whole or not at all, through links, and over nothing that is no file."""

import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from planner.support import writing
from planner.support.errors import FileError
from planner.support.writing import write_atomically, write_together

ROOT = Path(__file__).parents[1]
IS_ROOT = os.geteuid() == 0


@pytest.fixture(params=["unnamed", "named"])
def folder(request, tmp_path, monkeypatch):
    """An empty folder to work in, on systems that have files without a name and on others."""
    if request.param == "named":
        monkeypatch.setattr(writing, "_UNNAMED", 0)
    elif not writing._UNNAMED:
        pytest.skip("this system has no files without a name")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def full_disk(free_bytes=0):
    """As if files could have no more bytes than these."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_a_file_is_replaced_and_keeps_its_access_rights(folder):
    path = folder / "a" / "b.json"
    write_atomically(path, b"old")
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    path.chmod(0o600)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(folder) == ["a", "a/b.json"]


def test_a_link_is_written_through(folder):
    Path("real").mkdir()
    Path("link.json").symlink_to("real/file.json")
    for content in (b"first", b"second"):  # the first one makes the file
        write_atomically(Path("link.json"), content)
        assert Path("link.json").is_symlink()
        assert Path("real/file.json").read_bytes() == content
    assert names(folder) == ["link.json", "real", "real/file.json"]


def make_special(path):
    """A node of each kind that is no file, by name."""
    os.mkfifo(path / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
    (path / "folder").mkdir()
    (path / "circle").symlink_to("circle")
    (path / "to-pipe").symlink_to("pipe")
    (path / "to-device").symlink_to("/dev/null")


SPECIAL = {
    "pipe": "it is a pipe", "socket": "it is a socket", "folder": "it is a folder",
    "circle": "it is a link in a circle", "to-pipe": "it is a link to a pipe",
    "to-device": "it is a link to a device", "/dev/null": "it is a device",
    "/dev/stdout": "it is a stream", "/proc/self/fd/1": "it is a stream",
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_what_is_no_file_is_refused_and_stays(folder, name):
    make_special(folder)
    before = {one: os.lstat(one).st_ino for one in SPECIAL if os.path.lexists(one)}
    with pytest.raises(FileError, match=f"^{name}: cannot be written: {SPECIAL[name]}; name a"):
        write_atomically(Path(name), b"x")
    assert {one: os.lstat(one).st_ino for one in SPECIAL if os.path.lexists(one)} == before


@pytest.mark.skipif(not IS_ROOT, reason="only root makes device nodes")
def test_root_replaces_no_device_node(folder):
    try:
        os.mknod("device", 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("this container makes no device nodes")
    with pytest.raises(FileError, match="it is a device"):
        write_atomically(Path("device"), b"x")
    assert Path("device").is_char_device()


def test_a_full_disk_leaves_the_old_file_and_nothing_else(folder):
    write_atomically(Path("old.json"), b"old")
    with full_disk(free_bytes=1), pytest.raises(FileError, match=r"old\.json: cannot be written: "):
        write_atomically(Path("old.json"), b"new one")
    with full_disk(free_bytes=1), pytest.raises(FileError, match="cannot be written: "):
        write_atomically(Path("new/folder/new.json"), b"new one")
    assert Path("old.json").read_bytes() == b"old"
    assert names(folder) == ["old.json"]


def test_of_files_that_belong_together_all_are_written_or_none(folder):
    write_together({Path("a.json"): b"1", Path("b.onnx"): b"1"})
    with full_disk(free_bytes=2), pytest.raises(FileError, match=r"b\.onnx: cannot be written"):
        write_together({Path("a.json"): b"2", Path("b.onnx"): b"222"})
    Path("pipe").symlink_to("/dev/null")
    with pytest.raises(FileError, match="pipe"):
        write_together({Path("a.json"): b"2", Path("new/x"): b"2", Path("pipe"): b"2"})
    assert (Path("a.json").read_bytes(), Path("b.onnx").read_bytes()) == (b"1", b"1")
    assert names(folder) == ["a.json", "b.onnx", "pipe"]


def test_an_error_of_the_system_names_the_path_and_the_remedy(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FileError) as caught:
        write_atomically(Path("x.json"), b"x")
    assert str(caught.value) == (
        "x.json: cannot be written: No space left on device; make room for it, or name another"
        " place"
    )


@pytest.mark.skipif(IS_ROOT, reason="root may write everywhere")
def test_a_file_that_is_read_only_is_not_replaced(folder):
    Path("x.json").touch(0o400)
    with pytest.raises(FileError, match="it is read-only"):
        write_atomically(Path("x.json"), b"x")


WRITER = """
import sys
from pathlib import Path
from planner.support.writing import write_atomically
while True:
    for letter in b"ab":
        write_atomically(Path("x"), bytes([letter]) * 3_000_000)
"""


def test_a_killed_writer_leaves_no_half_file(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for delay_s in (0.0, 0.01, 0.02, 0.03):
        process = subprocess.Popen([sys.executable, "-c", WRITER], cwd=tmp_path, env=env)
        deadline = time.monotonic() + 30
        while not (tmp_path / "x").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        content = (tmp_path / "x").read_bytes()
        assert content in (b"a" * 3_000_000, b"b" * 3_000_000)
        (tmp_path / "x").unlink()
    # A file without a name goes with its process; it has one only while it takes its place.
    assert not writing._UNNAMED or len(names(tmp_path)) <= 1
