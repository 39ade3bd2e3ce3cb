"""Two ranks whose data differs say so in one message, and learn where it is the same."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.support import copied
from tests.support.data_runs import HERE, run_all
from tests.support.group_runs import Net, write_model, write_plans
from tests.support.ranks import ROOT

STEPS, RATE = 6, 0.05
PLANS, TWO = ("pipeline", "replicas", "split", "zero3"), ("pipeline", "replicas")
OPTIONS = {"steps": STEPS, "learning_rate": RATE, "shuffle": False}
UNSEEDED = (
    "the data draws from a generator of its own without a seed, such as np.random.default_rng"
)
ELSEWHERE = "the data draws from a generator of its own, which is in another state on each rank"
OTHER = "give all ranks the whole data, the same files and no part by RANK; make it in a function"
VALUES = "rank 0 and rank 1 read different values of input 'x' in "
ORDERS = "rank 0 and rank 1 have different orders of the samples of epoch "

# Data -> plans, and the begin and the cause of the message.
REFUSED = {
    "crop_unseeded": (PLANS, f"{VALUES}sample 0 (step 0, microbatch 0)", UNSEEDED),
    "crop_workers": (TWO, f"{VALUES}sample 0 (step 0, microbatch 0)", UNSEEDED),
    "masks_unseeded": (TWO, f"{VALUES}sample ", UNSEEDED),
    "masks_collated": (TWO, f"{VALUES}sample ", UNSEEDED),
    "built_unseeded": (TWO, f"{VALUES}sample 0 (step 0, microbatch 0)", OTHER),
    "imported": (TWO, f"{VALUES}sample 0 (step 0, microbatch 0)", OTHER),
    "shard": (PLANS, f"{VALUES}sample 0 (step 0, microbatch 0)", OTHER),
    "one_target": (TWO, "rank 0 and rank 1 read different values of target of 'linear_2' in"
                   " sample 2 (step 0, microbatch 0)", OTHER),
    "longer": (TWO, "expected the same dataset on all ranks, got 24 samples on rank 0 and 26"
               " samples on rank 1; ", OTHER),
    "sampler_unseeded": (TWO, f"{ORDERS}0, samples ", "the Orders goes by RANK, or draws from"),
    "sampler_later": (PLANS, f"{ORDERS}1, samples ", "the Orders goes by RANK, or draws from"),
    "sampler_by_rank": (TWO, f"{ORDERS}0, samples 0 and 1 at position 0", "leave Distributed"),
    "stream_by_rank": (TWO, f"{VALUES}row 0 (step 0, microbatch 0)", OTHER),
    "stream_loader_unseeded": (TWO, f"{VALUES}row 0 (step 0, microbatch 0)", OTHER),
    "function_unseeded": (TWO, f"{VALUES}row 0 (step 0, microbatch 0)", ""),
    "crop_seeded": (("replicas",), "step 0, microbatch 0: the same samples are other ones when they"
                    " are read again: the data draws from a generator of its own", ""),
    "crop_hidden": (("replicas",), "step 0, microbatch 0: the same samples are other ones when they"
                    " are read again: the data draws from a generator of its own", ""),
    "late": (("pipeline", "zero3"), f"{VALUES}sample ", OTHER),
    "late_workers": (("pipeline",), f"{VALUES}sample ", OTHER),
}  # fmt: skip
LEARNED = {
    "crop_global": (*PLANS, "alone"), "crop_seeded": ("alone", "pipeline", "split", "zero3"),
    "crop_hidden": ("alone", "pipeline"), "drawn": (*TWO, "alone"), "split": (*TWO, "alone"),
    "stream": (*TWO, "alone"), "function_global": (*TWO, "alone"),
}  # fmt: skip


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What both ranks say, by plan and data."""
    folder = tmp_path_factory.mktemp("agreement")
    write_plans(folder, write_model(folder), "sgd")
    cases = [(plan, data) for data, (plans, *_) in REFUSED.items() for plan in plans]
    cases += [("flow of two", "crop_unseeded"), ("flow of two", "shard")]
    cases += [(plan, data) for data, plans in LEARNED.items() for plan in plans]
    return run_all(folder, {
        f"{plan} {data}": {"plan": plan, "data": data, **OPTIONS} for plan, data in cases
    })  # fmt: skip


