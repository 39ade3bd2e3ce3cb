"""Clusters: imported, measured and changed; the types of their devices."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.artefacts.options import WhatIf
from planner.clusters.options import Importing
from planner.launcher.options import Probing
from planner.support.errors import FileError, OptionError
from planner.support.options import options_from
from planner.support.reading import File

if TYPE_CHECKING:
    from planner.artefacts.profile import Profile
    from planner.artefacts.topology import DeviceType, Topology
    from planner.clusters.what_if import ChangedTopology
    from planner.launcher.probe import Probed

# Maximum number of hosts that a message names.
MAX_NAMED_HOSTS = 8


def import_topology(path: File, **how: Any) -> "Topology":
    """The cluster that a file in another format describes.

    Args:
        how: the fields of `planner.clusters.options.Importing`: `form`, `device`, `types`, `inside`
            and `between`.

    Raises:
        FileError: if the file is missing or malformed.
        OptionError: if a type is unknown or missing, or an option is for another format.
        TypeError: if there is no option of that name.
    """
    from planner.clusters.formats import importing

    (options,) = options_from("import_topology", how, Importing)
    return importing.import_topology(
        Path(path),
        options.form,
        device=options.device,
        types=options.types,
        inside_bytes_per_s=options.inside,
        between_bytes_per_s=options.between,
    )


def probe(
    name: str, *, progress: Callable[[int, int], None] = lambda done, total: None, **how: Any
) -> "Probed | None":
    """Measures the cluster that torchrun has started ranks on; every rank calls it.

    Args:
        name: of the topology.
        progress: called on rank 0 with the number of measurements done, and of all.
        how: the fields of `planner.launcher.options.Probing`: `device` and `largest`.

    Returns:
        The topology and its measurements on rank 0, None elsewhere.

    Raises:
        LaunchError: if this process is no rank, or there is no GPU for it.
        OptionError: if a value is wrong.
        TopologyError: on rank 0, if the measurements make no sense.
        TypeError: if there is no option of that name.
        Stopped: on a rank that has lost another one.
    """
    from planner.launcher import probe as probing

    (options,) = options_from("probe", how, Probing)
    size_bytes = options.largest
    return probing.probe(name, device=options.device, largest_bytes=size_bytes, progress=progress)


def start_probe(nproc: int, arguments: Sequence[str] = ()) -> int:
    """Runs `planner topology probe` in processes of this host, and waits for them.

    Args:
        arguments: options of the command, as on the command line.

    Returns:
        The exit code: 0, or 1 if a rank failed and said why.
    """
    from planner.launcher.failures.monitor import start_ranks

    return start_ranks(["topology", "probe", *arguments], nproc)


def type_of(profile: "Profile", topology: "Topology") -> "DeviceType | None":
    """The type of device that a profile was made on; None if it is not known."""
    from planner.clusters.yaml.read import device_table

    own = {kind.name: kind for kind in topology.device_types}
    return (device_table() | own).get(profile.device_type)


def changed_cluster(topology: "Topology", changes: WhatIf) -> "ChangedTopology":
    """The topology with the changes that are asked for.

    Raises:
        OptionError: if a change names something that is not there, or makes no sense.
    """
    from planner.clusters.what_if import what_if
    from planner.clusters.yaml.read import device_table, find_topology, read_topology

    hosts = [host.name for host in topology.hosts]
    shown = ", ".join(hosts[:MAX_NAMED_HOSTS]) + ", .." * (len(hosts) > MAX_NAMED_HOSTS)
    added = []
    for name in changes.add_host:
        try:
            path = None if name in hosts else find_topology(name)
        except FileError as error:
            raise OptionError(
                f"--add-host {name}: expected a host of the topology, {shown}, or another"
                f" topology; {error}"
            ) from None
        added.append((name, None if path is None else read_topology(path)))
    return what_if(topology, changes.set, changes.drop, added, device_table())
