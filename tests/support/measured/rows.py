"""The measured iterations, as rows: what ran, and what it took."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.measured.networks import Kind, Network
from tests.support.reference import REFERENCE

FOLDER = REFERENCE / "measured"
TABLES = ("llm-foundry", "vtrain-multi", "vtrain-single", "megatron-lm")
"""Sources with tables of their own; all others are in published.csv."""
PUBLISHED = "published.csv"
SEQUENCE = 2048
"""Of the tables that do not say it: llm-foundry's, by its file, and that of Megatron-LM's paper."""


@dataclass(frozen=True)
class Row:
    """One measured iteration, in the words of its table.

    Attributes:
        source: the table, or in published.csv the source.
        name: of the row.
        network: None where the table gives no sizes.
        device: its type.
        num_devices: all.
        per_host: devices of a host.
        degrees: tensor, pipeline and data.
        sharing: what copies keep in parts, such as "ZeRO-1"; "" for nothing.
        microbatch: samples of a microbatch.
        batch: samples of an iteration.
        recompute: which forwards run twice, such as "full".
        dtype: of the computation.
        network_rate: between hosts, such as "200 Gbps per GPU"; "" where it is not told.
        iteration_s: measured.
        memory_bytes: measured on a device; None where it was not.
        allocated: whether that is what tensors take, not all that the device has in use.
        known: whether degrees, microbatch and recomputation were published.
        lacks: what the planner cannot express; "" for nothing.
        compiled: whether torch.compile had compiled the step.
    """

    source: str
    name: str
    network: Network | None
    device: str
    num_devices: int
    per_host: int
    degrees: tuple[int, int, int]
    sharing: str
    microbatch: int
    batch: int
    recompute: str
    dtype: str
    network_rate: str
    iteration_s: float
    memory_bytes: float | None = None
    allocated: bool = False
    known: bool = True
    lacks: str = ""
    compiled: bool = False

    @property
    def question(self) -> tuple[object, ...]:
        """Rows with an equal one are answers to one question: the same network, devices and batch,
        by other plans.
        """
        return self.source, self.network, self.device, self.num_devices, self.batch

    @property
    def plan(self) -> tuple[object, ...]:
        """Answers to a question with an equal one are the same plan, measured several times."""
        return (
            self.degrees,
            self.microbatch,
            self.sharing,
            self.recompute,
            self.dtype,
            self.compiled,
        )


def rows(folder: Path = FOLDER) -> list[Row]:
    """All rows of the tables.

    Raises:
        FileNotFoundError: if a table is not there.
    """
    return [
        *_llm_foundry(folder / "llm_foundry_fsdp.csv"),
        *_vtrain(folder / "vtrain_multi.csv", "vtrain-multi", 51_200),
        *_vtrain(folder / "vtrain_single.csv", "vtrain-single", 50_304),
        *_megatron(folder / "README.md"),
        *_published(folder / PUBLISHED),
    ]


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """The numbers and cells of a table's lines; the head is line 1."""
    with path.open(newline="") as file:
        yield from enumerate(csv.DictReader(file), 2)


def _gpt(layers: int, width: int, heads: int, vocabulary: int, sequence: int = SEQUENCE) -> Network:
    return Network(Kind.GPT, layers, width, heads, heads, 4 * width, vocabulary, sequence)


def _llm_foundry(path: Path) -> Iterator[Row]:
    for number, line in _lines(path):
        layers, width, heads, gpus, batch = (
            int(line[name]) for name in ("layers", "hidden", "heads", "gpus", "global_batch")
        )
        yield Row(
            source="llm-foundry",
            name=f"{number}: {line['model']}",
            network=_gpt(layers, width, heads, 50_432),
            device=line["device"],
            num_devices=gpus,
            per_host=8,
            degrees=(1, 1, gpus),
            sharing="FSDP",
            microbatch=int(line["microbatch_per_gpu"]),
            batch=batch,
            recompute="full" if line["activation_checkpointing"] == "1" else "none",
            dtype="bfloat16",
            network_rate="",
            iteration_s=batch * SEQUENCE / float(line["tokens_per_s"]),
        )


