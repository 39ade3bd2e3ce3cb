"""Options that an asynchronous schedule cannot follow, because its stages never meet."""

from planner.artefacts.plan import Plan
from planner.launcher.options import Loop, NanRule
from planner.support.errors import OptionError


def check_schedule(plan: Plan, loop: Loop) -> None:
    """Raises the first option that does not go with the schedule of a plan.

    Raises:
        OptionError: if all stages would have to decide about a step together.
    """
    if not plan.strategy.schedule.is_asynchronous:
        return
    dtype = loop.dtype or plan.dtype
    for given, refused, why, instead in (
        (
            f"--clip {loop.clip}", loop.clip is not None,
            "needs the gradients of all stages", "leave it out",
        ),
        (
            f"--nan {loop.nan}", loop.nan == NanRule.SKIP,
            "leaves out a step in all stages", "give --nan stop",
        ),
        (
            f"--dtype {dtype}", dtype == "float16",
            "has a loss scale for all stages", "give --dtype bfloat16",
        ),
    ):  # fmt: skip
        if refused:
            raise OptionError(
                f"{given}: it {why}, and under the schedule {plan.strategy.schedule} each stage"
                f" steps for itself; {instead}, or plan with --schedule 1f1b"
            )
