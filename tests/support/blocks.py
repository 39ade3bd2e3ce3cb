"""A transformer's block as a graph, and Megatron-LM's split of it (Shoeybi et al. 2019, section 3),
written by hand.
"""

from planner.artefacts.graph import Graph, Operator, Parameter, Tensor
from planner.artefacts.sharding import Sharding, rule_of
from planner.artefacts.strategy import Stage

# name, type, tensors read, parameters read with their shapes, shape of the result.
BATCH, LENGTH, WIDTH, HEADS = 2, 4, 8, 2
_X, _H = (BATCH, LENGTH, WIDTH), (BATCH, HEADS, LENGTH, WIDTH // HEADS)
_NODES = [
    ("norm1", "LayerNormalization", ["x"], {"g1": (WIDTH,)}, _X),
    *[(n, "MatMul", ["norm1"], {f"w{n}": (WIDTH, WIDTH)}, _X) for n in "qkv"],
    *[(f"{n}h", "Heads", [n], {}, _H) for n in "qkv"],
    ("attention", "Attention", ["qh", "kh", "vh"], {}, _H),
    ("joined", "Joined", ["attention"], {}, _X),
    ("o", "MatMul", ["joined"], {"wo": (WIDTH, WIDTH)}, _X),
    ("add1", "Add", ["x", "o"], {}, _X),
    ("norm2", "LayerNormalization", ["add1"], {"g2": (WIDTH,)}, _X),
    ("up", "MatMul", ["norm2"], {"wu": (WIDTH, 4 * WIDTH)}, (BATCH, LENGTH, 4 * WIDTH)),
    ("gelu", "Gelu", ["up"], {}, (BATCH, LENGTH, 4 * WIDTH)),
    ("down", "MatMul", ["gelu"], {"wd": (4 * WIDTH, WIDTH)}, _X),
    ("add2", "Add", ["add1", "down"], {}, _X),
]


def block():
    """Pre-norm attention and MLP; "x" has a gradient, as the output of another block has."""
    return Graph(
        operators=tuple(
            Operator(name, kind, tuple(inputs), (name,), tuple(parameters))
            for name, kind, inputs, parameters, _ in _NODES
        ),
        tensors=(
            Tensor("x", _X, "float32", True),
            *(Tensor(name, shape, "float32", True) for name, _, _, _, shape in _NODES),
        ),
        parameters=tuple(
            Parameter(name, shape, "float32", True)
            for _, _, _, parameters, _ in _NODES
            for name, shape in parameters.items()
        ),
        inputs=("x",),
        outputs=("add2",),
    )


COLUMNS, ROWS = "R,S1->S2", "S2,S0->P"
MEGATRON = {
    **dict.fromkeys(("q", "k", "v", "up"), COLUMNS),
    **dict.fromkeys(("o", "down"), ROWS),
    **{f"{name}h": "S2->S1 shape[2]" for name in "qkv"},
    "attention": "S1,S1,S1->S1", "joined": "S1->S2", "gelu": "S2->S2",
}  # fmt: skip
SEQUENCE = {
    "norm1": "S1,R->S1", "norm2": "S1,R->S1", "add1": "S1,S1->S1", "add2": "S1,S1->S1",
}  # fmt: skip


def megatron(size, sequence=False):
    """The block as one stage on `size` devices; with `sequence`, norms and sums are cut along the
    sequence, and so is what enters and leaves.
    """
    rules = {
        name: rule_of([line])
        for name, line in {**MEGATRON, **(SEQUENCE if sequence else {})}.items()
    }
    lies = {"x": ("S1",)} if sequence else {}
    leaves = {"add2": ("S1",)} if sequence else {}
    parameters = {
        **{f"w{name}": ("S1",) for name in "qkvu"}, "wo": ("S0",), "wd": ("S0",),
    }  # fmt: skip
    return Stage(
        tuple(name for name, *_ in _NODES),
        (tuple(range(size)),),
        warmup=1,
        recompute=False,
        sharding=Sharding((size,), rules, parameters, lies, leaves),
    )
