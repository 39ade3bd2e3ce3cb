"""Hosts on this machine that are joined by slow links: network namespaces whose ends of the network
are shaped.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# One network namespace and host name per rate, joined by a bridge, shaped in both directions. The
# argument that comes first is a shell command, run on all hosts at once with $HOSTS and $NUMBER.
HOSTS = """
set -e
command=$1; shift
mount -t tmpfs none /run
mkdir -p /run/netns
ip netns add switch
ip -n switch link add bridge type bridge
ip -n switch link set bridge up
export HOSTS=0 GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
for rate in "$@"; do
  host=host$HOSTS port=port$HOSTS
  ip netns add $host
  ip -n $host link set lo up
  ip link add $port netns switch mtu 9000 type veth peer name eth0 netns $host mtu 9000
  ip -n $host addr add 10.9.0.$((HOSTS + 1))/24 dev eth0
  ip -n $host link set eth0 up
  ip -n switch link set $port master bridge up
  # A bucket of 5 ms, so that a late timer costs nothing; a queue that drops nothing.
  tc -n $host qdisc add dev eth0 root tbf rate ${rate}mbit burst $((rate * 625)) limit 64mb
  tc -n switch qdisc add dev $port root tbf rate ${rate}mbit burst $((rate * 625)) limit 64mb
  HOSTS=$((HOSTS + 1))
done
pids=
for NUMBER in $(seq 0 $((HOSTS - 1))); do
  export NUMBER
  ip netns exec host$NUMBER unshare --uts sh -c "hostname host$NUMBER; $command" &
  pids="$pids $!"
done
status=0
for pid in $pids; do wait $pid || status=1; done
exit $status
"""


def missing() -> str | None:
    """Why there can be no such hosts here; None where there can."""
    for tool in ("unshare", "ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool}, which is not installed"
    done = on_hosts("true", 100, 1000, cwd=Path.cwd())
    return (
        f"no network namespaces with tbf here: {done.stderr.strip()}" if done.returncode else None
    )


def on_hosts(command: str, *rates_mbit: int, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a shell command on all of as many hosts as there are rates, at once.

    Args:
        command: it finds $HOSTS and $NUMBER.
        rates_mbit: of each host's link, in both directions.
    """
    return subprocess.run(
        ["unshare", "-rnm", "bash", "-c", HOSTS, "hosts", command, *map(str, rates_mbit)],
        cwd=cwd, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


def on_ranks(arguments: str, port: int, script: Path = ROOT / "cli.py") -> str:
    """A command for `on_hosts`: the planner on every host, one rank each.

    Args:
        port: where the ranks meet.
        script: that takes the arguments.
    """
    start = "--nnodes $HOSTS --node-rank $NUMBER --nproc-per-node 1 --master-addr 10.9.0.1"
    torchrun = f"{sys.executable} -m torch.distributed.run {start} --master-port {port}"
    return f"{torchrun} {script} {arguments}"
