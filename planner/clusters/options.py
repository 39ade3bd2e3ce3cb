"""`Importing`: the figures that a description of a cluster in another format leaves out."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.support.options import Options, option
from planner.support.units import parse_rate

RATE = 'a rate such as "12 GB/s"'


@dataclass(frozen=True, slots=True)
class Importing(Options):
    """How a file in another format becomes a topology."""

    form: str | None = option(
        "Format of FILE.", flag="--from", choices=("nvidia-smi", "astra-sim", "hostfile"),
        shown="by its content",
    )  # fmt: skip
    device: str | None = option("Type of all devices that have no --type.", metavar="TYPE")
    types: Mapping[str, str] | None = option(
        "Type of the devices of host NAME (hostfile) or of device NAME (nvidia-smi). May be"
        " repeated.",
        flag="--type", metavar="NAME=TYPE",
    )  # fmt: skip
    inside: float | None = option(
        'hostfile: bandwidth from a device to its host, such as "12 GB/s".',
        parse=parse_rate, words=RATE, above=0, metavar="RATE",
    )  # fmt: skip
    between: float | None = option(
        'hostfile: bandwidth from a host to the network, such as "25 Gbps".',
        parse=parse_rate, words=RATE, above=0, metavar="RATE",
    )  # fmt: skip
