"""A rank, its action and its memory in words, from its page."""

from planner.launcher.failures.page import Glance
from planner.support.units import format_bytes


def who(rank: int, glance: Glance | None) -> str:
    """A rank with its stages, such as "rank 1 (stage 3)"."""
    return (
        f"rank {rank} ({glance.words})" if glance is not None and glance.words else f"rank {rank}"
    )


def where(glance: Glance | None) -> str:
    """The action that a rank is in, with a blank before it; "" where it is not known."""
    return f" {glance.doing}" if glance is not None and glance.process else ""


def memory_words(glance: Glance | None) -> str:
    """The memory that a process used last, beside the plan's; "" where it is not known."""
    if glance is None or not glance.used_bytes:
        return ""
    used = f" ({format_bytes(glance.used_bytes)} in use"
    if not glance.predicted_bytes:
        return f"{used})"
    return f"{used}, {format_bytes(glance.predicted_bytes)} predicted)"
