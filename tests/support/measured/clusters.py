"""The cluster of a row: hosts as in the shipped topologies, and the row's network between them."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import planner
from planner.artefacts.topology import DeviceType, Topology
from planner.clusters.yaml.read import shipped_device_type
from tests.support.measured.assumptions import (
    CARDS,
    HOSTS,
    LINK_LATENCY,
    NVLINKS,
    REPORTED,
    WHOLE_HOSTS,
    Card,
    rate_bytes_per_s,
)
from tests.support.measured.rows import Row


def cluster(row: Row) -> Topology:
    """The topology of a row.

    Raises:
        KeyError: if `HOSTS` has no such host.
        ValueError: if the row's network is not known.
    """
    share = NVLINKS.get(row.source, 1.0)
    host = _host(row.device, row.per_host, min(row.per_host, row.num_devices), share)
    whole = host if row.num_devices <= row.per_host else _joined(host, row)
    card = CARDS.get(row.source)
    return whole if card is None else _with_card(whole, card)


@cache
def _host(device: str, per_host: int, count: int, share: float) -> Topology:
    """The first devices of a host, all of the type.

    Args:
        share: of the preset's links that the host has.
    """
    preset = planner.read_topology(HOSTS[device, per_host], count, pruned=True)
    return replace(
        preset,
        devices=tuple(replace(one, type=device) for one in preset.devices),
        device_types=(_as_reported(shipped_device_type(device)),),
        links=tuple(
            replace(one, bandwidth_bytes_per_s=share * one.bandwidth_bytes_per_s)
            for one in preset.links
        ),
        tables=tuple(
            replace(one, times=tuple((size, time_s / share) for size, time_s in one.times))
            for one in preset.tables
        ),
    )


def _as_reported(kind: DeviceType) -> DeviceType:
    """The type with the memory that CUDA reports."""
    return replace(kind, memory_bytes=REPORTED.get(kind.name, kind.memory_bytes))


def _joined(host: Topology, row: Row) -> Topology:
    """As many hosts as the row has devices, with a card for each device."""
    rate = rate_bytes_per_s(row)
    wide = WHOLE_HOSTS * rate * row.per_host
    groups = _whole_hosts(row)
    tables = f"tables: [{{busbw: {{1 GB: {wide / 1e9} GB/s}}, groups: {groups}}}]" if groups else ""
    with tempfile.TemporaryDirectory() as folder:
        planner.write_topology(host, Path(folder) / "host.yaml")
        path = Path(folder) / "cluster.yaml"
        path.write_text(
            "format: planner-topology/1\n"
            f"name: {row.num_devices} x {row.device}\n"
            f"hosts: [{{template: host.yaml, count: {row.num_devices // row.per_host}}}]\n"
            "switches: [network]\n"
            "links: [{name: nic, between: [gpu*, network],"
            f" bandwidth: {rate / 1e9} GB/s, latency: {LINK_LATENCY}}}]\n"
            f"{tables}\n"
        )
        return planner.read_topology(path)


def _whole_hosts(row: Row) -> list[list[str]]:
    """The hosts of each stage, where its copies are all devices of several hosts."""
    tensor, pipeline, data = row.degrees
    hosts = data // row.per_host
    if tensor > 1 or hosts < 2 or data % row.per_host:
        return []
    return [[f"host{s * hosts + h}" for h in range(hosts)] for s in range(pipeline)]


def _with_card(topology: Topology, card: Card) -> Topology:
    """The same devices with the memory of a card."""
    (kind,) = topology.device_types
    bandwidth = card.bandwidth_bytes_per_s or kind.memory_bandwidth_bytes_per_s
    own = replace(
        kind,
        name=f"{kind.name} of {card.memory_bytes / 1e9:.0f} GB",
        memory_bytes=card.memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        flops={dtype: card.speed * peak for dtype, peak in kind.flops.items()},
    )
    devices = tuple(replace(one, type=own.name) for one in topology.devices)
    return replace(topology, devices=devices, device_types=(own,))
