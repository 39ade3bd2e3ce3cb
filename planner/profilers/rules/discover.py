"""`split_rules`: for every operator of a model, the rules by which it can be split over an axis.

Operators of one class (the same function, attributes and shapes) share their rules, which are kept
in the user's cache folder. A rule that was found for two parts is tried again with other numbers,
and for more parts.

Operators meet shapes here that no model has, and what computes them need not check any: it may read
memory that is not its own. So trials run in a process of their own, which starts when the first
result is not in the cache. An operator that ends it has no rules, and another process goes on.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.artefacts.graph import FLOAT_DTYPES, parameters_by_name, tensors_by_name
from planner.artefacts.operator_types import registered
from planner.artefacts.profile import Profile, SplitRule
from planner.artefacts.sharding import AxisRule, blocks_of, dim_of, reads
from planner.model.load import Model, Node
from planner.operators.binding import Call, Read, bind
from planner.operators.gradients.events import functions_in
from planner.profilers.rules import blocks
from planner.profilers.rules.blocks import in_blocks
from planner.profilers.rules.communicating import communicating_rules, with_statistics
from planner.profilers.rules.search import holds, rules_at
from planner.profilers.rules.template import (
    Factors,
    Sizes,
    Template,
    call_at,
    shape_of,
    size_of,
    template,
)
from planner.profilers.rules.trial import TooLargeError, Trial
from planner.support.caches import LOGGER, CacheFolder, cache_root
from planner.support.forked import EndedError, Forked

METHOD = 1
"""Number of the way to discover, and of the fields of an entry."""
MORE_PARTS = (3, 4)
"""A rule that holds for 2 parts and for these holds for all numbers, if it cuts nothing whose size
is fixed."""
FIXED_PARTS = (2, 3, 4, 8)
"""Numbers of parts that are tried where the size of a dimension is fixed."""
FEW_BLOCKS = 3
"""Blocks that are tried in the place of more."""
SEEDS = (0, 1), (0, 1, 2, 3)
"""Of the numbers that are tried, of two parts more than of others."""
OTHER_SCALE = 4.0
"""Deviation of the numbers of the second try: limits that the first did not reach are reached."""


def split_rules(
    model: Model, *, cached: bool = True, warn: Callable[[str], None] = LOGGER.warning
) -> tuple[tuple[SplitRule, ...], ...]:
    """The rules of every operator of a model, in the graph's order; inputs of a rule are in the
    order of the operator's inputs and then its parameters.

    Args:
        cached: whether to reuse rules that were found before, and to store new ones.
        warn: called with a line about the operators whose trials ended the process that they run
            in, if there are any: these have no rules.

    Raises:
        OperatorError: if an operator has no conversion.
    """
    operators = operators_of(model)
    forms: dict[str, tuple[SplitRule, ...]] = {}

    def tried(question: _Question) -> object:
        index, rule = question
        if rule is not None:
            return operators[index].in_blocks(rule)
        return [(one.line, one.sizes) for one in operators[index].discover(forms)]

    with Forked(tried) as process:
        trials = _Trials(operators, CacheFolder(_folder() if cached else None), process)
        rules = [trials.rules(i) for i in range(len(operators))]
        nodes = [one.node_with(own) for one, own in zip(operators, rules, strict=True)]
        blocked = in_blocks(nodes, trials.hold_in_blocks)
    # None is tried a second time: an operator that damages memory need not be the one that dies of
    # it. Nothing of it is kept in the cache either, so that the next profile says it again.
    if trials.ended:
        whole = ", ".join(sorted({*trials.ended.values()}))
        warn(
            f"operators that ended the process in which they were run on parts are planned whole:"
            f" {whole}"
        )
    return tuple(
        () if name in trials.ended else one.lines((*own, *(SplitRule(str(rule)) for rule in more)))
        for name, one, own, more in zip(trials.names, operators, rules, blocked, strict=True)
    )


def with_rules(profile: Profile, model: Model, *, cached: bool = True) -> Profile:
    """A profile with the rules of every operator, and a warning if some have none because trying
    them ended a process.

    Args:
        model: that it is of.
        cached: as of `split_rules`.

    Raises:
        ValueError: if the model is another one.
    """
    ended: list[str] = []
    rules = split_rules(model, cached=cached, warn=ended.append)
    if [one.name for one in model.graph.operators] != [one.name for one in profile.operators]:
        raise ValueError("expected the model of the profile, got one with other operators")
    both = zip(profile.operators, rules, strict=True)
    return replace(
        profile,
        operators=tuple(replace(cost, rules=own) for cost, own in both),
        warnings=(*profile.warnings, *ended),
    )


_Question = tuple[int, AxisRule | None]
"""What is tried: the operator of an index, or a rule with blocks of it."""


class _Trials:
    """The results of trials: those that are kept, and those of a process, in which others run.

    Attributes:
        names: of the operators' classes.
        ended: by class, the type of an operator whose trials have ended the process, and by what.
            The class is not tried again, and nothing is kept of it.
    """

    def __init__(
        self,
        operators: "Sequence[OperatorTrial]",
        shelf: CacheFolder,
        process: Callable[[_Question], object],
    ) -> None:
        self.names = [one.name for one in operators]
        self.ended: dict[str, str] = {}
        self._types = [one.own.type for one in operators]
        self._shelf, self._process = shelf, process
        self._results: dict[str, Any] = {}

    def rules(self, index: int) -> tuple[SplitRule, ...]:
        """The rules of an operator without blocks."""
        return tuple(
            SplitRule(line, sizes and tuple(sizes))
            for line, sizes in self._result(self.names[index], (index, None)) or ()
        )

    def hold_in_blocks(self, index: int, rule: AxisRule) -> bool:
        """Whether a rule with blocks holds."""
        name = hashlib.sha256(f"{self.names[index]} {rule}".encode()).hexdigest()
        return bool(self._result(name, (index, rule)))

    def _result(self, name: str, question: _Question) -> Any:
        """The result of a name, as it is kept; None where there is none."""
        if name not in self._results:
            plain = self._shelf.get_json(_file(name))
            self._results[name] = self._tried(name, question) if plain is None else plain
        return self._results[name]

    def _tried(self, name: str, question: _Question) -> object:
        index, _ = question
        if self.names[index] in self.ended:
            return None
        _load_functions()
        try:
            plain = self._process(question)
        except EndedError as error:
            self.ended[self.names[index]] = f"{self._types[index]} ({error})"
            return None
        self._shelf.put_json(_file(name), plain)
        return plain


@cache
def _load_functions() -> None:
    """Has torch load its functions of tensors without numbers, which takes 0.6 s, in this process:
    they stay here, and every process that is forked off has them.
    """
    torch.neg(torch.empty(1, device="meta"))


def operators_of(model: Model) -> "list[OperatorTrial]":
    """All operators of a model, in the graph's order.

    Raises:
        OperatorError: if one has no conversion.
    """
    return [OperatorTrial(model, i) for i in range(len(model.graph.operators))]


class OperatorTrial:
    """One operator of a model, to be tried.

    Attributes:
        own: the graph's operator.
        call: of its function.
        held: shape and type of the tensors and parameters that it reads, by name.
        constants: what it reads besides, by name.
        outputs: position among the results of the call, and shape, of each output.
    """

    def __init__(self, model: Model, index: int) -> None:
        self.model, self.index = model, index
        self.node: Node = model.nodes[index]
        self.own = model.graph.operators[index]
        self.call: Call = bind(model, self.node, "cpu")
        tensors, parameters = tensors_by_name(model.graph), parameters_by_name(model.graph)
        self.held = {
            name: (one.shape, one.dtype)
            for name in self.call.reads
            if (one := tensors.get(name) or parameters.get(name)) is not None
        }
        self.constants = {
            name: model.values[name] for name in self.call.reads if name not in self.held
        }
        self.outputs = [
            (position, tensors[name].shape)
            for position, name in enumerate(self.node.outputs)
            if name
        ]

    @property
    def name(self) -> str:
        """The hash of all that its rules depend on."""
        places = {name: i for i, name in enumerate(self.call.reads)}

        def plain(value: object) -> object:
            return ["read", places[value.name]] if isinstance(value, Read) else repr(value)

        content = [
            self.own.type,
            self.node.version,
            [plain(value) for value in self.call.args],
            {k: plain(value) for k, value in self.call.kwargs.items() if k != "node"},
            [self.held.get(name) for name in self.call.reads],
            [_digest(self.constants[n]) for n in self.call.reads if n in self.constants],
            self.outputs,
        ]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def discover(self, known: dict[str, tuple[SplitRule, ...]]) -> tuple[SplitRule, ...]:
        """Its rules; none where it cannot be tried.

        Args:
            known: rules by what is tried, to which it adds: many operators are one at small sizes.
        """
        if not self.call.reads or not self.outputs:
            return ()
        with _alone():
            made = self.template()
            form = _form(made, self.own.type)
            if form not in known:
                own = _has_own_backward(made)
                known[form] = () if own else _discovered(made, self.own.type)
            rules = with_statistics(self.own.type, self.call, known[form])
            return (*rules, *self._communicating())

    def template(self) -> Template:
        """The operator at small sizes."""
        values: list[tuple[tuple[int, ...], str, Tensor | None]] = []
        for name in self.call.reads:
            if name in self.held:
                shape, dtype = self.held[name]
                values.append((shape, _kind(dtype), None))
            else:
                value = torch.from_numpy(self.constants[name].copy())
                values.append((tuple(value.shape), _kind(str(value.dtype)), value))
        return template(self.own.type, self.call, values, self.outputs)

    @property
    def made(self) -> tuple[int, ...]:
        """The positions of its outputs among the results of the call."""
        return tuple(position for position, _ in self.outputs)

    def drawn(self, parts: int, seed: int) -> tuple[Call, list[Tensor], set[int]]:
        """The call at small sizes, numbers for what it reads, and the positions of constants.

        Raises:
            TooLargeError: if it cannot be tried.
        """
        made = self.template()
        trial = Trial(made, parts, seed)
        constants = {i for i, one in enumerate(made.values) if one.constant is not None}
        return trial.call, trial.values, constants

    def node_with(self, rules: Sequence[SplitRule]) -> blocks.Node:
        """The operator, as the search for rules with blocks needs it."""
        tensors = {*self.own.inputs, *self.own.outputs}
        shapes = {name: shape for name, (shape, _) in self.held.items()}
        shapes |= {name: tuple(value.shape) for name, value in self.constants.items()}
        made = [shape for _, shape in self.outputs]
        shapes |= dict(zip(self.own.outputs, made, strict=True))
        return blocks.Node(
            self.own.type, self.call, frozenset(tensors), self.call.reads, self.own.outputs, shapes,
            tuple(one.rule for one in rules if one.sizes is None and not one.rule.marks),
        )  # fmt: skip

    def in_blocks(self, rule: AxisRule) -> bool:
        """Whether a rule with blocks holds."""
        made = self.template()
        few = min(FEW_BLOCKS, max(blocks_of(part) for part in rule.parts))
        with _alone():
            try:
                for parts, seed in ((2, 0), (2, 1), (3, 0)):
                    trial = Trial(made, parts, seed, blocks=few)
                    own = _in_blocks_of(made, rule, few, trial.sizes)
                    if own is None or not trial.makes(own):
                        return False
            except TooLargeError:
                return False
        return True

    def _communicating(self) -> tuple[SplitRule, ...]:
        if len(self.outputs) != 1 or self.constants:
            return ()
        shapes = {name: shape for name, (shape, _) in self.held.items()}
        floats = frozenset(n for n, (_, dtype) in self.held.items() if dtype in FLOAT_DTYPES)
        return tuple(
            communicating_rules(self.own.type, self.call, shapes, floats, self.outputs[0][1])
        )

    def lines(self, rules: Sequence[SplitRule]) -> tuple[SplitRule, ...]:
        """Rules as a profile has them."""
        return tuple(replace(one, line=str(self._reordered(one.rule))) for one in rules)

    def _reordered(self, rule: AxisRule) -> AxisRule:
        """A rule with its inputs in the order of the operator's, not of the call's."""
        inputs = dict(zip(self.call.reads, rule.inputs, strict=True))
        return replace(rule, inputs=tuple(inputs.get(name, "R") for name in reads(self.own)))


def _in_blocks_of(made: Template, rule: AxisRule, few: int, sizes: Sizes) -> AxisRule | None:
    """A rule with as many blocks as the dimensions have at small sizes: a few where the rest of the
    dimension is free, else those to the left of what is cut. None where a dimension is fixed.
    """

    def part(one: str, dims: Sequence[Factors]) -> str | None:
        dim = dim_of(one)
        if dim is None:
            return one
        if not _is_free(dims[dim]):
            return None
        own, count = dims[dim], blocks_of(one)
        left = [k for k in range(len(own)) if prod(f.real for f in own[:k]) == count]
        if len(own) > 1 and left:
            count = size_of(own[: left[0]], sizes)
        elif count > 1:
            count = few
        return f"S{dim}/{count}" if count > 1 else f"S{dim}"

    given = [part(one, v.dims) for one, v in zip(rule.inputs, made.values, strict=True)]
    results = [part(one, dims) for one, dims in zip(rule.outputs, made.outputs, strict=True)]
    known, due = [p for p in given if p is not None], [p for p in results if p is not None]
    if len(known) < len(given) or len(due) < len(results):
        return None
    return AxisRule(tuple(known), tuple(due), rule.local)


@contextmanager
def _alone() -> Iterator[None]:
    """A context for many small runs: on one thread, without torch's warnings of ways that fail."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def _has_own_backward(template: Template) -> bool:
    """Whether a `torch.autograd.Function` or an operator of `torch.library` computes a part of an
    operator. Its backward pass may do what its forward pass does not tell, such as to limit a norm,
    so what its parts make of the forward pass is no rule.
    """
    trial = Trial(template, 2)
    try:
        numbers = trial.values
    except TooLargeError:
        return False
    leaves = [one.detach().requires_grad_(one.is_floating_point()) for one in numbers]
    made = trial.run(trial.call, [one.clone() for one in leaves], gradients=True)
    return made is not None and any(functions_in(made))


