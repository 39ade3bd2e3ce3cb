"""A deep transformer and a large cluster, to see how planning scales.

    python -m tests.support.scale --layers 200 --out deep.json
    python -m tests.support.scale --hosts 128 --out big.yaml [--explicit]

The profile's times are rooflines of the device, since nobody has run the model.
"""

import argparse
from pathlib import Path

from planner.artefacts.files import write_profile
from tests.support.models import deep_transformer
from tests.support.rooflines import roofline_of_onnx


def deep_profile(layers, device="A100-SXM4-40GB", width=1024, sequence=512):
    """A profile of `deep_transformer` for one sample; a backward takes two forwards."""
    return roofline_of_onnx(deep_transformer(layers, width, sequence), device)


def regular_cluster(hosts, gpus=8, device="A100-SXM4-40GB", explicit=False):
    """Hosts of GPUs over NVSwitch, one network card of 100 Gbps each, as the text of a topology."""
    head = f"format: planner-topology/1\nname: cluster-{hosts}x{gpus}\n"
    inner, outer = "bandwidth: 300 GB/s, latency: 3 us", "bandwidth: 100 Gbps, latency: 10 us"
    if not explicit:
        return (
            f"{head}device: {device}\nlevels:\n"
            f"  - {{name: gpu, count: {gpus}, {inner}}}\n"
            f"  - {{name: host, count: {hosts}, {outer}}}\n"
        )
    where = [(f"gpu{h * gpus + g}", f"host{h}") for h in range(hosts) for g in range(gpus)]
    lines = ["hosts:", *(f"  - {{name: host{h}}}" for h in range(hosts)), "devices:"]
    lines += [f"  - {{name: {gpu}, type: {device}, host: {host}}}" for gpu, host in where]
    lines += ["switches: [core]", "links:"]
    lines += [f"  - {{between: [{gpu}, {host}], {inner}}}" for gpu, host in where]
    lines += [f"  - {{between: [host{h}, core], {outer}}}" for h in range(hosts)]
    return "\n".join([head.rstrip(), *lines, ""])


def main():
    parser = argparse.ArgumentParser(description="Write a deep profile or a large topology.")
    parser.add_argument("--layers", type=int, help="write a profile; 200 make 10,000 operators")
    parser.add_argument("--hosts", type=int, help="write a topology of so many hosts")
    parser.add_argument("--gpus", type=int, default=8, help="of each host")
    parser.add_argument("--device", default="A100-SXM4-40GB")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--explicit", action="store_true", help="list devices and links")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if (options.layers is None) == (options.hosts is None):
        parser.error("expected either --layers or --hosts")
    if options.layers is not None:
        found = deep_profile(options.layers, options.device, options.width, options.sequence)
        write_profile(found, options.out)
    else:
        text = regular_cluster(options.hosts, options.gpus, options.device, options.explicit)
        options.out.write_text(text)


if __name__ == "__main__":
    main()
