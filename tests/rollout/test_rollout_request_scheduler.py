"""The load scheduler, checked against loops over all dispatched requests; and length prediction."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.request_scheduler import AFFINITY, LengthEstimator, PendingRequest, RequestScheduler

ENTRIES = st.lists(
    st.builds(
        PendingRequest,
        st.none(),
        st.sampled_from("abcdefgh"),
        st.integers(1, 1000).map(float),
    ),
    min_size=1,
    max_size=60,
)


def known_lengths(tokens):
    """An estimator that has seen one response of each key."""
    lengths = LengthEstimator()
    for key, length in tokens.items():
        lengths.finish(key, lengths.start(key), length)
    return lengths


@settings(max_examples=100)
@given(entries=ENTRIES, replicas=st.integers(1, 5), capacity=st.integers(1, 8), data=st.data())
def test_every_request_finishes_once_and_no_replica_idles_while_requests_wait(entries, replicas, capacity, data):
    scheduler = RequestScheduler([capacity] * replicas)
    arrivals = data.draw(st.integers(0, len(entries)))
    scheduler.add(entries[:arrivals])
    later, finished, assigned = entries[arrivals:], [], {}
    while len(finished) < len(entries):
        for replica, new in scheduler.dispatch().items():
            assigned.update({id(entry): replica for entry in new})
        for replica in scheduler.replicas:
            assert len(scheduler.held(replica)) <= capacity
            assert len(scheduler.held(replica)) == capacity or not scheduler.waiting
        held = [(replica, entry) for replica in scheduler.replicas for entry in scheduler.held(replica)]
        assert all(assigned[id(entry)] == replica for replica, entry in held)
        if later and (not held or data.draw(st.booleans())):
            scheduler.add([later.pop()])
        else:
            replica, entry = data.draw(st.sampled_from(sorted(held, key=lambda pair: (pair[0], pair[1].cost))))
            scheduler.release(replica, entry, data.draw(st.none() | st.integers(0, 1000)))
            finished.append(entry)
    assert sorted(map(id, finished)) == sorted(map(id, entries))


def test_the_longest_request_goes_first_to_the_least_loaded_replica():
    costs = (1, 50, 7, 90, 30)
    scheduler = RequestScheduler([2, 2], known_lengths({f"{cost}": cost for cost in costs}))
    entries = [PendingRequest(None, f"{cost}", 100.0) for cost in costs]
    scheduler.add(entries)
    dispatched = scheduler.dispatch()
    # 90 to the first, 50 to the second, 30 to the second, then 7 to the first: both are full.
    assert {replica: [entry.cost for entry in new] for replica, new in dispatched.items()} == {0: [90, 7], 1: [50, 30]}
    assert scheduler.waiting == 1 and scheduler.dispatch() == {}
    scheduler.release(0, entries[3])
    assert [entry.cost for entry in scheduler.dispatch()[0]] == [1]


def test_samples_and_turns_of_a_prompt_share_a_replica():
    scheduler = RequestScheduler([9, 9, 9])
    groups = {key: [PendingRequest(None, key, 10.0) for _ in range(3)] for key in "abc"}
    scheduler.add(entry for entries in zip(*groups.values(), strict=True) for entry in entries)
    replica_of = {new[0].key: replica for replica, new in scheduler.dispatch().items()}
    assert sorted(replica_of.values()) == [0, 1, 2]
    for key, entries in groups.items():
        assert all(entry in scheduler.held(replica_of[key]) for entry in entries)
    # A later turn of b, whose replica is now the busiest, still goes there ...
    turn = PendingRequest(None, "b", 12.0)
    scheduler.add([turn])
    assert scheduler.dispatch() == {replica_of["b"]: [turn]}
    # ... but not when another has far less to do.
    for entry in groups["a"]:
        scheduler.release(replica_of["a"], entry)
    late = PendingRequest(None, "b", 12.0)
    assert (1 + AFFINITY) * 0.0 + late.cost < 42.0
    scheduler.add([late])
    assert scheduler.dispatch() == {replica_of["a"]: [late]}


def test_one_probe_of_each_unknown_prompt_goes_first():
    now = 0.0
    scheduler = RequestScheduler([4], LengthEstimator(lambda: now))
    scheduler.add(PendingRequest(sample, key, 1000.0) for key in "abcd" for sample in range(3))
    probes = scheduler.dispatch()[0]
    assert [(entry.key, entry.request) for entry in probes] == [("a", 0), ("b", 0), ("c", 0), ("d", 0)]
    now = 10.0
    scheduler.release(0, probes[0], 20)
    # Two tokens a second: b, c and d are expected to have twice the 20 that they have by now, a has 20.
    dispatched = scheduler.dispatch()[0]
    assert [(entry.key, entry.request, entry.cost) for entry in dispatched] == [("b", 1, 40.0)]
    now = 20.0
    scheduler.release(0, probes[2], 90)
    # 110 tokens in 30 s of answering: b is expected to have more than c's 90 still.
    assert [(entry.key, entry.cost) for entry in scheduler.dispatch()[0]] == [("b", pytest.approx(2 * 20 * 110 / 30))]
    scheduler.release(0, probes[1], 95)
    scheduler.release(0, probes[3], 10)
    # Now all are known, and b has no more: the longest are c's, then a's.
    assert [(entry.key, entry.cost) for entry in scheduler.dispatch()[0]] == [("c", 90.0), ("c", 90.0)]


def test_samples_of_unknown_prompts_stay_together_if_all_fit():
    scheduler = RequestScheduler([6, 6])
    scheduler.add(PendingRequest(sample, key, 1000.0) for sample in range(3) for key in "abcd")
    assert {tuple(entry.key for entry in new) for new in scheduler.dispatch().values()} == {
        tuple("aaaccc"), tuple("bbbddd")}  # fmt: skip


def test_a_lost_replica_returns_its_requests():
    scheduler = RequestScheduler([4, 4])
    entries = [PendingRequest(None, f"{number}", 1.0) for number in range(8)]
    scheduler.add(entries)
    scheduler.dispatch()
    lost = scheduler.remove(0)
    assert len(lost) == 4 and scheduler.replicas == (1,)
    scheduler.add(lost)
    assert scheduler.dispatch() == {} and scheduler.waiting == 4
    scheduler.withdraw(lost[0])
    assert scheduler.waiting == 3


def test_length_prediction_from_elapsed_to_measured():
    now = 0.0
    lengths = LengthEstimator(lambda: now)
    assert lengths.expected_tokens("a") is None and lengths.mean is None and not lengths.started("a")
    started = lengths.start("a")
    lengths.start("b")
    now = 4.0
    assert lengths.expected_tokens("b") is None  # nothing has ended, so that nobody knows how fast tokens come
    lengths.finish("a", started, 8)
    # a: 8 tokens in 4 s. b has had 4 s, about 8 tokens, and so is expected to have 16.
    assert (lengths.expected_tokens("a"), lengths.expected_tokens("b"), lengths.expected_tokens("c")) == (
        8.0,
        16.0,
        None,
    )
    now = 6.0
    assert lengths.expected_tokens("b") == 24.0
    again = lengths.start("a")
    now = 8.0
    lengths.finish("a", again, 2)
    # Ten tokens in 4 + 2 s of answering.
    assert lengths.expected_tokens("a") == 5.0 and lengths.mean == 5.0
    assert lengths.expected_tokens("b") == 2 * 8.0 * 10 / 6


def test_prompts_of_an_earlier_interval_go_before_newer_ones():
    """Also before probes of newer prompts, longer ones, and after an interruption."""
    lengths = known_lengths({"old 5": 5, "old 9": 9})
    scheduler = RequestScheduler([1], lengths)
    old = [PendingRequest(None, f"old {cost}", 100.0) for cost in (5, 9)]
    scheduler.add(old)
    assert scheduler.dispatch() == {0: [old[1]]}
    scheduler.begin_interval()
    lengths.finish("new", lengths.start("new"), 50)
    new = [PendingRequest(None, key, 100.0) for key in ("new", "unknown")]
    scheduler.add(new)
    scheduler.release(0, old[1])
    scheduler.add([old[1]])
    order = []
    while scheduler.waiting:
        ((entry,),) = scheduler.dispatch().values()
        order.append(entry)
        scheduler.release(0, entry)
    assert order == [old[1], old[0], new[1], new[0]]


def test_idle_keys_are_forgotten():
    scheduler = RequestScheduler([2, 2], lengths := LengthEstimator())
    entries = {key: PendingRequest(None, key, 100.0) for key in ("ended", "held", "waits")}
    scheduler.add([entries["ended"], entries["held"]])
    replica_of = {new[0].key: replica for replica, new in scheduler.dispatch().items()}
    scheduler.release(replica_of["ended"], entries["ended"], 40)
    scheduler.add([PendingRequest(None, "held", 100.0) for _ in range(3)])
    scheduler.dispatch()
    scheduler.add([entries["waits"]])
    assert lengths.expected_tokens("ended") == 40
    scheduler.begin_interval()
    assert not lengths.started("ended") and lengths.started("held") and scheduler._prefix_replica.keys() == {"held"}
    assert scheduler.waiting == 1 and lengths.mean == 40
    scheduler.release(replica_of["held"], entries["held"], 7)
    assert lengths.expected_tokens("held") == 7
