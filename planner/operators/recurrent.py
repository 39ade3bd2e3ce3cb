"""LSTM, GRU and RNN.

Shapes: T positions, B samples, D directions (1 or 2), I inputs, H hidden numbers, G gates (4 of
LSTM, 3 of GRU, 1 of RNN). X is (T, B, I), W (D, G H, I), R (D, G H, H) and B (D, 2 G H): the
inputs' biases, then the hidden numbers'. Y is (T, D, B, H), the last states are (D, B, H). With
`layout` 1 the samples come first everywhere.

A layer that torch has is one call of torch's own function, which has fused kernels; its weights are
those of ONNX with the gates in another order. Every other layer (other activations, clipping,
peepholes, coupled gates, sequences of several lengths) is a loop over positions.

All shapes are checked before that: torch's own functions read memory that is not theirs where
an LSTM's two states differ (in float64) or states and weights do not fit (in float32, by oneDNN). A
loop would repeat what has size 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from planner.operators.shape import Numbers
from planner.support.errors import OperatorError

Activation = Callable[[Tensor], Tensor]
State = tuple[Tensor, ...]  # (h,), of an LSTM (h, c); each (B, H)
Words = tuple[str, ...]
# Projected inputs (B, G H), recurrent weights (G H, H), their biases (G H,), state -> next state.
Cell = Callable[[Tensor, Tensor, Tensor, State], State]

# Name -> the function of (x, alpha, beta), and the defaults of alpha and beta, as far as it has
# them.
ACTIVATIONS: Mapping[str, tuple[Callable[..., Tensor], Numbers]] = {
    "affine": (lambda x, alpha, beta: alpha * x + beta, (1.0, 0.0)),
    "elu": (functional.elu, (1.0,)),
    "hardsigmoid": (lambda x, alpha, beta: torch.clamp(alpha * x + beta, 0, 1), (0.2, 0.5)),
    "leakyrelu": (functional.leaky_relu, (0.01,)),
    "relu": (torch.relu, ()),
    "scaledtanh": (lambda x, alpha, beta: alpha * torch.tanh(beta * x), (1.0, 1.0)),
    "sigmoid": (torch.sigmoid, ()),
    "softplus": (functional.softplus, ()),
    "softsign": (functional.softsign, ()),
    "tanh": (torch.tanh, ()),
    "thresholdedrelu": (lambda x, alpha: torch.where(x > alpha, x, 0.0), (1.0,)),
}


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer before its cell is known.

    Attributes:
        x: (T, B, I).
        w, r, b: as given; b is zeros where there is none.
        lengths: (B,), the number of positions of each sample; None where they are all T.
        states: first states, each (D, B, H).
        reverse: per direction, whether it runs from the last position to the first.
        activations: per direction, of each use in the cell.
        plain: names of the activations where all directions have those and no clipping, else ().
        layout: 1 where samples come first in the inputs and outputs.
    """

    x: Tensor
    w: Tensor
    r: Tensor
    b: Tensor
    lengths: Tensor | None
    states: State
    reverse: tuple[bool, ...]
    activations: tuple[tuple[Activation, ...], ...]
    plain: Words
    layout: int


_DIRECTIONS: Mapping[str, int] = {"forward": 1, "reverse": 1, "bidirectional": 2}


def _check(
    given: Mapping[str, Tensor | None],
    gates: int,
    direction: str,
    hidden_size: int | None,
    layout: int,
) -> None:
    """Whether the arguments of an operator fit each other.

    Args:
        given: X, R and the other inputs, by ONNX's names.
        gates: G.
        direction: forward, reverse or bidirectional.
        hidden_size: H; None takes that of R.
        layout: 1 where samples come first.

    Raises:
        OperatorError: if they do not; it lists all that is wrong.
    """
    if direction not in _DIRECTIONS:
        raise OperatorError(
            f"direction: expected forward, reverse or bidirectional, got {direction!r}"
        )
    if layout not in (0, 1):
        raise OperatorError(f"layout: expected 0 or 1, got {layout}")
    shapes = {name: tuple(one.shape) for name, one in given.items() if one is not None}
    wrong = [
        f"{name}: expected 3 dimensions, got shape {shapes[name]}"
        for name in ("X", "R")
        if len(shapes[name]) != 3
    ]
    if not wrong:
        hidden = shapes["R"][2] if hidden_size is None else hidden_size
        expected = _expected_shapes(shapes["X"], gates, _DIRECTIONS[direction], hidden, layout)
        wrong = [
            f"{name}: expected shape {due}, got {shapes[name]}"
            for name, due in expected.items()
            if shapes.get(name, due) != due
        ]
        if hidden < 1:
            wrong.append(f"hidden_size: expected at least 1, got {hidden}")
    if wrong:
        size = "" if hidden_size is None else f", hidden_size {hidden_size}"
        raise OperatorError(
            f"{'; '.join(wrong)} (X has shape {shapes['X']}; direction {direction}{size}, layout"
            f" {layout})"
        )


