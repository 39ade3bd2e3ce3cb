"""`planner calibrate`."""

import json
from dataclasses import dataclass
from pathlib import Path

import click

from planner import api
from planner.commands.options import JSON, takes
from planner.commands.terminal import bar, say, show
from planner.support.options import Options, option


@dataclass(frozen=True, slots=True)
class Runs(Options):
    """What the measured runs were planned for."""

    profile: tuple[str, ...] = option(
        "Profile of a run, or of another model that the corrections are for. May be repeated.", (),
        metavar="FILE", shown="the newest in ./profiles",
    )  # fmt: skip
    topology: tuple[str, ...] = option(
        "Topology that a run was planned for. May be repeated.", ("local.yaml",), metavar="NAME",
        shown="local.yaml",
    )  # fmt: skip
    measured: Path | None = option(
        "Table of measured iterations, instead of traces: a CSV file with the columns t, d, p,"
        " microbatch, batch and time.", metavar="FILE.csv",
    )  # fmt: skip


@click.command()
@click.argument("traces", metavar="[TRACE...]", nargs=-1,
                type=click.Path(path_type=Path))  # fmt: skip
@takes(Runs, "runs")
@JSON
def calibrate(traces: tuple[Path, ...], runs: Runs, as_json: bool) -> None:
    """Corrects predicted times by measured TRACES, and writes the corrections beside each profile.

    \b
    planner launch strategy.json --nproc 2 --trace run1.json
    planner calibrate run1.json run2.json --profile gpt2 --topology two.yaml
    planner calibrate --measured runs.csv --profile llama7b-a100 --topology p4d

    The corrections belong to the devices and to types of operators, not to one model: the speed of
    operators inside a run, the times of the loss, of launching and of posting transfers, and
    factors of copies, all-reduces and steps. The error after the fit is that of runs whose model
    was left out of it, or of runs left out one by one if there is only one model. solve and
    compare apply the corrections from then on, unless --no-calibration is given.

    A table of --measured has a line for each run: its degrees (tensor t, data d, pipeline p), the
    samples of a microbatch and of the batch, and the time of an iteration, such as "372 ms". It
    gives four factors: the efficiency of computations, the time of a launch, the host's, and the
    network's.
    """
    from planner.reports.traces import calibrate_json, calibrate_table, calibration_lines

    if not traces and runs.measured is None:
        raise click.UsageError("give traces, or a table with --measured")
    paths = [*map(api.find_profile, runs.profile)] or [api.newest_profile()]
    profiles = {path: api.read_profiles(path) for path in paths}
    read = {f"trace {trace}": trace for trace in traces} | {"table": runs.measured}
    for path in profiles:
        api.check_outputs({"calibration": api.calibration_path(path)}, read)
    with bar("Reading runs") as tick:
        fitted = api.calibrate(
            traces,
            measured=runs.measured,
            profiles=[profile for several in profiles.values() for profile in several],
            topologies=runs.topology,
            progress=tick,
        )
    written = [
        str(api.write_calibration(fitted, path, several)) for path, several in profiles.items()
    ]
    if as_json:
        click.echo(json.dumps(calibrate_json(fitted, written)))
        return
    show(calibrate_table(fitted))
    for line in (
        *calibration_lines(fitted, by_table=runs.measured is not None),
        f"wrote {' and '.join(written)}",
    ):
        say(line)
