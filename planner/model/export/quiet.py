"""Silence around torch's exporter, which prints, warns and logs a great deal."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

# Loggers of the exporter and of what it calls.
LOGGERS = frozenset({"torch", "onnxscript", "onnx_ir"})


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """Hides what is printed, warned and logged for as long as it is entered.

    Args:
        wanted: otherwise nothing is hidden.
    """
    if not wanted:
        yield
        return
    known = {**logging.root.manager.loggerDict, **dict.fromkeys(LOGGERS)}
    loggers = [logging.getLogger(name) for name in known if name.split(".")[0] in LOGGERS]
    levels = [one.level for one in loggers]
    with (
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        for one in loggers:
            one.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for one, level in zip(loggers, levels, strict=True):
                one.setLevel(level)
