"""Two agents of torchrun, as on two hosts: each has one rank of a plan for two devices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mode_runs import loop, net, profile_of, write_strategy

CLI = str(Path(__file__).resolve().parents[2] / "cli.py")
STEPS = 4


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(1, 1), (2,)], ids=["stages", "replicas"])
def test_two_agents_train_as_one_process_of_pytorch(tmp_path, widths):
    module = net(tmp_path / "net.onnx")
    write_strategy(tmp_path / "two.json", profile_of(tmp_path / "net.onnx"), widths)
    port = str(free_port())
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", number,
             "--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "1", CLI,
             "launch", "two.json", "--steps", str(STEPS), "--lr", "0.1", "--json"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number in ("0", "1")
    ]  # fmt: skip
    said = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    reports = [json.loads(out) for out, _ in said if out.strip()]
    assert len(reports) == 1, "rank 0 alone reports"
    assert reports[0]["loss"] == pytest.approx(loop(module, tmp_path / "net.onnx", STEPS), rel=1e-7)
