"""The suites: which file is changed, and which commands get it."""

from collections.abc import Callable, Mapping
from random import Random

from onnx import ModelProto

from tests.fuzz import models, texts
from tests.fuzz.bases import bases
from tests.fuzz.cases import Case, Content, Link, Pipe
from tests.fuzz.mutations.lines import mutated_lines
from tests.fuzz.mutations.octets import no_file, octets
from tests.fuzz.mutations.onnx_models import mutate_model
from tests.fuzz.mutations.trees import mutated_json, mutated_yaml

Command = tuple[str, ...]
Mutation = Callable[[Random, bytes], tuple[bytes, str]]
QUICK = ("--no-cache", "--no-contention", "--repetitions", "1", "--budget", "1ms")
COMPUTED = ("--engine", "analytic", "--device", "T4")
SOLVERS = ("single", "data-parallel", "even", "antichain", "antichain", "pipedream", "netsplit",
           "heft", "m-topo", "m-etf", "m-sct", "pesto")  # fmt: skip
LIMIT = ("--time-limit", "1s")


def changed(random: Random, name: str, content: bytes, *mutations: Mutation) -> tuple[Content, str]:
    """A file after a mutation; seldom its bytes are changed, or it is no file at all."""
    kind = random.random()
    if kind < 0.02:
        return no_file(random, name)
    if kind < 0.12:
        other = bases()[random.choice(sorted(bases()))]
        return octets(random, content, other)
    return random.choice(mutations)(random, content)


def maybe(random: Random, *words: str, chance: float = 0.3) -> Command:
    """Options that are given at times."""
    return words if random.random() < chance else ()


def onnx_case(random: Random) -> Case:
    """A model through profile, solve, simulate and launch."""
    base = random.choice((*models.TEXTS, "outside"))
    files: dict[str, Content] = {"m.data": bases()["m.data"]} if base == "outside" else {}
    content, what = changed(random, "m.onnx", bases()[f"{base}.onnx"], mutated_onnx)
    files |= {"m.onnx": content, "pair.yaml": bases()["levels.yaml"]}
    if isinstance(content, bytes):  # what a weight in a file may turn out to be
        odd = {"pipe": Pipe(), "link": Link("/dev/zero")}
        files |= {name: one for name, one in odd.items() if name.encode() in content}
    binding = models.BATCH.get("mlp" if base == "outside" else base, ())
    if random.random() < 0.02:
        binding = random.choice(((), ("--batch", "1000000000000"), ("--batch", "1000000")))
    solve = ("solve", "--profile", "p.json", "--topology", "pair.yaml", *LIMIT, "-o", "s.json")
    shown = maybe(random, "--json")
    kind = random.random()
    if kind < 0.25:
        return Case(files, (("inspect", "m.onnx", *binding, *shown),), f"{base}: {what}")
    engine = COMPUTED if kind < 0.6 else ("--engine", "torch", *QUICK)
    if kind > 0.95:
        engine = ("--engine", "onnxruntime", *QUICK)
    commands: list[Command] = [("profile", "m.onnx", *binding, *engine, "-o", "p.json", *shown)]
    if random.random() < 0.4:
        one = random.random() < 0.5
        commands.append((*solve, "--gpus", "1" if one else "2", *maybe(random, "--solver", "even")))
        last = ("launch", "s.json", "--steps", "1") if one else ("simulate", "s.json", "--gantt")
        commands.append((*last, *maybe(random, "--trace", "t.json"), *maybe(random, "--json")))
    return Case(files, tuple(commands), f"{base}: {what}")


def mutated_onnx(random: Random, content: bytes) -> tuple[bytes, str]:
    """A model with one to three changes."""
    model = ModelProto.FromString(content)
    words = [mutate_model(random, model) for _ in range(random.choice((1, 1, 1, 2, 3)))]
    return model.SerializeToString(deterministic=True), ", ".join(words)


