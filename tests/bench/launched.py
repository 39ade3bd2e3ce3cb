"""Plans of intra-op beside Megatron's and data parallelism's on local ranks (40 minutes).

The plans of a GPT-2, a mixture of experts and a wide ResNet in training mode are predicted, and
then run by turns on 2 and 4 ranks. There is one microbatch, so all of them split operators.

    python -m tests.bench.launched [--write] [--networks NAME ...] [--ranks 2 4] [--steps N]
        [--repeats N] [--keep FOLDER]

Topologies, profiles and the parts of operators that the plans run are measured first, as in
`tests/bench/accuracy.py`. Measured times are medians of the runs. `--write` puts a table into
docs/split.md for each network.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from planner.artefacts.files import read_profile
from planner.artefacts.problem import Problem
from planner.artefacts.strategy import Stage
from planner.clusters.yaml.read import read_topology
from planner.solvers.registry import SOLVERS
from planner.solvers.sharded.options import Megatron, Zero
from planner.support.options import Options
from planner.support.units import format_seconds
from tests.bench.accuracy import PACE_FILE, ROOT, measure, prepare, refine, reports_of, say
from tests.bench.solvers import machine, put, table
from tests.support.accuracy_plans import SUBJECTS, Drawn, Subject, planned
from tests.support.builders import asked
from tests.support.measured.networks import Kind, Network, model

DOCUMENT = ROOT / "docs" / "split.md"
RANKS, STEPS, REPEATS = (2, 4), 5, 3
LIMIT_S = 20.0


def with_weights(network: Network) -> ModelProto:
    """A network with random weights: vectors, which belong to norms, are ones."""
    proto, chance = model(network), np.random.default_rng(0)
    for one in proto.graph.initializer:
        if one.data_location == TensorProto.EXTERNAL:
            shape = tuple(one.dims)
            fan_in = np.prod(shape[1:] if len(shape) == 4 else shape[:-1] or 1)
            random = chance.standard_normal(shape, np.float32) / np.float32(np.sqrt(fan_in))
            value = random if len(shape) > 1 else np.ones(shape, np.float32)
            one.CopyFrom(numpy_helper.from_array(value, one.name))
    return proto


MIXTURE = Network(
    Kind.GPT, layers=2, width=128, heads=4, kv_heads=4, inner=1024, vocabulary=2000, sequence=64,
    experts=4, group=64,
)  # fmt: skip
RESNET = Network(Kind.WIDE_RESNET, layers=50, width=16, widening=2)
NETWORKS: Mapping[str, Subject] = {
    "gpt2": replace(SUBJECTS["gpt2"], batch=4),
    "mixture": Subject(partial(with_weights, MIXTURE), 4),
    "resnet": Subject(partial(with_weights, RESNET), 4),
}


@dataclass(frozen=True)
class Way:
    """A solver of plans with one stage, and its switches."""

    name: str
    solver: str
    switches: tuple[Options, ...] = ()


WAYS = (
    Way("intra-op", "intra-op"),
    Way("Megatron", "megatron", (Megatron(pipeline_degree=1),)),
    Way("Data", "zero", (Zero(0),)),
)


def plans_of(folder: Path, name: str, ranks: Sequence[int]) -> Iterator[Drawn]:
    """The plans of all ways."""
    profile = read_profile(folder / f"{name}.json")
    for count in ranks:
        topology = read_topology(folder / f"cluster{count}.yaml")
        for way in WAYS:
            options = asked(1, optimizer="adam", switches=way.switches)
            problem = Problem(profile, topology, **options)
            result = SOLVERS[way.solver](problem, LIMIT_S)
            if result.strategy is None:
                say(f"{name} on {count}: no plan by {way.name}: {result.reason}")
                continue
            (stage,) = result.strategy.stages
            yield Drawn(
                f"{name}-{count}-{way.name}", name, problem, planned(problem, result.strategy),
                in_words(stage), splits=stage.sharding is not None,
            )  # fmt: skip


def in_words(stage: Stage) -> str:
    """The mesh, and the rules that most operators have that are split."""
    rules = stage.sharding.rules.values() if stage.sharding else ()
    often = Counter(" x ".join(one.lines) for one in rules).most_common(2)
    return f"mesh {'x'.join(map(str, stage.mesh))}: {', '.join(rule for rule, _ in often)}"


COLUMNS = ("ranks", "way", "plan", "predicted", "measured", "predicted/measured", "spread")


def cells(folder: Path, one: Drawn) -> list[str]:
    """A row of the table."""
    runs = [json.loads(path.read_text()) for path in reports_of(folder, one)]
    times = [run["measured_iteration_s"] for run in runs]
    measured_s, predicted_s = median(times), one.plan.prediction.iteration_s
    return [
        f"{one.ranks}",
        one.name.removeprefix(f"{one.model}-{one.ranks}-"),
        one.said,
        format_seconds(predicted_s),
        format_seconds(measured_s),
        f"{predicted_s / measured_s:.2f}",
        f"{(max(times) - min(times)) / measured_s:.0%}",
    ]


def main() -> None:
    """Prints the tables, and writes them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write docs/{DOCUMENT.name}")
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=tuple(NETWORKS))
    parser.add_argument("--ranks", nargs="*", type=int, choices=RANKS, default=RANKS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument(
        "--keep", type=Path, help="folder of topologies, profiles and plans; measured once"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        files = [PACE_FILE, *(f"{name}.json" for name in options.networks)]
        if not all((folder / name).is_file() for name in files):
            prepare(folder, options.networks, options.ranks, slow=False, subjects=NETWORKS)
        for name in options.networks:
            plans = [*plans_of(folder, name, options.ranks)]
            # With measured parts, solvers may choose others.
            while refine(folder, plans):
                plans = [*plans_of(folder, name, options.ranks)]
            measure(folder, plans, options.steps, options.repeats)
            text = table(COLUMNS, [cells(folder, one) for one in plans])
            print(f"{name}\n\n{text}\n", flush=True)
            if options.write:
                put(DOCUMENT, f"launched {name}", f"{machine()}.\n\n{text}")


if __name__ == "__main__":
    main()
