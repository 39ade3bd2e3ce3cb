"""Trainings whose targets count in part, by several plans, and the same by a plain PyTorch loop.

    torchrun --nproc-per-node N tests/support/counted_runs.py FOLDER

FOLDER/launches.json has the options of each training by name, as `split_launches` has them.
"""

import sys
import warnings
from functools import cache, partial
from pathlib import Path

import torch
from onnx import TensorProto, numpy_helper
from torch.nn import functional
from torch.utils.data import TensorDataset

import planner
from planner.artefacts.files import write_plan
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.commands.errors import ranks_leave_at_once
from tests.support import split_launches
from tests.support.split import sharding
from tests.support.split_models import LENGTH, WIDTH, WORDS, Net, loaded
from tests.support.split_plans import plan_of

SAMPLES, STEPS, RATE, CLIP = 12, 8, 0.5, 0.4
NAMES = ("words", "g", "b", "w1", "w2")


def tokens(path, batch, width=WIDTH):
    """(batch, LENGTH) tokens -> (batch, LENGTH, WORDS) scores; gives the parameters by name."""
    net = Net()
    h = net.add("Gather", net.weight("words", WORDS, width), "x")
    h = net.add("LayerNormalization", h, net.weight("g", width), net.weight("b", width))
    h = net.add("MatMul", h, net.weight("w1", width, 2 * width))
    h = net.add("Gelu", h)
    h = net.add("MatMul", h, net.weight("w2", 2 * width, WORDS))
    net.save(path, ((batch, LENGTH), TensorProto.INT64), (h, (batch, LENGTH, WORDS)))
    return {n: torch.tensor(numpy_helper.to_array(numpy_helper.from_array(net.held[n])))
            for n in NAMES}  # fmt: skip


@cache
def samples():
    """Of four steps: 1 to 8 of 8 targets count, none of samples 3 to 5, none in the second step."""
    chance = torch.Generator().manual_seed(3)
    x = torch.randint(WORDS, (4 * SAMPLES, LENGTH), generator=chance)
    y = torch.randint(WORDS, (4 * SAMPLES, LENGTH), generator=chance)
    lengths = torch.randint(1, LENGTH + 1, (len(y), 1), generator=chance)
    y[torch.arange(LENGTH) >= lengths] = -100
    y[3:6] = -100
    y[SAMPLES : 2 * SAMPLES] = -100
    return x, y


def data():
    """For --data."""
    return TensorDataset(*samples())


def nothing():
    """The same without any target that counts."""
    x, y = samples()
    return TensorDataset(x, torch.full_like(y, -100))


def counted(output, target):
    """For --loss: the sum of cross-entropies, and the number of targets that count."""
    known = target != -100
    picked = output.log_softmax(-1).gather(-1, target.where(known, 0)[..., None])[..., 0]
    return -(picked * known).sum(), known.sum()


def batches():
    """Of whole steps, in their order."""
    x, y = samples()
    pairs = list(zip(x.split(SAMPLES), y.split(SAMPLES), strict=True))
    return [pairs[step % len(pairs)] for step in range(STEPS)]


def by_torch(values, given, momentum=0.9, clip=CLIP):
    """Losses and parameters of a plain loop: each step is one cross-entropy of its whole batch, and
    one in which no target counts is left out.
    """
    held = {name: value.clone().requires_grad_() for name, value in values.items()}
    optimizer = torch.optim.SGD(held.values(), RATE, momentum=momentum)
    losses = []
    for x, y in given:
        if bool((y == -100).all()):
            losses.append(None)
            continue
        optimizer.zero_grad()
        h = functional.layer_norm(held["words"][x], held["g"].shape, held["g"], held["b"])
        scores = functional.gelu(h @ held["w1"]) @ held["w2"]
        loss = functional.cross_entropy(scores.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(held.values(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in held.items()}


# ------------------------------------------------------------------------------ plans

ROWS = {  # samples are split
    "Gather": "S0,R->S0", "LayerNormalization": "S0,R,R->S0", "MatMul": "S0,R->S0",
    "Gelu": "S0->S0",
}  # fmt: skip


def lies(model, kind):
    """A sharding of the whole model over two devices."""
    operators, (output,) = model.graph.operators, model.graph.outputs
    if kind == "classes":  # Megatron-LM's products, and a head whose classes are cut
        return sharding(
            (2,), {operators[-1].name: ["R,S1->S2"]}, parameters={"w2": ("S1",)},
            outputs={output: ("S2",)},
        )  # fmt: skip
    cut = {"zero": dict.fromkeys(NAMES, ("S0",))}.get(kind, {})
    rows = {one.name: [ROWS[one.type]] for one in operators}
    return sharding(
        (2,), rows, parameters=cut, inputs={"x": ("S0",)}, outputs={output: ("S0",)}
    )  # fmt: skip


def write(path, model, kind, schedule=ScheduleName.ONE_F_ONE_B, *, recompute=False):
    """A strategy of a kind, for steps of `SAMPLES` samples."""
    names, count = [one.name for one in model.graph.operators], SAMPLES // model.batch
    whole = partial(Stage, recompute=recompute)
    stages = {
        "one": lambda: [whole(tuple(names), ((0,),), 1)],
        "pipeline": lambda: [
            whole(tuple(names[:3]), ((0,),), min(2, count)),
            whole(tuple(names[3:]), ((1,),), 1),
        ],
        "unequal": lambda: [  # two replicas in front, of two microbatches and of one
            whole(tuple(names[:3]), ((0,), (1,)), 1),
            whole(tuple(names[3:]), ((2,),), 1),
        ],
        "replicas": lambda: [whole(tuple(names), ((0,), (1,)), 1)],
    }.get(kind, lambda: [whole(tuple(names), ((0, 1),), 1, sharding=lies(model, kind))])()
    strategy = Strategy(tuple(stages), schedule, count)
    write_plan(plan_of(model, strategy, optimizer="momentum"), path)


def model_of(folder, batch, width=WIDTH):
    """The model for microbatches of a size, and its parameters."""
    path = folder / f"net{batch}.onnx"
    values = tokens(path, batch, width)
    return loaded(path), values


# ------------------------------------------------------------------------------ runs


def launched(folder, strategy, keep, loop=False, model="", **options):
    """What a training by the planner's own loop, or by one of the user's, told on rank 0."""
    options["model"] = folder / model
    if not loop:
        return split_launches.launched(folder, strategy, keep, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with planner.trainer(folder / strategy, **options) as trainer:
            losses = [trainer.step(batch) for batch in batches()]
            trainer.save(folder / keep)
    said = [str(one.message) for one in caught if one.category is UserWarning]
    return {"loss": losses, "notes": said}


if __name__ == "__main__":
    with ranks_leave_at_once():
        split_launches.main(Path(sys.argv[1]), launched)
        sys.exit(0)
