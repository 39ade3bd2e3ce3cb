"""Types of options that click does not know: sizes, times, rates, dimensions."""

from collections.abc import Callable
from typing import Any

import click

from planner.support.errors import UnitError
from planner.support.units import parse_bytes, parse_rate, parse_seconds


class Quantity(click.ParamType[Any]):
    """A quantity with a unit; some have to be above 0."""

    def __init__(self, name: str, parse: Callable[[str], float], *, positive: bool = False) -> None:
        self.name, self.parse, self.positive = name, parse, positive

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Parses text; defaults that are numbers already stay."""
        if not isinstance(value, str):
            return value
        try:
            quantity = self.parse(value)
        except UnitError as error:
            return self.fail(str(error), param, ctx)
        if self.positive and quantity <= 0:
            return self.fail(f"expected more than 0, got {value!r}", param, ctx)
        return quantity


class Dimension(click.ParamType[Any]):
    """NAME=N."""

    name = "NAME=N"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Splits at the equals sign."""
        name, _, number = str(value).partition("=")
        is_number = number.isascii() and number.isdecimal()
        if not name or not is_number or int(number) < 1:
            return self.fail(f"expected NAME=N such as sequence=128, got {value!r}", param, ctx)
        return name, int(number)


class Dynamic(click.ParamType[Any]):
    """INPUT.DIM=NAME."""

    name = "INPUT.DIM=NAME"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The input, the index of the dimension and its name."""
        place, _, name = str(value).partition("=")
        argument, _, dim = place.rpartition(".")
        if not argument or not (dim.isascii() and dim.isdecimal()) or not name.isidentifier():
            return self.fail(
                f"expected INPUT.DIM=NAME such as x.0=batch, got {value!r}", param, ctx
            )
        return argument, int(dim), name


class Pin(click.ParamType[Any]):
    """NAME=DEVICE."""

    name = "NAME=DEVICE"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Splits at the last equals sign: names of operators may have one."""
        operator, _, device = str(value).rpartition("=")
        if not operator or not device:
            return self.fail(f"expected NAME=DEVICE such as conv1=gpu0, got {value!r}", param, ctx)
        return operator, device


class Batches(click.ParamType[Any]):
    """One or several sizes of the microbatch, such as 1,2,4."""

    name = "N[,N...]"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """The sizes, ascending."""
        if not isinstance(value, str):
            return value
        texts = value.split(",")
        good = all(text.isascii() and text.isdecimal() and int(text) > 0 for text in texts)
        if not good or len({int(text) for text in texts}) < len(texts):
            return self.fail(f"expected a size such as 8, or 4,8,16, got {value!r}", param, ctx)
        return tuple(sorted(int(text) for text in texts))


def distinct(
    ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, int], ...]:
    """Refuses a dimension that is bound twice."""
    names = [name for name, _ in value]
    for name in names:
        if names.count(name) > 1:
            raise click.BadParameter(f"{name} is given more than once", ctx, param)
    return value


class ByOutput(click.ParamType[Any]):
    """[OUTPUT=]VALUE, where names of outputs may have an equals sign."""

    def __init__(self, value: str, kind: Callable[[str], Any]) -> None:
        self.name, self.kind = f"[OUTPUT=]{value}", kind

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Splits at the last equals sign."""
        output, _, text = str(value).rpartition("=")
        try:
            return output, self.kind(text)
        except ValueError:
            return self.fail(f"expected {self.name}, got {value!r}", param, ctx)


def by_output(
    ctx: click.Context, param: click.Parameter, value: tuple[tuple[str, Any], ...]
) -> Any:
    """One value for all outputs, or one for each that is named; None without any."""
    outputs = [output for output, _ in value]
    if outputs == [""]:
        return value[0][1]
    if "" in outputs or len(set(outputs)) < len(outputs):
        raise click.BadParameter(
            "expected it once, or once for each output as OUTPUT=VALUE", ctx, param
        )
    return dict(value) or None


def loss_options(usual: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options --loss and --class-dim.

    Args:
        usual: their default, in words.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        loss = click.option(
            "--loss", type=ByOutput("LOSS", str), multiple=True, callback=by_output,
            help="Loss: auto, cross-entropy, nll, mse, l1, smooth-l1, huber, bce, own (the output"
            " is the loss), or your module:function (output, target) -> scalar tensor; may be"
            f" repeated for several outputs.  [default: {usual}]",
        )  # fmt: skip
        class_dim = click.option(
            "--class-dim", type=ByOutput("N", int), multiple=True, callback=by_output,
            help="Dimension of the output that classes lie on.  [default: 1; of rank 3, 2]",
        )  # fmt: skip
        return loss(class_dim(command))

    return decorate


def names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names between commas."""
    given = () if value is None else tuple(name.strip() for name in value.split(","))
    if not all(given):
        raise click.BadParameter(f"expected names such as a,b, got {value!r}", ctx, param)
    return given


def counts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Numbers above 0 between commas."""
    texts = names(ctx, param, value)
    if not all(text.isascii() and text.isdecimal() and int(text) > 0 for text in texts):
        raise click.BadParameter(f"expected numbers such as 2,1, got {value!r}", ctx, param)
    return tuple(map(int, texts))


SIZE, TIME = Quantity("size", parse_bytes), Quantity("time", parse_seconds)
MEMORY = Quantity("size", parse_bytes, positive=True)


RATE = Quantity("rate", parse_rate)