def _expected_shapes(
    x: tuple[int, ...], gates: int, count: int, hidden: int, layout: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the other inputs, from that of X (T, B, I), D directions and H hidden units."""
    samples, inputs = x[1 - layout], x[2]
    state = (samples, count, hidden) if layout else (count, samples, hidden)
    return {
        "W": (count, gates * hidden, inputs), "R": (count, gates * hidden, hidden),
        "B": (count, 2 * gates * hidden), "sequence_lens": (samples,),
        "initial_h": state, "initial_c": state, "P": (count, 3 * hidden),
    }  # fmt: skip


def _layer(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    first: tuple[Tensor | None, ...],
    direction: str,
    activations: tuple[Words, Numbers, Numbers, float | None],
    layout: int,
) -> _Layer:
    """The layer of an operator's arguments, which fit each other.

    Args:
        tensors: X, W, R, B, sequence_lens.
        first: initial_h, and of an LSTM initial_c.
        direction: forward, reverse or bidirectional.
        activations: names, alphas, betas, the bound of clipping.
        layout: 1 where samples come first.
    """
    x, w, r, b, lengths = tensors
    x = x.transpose(0, 1) if layout else x
    count, hidden = w.shape[0], r.shape[2]
    zeros = x.new_zeros((count, x.shape[1], hidden))
    states = tuple(
        zeros if one is None else (one.transpose(0, 1) if layout else one) for one in first
    )
    names, alphas, betas, clip = activations
    functions = _functions(names, alphas, betas, clip, count)
    per = len(names) // count
    same = len(names) == per * count and len({names[i * per : i * per + per] for i in range(count)})
    plain = tuple(map(str.lower, names[:per])) if same == 1 and not clip else ()
    return _Layer(
        x, w, r, r.new_zeros((count, 2 * r.shape[1])) if b is None else b, lengths, states,
        (direction == "reverse", True)[:count], functions, plain, layout,
    )  # fmt: skip


def _functions(
    names: Words, alphas: Numbers, betas: Numbers, clip: float | None, count: int
) -> tuple[tuple[Activation, ...], ...]:
    """The activations per direction. Those that have an alpha or a beta take the next of the list,
    and their default when it is used up.
    """
    unknown = [name for name in names if name.lower() not in ACTIVATIONS]
    if unknown or not names or len(names) % count:
        known = ", ".join(ACTIVATIONS)
        raise OperatorError(
            f"activations: expected a multiple of {count} among {known}, got {', '.join(names)}"
        )
    rest = iter(alphas), iter(betas)
    made, per = [], len(names) // count
    for i, name in enumerate(names):
        function, defaults = ACTIVATIONS[name.lower()]
        given = [next(one, default) for one, default in zip(rest, defaults, strict=False)]
        # The third is that of an LSTM's memory, which is no gate: ONNX Runtime clips gates only.
        bound = clip if i % per < 2 else None
        made.append(partial(_activated, function, tuple(given), bound))
    return tuple(tuple(made[i : i + per]) for i in range(0, len(made), per))


def _activated(
    function: Callable[..., Tensor], given: Numbers, clip: float | None, x: Tensor
) -> Tensor:
    return function(torch.clamp(x, -clip, clip) if clip else x, *given)


def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    p: Tensor | None = None,
    activation_alpha: Numbers = (),
    activation_beta: Numbers = (),
    activations: Words = (),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    output_sequence: int = 1,
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """All states, the last ones, and the last memories. ONNX has the gates in the order input,
    output, forget, cell; torch has input, forget, cell, output.
    """
    given = {"X": x, "W": w, "R": r, "B": b, "sequence_lens": sequence_lens,
             "initial_h": initial_h, "initial_c": initial_c, "P": p}  # fmt: skip
    _check(given, 4, direction, hidden_size, layout)
    names = activations or ("Sigmoid", "Tanh", "Tanh") * w.shape[0]
    layer = _layer(
        (x, w, r, b, sequence_lens), (initial_h, initial_c), direction,
        (names, activation_alpha, activation_beta, clip), layout,
    )  # fmt: skip
    simple = layer.plain == ("sigmoid", "tanh", "tanh") and p is None and not input_forget
    if simple and layer.lengths is None:
        return _answer(layer, _by_torch(layer, torch.lstm, (0, 2, 3, 1)), num_outputs)
    cells = []
    for d, functions in enumerate(layer.activations):
        peepholes = (None, None, None) if p is None else p[d].chunk(3)
        cells.append(partial(_lstm_cell, functions, peepholes, bool(input_forget)))
    return _answer(layer, _by_loop(layer, cells), num_outputs)


def _lstm_cell(
    functions: tuple[Activation, ...],
    peepholes: tuple[Tensor | None, ...],
    coupled: bool,
    projected: Tensor,
    r: Tensor,
    bias: Tensor,
    state: State,
) -> State:
    """The next h and c; `peepholes` are of the input, output and forget gates, `coupled` makes the
    forget gate one minus the input gate.
    """
    f, g, out = functions
    h, c = state
    i, o, forget, cell = (projected + functional.linear(h, r, bias)).chunk(4, -1)
    to_input, to_output, to_forget = (0.0 if one is None else one for one in peepholes)
    i = f(i + to_input * c)
    forget = 1 - i if coupled else f(forget + to_forget * c)
    c = forget * c + i * g(cell)
    return f(o + to_output * c) * out(c), c


def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    activation_alpha: Numbers = (),
    activation_beta: Numbers = (),
    activations: Words = (),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    output_sequence: int = 1,
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """All states and the last ones. ONNX has the gates in the order update, reset, hidden; torch
    has reset, update, hidden, and resets after the product only.
    """
    given = {"X": x, "W": w, "R": r, "B": b, "sequence_lens": sequence_lens,
             "initial_h": initial_h}  # fmt: skip
    _check(given, 3, direction, hidden_size, layout)
    names = activations or ("Sigmoid", "Tanh") * w.shape[0]
    layer = _layer(
        (x, w, r, b, sequence_lens), (initial_h,), direction,
        (names, activation_alpha, activation_beta, clip), layout,
    )  # fmt: skip
    if layer.plain == ("sigmoid", "tanh") and linear_before_reset and layer.lengths is None:
        return _answer(layer, _by_torch(layer, torch.gru, (1, 0, 2)), num_outputs)
    cells = [partial(_gru_cell, one, bool(linear_before_reset)) for one in layer.activations]
    return _answer(layer, _by_loop(layer, cells), num_outputs)


def _gru_cell(
    functions: tuple[Activation, ...],
    reset_after: bool,
    projected: Tensor,
    r: Tensor,
    bias: Tensor,
    state: State,
) -> State:
    """The next h; with `reset_after` the product with the recurrent weights is reset, else h."""
    f, g = functions
    (h,) = state
    size = h.shape[-1]
    gates = functional.linear(h, r[: 2 * size], bias[: 2 * size])
    update, reset = f(projected[:, : 2 * size] + gates).chunk(2, -1)
    if reset_after:
        hidden = reset * functional.linear(h, r[2 * size :], bias[2 * size :])
    else:
        hidden = functional.linear(reset * h, r[2 * size :], bias[2 * size :])
    new = g(projected[:, 2 * size :] + hidden)
    return ((1 - update) * new + update * h,)


_RNN: Mapping[Words, Callable[..., tuple[Tensor, ...]]] = {
    ("tanh",): torch.rnn_tanh, ("relu",): torch.rnn_relu,
}  # fmt: skip


def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Tensor | None = None,
    initial_h: Tensor | None = None,
    activation_alpha: Numbers = (),
    activation_beta: Numbers = (),
    activations: Words = (),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    output_sequence: int = 1,
    *,
    num_outputs: int,
) -> Tensor | tuple[Tensor, ...]:
    """All states and the last ones."""
    given = {"X": x, "W": w, "R": r, "B": b, "sequence_lens": sequence_lens,
             "initial_h": initial_h}  # fmt: skip
    _check(given, 1, direction, hidden_size, layout)
    layer = _layer(
        (x, w, r, b, sequence_lens), (initial_h,), direction,
        (activations or ("Tanh",) * w.shape[0], activation_alpha, activation_beta, clip), layout,
    )  # fmt: skip
    own = _RNN.get(layer.plain)
    if own is not None and layer.lengths is None:
        return _answer(layer, _by_torch(layer, own, (0,)), num_outputs)
    cells = [partial(_rnn_cell, one[0]) for one in layer.activations]
    return _answer(layer, _by_loop(layer, cells), num_outputs)


def _rnn_cell(
    function: Activation, projected: Tensor, r: Tensor, bias: Tensor, state: State
) -> State:
    (h,) = state
    return (function(projected + functional.linear(h, r, bias)),)


def _by_torch(
    layer: _Layer, function: Callable[..., tuple[Tensor, ...]], order: tuple[int, ...]
) -> tuple[Tensor, State]:
    """Y (T, D, B, H) and the last states, each (D, B, H), by torch's own function.

    Args:
        order: the place in ONNX's order of each gate in torch's.
    """
    kind = layer.x.dtype  # under autocast tensors may come in several types; torch takes one
    x = layer.x.flip(0) if layer.reverse == (True,) else layer.x
    weights = [
        _reordered(one, order).to(kind)
        for w, r, b in zip(layer.w, layer.r, layer.b, strict=True)
        for one in (w, r, *b.chunk(2))
    ]
    count = len(layer.reverse)
    states = tuple(one.to(kind).contiguous() for one in layer.states)
    first = states if len(states) > 1 else states[0]
    y, *last = function(x, first, weights, True, 1, 0.0, True, count == 2, False)
    y = y.flip(0) if layer.reverse == (True,) else y
    return y.reshape(*y.shape[:2], count, -1).transpose(1, 2), tuple(last)


def _reordered(weight: Tensor, order: tuple[int, ...]) -> Tensor:
    """The gates, G equal parts of the first dimension, in another order."""
    parts = weight.chunk(len(order))
    return torch.cat([parts[i] for i in order])


def _by_loop(layer: _Layer, cells: Sequence[Cell]) -> tuple[Tensor, State]:
    """Y and the last states, a position after the other.

    A sample that is shorter than T has zeros in Y behind its end, and keeps its last states.
    """
    made = [_direction(layer, d, cell) for d, cell in enumerate(cells)]
    last = zip(*(states for _, states in made), strict=True)
    return torch.stack([y for y, _ in made], 1), tuple(torch.stack(one) for one in last)


def _direction(layer: _Layer, d: int, cell: Cell) -> tuple[Tensor, State]:
    """Y (T, B, H) of one direction, and its last states, each (B, H)."""
    x_bias, h_bias = layer.b[d].chunk(2)
    projected = functional.linear(layer.x, layer.w[d], x_bias)
    states = tuple(one[d] for one in layer.states)
    ys: list[Tensor] = []
    for t in _positions(len(layer.x), layer.reverse[d]):
        new = cell(projected[t], layer.r[d], h_bias, states)
        if layer.lengths is None:
            ys.append(new[0])
            states = new
            continue
        within = (t < layer.lengths).unsqueeze(-1)
        ys.append(torch.where(within, new[0], 0.0))
        states = tuple(torch.where(within, n, s) for n, s in zip(new, states, strict=True))
    return torch.stack(ys[::-1] if layer.reverse[d] else ys), states


def _positions(count: int, reverse: bool) -> Iterator[int]:
    return iter(reversed(range(count)) if reverse else range(count))


def _answer(
    layer: _Layer, made: tuple[Tensor, State], num_outputs: int
) -> Tensor | tuple[Tensor, ...]:
    """The outputs that are asked for, in the operator's layout."""
    y, last = made
    if layer.layout:
        y, last = y.permute(2, 0, 1, 3), tuple(one.transpose(0, 1) for one in last)
    outputs = (y, *last)[:num_outputs]
    return outputs if num_outputs > 1 else y
