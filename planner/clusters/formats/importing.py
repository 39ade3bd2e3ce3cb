"""One entry for clusters in other formats. A file is recognised by its content."""

from collections.abc import Callable, Mapping
from pathlib import Path

from planner.artefacts.topology import DeviceType, Topology, problems
from planner.clusters.formats import astra_sim, hostfile, nvidia_smi
from planner.clusters.routes import routes
from planner.clusters.yaml.read import device_table
from planner.support.errors import FileError, OptionError, TopologyError
from planner.support.printable import printable
from planner.support.reading import MAX_CLUSTER_BYTES, read_text

NVIDIA_SMI, ASTRA_SIM, HOSTFILE = "nvidia-smi", "astra-sim", "hostfile"
LOOKS_LIKE: Mapping[str, Callable[[str], bool]] = {
    NVIDIA_SMI: nvidia_smi.looks_like,
    ASTRA_SIM: astra_sim.looks_like,
    HOSTFILE: hostfile.looks_like,
}


def detect(text: str, path: Path) -> str:
    """The format of a text.

    Raises:
        FileError: if it is none that is known.
    """
    for form, looks_like in LOOKS_LIKE.items():
        if looks_like(text):
            return form
    raise FileError(
        f"{path}: expected {nvidia_smi.FORM}, {astra_sim.FORM} or {hostfile.FORM}; it looks like"
        " none of them; say which with --from"
    )


def import_topology(
    path: Path,
    form: str | None = None,
    *,
    device: str | None = None,
    types: Mapping[str, str] | None = None,
    inside_bytes_per_s: float | None = None,
    between_bytes_per_s: float | None = None,
) -> Topology:
    """The cluster in a file of another format, named after the file.

    Args:
        form: a key of `LOOKS_LIKE`; None goes by the content.
        device: the type of all devices that are not in `types`.
        types: device types by host (hostfile) or by device (nvidia-smi).
        inside_bytes_per_s: of a hostfile: between a device and its host.
        between_bytes_per_s: of a hostfile: between a host and the network.

    Raises:
        FileError: if it is missing or malformed.
        OptionError: if a type is unknown or missing, or options are not for this format.
    """
    if form not in (None, *LOOKS_LIKE):
        raise OptionError(f"unknown format {form!r}; known: {', '.join(LOOKS_LIKE)}")
    text = read_text(path, "a description of a cluster", "give another file", MAX_CLUSTER_BYTES)
    form = form or detect(text, path)
    rates = inside_bytes_per_s, between_bytes_per_s
    if form != HOSTFILE and rates != (None, None):
        raise OptionError(f"--inside and --between are for hostfiles, and {path} is {form}")
    topology = _converted(text, form, path, device=device, given=dict(types or {}), rates=rates)
    wrong = problems(topology)
    if wrong:
        raise FileError("\n".join(f"{path}: {one}" for one in wrong))
    try:
        routes(topology)
    except TopologyError as error:
        raise FileError(f"{path}: {error}") from None
    return topology


def _converted(
    text: str,
    form: str,
    path: Path,
    *,
    device: str | None,
    given: Mapping[str, str],
    rates: tuple[float | None, float | None],
) -> Topology:
    """The cluster in a text; see `import_topology`."""
    name = printable(path.stem)
    if form == ASTRA_SIM:
        if given:
            raise OptionError(f"--type: {path} has no names of hosts; give one type with --device")
        kind = _kinds(["all devices"], device, {}, path)["all devices"]
        return astra_sim.to_topology(astra_sim.parse(text, path), name, kind)
    if form == HOSTFILE:
        slots = hostfile.parse(text, path)
        kinds = _kinds([one.host for one in slots], device, given, path)
        return hostfile.to_topology(slots, name, kinds, rates, path)
    matrix = nvidia_smi.parse(text, path)
    lower = {key.lower(): value for key, value in given.items()}
    kinds = _kinds([one.lower() for one in matrix.names], device, lower, path)
    return nvidia_smi.to_topology(matrix, name, tuple(kinds.values()), path)


def _kinds(
    names: list[str], device: str | None, types: Mapping[str, str], path: Path
) -> dict[str, DeviceType]:
    """The device type of each host or device."""
    table = device_table()
    stray = [name for name in types if name not in names]
    if stray:
        raise OptionError(f"--type {stray[0]}: {path} has no {stray[0]!r}; it has {_some(names)}")
    missing = [name for name in names if name not in types and device is None]
    if missing:
        raise OptionError(
            f"{path} does not say which devices there are; give --device TYPE, or --type NAME=TYPE"
            f" for {_some(missing)}; known types: {', '.join(sorted(table))}"
        )
    chosen = {name: types.get(name, device or "") for name in names}
    for kind in chosen.values():
        if kind not in table:
            raise OptionError(f"unknown device type {kind!r}; known: {', '.join(sorted(table))}")
    return {name: table[kind] for name, kind in chosen.items()}


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (" .." if len(names) > 8 else "")