@pytest.mark.parametrize("data", REFUSED)
def test_ranks_with_different_data_say_what_differs_and_why(told, data):
    plans, begin, cause = REFUSED[data]
    for plan in plans:
        own, other = (one[f"{plan} {data}"] for one in told)
        assert own == other, "the first rank that comes prints it"
        assert own.startswith(f"--data {HERE}:{data}: {begin}"), plan
        assert cause in own, plan


def test_asynchronous_plans_compare_their_data_too(told):
    for data in ("crop_unseeded", "shard"):
        _, begin, cause = REFUSED[data]
        assert told[0][f"flow of two {data}"].startswith(f"--data {HERE}:{data}: {begin}")
        assert cause in told[1][f"flow of two {data}"]


@pytest.mark.parametrize("data", LEARNED)
def test_data_that_draws_from_the_launchs_seed_is_the_same_under_every_plan(told, data):
    losses = [told[0][f"{plan} {data}"] for plan in LEARNED[data]]
    for one in losses:
        assert one == pytest.approx(losses[0], rel=1e-9)
        assert one[-1] < one[0]


def once(data):
    """The samples of an epoch; a dataset without an end of its own is asked for its length."""
    return (data[i] for i in range(len(data))) if hasattr(data, "__len__") else data


def by_torch(data):
    """Losses of a plain loop over a dataset in its order, epoch after epoch."""
    module = Net().double()
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    read = [one for _ in range(STEPS * copied.STEP // copied.SAMPLES) for one in once(data)]
    x, y = (torch.stack(one) for one in zip(*read, strict=True))
    losses = []
    for step in range(STEPS):
        rows = slice(step * copied.STEP, (step + 1) * copied.STEP)
        loss = nn.functional.cross_entropy(module(x[rows]).flatten(0, 1), y[rows].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("data", ["stream", "crop_seeded"])
def test_streams_and_generators_with_a_seed_are_those_of_a_plain_loop(told, data):
    dataset = getattr(copied, data)()
    expected = by_torch(dataset)
    for plan in LEARNED[data]:
        assert told[0][f"{plan} {data}"] == pytest.approx(expected, rel=1e-9), plan


# -------------------------------------------------------------------------- the order of sets

LAUNCH = ["launch", "pipeline.json", "--data", f"{HERE}:set_order", "--steps", str(STEPS), "--lr",
          str(RATE), "--no-shuffle", "--json"]  # fmt: skip
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OF_SEED = f"import torch; from {HERE} import set_order; torch.save([*set_order()], 'samples.pt')"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    write_plans(folder, write_model(folder), "sgd")
    return folder


def python(folder, arguments, **variables):
    environment = {name: one for name, one in os.environ.items() if name != "PYTHONHASHSEED"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [[str(ROOT / "cli.py"), *LAUNCH, "--nproc", "2"], [*TORCHRUN, str(ROOT / "cli.py"), *LAUNCH]],
    ids=["nproc", "torchrun"],
)
def test_all_ranks_read_a_list_of_a_set_in_one_order(folder, start):
    assert python(folder, ["-c", OF_SEED], PYTHONHASHSEED="0").returncode == 0
    expected = by_torch(torch.load(folder / "samples.pt"))
    done = python(folder, start)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_ranks_that_hash_otherwise_are_told_of_it_once(folder):
    done = python(folder, [str(ROOT / "cli.py"), *LAUNCH, "--nproc", "2"], PYTHONHASHSEED="random")
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: --data {HERE}:set_order: {VALUES}sample 0 (step 0, ")
    assert done.stderr.count("rank 0 and rank 1") == 1
    assert "; PYTHONHASHSEED differs, too" in done.stderr