def _discovered(template: Template, kind: str) -> tuple[SplitRule, ...]:
    """The rules of an operator, each with the numbers of parts for which it holds.

    Args:
        kind: its ONNX type.
    """
    trials = _TrialsOf(template)
    checked: list[SplitRule] = []
    for rule in trials.rules(kind):
        sizes = _sizes(rule, template)
        if sizes is None or not _cut_fixed(rule, template):
            # Heads and groups are free, too: what holds for some numbers of parts holds for all.
            tried = [trials.right(rule, parts) for parts in (2, *MORE_PARTS)]
            if tried[0] and False not in tried and sizes != ():
                checked.append(SplitRule(str(rule), sizes))
        elif held := tuple(parts for parts in sizes if trials.right(rule, parts)):
            checked.append(SplitRule(str(rule), held))
    return tuple(checked)


class _TrialsOf:
    """The trials of an operator, each of which is made once."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._trials: dict[tuple[int, int], Trial] = {}

    def trial(self, parts: int, seed: int) -> Trial:
        """The trial with some numbers."""
        scale = OTHER_SCALE if seed % 2 else 1.0
        made = Trial(self._template, parts, seed, scale)
        return self._trials.setdefault((parts, seed), made)

    def rules(self, kind: str) -> dict[AxisRule, None]:
        """The rules for two parts and, where two do not divide a fixed size, for three."""
        found: dict[AxisRule, None] = {}
        for parts in (2, 3):
            try:
                found |= dict.fromkeys(rules_at(self.trial(parts, 0), kind))
            except TooLargeError:
                continue
            if not _thirds(self._template):
                break
        return found

    def right(self, rule: AxisRule, parts: int) -> bool | None:
        """Whether a rule holds for a number of parts; None where it cannot be tried."""
        try:
            if self.trial(parts, 0).localized(rule.local) is None:
                return None
            return all(holds(self.trial(parts, seed), rule) for seed in SEEDS[parts == 2])
        except TooLargeError:
            return None


def _form(template: Template, kind: str) -> str:
    """All that the rules of an operator depend on, as text."""
    calls = []
    for parts in (2, *MORE_PARTS, *FIXED_PARTS):
        sizes = template.sizes(parts)
        call = call_at(template, sizes)
        shapes = [shape_of(one.dims, sizes) for one in template.values]
        calls.append((_plain(call), shapes, [size_of(one.below, sizes) for one in template.values]))
    values = [
        (one.kind, None if one.constant is None else _digest(one.constant))
        for one in template.values
    ]
    every = (*(one.dims for one in template.values), *template.outputs)
    fixed = [[None if _is_free(dim) else _real(dim) for dim in dims] for dims in every]
    return repr((kind, calls, values, fixed, template.made, sorted(template.counts.items())))


def _plain(call: Call) -> list[tuple[object, object]]:
    """The arguments of a call; of what it reads, the place."""
    places = {name: i for i, name in enumerate(call.reads)}
    return [
        (name, places[value.name] if isinstance(value, Read) else repr(value))
        for name, value in (*enumerate(call.args), *call.kwargs.items())
        if name != "node"
    ]


def _is_free(dim: Factors) -> bool:
    return any(factor.free for factor in dim)


def _thirds(template: Template) -> bool:
    """Whether a dimension of fixed size can be cut into three parts, but not into two."""
    dims = [dim for one in template.values for dim in one.dims]
    sizes = [_real(dim) for dim in dims if dim and not _is_free(dim)]
    return any(size % 3 == 0 and size % 2 for size in sizes)


def _real(dim: Factors) -> int:
    return prod(factor.real for factor in dim)


def _cut_fixed(rule: AxisRule, template: Template) -> list[int]:
    """The real sizes of the dimensions that a rule cuts, as far as they are fixed."""
    every = [
        *((spec, one.dims) for spec, one in zip(rule.inputs, template.values, strict=True)),
        *((spec, dims) for spec, dims in zip(rule.outputs, template.outputs, strict=True)),
    ]
    cut = [dims[d] for spec, dims in every if (d := dim_of(spec)) is not None]
    return [_real(dim) for dim in cut if not _is_free(dim)]


def _sizes(rule: AxisRule, template: Template) -> tuple[int, ...] | None:
    """The numbers of parts for which a rule may hold: all that divide what it cuts (None), all that
    divide the heads or groups that it counts, or those that are tried because a size is fixed.
    """
    counts = [template.counts[name] for name in rule.local if name in template.counts]
    fixed = _cut_fixed(rule, template)
    if not counts and not fixed:
        return None
    common = gcd(*counts, *fixed)
    if fixed:
        return tuple(parts for parts in FIXED_PARTS if common % parts == 0)
    return tuple(parts for parts in range(2, common + 1) if common % parts == 0)


# ---- the cache


def _folder() -> Path:
    """The folder of the rules that these sources find with this version of torch."""
    own = [hashlib.sha256(source).hexdigest() for source in registered().values()]
    conditions = [METHOD, torch.__version__, _sources(), *own]
    digest = hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]
    return cache_root() / "rules" / digest


@cache
def _sources() -> str:
    """A hash of the operators' functions, of the discovery, and of the specs that it tries."""
    here = Path(__file__).resolve().parent
    package = here.parents[1]
    operators = (package / "operators").rglob("*.py")
    known = package / "artefacts/operator_types.py", package / "artefacts/sharding.py"
    files = sorted((*here.glob("*.py"), *operators, *known))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _file(name: str) -> str:
    return f"{name[:2]}/{name}.entry"


def _kind(dtype: str) -> str:
    name = dtype.removeprefix("torch.")
    return "float" if name in FLOAT_DTYPES else "bool" if name == "bool" else "int"


def _digest(value: object) -> object:
    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
    small = tensor.numel() <= 1 or not tensor.is_floating_point()
    digest = hashlib.sha256(tensor.numpy().tobytes()).hexdigest() if small else None
    return [list(tensor.shape), str(tensor.dtype), digest]
