"""`planner topology`: list, probe, show, import."""

import json
import os
import shlex
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click

from planner.commands.ends import one_of_several
from planner.commands.option_types import RATE, SIZE
from planner.commands.outputs import check_output
from planner.commands.printing import bar, show
from planner.errors import OptionError


@click.group()
def topology() -> None:
    """Lists, shows, imports and measures clusters.

    \b
    planner topology list
    planner topology show p3 --svg p3.svg
    planner topology probe --nproc 2
    """


@topology.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_topologies(as_json: bool) -> None:
    """Lists the clusters that ship with the planner.

    \b
    planner topology list
    planner topology list --json
    """
    from planner.reports.clusters import presets, presets_table

    found = presets()
    if as_json:
        click.echo(json.dumps({"presets": [asdict(one) for one in found]}))
    else:
        show(presets_table(found))


@topology.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("cluster.yaml"),
              show_default=True)  # fmt: skip
@click.option("--nproc", type=click.IntRange(1), metavar="N",
              help="Start N processes on this host with torchrun.")  # fmt: skip
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              show_default=True, help="cpu measures with gloo, cuda with nccl.")  # fmt: skip
@click.option("--largest", metavar="SIZE", default="256 MiB", show_default=True,
              help="Of the messages.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, on rank 0.")
@click.pass_context
def probe(
    ctx: click.Context, output: Path, nproc: int | None, device: str, largest: str, as_json: bool
) -> None:
    """Measures the cluster that torchrun has started ranks on, and writes its topology.

    \b
    torchrun --nproc-per-node 8 --no-python planner topology probe -o cluster.yaml
    planner topology probe --nproc 2

    Every ordered pair of ranks and all-reduces of growing groups are measured, one after the
    other; nothing else should run meanwhile. Sizes of messages go up to --largest, or for a pair
    until one would take over 1 s.
    """
    largest_bytes = SIZE.convert(largest, None, ctx)
    check_output([output], {})
    if nproc is not None and "RANK" not in os.environ:
        from planner.launcher.torchrun import start_ranks

        options = ["--output", str(output), "--device", device, "--largest", largest]
        command = ["topology", "probe", *options, *(["--json"] if as_json else [])]
        ctx.exit(start_ranks(command, nproc))
    from planner.clusters.yaml.write import write_topology
    from planner.launcher.probe import probe as run
    from planner.reports.probe import (
        class_table,
        probe_comments,
        probe_json,
        probe_lines,
        sums_table,
    )

    with one_of_several(), bar("Probing") as tick:
        found = run(output.stem, device=device, largest_bytes=largest_bytes, progress=tick)
    if found is None:
        return
    today = datetime.now(UTC).date().isoformat()
    write_topology(found.inferred.topology, output, probe_comments(found, today))
    if as_json:
        click.echo(json.dumps(probe_json(found, str(output))))
        return
    show(class_table(found))
    if found.allreduces:
        show(sums_table(found))
    for line in probe_lines(found):
        click.echo(line)
    click.echo(f"wrote {output}; use it: planner solve --topology {shlex.quote(str(output))}")


@topology.command("show")
@click.argument("name")
@click.option("--gpus", type=click.IntRange(1), metavar="N",
              help="Only the first N devices.  [default: all]")  # fmt: skip
@click.option("--svg", "picture", type=click.Path(path_type=Path), help="Write a picture.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show_topology(name: str, gpus: int | None, picture: Path | None, as_json: bool) -> None:
    """Shows a cluster: devices, links, bandwidth between devices, and what bounds all-reduces.
    NAME is a file, one in ./topologies, or a preset.

    \b
    planner topology show p3
    planner topology show cluster.yaml --gpus 12 --svg cluster.svg
    """
    from planner.clusters.places import without_dead_ends
    from planner.clusters.yaml.read import find_topology, read_topology
    from planner.drawing.topology_svg import svg
    from planner.drawing.tree import tree
    from planner.files import write_atomically
    from planner.reports import clusters as report
    from planner.topology import take

    path = find_topology(name)
    found = read_topology(path, gpus)
    found = found if gpus is None else without_dead_ends(take(found, gpus))
    if picture is not None:
        check_output([picture], {"topology": path})
        write_atomically(picture, svg(found).encode())
    if as_json:
        plain = report.topology_json(found)
        click.echo(json.dumps({**plain, "svg": None if picture is None else str(picture)}))
        return
    show(report.devices_table(found))
    click.echo(f"{tree(found)}\n")
    if len(found.devices) > 1:
        for table in (
            report.bandwidth_table(found),
            report.latency_table(found),
            report.classes_table(found),
            report.collectives_table(report.collectives(found)),
        ):
            show(table)
    for note in found.notes:
        click.echo(f"note: {note}")
    if picture is not None:
        click.echo(f"wrote {picture}")


@topology.command("import")
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--from", "form", type=click.Choice(["nvidia-smi", "astra-sim", "hostfile"]),
              help="The format of FILE.  [default: by its content]")  # fmt: skip
@click.option("--device", metavar="TYPE", help="The type of all devices.")
@click.option("--type", "types", multiple=True, metavar="NAME=TYPE",
              help="The type of a host's devices (hostfile) or of a device (nvidia-smi).",
              )  # fmt: skip
@click.option("--inside", type=RATE,
              help='Of a hostfile: from a device to its host, such as "12 GB/s".')  # fmt: skip
@click.option("--between", type=RATE,
              help='Of a hostfile: from a host to the network, such as "25 Gbps".')  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True,
              help="Topology to write.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def import_cluster(
    source: Path,
    form: str | None,
    device: str | None,
    types: tuple[str, ...],
    inside: float | None,
    between: float | None,
    output: Path,
    as_json: bool,
) -> None:
    """Writes a topology from a description of a cluster in another format: the output of
    nvidia-smi topo -m, an ASTRA-sim network YAML, or a DeepSpeed hostfile.

    \b
    nvidia-smi topo -m > topo.txt
    planner topology import topo.txt --device A100-SXM4-80GB -o server.yaml
    planner topology import network.yml --device H100-SXM -o cluster.yaml
    planner topology import hostfile --type worker-1=T4 --type worker-2=L4 \\
        --inside "12 GB/s" --between "25 Gbps" -o cluster.yaml

    What the file does not say, bandwidths of NVLink and PCIe above all, comes from data sheets and
    is said in the file that is written: look through it.
    """
    from planner.clusters.formats.importing import import_topology
    from planner.clusters.yaml.write import write_topology

    named = {}
    for one in types:
        name, equals, kind = one.partition("=")
        if not (name and equals and kind):
            raise OptionError(f"--type {one}: expected NAME=TYPE such as worker-1=T4")
        if name in named:
            raise OptionError(f"--type {one}: {name} is given more than once")
        named[name] = kind
    check_output([output], {"file": source})
    found = import_topology(source, form, device, named, inside, between)
    write_topology(found, output, [f"Imported from {source.name}.", *found.notes])
    if as_json:
        plain = {"written": str(output), "num_devices": len(found.devices)}
        click.echo(json.dumps({**plain, "notes": list(found.notes)}))
        return
    for note in found.notes:
        click.echo(f"note: {note}")
    click.echo(f"wrote {output}; look at it: planner topology show {shlex.quote(str(output))}")
