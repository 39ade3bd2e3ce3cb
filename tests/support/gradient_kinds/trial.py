"""A kind on the user's way beside PyTorch: export, profile, solve, train in this process.

The reference is the plain loop over the module itself, from the same weights, over the same
microbatches, with the same optimizer. Nothing here knows how the planner checks gradients.
"""

import os
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

import planner
from tests.support.gradient_kinds.kind import Inputs, Kind, Outcome
from tests.support.zoo import draws

STEPS, NUM_MICROBATCHES = 5, 2
NOISE = 64
"""Gradients up to this many roundings of the model's largest one are nothing but rounding. AdamW
steps by a gradient's sign, so elements that have no other gradients, such as the bias of
attention's keys, are compared with SGD alone, and as they are, for want of a magnitude."""

Microbatch = tuple[Inputs, dict[str, Tensor]]


@dataclass(frozen=True)
class Trial:
    """A kind, trained by one optimizer in one dtype.

    Attributes:
        outcome: what came of it.
        loss: the largest relative difference of a loss; None where nothing was compared.
        weight: the largest difference of a weight, of the largest magnitude in its tensor.
        text: the message of what ended it, the notes of the export, or the tensor that differs.
    """

    outcome: Outcome
    loss: float | None = None
    weight: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Trained:
    """Losses of all steps, and the tensors after them, by name in the module.

    Attributes:
        gradients: the largest magnitude of the gradient of each element; of the plain loop alone.
    """

    losses: list[float]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]


