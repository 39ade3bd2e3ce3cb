"""Time and memory under `--schedule pipedream`, on a quiet machine (10 minutes).

They are predicted and measured, per minibatch, on 2 and 3 ranks of this machine.

    python -m tests.bench.pipedream [--models NAME,...] [--steps N] [--keep FOLDER]

Each rank has a core of its own, as long as there are enough; the machine should do nothing else.
Times are those of steps in the middle of a run. The pace says how much longer a fixed piece of work
took at the run than at the profile, because a shared machine is faster at one time than at another.
Memory is that of live tensors, by a tracker that counts storages, beside the prediction without the
reserve; older versions of the parameters are among it.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

import numpy as np

from planner.artefacts.files import read_profile, write_plan
from planner.artefacts.plan import Plan
from planner.artefacts.problem import Options, Problem
from planner.artefacts.profile import Profile
from planner.artefacts.strategy import ScheduleName, Stage, Strategy
from planner.artefacts.topology import take
from planner.clusters.yaml.read import read_topology
from planner.schedules.orders import default_warmups
from tests.bench.accuracy import PACE_FILE, pace_s, planner, prepare
from tests.support.accuracy_plans import planned

WIDTHS: Mapping[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 1), (2,)),
    3: ((1, 1, 1), (2, 1), (1, 2)),
}
COUNT = 6  # minibatches of a step; a multiple of all widths


def strategy_of(profile: Profile, widths: tuple[int, ...], *, vertical_sync: bool) -> Strategy:
    """Stages of equal work per replica."""
    times = np.array([one.forward_s + one.backward_s for one in profile.operators])
    done = np.cumsum(times) / times.sum()
    goals = np.cumsum(widths)[:-1] / sum(widths)
    count = len(times)  # each stage has an operator at least
    cuts = [
        min(int(np.searchsorted(done, goal)) + 1, count - left)
        for goal, left in zip(goals, range(len(goals), 0, -1), strict=True)
    ]
    names = [operator.name for operator in profile.graph.operators]
    bounds = [0, *cuts, len(names)]
    warmups = default_warmups(widths, COUNT, schedule=ScheduleName.PIPEDREAM)
    stages, first = [], 0
    for s, width in enumerate(widths):
        inside, devices = tuple(names[bounds[s] : bounds[s + 1]]), range(first, first + width)
        stages.append(Stage.whole(inside, devices, warmups[s], False))
        first += width
    return Strategy(tuple(stages), ScheduleName.PIPEDREAM, COUNT, vertical_sync)


def plans(folder: Path, models: list[str]) -> Iterator[tuple[str, str, Plan]]:
    """Model, words and plan."""
    for model in models:
        profile = read_profile(folder / f"{model}.json")
        for ranks, some in WIDTHS.items():
            topology = take(read_topology(folder / f"cluster{ranks}.yaml"), ranks)
            options = Options(COUNT, schedule=ScheduleName.PIPEDREAM)
            problem = Problem(profile, topology, options)
            for widths in some:
                for vertical_sync in (False, True) if len(widths) > 2 else (False,):
                    strategy = strategy_of(profile, widths, vertical_sync=vertical_sync)
                    words = "+".join(map(str, widths)) + (" vertical" if vertical_sync else "")
                    yield model, words, planned(problem, strategy)


def measured(folder: Path, plan: Plan, steps: int) -> tuple[dict[str, object], float]:
    """What the launch reports, and the pace around it, in s."""
    path = folder / "run.strategy.json"
    write_plan(plan, path)
    before_s = pace_s()
    command = [
        "launch",
        path.name,
        "--steps",
        str(steps),
        "--json",
        "--track-memory",
        "--lr",
        "1e-3",
    ]
    out = planner(command, folder, len(plan.ranks))
    report: dict[str, object] = json.loads(out.splitlines()[-1])
    return report, fmean((before_s, pace_s()))


def main() -> None:
    """Measures all plans, a row for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llama,squeezenet")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--keep", type=Path, help="folder for plans and models")
    options = parser.parse_args()
    models = options.models.split(",")
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / PACE_FILE).exists():
            prepare(folder, models, [*WIDTHS], False)
        paces_s = json.loads((folder / PACE_FILE).read_text())
        print(
            f"{'model':<12}{'replicas':<16}{'predicted':>12}{'measured':>12}{'ratio':>8}"
            f"{'pace':>8}{'load':>7}   memory of ranks, predicted / live MB"
        )
        for model, words, plan in plans(folder, models):
            found, pace = measured(folder, plan, options.steps)
            predicted_s, measured_s = (
                found[f"{which}_minibatch_s"] for which in ("predicted", "measured")
            )
            assert isinstance(predicted_s, float) and isinstance(measured_s, float)
            sizes = zip(found["predicted_live_bytes"], found["live_bytes"], strict=True)
            memory = ", ".join(f"{a / 1e6:.1f} / {b / 1e6:.1f}" for a, b in sizes)
            print(
                f"{model:<12}{words:<16}{1e3 * predicted_s:>9.1f} ms{1e3 * measured_s:>9.1f} ms"
                f"{predicted_s / measured_s:>8.3f}{pace / paces_s[model]:>8.3f}"
                f"{os.getloadavg()[0]:>7.2f}   {memory}",
                flush=True,
            )


if __name__ == "__main__":
    main()