def topology_case(random: Random) -> Case:
    """A topology, shown and planned for."""
    base = random.choice(tuple(texts.TOPOLOGIES))
    content, what = changed(
        random, "c.yaml", bases()[f"{base}.yaml"], mutated_yaml, mutated_yaml, mutated_lines
    )
    files: dict[str, Content] = {"c.yaml": content, "p.json": bases()["mlp.json"]}
    more = (*maybe(random, "--json"), *maybe(random, "--gpus", "2"))
    show = ("topology", "show", "c.yaml", *maybe(random, "--svg", "c.svg"), *more)
    plan = ("solve", "--profile", "p.json", "--topology", "c.yaml", "-o", "s.json", *LIMIT, *more)
    solve = (*plan, "--solver", random.choice(SOLVERS), *maybe(random, "--sensitivity", chance=0.1))
    commands = (show, solve) if random.random() < 0.4 else (show,)
    return Case(files, commands, f"{base}: {what}")


def json_case(random: Random) -> Case:
    """A profile, a strategy or a calibration."""
    return random.choice((profile_case, strategy_case, strategy_case, calibration_case))(random)


def profile_case(random: Random) -> Case:
    """A profile, planned with, simulated, rescaled or converted."""
    base = random.choice(("mlp", "mlp", "sizes", "branches", "measured"))
    content, what = changed(random, "p.json", bases()[f"{base}.json"], mutated_json)
    files: dict[str, Content] = {"p.json": content, "pair.yaml": bases()["levels.yaml"]}
    files |= {name: bases()[name] for name in ("mlp.onnx",)}
    given = ("--profile", "p.json", "--topology", "pair.yaml")
    commands: tuple[Command, ...] = random.choice(
        (
            (("solve", *given, *LIMIT, "-o", "s.json", "--solver", random.choice(SOLVERS),
              *maybe(random, "--json"), *maybe(random, "--gpus", "2")),),
            (("simulate", *given, "--replicas", "2", "--gpus", "2", "--gantt", "--svg", "s.svg",
              "--trace", "t.json"),),
            (("profile", "p.json", "--device", "A100-SXM4-40GB", "-o", "q.json"),),
            (("convert", "p.json", "g.txt"), ("convert", "g.txt", "q.json")),
            (("solve", *given, *LIMIT, "--cost-model",
              random.choice(("piper", "dnn-partitioning", "pipedream"))),),
            (("compare", *given, *LIMIT, "--gpus", "2", "--solver", "even", "--csv", "rows.csv"),),
        )
    )  # fmt: skip
    return Case(files, commands, f"{base}.json: {what}")


def strategy_case(random: Random) -> Case:
    """A strategy, simulated, converted or trained."""
    base = random.choice(("two", "same", "one"))
    content, what = changed(random, "s.json", bases()[f"{base}.json"], mutated_json)
    files: dict[str, Content] = {"s.json": content}
    files |= {name: bases()[name] for name in ("mlp.json", "levels.yaml", "mlp.onnx")}
    simulate = ("simulate", "s.json", "--profile", "mlp.json", "--topology", "levels.yaml")
    drawn = ("--trace", "t.json", "--svg", "t.svg", "--gantt")
    commands: tuple[Command, ...] = random.choice(
        (
            ((*simulate, *maybe(random, *drawn)),),
            ((*simulate, "--json", *maybe(random, "--microbatches", "1")),),
            (("convert", "s.json", "g.txt", "--profile", "mlp.json"),),
        )
    )
    if base == "one" and random.random() < 0.7:
        commands = (("launch", "s.json", "--steps", "1", *maybe(random, "--json"),
                     *maybe(random, "--trace", "t.json")),)  # fmt: skip
    return Case(files, commands, f"{base}.json: {what}")


def calibration_case(random: Random) -> Case:
    """Corrections, planned with."""
    name = "measured.calibration.json"
    content, what = changed(random, name, bases()[name], mutated_json)
    files: dict[str, Content] = {name: content}
    files |= {one: bases()[one] for one in ("measured.json", "levels.yaml")}
    plan = ("solve", "--profile", "measured.json", "--topology", "levels.yaml", "--gpus", "2")
    commands = ((*plan, *LIMIT, "--solver", "even", "-o", "s.json", *maybe(random, "--json")),)
    return Case(files, commands, f"{name}: {what}")


