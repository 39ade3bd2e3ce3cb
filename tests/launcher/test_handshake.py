"""Ranks that are not of one launch are told so before the first step; hosts of the plan."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from planner.artefacts.operator_types import OPERATOR_TYPES, OperatorType
from planner.artefacts.options import LossOptions
from planner.launcher import rendezvous
from planner.launcher.failures import hosts
from planner.launcher.failures.hosts import ENDED, LOST_S, HostHeartbeats
from planner.launcher.options import Loop, function_name
from planner.launcher.rendezvous import agree, report_failure, shake_hands
from planner.launcher.seating import RankFacts, rank_assignment
from planner.support.errors import LaunchError
from planner.support.options import Form, declared
from planner.training.options import Checkpoints, Launching
from tests.support.launch_worker import Case, load_model, make_model, make_plan

SAME = {"strategy": "3f2a", "torch": "2.9"}


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    path = tmp_path_factory.mktemp("handshake") / "net.onnx"
    make_model(path, "float32")
    return make_plan(Case((2,), 4), load_model(path))


def in_turn(hellos):
    return tuple(range(len(hellos)))


def meet(store, hellos, seats=in_turn):
    """What each rank gets from the handshake: an agreement, or the text of an error."""

    def one(rank):
        try:
            return shake_hands(store, rank, len(hellos), hellos[rank], seats)
        except LaunchError as error:
            return str(error)

    with ThreadPoolExecutor(len(hellos)) as pool:
        return list(pool.map(one, range(len(hellos))))


def test_equal_ranks_agree(store):
    met = meet(store, [RankFacts(SAME, "a 1", first=0), RankFacts(SAME, "b 2", first=1)])
    assert met[0] == met[1]
    assert met[0].ranks == (0, 1) and not met[0].restarted
    assert met[0].hosts == {0: "a", 1: "b"}


def test_a_mismatch_names_rank_and_thing_on_all_ranks(store):
    other = {**SAME, "torch": "2.8"}
    met = meet(store, [RankFacts(SAME, "a 1"), RankFacts(SAME, "a 1"), RankFacts(other, "b 2")])
    assert len({*met}) == 1
    first, line = met[0].splitlines()
    assert first.startswith("the ranks do not run the same; start all with the same files")
    assert line == "  torch: rank 0 has '2.9', rank 2 on b has '2.8'"


def test_a_value_that_one_rank_lacks_is_a_difference():
    more = RankFacts({**SAME, "option clip": "1.0"}, "a 1")
    assert rendezvous.differences([RankFacts(SAME, "a 1"), more]) == [
        "option clip: rank 0 has None, rank 1 on a has '1.0'"
    ]


def two_values(one):
    """Two values of an option that it takes."""
    if one.type is object or one.parse is function_name:
        pair = "mine:first", "mine:second"
    elif one.type is bool:
        pair = False, True
    elif one.choices:
        pair = one.choices[:2]
    elif one.type in (int, float):
        pair = one.type(1), one.type(2)
    else:
        pair = "constant", "linear:1:9"
    forms = {
        Form.ONE: lambda value: value,
        Form.SEVERAL: lambda value: (value,),
        Form.BY_OUTPUT: lambda value: {"logits": value},
    }
    return [forms[one.form](value) for value in pair]


COMPARED = [
    (kind, one)
    for kind in (Loop, LossOptions, Launching, Checkpoints)
    for one in declared(kind).values()
    if not one.per_rank
]


@pytest.mark.parametrize(("kind", "one"), COMPARED, ids=[one.name for _, one in COMPARED])
def test_another_value_of_any_option_is_one_message_on_both_ranks(store, plan, kind, one):
    facts = [
        RankFacts(rendezvous._values(plan, [kind(**{one.name: value})], several_hosts=False), "a 1")
        for value in two_values(one)
    ]
    met = meet(store, facts)
    assert met[0] == met[1]
    first, line = met[0].splitlines()
    assert first.startswith("the ranks do not run the same; start all with the same files")
    assert line.startswith(f"  option {one.name}: rank 0 has ")


def test_operators_of_ones_own_are_compared(plan, monkeypatch):
    def values():
        return RankFacts(rendezvous._values(plan, [], several_hosts=False), "a 1")

    without = values()
    given = []
    for source in (b"x + 1", b"x + 2"):
        monkeypatch.setitem(OPERATOR_TYPES, "mine.Swish", OperatorType(source=source))
        given.append(values())
    (line,) = rendezvous.differences([without, given[0]])
    assert line.startswith("operators: rank 0 has '', rank 1 on a has 'mine.Swish ")
    assert len(rendezvous.differences(given)) == 1


def test_all_know_of_a_restart_that_one_agent_has_counted(store):
    met = meet(store, [RankFacts(SAME, "a 1"), RankFacts(SAME, "b 2", restarts=1)])
    assert [one.restarted for one in met] == [True, True]


def test_hellos_of_the_start_before_are_not_taken_for_this_one(store):
    old = {**SAME, "strategy": "dead"}
    before = meet(store, [RankFacts(old, "a 1"), RankFacts(old, "a 1")])
    store.set("planner/hello/1", '{"number": "gone", "facts": {"values": {}, "host": "x 1"}}')
    after = meet(store, [RankFacts(SAME, "a 1"), RankFacts(SAME, "a 1")])
    assert after[0] == after[1] and after[0].generation != before[0].generation


def test_a_rank_that_fails_before_it_is_told_of(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "STALE_S", 0.1)
    report_failure(store, 1, "none.json: no such file")
    with pytest.raises(LaunchError, match=r"^rank 1 has failed: none\.json: no such file$"):
        shake_hands(store, 0, 2, RankFacts(SAME, "a 1"), in_turn)


def test_all_ranks_are_told_that_rank_0_fails_before_it(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "STALE_S", 0.1)
    monkeypatch.setattr(rendezvous, "MEET_S", 5.0)
    report_failure(store, 0, "none.json: no such file")
    with pytest.raises(LaunchError, match=r"^rank 0 has failed: none\.json: no such file$"):
        shake_hands(store, 1, 2, RankFacts(SAME, "b 2"), in_turn)


def test_a_failure_of_rank_0_before_a_restart_is_not_one_of_this_start(store):
    report_failure(store, 0, "none.json: no such file")
    first, second = meet(store, [RankFacts(SAME, "a 1"), RankFacts(SAME, "b 2")])
    assert first == second and first.ranks == (0, 1)


def test_a_rank_0_that_does_not_come_is_named(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_S", 0.1)
    with pytest.raises(LaunchError, match=r"1 ranks have not come, such as 0; look at"):
        shake_hands(store, 1, 2, RankFacts(SAME, "b 2"), in_turn)


def test_ranks_that_do_not_come_are_named(store, monkeypatch):
    monkeypatch.setattr(rendezvous, "MEET_S", 0.1)
    with pytest.raises(LaunchError, match=r"2 ranks have not come, such as 1, 2; look at"):
        shake_hands(store, 0, 3, RankFacts(SAME, "a 1"), in_turn)


def test_models_are_compared_after_they_are_read(store):
    def one(rank):
        agree(store, "generation", rank, 2, {"model": "91bc" if rank else "3f2a"})

    with ThreadPoolExecutor(2) as pool:
        for met in [pool.submit(one, rank) for rank in (0, 1)]:
            with pytest.raises(LaunchError, match="model: rank 0 has '3f2a', rank 1 has '91bc'"):
                met.result()


# ------------------------------------------------------------------------------ ranks and hosts


def plan_of(*sizes):
    """A plan whose hosts h0, h1, ... have so many devices."""
    names = tuple(f"h{i}" for i, size in enumerate(sizes) for _ in range(size))
    return SimpleNamespace(ranks=tuple(range(len(names))), hosts=names if len(sizes) > 1 else ())


def ranks_on(*names):
    return [RankFacts({}, f"{name} boot-{name}") for name in names]


@pytest.mark.parametrize(
    ("sizes", "there", "ranks"),
    [
        ((2, 2), "a a b b", (0, 1, 2, 3)),
        ((2, 2), "b b a a", (0, 1, 2, 3)),  # equal hosts are taken as they come
        ((2, 2), "a a a a", (0, 1, 2, 3)),  # two agents on one machine
        ((3, 1), "b a a a", (3, 0, 1, 2)),  # by size
        ((2, 2), "h1 h1 h0 h0", (2, 3, 0, 1)),  # by name
        ((1, 1), "h1 h0 h0", (1, 0)),  # the last rank idles
        ((3,), "a a a", (0, 1, 2)),
    ],
)
def test_devices_of_a_host_go_to_one_host(sizes, there, ranks):
    assert rank_assignment(plan_of(*sizes), ranks_on(*there.split())) == ranks


@pytest.mark.parametrize(
    ("sizes", "there", "message"),
    [
        ((2, 2), "a a a b", "planned are h0: 2, h1: 2, got a: 3, b: 1; start torchrun on each"),
        ((2,), "a b", r"for devices of one host, and its ranks are on several \(a: 1, b: 1\)"),
    ],
)
def test_a_host_on_several_hosts_is_refused(sizes, there, message):
    with pytest.raises(LaunchError, match=message):
        rank_assignment(plan_of(*sizes), ranks_on(*there.split()))


def test_hosts_of_one_name_are_told_apart():
    hellos = [RankFacts({}, "localhost 12"), RankFacts({}, "localhost 34")]
    with pytest.raises(LaunchError, match="localhost 12: 1, localhost 34: 1"):
        rank_assignment(plan_of(2), hellos)


# ------------------------------------------------------------------------------- lost hosts


@pytest.fixture
def watched(store):
    return HostHeartbeats(store, "now", 0, {4: "b"})


def test_a_host_that_counts_no_more_is_lost(store, watched):
    assert watched.exchange(2 * LOST_S) is None  # it has not begun
    store.set("now/beat/4", "7")
    assert watched.exchange(LOST_S) is None
    assert watched.exchange(LOST_S - 1) is None
    assert watched.exchange(2.0) == hosts.lost("b", 4)
    assert store.get("now/beat/0") == b"4"


def test_a_host_that_counts_on_or_has_ended_is_not_lost(store, watched):
    for beat in ("7", "8", ENDED, ENDED):
        store.set("now/beat/4", beat)
        assert watched.exchange(LOST_S - 1) is None


def test_the_message_of_a_rank_on_another_host_is_read(store, watched):
    store.set("now/failed", "rank 5 has failed: no data")
    assert watched.exchange(2.0) == "rank 5 has failed: no data"
