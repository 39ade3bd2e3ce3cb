"""`planner topology`: list, probe, show, import."""

import json
import os
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from planner import api
from planner.api import Devices, Importing, Probing
from planner.commands.errors import Listed, one_of_several
from planner.commands.options import JSON, JSON_OF_RANK_0, NPROC, file_option, takes
from planner.commands.terminal import bar, say, show
from planner.support.options import given

if TYPE_CHECKING:
    from planner.api import Probed, Topology


@click.group(cls=Listed)
def topology() -> None:
    """Lists, shows, imports and measures clusters.

    \b
    planner topology list
    planner topology show p3 --svg p3.svg
    planner topology probe --nproc 2
    """


@topology.command("list")
@JSON
def list_topologies(as_json: bool) -> None:
    """Lists the clusters that ship with the planner.

    \b
    planner topology list
    planner topology list --json
    """
    from planner.reports.topology import presets_json, presets_table

    if as_json:
        click.echo(json.dumps(presets_json()))
    else:
        show(presets_table())


@topology.command()
@file_option("-o", "--output", default=Path("cluster.yaml"), show_default=True,
             help="Topology to write.")  # fmt: skip
@NPROC
@takes(Probing, "probing")
@JSON_OF_RANK_0
@click.pass_context
def probe(
    ctx: click.Context, output: Path, nproc: int | None, probing: Probing, as_json: bool
) -> None:
    """Measures the cluster that torchrun has started ranks on, and writes its topology.

    \b
    torchrun --nproc-per-node 8 --no-python planner topology probe -o cluster.yaml
    planner topology probe --nproc 2

    Every ordered pair of ranks and all-reduces of growing groups are measured, one after the
    other; nothing else should run meanwhile. Transfers grow up to --largest, or for a pair until
    one would take over 1 s.
    """
    from planner.reports.topology import probe_comments

    api.check_outputs({"topology": output}, {})
    if nproc is not None and "RANK" not in os.environ:
        size = f"{probing.largest} B"
        options = ["--output", str(output), "--device", probing.device, "--largest", size]
        ctx.exit(api.start_probe(nproc, [*options, *(["--json"] if as_json else [])]))
    with one_of_several(), bar("Probing") as tick:
        probed = api.probe(output.stem, progress=tick, **given(probing))
    if probed is not None:
        today = datetime.now(UTC).date().isoformat()
        api.write_topology(probed.inferred.topology, output, probe_comments(probed, today))
        _print_probed(probed, output, as_json)


def _print_probed(probed: "Probed", output: Path, as_json: bool) -> None:
    """The measurements, and the file written."""
    from planner.reports.topology import class_table, measured_table, probe_json, probe_lines

    if as_json:
        click.echo(json.dumps(probe_json(probed, str(output))))
        return
    show(class_table(probed))
    if probed.collectives:
        show(measured_table(probed))
    for line in probe_lines(probed):
        say(line)
    say(f"wrote {output}; use it: planner solve --topology {shlex.quote(str(output))}")


@topology.command("show")
@click.argument("name")
@takes(Devices, "devices")
@file_option("--svg", "picture", help="Write a picture to this file.")
@JSON
def show_topology(name: str, devices: Devices, picture: Path | None, as_json: bool) -> None:
    """Shows a cluster: devices, links, bandwidth between devices, and what bounds all-reduces.
    NAME is a file, one in ./topologies, or a preset.

    \b
    planner topology show p3
    planner topology show cluster.yaml --gpus 12 --svg cluster.svg
    """
    from planner.reports.topology import topology_json

    path = api.find_topology(name)
    cluster = api.read_topology(path, devices.gpus, pruned=True)
    if picture is not None:
        api.check_outputs({"picture": picture}, {"topology": path})
        api.write_svg(cluster, picture)
    if as_json:
        plain = topology_json(cluster)
        click.echo(json.dumps({**plain, "svg": None if picture is None else str(picture)}))
        return
    _print_cluster(cluster)
    if picture is not None:
        say(f"wrote {picture}")


def _print_cluster(cluster: "Topology") -> None:
    """Devices, the tree of links, and what transfers and all-reduces take."""
    from planner.reports import topology as report
    from planner.reports.drawing.tree import tree

    show(report.devices_table(cluster))
    click.echo(f"{tree(cluster)}\n")
    if len(cluster.devices) > 1:
        for table in (
            report.bandwidth_table(cluster),
            report.latency_table(cluster),
            report.classes_table(cluster),
            report.collectives_table(report.collectives(cluster)),
        ):
            show(table)
    for note in cluster.notes:
        say(f"note: {note}")


@topology.command("import")
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@takes(Importing, "importing")
@file_option("-o", "--output", required=True, help="Topology to write.")
@JSON
def import_cluster(source: Path, importing: Importing, output: Path, as_json: bool) -> None:
    """Writes a topology from a description of a cluster in another format: the output of
    nvidia-smi topo -m, an ASTRA-sim network YAML, or a DeepSpeed hostfile.

    \b
    nvidia-smi topo -m > topo.txt
    planner topology import topo.txt --device A100-SXM4-80GB -o server.yaml
    planner topology import network.yml --device H100-SXM -o cluster.yaml
    planner topology import hostfile --type worker-1=T4 --type worker-2=L4 \\
        --inside "12 GB/s" --between "25 Gbps" -o cluster.yaml

    Figures that FILE leaves out, bandwidths of NVLink and PCIe above all, are taken from data
    sheets. The file that is written names them: look through it.
    """
    api.check_outputs({"topology": output}, {"file": source})
    cluster = api.import_topology(source, **given(importing))
    api.write_topology(cluster, output, _imported_comments(source, cluster))
    if as_json:
        plain = {"written": str(output), "num_devices": len(cluster.devices)}
        click.echo(json.dumps({**plain, "notes": list(cluster.notes)}))
        return
    for note in cluster.notes:
        say(f"note: {note}")
    say(f"wrote {output}; look at it: planner topology show {shlex.quote(str(output))}")


def _imported_comments(source: Path, cluster: "Topology") -> list[str]:
    """The head of an imported file."""
    return [f"Imported from {source.name} by planner topology import.", *cluster.notes]