def text_case(random: Random) -> Case:
    """A profile or a cluster of somebody else's, or options of a training."""
    name = random.choice(("graph.txt", "dnn.json", "piper.json", "train.yaml", *texts.CLUSTERS))
    if name == "train.yaml":
        return config_case(random)
    if name in texts.CLUSTERS:
        return cluster_case(random, name)
    mutations = (mutated_lines,) if name == "graph.txt" else (mutated_json, mutated_lines)
    content, what = changed(random, name, bases()[name], *mutations)
    files: dict[str, Content] = {name: content, "pair.yaml": bases()["levels.yaml"]}
    own = {"graph.txt": "pipedream", "dnn.json": "dnn-partitioning", "piper.json": "piper"}[name]
    plan = ("solve", "--profile", name, *LIMIT, *maybe(random, "--json"))
    on_pair = ("--topology", "pair.yaml", "-o", "s.json")
    commands: tuple[Command, ...] = random.choice(
        (
            (("convert", name, "p.json"), ("convert", "p.json", "q.txt")),
            (("convert", name, "q.txt"),),
            ((*plan, *on_pair, "--solver", random.choice(SOLVERS)),),
            ((*plan, "--cost-model", own, *(on_pair if own == "pipedream" else ()),
              *maybe(random, *(("--no-contiguous",) if own == "dnn-partitioning" else ()))),),
        )
    )  # fmt: skip
    return Case(files, commands, f"{name}: {what}")


def cluster_case(random: Random, form: str) -> Case:
    """A description of a cluster, imported and shown."""
    content, what = changed(random, "cluster", bases()[f"{form}.cluster"], mutated_lines)
    rates = ("--inside", "12 GB/s", "--between", "25 Gbps") if form == "hostfile" else ()
    given = ("topology", "import", "cluster", "--device", "V100-SXM2-16GB", *rates)
    known = maybe(random, "--from", form, chance=0.7)
    commands: tuple[Command, ...] = (
        (*given, *known, "-o", "c.yaml", *maybe(random, "--json")),
        ("topology", "show", "c.yaml", *maybe(random, "--svg", "c.svg")),
    )
    return Case({"cluster": content}, commands, f"{form}: {what}")


def config_case(random: Random) -> Case:
    """Options of a training. Steps may be any number; a fork has no threads of OpenMP."""
    name = "train.yaml"
    content, what = changed(random, name, bases()[name], mutated_yaml, mutated_yaml, mutated_lines)
    files: dict[str, Content] = {name: content, "s.json": bases()["one.json"]}
    files["mlp.onnx"] = bases()["mlp.onnx"]
    fixed = ("--steps", random.choice("12"), "--threads", "1")
    launch = ("launch", "s.json", "--config", name, *fixed, *maybe(random, "--json"))
    return Case(files, (launch,), f"{name}: {what}")


def trace_case(random: Random) -> Case:
    """A trace, compared with another one, or learned from."""
    base = random.choice(("two", "same"))
    kinds = ["predicted", "measured"]
    victim = random.choice(kinds)
    content, what = changed(random, victim, bases()[f"{base}.{victim}"], mutated_json)
    files: dict[str, Content] = {kind: bases()[f"{base}.{kind}"] for kind in kinds}
    files |= {victim: content, "p.json": bases()["mlp.json"], "pair.yaml": bases()["levels.yaml"]}
    files["again"] = bases()["same.measured"]
    shown = maybe(random, "--json")
    compare = ("compare-trace", "predicted", "measured", *maybe(random, "-o", "both.json"), *shown)
    learn = ("calibrate", "measured", "again", "--profile", "p.json", "--topology", "pair.yaml")
    is_compared = victim == "predicted" or random.random() < 0.5
    return Case(files, (compare if is_compared else (*learn, *shown),), f"{base}.{victim}: {what}")


SUITES: Mapping[str, Callable[[Random], Case]] = {
    "onnx": onnx_case,
    "topology": topology_case,
    "json": json_case,
    "text": text_case,
    "trace": trace_case,
}
ORDER = ("onnx", "json", "topology", "onnx", "text", "json", "onnx", "trace", "topology", "text")
"""The suites of cases 0 to 9, and of every ten that follow."""


def suite_of(number: int) -> str:
    """The suite of a case."""
    return ORDER[number % len(ORDER)]


def case(seed: int, number: int) -> Case:
    """The case of that number."""
    return SUITES[suite_of(number)](Random(f"{seed}:{number}"))
