"""Mistakes of the user. Each message names the place, the expected and the given value, and the
remedy, and is ready to print.

    PlannerError
    |- FileError        a file that is missing, malformed, of another version or another hash
    |- UnitError        a quantity without a unit, or with one that does not fit
    |- ModelError       an ONNX model that cannot be planned
    |  `- OperatorError     an operator that the table of conversions does not have
    |- ExportError      a PyTorch module that cannot be written as ONNX
    |- TopologyError    a cluster that contradicts itself
    |- OptionError      options that contradict each other or the files
    `- LaunchError      a world that does not fit the strategy
       |- Stopped           a rank that ends because another one has failed
       `- Preempted         a training that has saved and ends, as a signal asked

Infeasible is no exception: it is a `Status`. A mistake of the programmer is a `ValueError`.
"""


class PlannerError(Exception):
    """A mistake that the user can mend; `str()` of it is the whole message."""


class FileError(PlannerError):
    """A file is missing, malformed, or was made for something else."""


class UnitError(PlannerError):
    """A quantity has no unit, or one that does not fit."""


class ModelError(PlannerError):
    """An ONNX model cannot be read, bound or planned."""


class OperatorError(ModelError):
    """An ONNX operator has no conversion to torch."""


class ExportError(PlannerError):
    """A PyTorch module cannot be written as ONNX."""


class TopologyError(PlannerError):
    """A topology contradicts itself or cannot serve the request."""


class OptionError(PlannerError):
    """Options contradict each other or the files they refer to."""


class LaunchError(PlannerError):
    """The processes of a launch do not fit the strategy."""


class Stopped(LaunchError):  # noqa: N818, no error of its own
    """This rank ends because another rank has failed, which says why."""


class Preempted(LaunchError):  # noqa: N818, no error of its own
    """A training has saved and ends before its last step, as a signal asked."""


def words_of(error: BaseException) -> str:
    """The first line that an error says; the name of its type where it says nothing.

    >>> words_of(ZeroDivisionError("division by zero")), words_of(MemoryError())
    ('division by zero', 'MemoryError')
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def shown(value: object) -> str:
    """A value as messages show it."""
    if isinstance(value, int) and abs(value) >= 10**60:
        return "a number of more than 60 digits"  # Python writes out no number of 4,300 digits
    kinds = ((dict, "a mapping"), ((list, tuple), "a list"), (type(None), "nothing"))
    # Lists are not written out: a list of YAML may hold itself, or another list many times.
    kind = next((kind for of, kind in kinds if isinstance(value, of)), None)
    return kind or f"{value!r:.60}"
