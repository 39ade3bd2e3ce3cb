"""Small stages that are split over meshes, with rules written by hand."""

from dataclasses import replace

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from planner.artefacts.profile import OperatorCost, Profile, Source
from planner.artefacts.sharding import Sharding, rule_of
from planner.artefacts.strategy import ScheduleName, Stage, Strategy

ROWS, WIDTH, HIDDEN = 8, 16, 64


def mlp(forward_s=(0.5, 4.0, 2.0, 4.0), shape=(ROWS, WIDTH, HIDDEN)):
    """scale -> up -> gelu -> down, all with a weight but for gelu; backwards take twice."""
    rows, width, hidden = shape

    def tensor(name, size, gradient=True):
        return Tensor(name, (rows, size), "float32", gradient)

    operators = (
        Operator("scale", "Mul", ("x",), ("s",), ("w0",)),
        Operator("up", "MatMul", ("s",), ("h",), ("w1",)),
        Operator("gelu", "Gelu", ("h",), ("a",), ()),
        Operator("down", "MatMul", ("a",), ("y",), ("w2",)),
    )
    graph = Graph(
        operators=operators,
        tensors=(tensor("x", width, False), tensor("s", width), tensor("h", hidden),
                 tensor("a", hidden), tensor("y", width)),
        parameters=(Parameter("w0", (width,), "float32", True),
                    Parameter("w1", (width, hidden), "float32", True),
                    Parameter("w2", (hidden, width), "float32", True)),
        inputs=("x",),
        outputs=("y",),
    )  # fmt: skip
    stashes = (("x",), ("s",), ("h",), ("a",))
    return Profile(
        graph=graph,
        operators=tuple(
            OperatorCost(o.name, f, 2 * f, 0, 0, 10**9, 10**6, stash, 0)
            for o, f, stash in zip(operators, forward_s, stashes, strict=True)
        ),
        views=(), model_path=None, model_hash=None, dimensions={}, microbatch_size=rows,
        dtype="float32", device_type="unit", source=Source.IMPORTED, threads=None, repetitions=1,
        spread=0.0, whole_step=None, versions={},
    )  # fmt: skip


MEGATRON = {"up": ["R,S1->S1"], "gelu": ["S1->S1"], "down": ["S1,S0->P"]}
DATA = {"scale": ["S0,R->S0"], "up": ["S0,R->S0"], "gelu": ["S0->S0"], "down": ["S0,R->S0"]}


def sharding(mesh, lines, **at_rest):
    """A sharding from the lines of its rules; specs of names as tuples."""
    specs = {kind: at_rest.get(kind, {}) for kind in ("parameters", "inputs", "outputs")}
    more = {kind: at_rest[kind] for kind in ("gradients", "states") if kind in at_rest}
    rules = {name: rule_of(some) for name, some in lines.items()}
    return Sharding(mesh=mesh, rules=rules, **specs, **more)


def megatron(size):
    """The rules of Megatron-LM's MLP (Shoeybi et al. 2019, section 3)."""
    return sharding((size,), MEGATRON, parameters={"w1": ("S1",), "w2": ("S0",)})


def zero(size, stage):
    """Data over the rows, and ZeRO's stage 0 to 3 (Rajbhandari et al. 2020, section 5)."""
    cut = {"w0": ("S0",), "w1": ("S0",), "w2": ("S0",)}
    more = {
        0: {},
        1: {"states": cut},
        2: {"states": cut, "gradients": cut},
        3: {"parameters": cut},
    }[stage]
    ends = {"inputs": {"x": ("S0",)}, "outputs": {"y": ("S0",)}}
    return sharding((size,), DATA, **ends, **more)


def one_stage(profile, split, groups, num_microbatches=1, recompute=False, warmup=1):
    """The whole model in one stage."""
    names = tuple(operator.name for operator in profile.graph.operators)
    stage = Stage(names, tuple(map(tuple, groups)), warmup, recompute, split)
    return Strategy((stage,), ScheduleName.ONE_F_ONE_B, num_microbatches)


def two_stages(profile, cut, first, second, num_microbatches=2):
    """Two stages; each of the last two a pair of sharding and groups."""
    names = tuple(operator.name for operator in profile.graph.operators)
    stages = tuple(
        Stage(some, tuple(map(tuple, groups)), warmup, False, split)
        for some, (split, groups), warmup in (
            (names[:cut], first, min(2, -(-num_microbatches // len(first[1])))),
            (names[cut:], second, 1),
        )
    )
    return Strategy(stages, ScheduleName.ONE_F_ONE_B, num_microbatches)


def with_stage(strategy, **changes):
    """The strategy with changes of its only stage."""
    return replace(strategy, stages=(replace(strategy.stages[0], **changes),))
