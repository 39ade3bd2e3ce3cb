"""`planner calibrate`."""

import json
from pathlib import Path

import click

from planner.commands.printing import show


@click.command()
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True,
                type=click.Path(path_type=Path))  # fmt: skip
@click.option("--profile", "profile_paths", multiple=True, type=click.Path(path_type=Path),
              help="Profile of a run, or of another model that runs are to teach something; may be"
              " repeated.  [default: the newest in ./profiles]")  # fmt: skip
@click.option("--topology", "topology_names", multiple=True, default=("local.yaml",),
              show_default=True,
              help="That runs were planned for; may be repeated.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(
    traces: tuple[Path, ...],
    profile_paths: tuple[Path, ...],
    topology_names: tuple[str, ...],
    as_json: bool,
) -> None:
    """Corrects what is predicted by measured TRACES, beside each profile that is given.

    \b
    planner launch strategy.json --nproc 2 --trace run1.json
    planner calibrate run1.json run2.json --profile profiles/gpt2.json --topology cluster.yaml

    It fits what belongs to the devices and to types of operators, not to one model: their speed
    inside a run, the loss, what launching and posting take, copies, sums and steps. The error
    after it is told of runs whose model was left out of the fit; where there is one model only, of
    runs that were left out. solve and compare use it from then on, unless --no-calibration is
    given.
    """
    from planner.calibration import CalibrationFile
    from planner.clusters.yaml.read import device_table, find_topology, read_topology
    from planner.files import artefact_hash, calibration_path, newest_profile, write_calibration
    from planner.formats import read_any_profiles
    from planner.reports.calibrate import calibrate_json, calibrate_lines, calibrate_table
    from planner.traces.calibrate import calibrate as run
    from planner.traces.runs import read_runs

    chosen = profile_paths or (newest_profile(Path("profiles")),)
    profiles = {path: tuple(read_any_profiles(path)) for path in chosen}
    found = run(
        read_runs(
            traces,
            [one for some in profiles.values() for one in some],
            [read_topology(find_topology(name)) for name in topology_names],
            dict(device_table()),
        )
    )
    written = []
    for path, some in profiles.items():
        write_calibration(
            CalibrationFile(
                profiles=tuple(map(artefact_hash, some)),
                calibration=found.calibration,
                error_before=found.error_before,
                error_after=found.error_after,
                left_out=found.left_out,
            ),
            calibration_path(path),
        )
        written.append(str(calibration_path(path)))
    if as_json:
        click.echo(json.dumps(calibrate_json(found, written)))
        return
    show(calibrate_table(found))
    for line in (*calibrate_lines(found), f"wrote {' and '.join(written)}"):
        click.echo(line)
