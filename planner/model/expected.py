"""What a file says that its module trains, against what is trained: warnings where they differ."""

from collections.abc import Collection, Iterator, Mapping

from planner.model.folding import some
from planner.model.origins import Kind, Origin
from planner.model.record import ModuleRecord
from planner.model.repair import AVOIDING
from planner.model.trainable import Choice


def doubts(
    choices: Mapping[str, Choice],
    record: ModuleRecord | None,
    named: Collection[Origin],
    origins: Mapping[str, Origin],
) -> Iterator[str]:
    """Why the trained tensors may not be the module's, in words.

    Args:
        choices: for each float initializer, whether it is trained, and why.
        record: of the module; None in files of other exporters.
        named: parameters and buffers that the exporter's notes name.
        origins: the module's tensor that an initializer is, where the notes say it.
    """
    if record is not None:
        yield from _by_record(choices, record)
        return
    trained = {one.parameter or name for name, one in choices.items() if one.trained}
    known = {one.name for one in named if one.kind is Kind.PARAMETER}
    frozen = {one.parameter for one in choices.values() if not one.trained and one.parameter}
    if lost := sorted(known - trained - frozen):
        yield (
            f"the file names {len(known)} parameters of the module, and {len(lost)} of them are no"
            f" initializers of their own: {some(lost)}; the exporter computed them into others,"
            f" and these are trained; {AVOIDING}"
        )
    computed = [
        name
        for name, one in choices.items()
        if one.trained and name in origins and origins[name].kind is Kind.COMPUTED
    ]
    if computed:
        yield (
            f"tensors that the exporter computed from parameters which the file does not name:"
            f" {some(computed)}; they are trained as they are, which is the same only where rows"
            f" were looked up; {AVOIDING}, or name constants with --freeze"
        )


def _by_record(choices: Mapping[str, Choice], record: ModuleRecord) -> Iterator[str]:
    missing = [one.name for one in record.trained if one.initializer not in choices]
    if missing:
        yield (
            f"the record of planner export names {len(record.trained)} trained parameters, and"
            f" {len(missing)} of them are not in the file: {some(missing)}; another tool has"
            " changed it: export it again, or name parameters with --train and --freeze"
        )
    for_user = ("--train names it", "--freeze names it")
    other = [
        one.name
        for one in record.trained
        if one.initializer is not None
        and one.initializer in choices
        and not choices[one.initializer].trained
        and choices[one.initializer].reason not in for_user
    ]
    if other:
        yield (
            f"the record of planner export names {len(record.trained)} trained parameters, and"
            f" {len(other)} of them are not trained: {some(other)}; no gradient reaches them"
        )