def build(name: str, kind: Kind, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
    """The module of a kind and its example inputs; the same in each call."""
    torch.manual_seed(crc32(name.encode()))
    module, example = kind.make()
    return module.to(dtype).train(kind.training), cast(example, dtype)


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs whose floats have a dtype."""

    def one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(inputs, Mapping):
        return {name: one(value) for name, value in inputs.items()}
    return tuple(one(value) for value in inputs)


def called(module: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The tensors that a module returns, by name, or by position where they have none."""
    made = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
    if isinstance(made, Tensor):
        return {"0": made}
    named = made.items() if isinstance(made, Mapping) else enumerate(made)
    return {str(name): value for name, value in named if isinstance(value, Tensor)}


def trained_outputs(kind: Kind, outputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of the outputs with a loss."""
    floats = (name for name, value in outputs.items() if value.is_floating_point())
    return kind.outputs or (next(floats),)


# ------------------------------------------------------------------------------ data


def batches(name: str, kind: Kind, dtype: torch.dtype) -> list[list[Microbatch]]:
    """Inputs and targets of all microbatches of all steps."""
    module, example = build(name, kind, dtype)
    outputs = called(module, example)
    generator = torch.Generator().manual_seed(5)

    def target(output: Tensor) -> Tensor:
        return torch.randn(output.shape, generator=generator).to(dtype)

    def one() -> Microbatch:
        inputs = kind.data(generator) if kind.data else redrawn(example, generator)
        names = () if kind.loss == "own" else trained_outputs(kind, outputs)
        return cast(inputs, dtype), {one: target(outputs[one]) for one in names}

    return [[one() for _ in range(NUM_MICROBATCHES)] for _ in range(STEPS)]


def redrawn(example: Inputs, generator: torch.Generator) -> Inputs:
    """Other inputs of the kind of the example's."""

    def one(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator)
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)

    if isinstance(example, Mapping):
        return {name: one(value) for name, value in example.items()}
    return tuple(one(value) for value in example)


# ------------------------------------------------------------------------------ PyTorch's loop


def by_torch(
    name: str, kind: Kind, dtype: torch.dtype, optimizer_name: str, feeding=None
) -> Trained:
    """The plain loop over the module.

    Args:
        feeding: gives a context for (step, microbatch) in which the module draws the launcher's
            numbers; None for modules that draw none.
    """
    module, _ = build(name, kind, dtype)
    optimizer = optimizer_of(optimizer_name, module, kind)
    losses = []
    largest: dict[str, Tensor] = {}
    for step, microbatches in enumerate(batches(name, kind, dtype)):
        optimizer.zero_grad()
        total = 0.0
        for m, (inputs, targets) in enumerate(microbatches):
            with feeding(step, m) if feeding else nullcontext():
                outputs = called(module, inputs)
            loss = loss_of(kind, outputs, targets) / NUM_MICROBATCHES
            loss.backward()
            total += loss.item()
        for key, parameter in module.named_parameters():
            if parameter.grad is not None:
                seen = parameter.grad.detach().to_dense().abs()
                largest[key] = torch.maximum(largest.get(key, seen), seen)
        optimizer.step()
        losses.append(total)
    state = {key: value.detach().clone() for key, value in module.state_dict().items()}
    return Trained(losses, state, largest)


def loss_of(kind: Kind, outputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> Tensor:
    """The loss of one microbatch."""
    if kind.loss == "own":
        return outputs[trained_outputs(kind, outputs)[0]].squeeze()
    losses = [functional.mse_loss(outputs[name], target) for name, target in targets.items()]
    return torch.stack(losses).sum()


def optimizer_of(name: str, module: nn.Module, kind: Kind) -> Optimizer:
    parameters = [one for one in module.parameters() if one.requires_grad]
    made = {"sgd": SGD, "adamw": AdamW}[name]
    return made(parameters, lr=kind.rate[name])


# ------------------------------------------------------------------------------ the planner's way


def by_planner(
    kind: Kind, dtype: torch.dtype, steps: Sequence[Sequence[Microbatch]], optimizer: str
) -> Trained:
    """The training of ./model.onnx by a plan for one device, in this process."""
    model = planner.read_model("model.onnx", output=kind.outputs, loss=kind.loss)
    profile = planner.profile(model, repetitions=1, budget_s=0.0, cache=False, contention=False)
    training = planner.Training(microbatches=NUM_MICROBATCHES, optimizer=optimizer)
    plans = planner.solve(profile, gpus=1, training=training, solvers=["single"])
    assert plans.plan is not None
    planner.write_strategy(plans.plan, "strategy.json", model="model.onnx")
    rate = kind.rate[optimizer]
    with planner.trainer("strategy.json", learning_rate=rate, threads=1) as trainer:
        losses = [trainer.step(joined(microbatches)) for microbatches in steps]
        return Trained(losses, trainer.state_dict(), {})


def joined(microbatches: Sequence[Microbatch]) -> object:
    """The batch of a whole step."""
    inputs = [one for one, _ in microbatches]
    targets = [list(one.values()) for _, one in microbatches]
    goals = [torch.cat(parts) for parts in zip(*targets, strict=True)]
    if isinstance(inputs[0], Mapping):
        named = {key: torch.cat([one[key] for one in inputs]) for key in inputs[0]}
        return (named, goals[0] if len(goals) == 1 else tuple(goals)) if goals else named
    return (*(torch.cat(parts) for parts in zip(*inputs, strict=True)), *goals)


def feeding_of(kind: Kind, strategy: str = "strategy.json"):
    """A context for each microbatch in which the module draws what the launcher has drawn."""
    if not kind.draws:
        return None
    model = planner.read_model("model.onnx", output=kind.outputs, loss=kind.loss)
    return partial(draws.fed, model, planner.read_strategy(strategy).seed)


# ------------------------------------------------------------------------------ trials


def trials(
    name: str, kind: Kind, dtype: torch.dtype, folder: Path, optimizers: Sequence[str] = ()
) -> Iterator[tuple[str, Trial]]:
    """A kind in one dtype, by each optimizer; a refusal of the export ends it.

    Args:
        folder: an empty one, for the files.
        optimizers: without any, all of the kind's.

    Yields:
        The optimizer, or "export" where this ends it, and what came of it.
    """
    torch.set_num_threads(1)
    with within(folder), warnings.catch_warnings(action="ignore"):
        try:
            kind.prepare()
            module, example = build(name, kind, dtype)
            exported = planner.export(module, example, "model.onnx")
        except planner.PlannerError as error:
            yield "export", refused(kind, error)
            return
        except Exception as error:
            yield "export", Trial(Outcome.FAILED, text=last_of(error))
            return
        for optimizer in optimizers or kind.optimizers:
            yield optimizer, trial(name, kind, dtype, optimizer, exported.notes)


def trial(name: str, kind: Kind, dtype: torch.dtype, optimizer: str, notes: Sequence[str]) -> Trial:
    """The training of what was exported, by one optimizer."""
    try:
        made = by_planner(kind, dtype, batches(name, kind, dtype), optimizer)
    except planner.PlannerError as error:
        return refused(kind, error)
    except Exception as error:  # whatever it is, it is in the table
        return Trial(Outcome.FAILED, text=last_of(error))
    try:
        wanted = by_torch(name, kind, dtype, optimizer, feeding_of(kind))
    except draws.OtherDrawsError as error:
        return Trial(Outcome.DRAWS, text=str(error))
    except Exception as error:
        return Trial(Outcome.FAILED, text=f"PyTorch's own loop: {last_of(error)}")
    return compared(name, kind, dtype, optimizer, made, wanted, "; ".join(notes))


def compared(
    name: str, kind: Kind, dtype: torch.dtype, optimizer: str, made: Trained, wanted: Trained,
    notes: str,
) -> Trial:  # fmt: skip
    """The outcome of two trainings."""
    loss = max(map(relative, made.losses, wanted.losses))
    weights = differences(name, kind, dtype, optimizer, made, wanted)
    tensor, weight = max(weights.items(), key=lambda one: one[1], default=("", 0.0))
    if max(loss, weight) <= kind.within[dtype]:
        return Trial(Outcome.EQUAL, loss, weight, notes)
    is_noted = bool(kind.causes) and mentions(kind, notes)
    where = f"{tensor} differs most; notes: {notes}" if notes else f"{tensor} differs most"
    return Trial(Outcome.NOTED if is_noted else Outcome.WRONG, loss, weight, where)


def relative(made: float, wanted: float) -> float:
    """How far a loss is off; two that are no numbers are equal."""
    return apart(torch.tensor(made, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))


def apart(made: Tensor, wanted: Tensor) -> float:
    """The largest difference, of the largest magnitude; infinite where one alone is finite."""
    made, wanted = made.double(), wanted.double()
    finite = wanted.isfinite()
    if not torch.equal(made.isfinite(), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = wanted[finite].abs().max().item() or 1.0
    return (made[finite] - wanted[finite]).abs().max().item() / scale


def differences(
    name: str, kind: Kind, dtype: torch.dtype, optimizer: str, made: Trained, wanted: Trained
) -> dict[str, float]:
    """How far each tensor of the module is off. Tensors that the planner does not train have to be
    as they were; a tied parameter is compared under each of its names that the planner gives.
    """
    module, _ = build(name, kind, dtype)
    before, names = module.state_dict(), _first_names(module)
    floor = noise(dtype, wanted)
    found = {}
    for key, goal in wanted.state.items():
        if key.endswith("num_batches_tracked") and key not in made.state:
            continue
        got = made.state.get(key, made.state.get(names.get(key, key), before[key]))
        counts = torch.ones_like(goal, dtype=torch.bool)
        if key in wanted.gradients:
            seen = wanted.gradients[key]
            counts = ~((seen > 0) & (seen <= floor))
        found[key] = apart(got[counts], goal[counts])
        if optimizer == "sgd" and not counts.all():
            found[key] = max(found[key], (got - goal)[~counts].abs().max().item())
    return found


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first name of every parameter, by each of its names."""
    first = {one: name for name, one in module.named_parameters()}
    return {name: first[one] for name, one in module.named_parameters(remove_duplicate=False)}


def noise(dtype: torch.dtype, wanted: Trained) -> float:
    """The largest gradient that is nothing but rounding."""
    finite = [one[one.isfinite()].flatten() for one in wanted.gradients.values()]
    largest = torch.cat(finite).max().item() if any(len(one) for one in finite) else 0.0
    return NOISE * torch.finfo(dtype).eps * largest


def refused(kind: Kind, error: planner.PlannerError) -> Trial:
    """A message of the planner's."""
    text = " ".join(str(error).split())
    named = mentions(kind, text)
    return Trial(
        Outcome.REFUSED if named else Outcome.UNNAMED, text=f"{type(error).__name__}: {text}"
    )


def mentions(kind: Kind, text: str) -> bool:
    """Whether a text names the cause."""
    return not kind.causes or any(word.lower() in text.lower() for word in kind.causes)


def last_of(error: Exception) -> str:
    """The last line of an exception with its traceback."""
    return " ".join(traceback.format_exception_only(error)[-1].split())


@contextmanager
def within(folder: Path) -> Iterator[None]:
    """A context with a folder as the current one."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
