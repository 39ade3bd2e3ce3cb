"""The one reader of input files, alone and in every command."""

import json
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from onnx import TensorProto

from planner.model.values import Values
from planner.model.weights import ModelFile
from planner.support import reading
from planner.support.errors import FileError
from planner.support.reading import check_mapped, read_bytes
from tests.support.commands import chain_on_two_hosts, run


@pytest.fixture
def pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def write_later(path, content, wait_s=0.0, first=b""):
    """Opens a pipe in another thread, writes the first bytes, and the content some time later."""

    def write():
        with path.open("wb", buffering=0) as file:
            file.write(first)
            time.sleep(wait_s)
            file.write(content)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_reads_a_file_of_exactly_the_limit(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"


def test_refuses_a_larger_file_without_reading_it(tmp_path):
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(FileError, match=r"x\.json: expected at most 64 MiB, got 1 TiB; check"):
        read_bytes(path, reading.MAX_TEXT_BYTES)


def test_reads_a_file_that_has_more_than_it_says():
    assert b"MemTotal" in read_bytes(Path("/proc/meminfo"), 10_000)
    with pytest.raises(FileError, match="expected at most 10 B, got more"):
        read_bytes(Path("/proc/meminfo"), 10)


def test_refuses_a_device_that_never_ends_at_the_limit():
    with pytest.raises(FileError, match="/dev/zero: expected at most 3 MiB, got more, from what"):
        read_bytes(Path("/dev/zero"), 3 * 2**20)


def test_a_device_without_content_is_empty_at_once():
    assert read_bytes(Path("/dev/null"), 10) == b""


def test_a_folder_and_a_missing_file_are_errors_of_the_system(tmp_path):
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "x", 10)


def test_a_socket_is_an_error_of_the_system(tmp_path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "s"))
        with pytest.raises(OSError, match="No such device"):
            read_bytes(tmp_path / "s", 10)


def test_a_pipe_is_read_up_to_its_end_and_once(pipe):
    content = bytes(300_000)
    writer = write_later(pipe, content, wait_s=0.2, first=b"begin")
    assert read_bytes(pipe, 2**20) == b"begin" + content
    writer.join()
    assert read_bytes(pipe, 2**20) == b"begin" + content
    with pytest.raises(FileError, match="expected at most 10 B, got more"):
        read_bytes(pipe, 10)


def test_a_pipe_may_be_opened_and_closed_without_a_word(pipe):
    writer = write_later(pipe, b"", wait_s=0.2)
    assert read_bytes(pipe, 10) == b""
    writer.join()


def test_a_pipe_that_nobody_opens_is_refused(pipe, monkeypatch):
    assert reading.OPENED_WITHIN_S <= 5
    monkeypatch.setattr(reading, "OPENED_WITHIN_S", 0.2)
    with pytest.raises(FileError, match="nobody has opened it for writing within 200 ms"):
        read_bytes(pipe, 10)


def test_a_pipe_whose_writer_is_silent_is_refused_later(pipe, monkeypatch):
    monkeypatch.setattr(reading, "OPENED_WITHIN_S", 0.1)
    monkeypatch.setattr(reading, "SILENT_FOR_S", 0.4)
    writer = write_later(pipe, b"", wait_s=1.0)
    with pytest.raises(FileError, match="nobody has written to it within 400 ms; give a file"):
        read_bytes(pipe, 10)
    writer.join()


def test_a_pipe_without_end_is_refused_at_the_limit():
    with subprocess.Popen(["yes"], stdout=subprocess.PIPE) as yes:
        path = Path(f"/dev/fd/{yes.stdout.fileno()}")
        with pytest.raises(FileError, match="expected at most 1 MiB, got more"):
            read_bytes(path, 2**20)
        yes.kill()


def test_a_pipe_of_the_shell_that_ends_empty_is_empty_at_once():
    ours, theirs = os.pipe()
    os.close(theirs)
    try:
        assert read_bytes(Path(f"/dev/fd/{ours}"), 10) == b""
    finally:
        os.close(ours)


def test_weights_are_mapped_from_regular_files_only(tmp_path, pipe):
    (tmp_path / "w.data").write_bytes(b"x")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    check_mapped(tmp_path / "w.data")
    check_mapped(tmp_path / "missing")  # said by whoever opens it
    for path in (pipe, tmp_path / "zeros", tmp_path):
        with pytest.raises(FileError, match="expected a regular file of weights"):
            check_mapped(path)


# ------------------------------------------------------------------------------ in commands


@pytest.fixture
def given():
    """Gives text as the shell's `<(..)` does: a path that can be read once."""
    handles, threads = [], []

    def path_of(text):
        ours, theirs = os.pipe()
        handles.append(ours)

        def write():
            with os.fdopen(theirs, "w") as file:
                file.write(text)

        threads.append(threading.Thread(target=write))
        threads[-1].start()
        return f"/dev/fd/{ours}"

    yield path_of
    for thread in threads:
        thread.join()
    for handle in handles:
        os.close(handle)


GRAPH = (
    "node0 -- A() -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=4.0,"
    " parameter_size=4.0\n"
)


def test_a_profile_and_a_topology_may_come_from_pipes(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    chain_on_two_hosts(tmp_path)
    profile = given((tmp_path / "profiles/chain.json").read_text())
    topology = given((tmp_path / "pair.yaml").read_text())
    inputs = ("--profile", profile, "--topology", topology)
    plan = json.loads(run("solve", *inputs, "--solver", "single", "--json").stdout)
    assert plan["solver"] == "single"


def test_a_graph_txt_is_converted_from_a_pipe(tmp_path, given):
    target = tmp_path / "copy.txt"
    run("convert", given(GRAPH), str(target))
    assert "forward_compute_time=1.0" in target.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "FILE"),
        ("profile", "FILE"),
        ("solve", "--profile", "FILE"),
        ("simulate", "FILE"),
        ("compare-trace", "FILE", "FILE"),
        ("convert", "FILE", "x.json"),
        ("topology", "show", "FILE"),
        ("topology", "import", "FILE", "-o", "x.yaml"),
    ],
)
def test_every_command_refuses_what_never_ends(tmp_path, monkeypatch, arguments, pipe):
    monkeypatch.chdir(tmp_path)
    for name in ("MAX_PIPED_BYTES", "OPENED_WITHIN_S"):
        monkeypatch.setattr(reading, name, 0.1 if name == "OPENED_WITHIN_S" else 2**20)
    for path, said in (("/dev/zero", "expected at most"), (str(pipe), "nobody has opened it")):
        output = run(*(path if one == "FILE" else one for one in arguments), code=1).output
        assert said in output
        assert len(output.splitlines()) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["pipe"]


def test_weights_outside_are_no_pipe_and_no_device(tmp_path, monkeypatch):
    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="w.data")
    values = Values([weights], ModelFile(tmp_path / "model.onnx"))
    os.mkfifo(tmp_path / "w.data")
    with pytest.raises(FileError, match=r"w\.data: expected a regular file of weights"):
        values["w"]