def _vtrain(path: Path, source: str, vocabulary: int) -> Iterator[Row]:
    for number, line in _lines(path):
        layers, width, heads, sequence = (
            int(line[f"{name}"])
            for name in ("# layers", "hidden size", "attention heads", "sequence length")
        )
        tensor, data, pipeline = (
            int(line[f"{name} parallelism"]) for name in ("tensor", "data", "pipeline")
        )
        yield Row(
            source=source,
            name=f"{number}: {layers} x {width}",
            network=_gpt(layers, width, heads, vocabulary, sequence),
            device="A100-SXM4-80GB",
            num_devices=int(line["# GPUs"]),
            per_host=8,
            degrees=(tensor, pipeline, data),
            sharing="",
            microbatch=int(line["micro batch"]),
            batch=int(line["global batch"]),
            recompute="full",
            dtype="float16",
            network_rate="4 x 200 Gbps per host",
            iteration_s=float(line["iteration time (ms)"]) / 1000,
        )


def _megatron(path: Path) -> Iterator[Row]:
    """The table of Megatron-LM's paper, which stands in the text; times follow from its FLOP/s."""
    lines = iter(path.read_text().splitlines())
    head = next(line for line in lines if line.startswith("| billions | heads |"))
    names = [cell.strip() for cell in head.strip("|").split("|")]
    next(lines)
    for number, text in enumerate(lines, 1):
        if not text.startswith("|"):
            return
        cells = (cell.strip() for cell in text.strip("|").split("|"))
        line = dict(zip(names, cells, strict=True))
        heads, width, layers, tensor, pipeline, gpus, batch, microbatch = (
            int(line[name])
            for name in ("heads", "hidden", "layers", "t", "p", "GPUs", "batch", "microbatch")
        )
        vocabulary = 51_200
        flops = 96.0 * batch * SEQUENCE * layers * width**2
        flops *= 1 + SEQUENCE / (6 * width) + vocabulary / (16 * layers * width)
        yield Row(
            source="megatron-lm",
            name=f"{number}: {line['billions']} billion",
            network=_gpt(layers, width, heads, vocabulary),
            device="A100-SXM4-80GB",
            num_devices=gpus,
            per_host=8,
            degrees=(tensor, pipeline, gpus // tensor // pipeline),
            sharing="",
            microbatch=microbatch,
            batch=batch,
            recompute="full",
            dtype="float16",
            network_rate="200 Gbps per GPU",
            iteration_s=flops / (1e12 * float(line["TFLOP/s per GPU"]) * gpus),
        )


def _published(path: Path) -> Iterator[Row]:
    for _, line in _lines(path):
        yield Row(
            source=line["source"],
            name=f"{line['id']}: {line['model']}",
            network=_network(line),
            device=line["device"],
            num_devices=int(line["num_gpus"]),
            per_host=int(line["gpus_per_host"]),
            degrees=(int(line["tp"] or 0), int(line["pp"] or 0), int(line["dp"] or 0)),
            sharing=line["zero_or_fsdp"],
            microbatch=int(line["micro_batch"] or 0),
            batch=int(line["global_batch"]),
            recompute=line["recompute"],
            dtype=line["dtype"],
            network_rate=line["network"],
            iteration_s=float(line["iteration_s"]),
            memory_bytes=1e9 * float(line["measured_memory"]) if line["measured_memory"] else None,
            allocated=line["memory_is"] == "allocated",
            known=line["known"] == "1",
            lacks=line["lacks"],
            compiled=line["compiled"] == "yes",
        )


def _network(line: Mapping[str, str]) -> Network | None:
    """The network of a row of published.csv, whose family its name tells."""
    name = line["model"]
    if name.startswith("ResNet-50"):
        return Network(Kind.RESNET50)
    sizes = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")
    if "LoRA" in name or not all(line[size] for size in sizes):
        return None
    kind = (
        Kind.BERT if name.startswith("BERT") else Kind.LLAMA if "lama" in name.lower() else Kind.GPT
    )
    return Network(kind, *(int(line[size]) for size in sizes))
