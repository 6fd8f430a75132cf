"""Who is given what; checked against loops over everything that was given out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout.expectation import Expectation
from megarl.rollout.load_board import AFFINITY, LoadBoard, Ticket

TICKETS = st.lists(
    st.builds(
        Ticket,
        st.none(),
        st.sampled_from("abcdefgh"),
        st.integers(1, 1000).map(float),
        st.none() | st.integers(1, 2000).map(float),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=100)
@given(tickets=TICKETS, replicas=st.integers(1, 5), capacity=st.integers(1, 8), data=st.data())
def test_everything_is_answered_once_and_nobody_is_idle_while_something_waits(tickets, replicas, capacity, data):
    board = LoadBoard([capacity] * replicas)
    arrivals = data.draw(st.integers(0, len(tickets)))
    board.add(tickets[:arrivals])
    later, answered, given_to = tickets[arrivals:], [], {}
    while len(answered) < len(tickets):
        for replica, new in board.place().items():
            given_to.update({id(ticket): replica for ticket in new})
        for replica in board.replicas:
            assert len(board.held(replica)) <= capacity
            assert len(board.held(replica)) == capacity or not board.waiting
        held = [(replica, ticket) for replica in board.replicas for ticket in board.held(replica)]
        assert all(given_to[id(ticket)] == replica for replica, ticket in held)
        if later and (not held or data.draw(st.booleans())):
            board.add([later.pop()])
        else:
            replica, ticket = data.draw(st.sampled_from(sorted(held, key=lambda pair: (pair[0], pair[1].cost))))
            board.release(replica, ticket, data.draw(st.none() | st.integers(0, 1000)))
            answered.append(ticket)
    assert sorted(map(id, answered)) == sorted(map(id, tickets))


def test_the_longest_goes_first_and_to_who_has_least():
    board = LoadBoard([2, 2])
    tickets = [Ticket(None, f"{cost}", 100.0, float(cost)) for cost in (1, 50, 7, 90, 30)]
    board.add(tickets)
    placed = board.place()
    # 90 to the first, 50 to the second, 30 to the second, then 7 to the first: both are full.
    assert {replica: [ticket.cost for ticket in new] for replica, new in placed.items()} == {0: [90, 7], 1: [50, 30]}
    assert board.waiting == 1 and board.place() == {}
    board.release(0, tickets[3])
    assert [ticket.cost for ticket in board.place()[0]] == [1]


def test_samples_of_a_prompt_go_together_and_come_back():
    board = LoadBoard([9, 9, 9])
    groups = {key: [Ticket(None, key, 10.0) for _ in range(3)] for key in "abc"}
    board.add(ticket for tickets in zip(*groups.values(), strict=True) for ticket in tickets)
    homes = {new[0].key: replica for replica, new in board.place().items()}
    assert sorted(homes.values()) == [0, 1, 2]
    for key, tickets in groups.items():
        assert all(ticket in board.held(homes[key]) for ticket in tickets)
    # A later turn of b, whose replica is now the busiest, still goes there ...
    turn = Ticket(None, "b", 12.0)
    board.add([turn])
    assert board.place() == {homes["b"]: [turn]}
    # ... but not when another has far less to do.
    for ticket in groups["a"]:
        board.release(homes["a"], ticket)
    late = Ticket(None, "b", 12.0)
    assert (1 + AFFINITY) * 0.0 + late.cost < 42.0
    board.add([late])
    assert board.place() == {homes["a"]: [late]}


def test_of_unknown_prompts_one_sample_each_goes_first_and_tells_the_others():
    now = 0.0
    board = LoadBoard([4], Expectation(lambda: now))
    board.add(Ticket(sample, key, 1000.0) for key in "abcd" for sample in range(3))
    probes = board.place()[0]
    assert [(ticket.key, ticket.request) for ticket in probes] == [("a", 0), ("b", 0), ("c", 0), ("d", 0)]
    now = 10.0
    board.release(0, probes[0], 20)
    # Two tokens a second: b, c and d are expected to have twice the 20 that they have by now, a has 20.
    given = board.place()[0]
    assert [(ticket.key, ticket.request, ticket.cost) for ticket in given] == [("b", 1, 40.0)]
    now = 20.0
    board.release(0, probes[2], 90)
    # 110 tokens in 30 s of answering: b is expected to have more than c's 90 still.
    assert [(ticket.key, ticket.cost) for ticket in board.place()[0]] == [("b", pytest.approx(2 * 20 * 110 / 30))]
    board.release(0, probes[1], 95)
    board.release(0, probes[3], 10)
    # Now all are known, and b has no more: the longest are c's, then a's.
    assert [(ticket.key, ticket.cost) for ticket in board.place()[0]] == [("c", 90.0), ("c", 90.0)]


def test_where_all_fit_the_samples_of_unknown_prompts_stay_together():
    board = LoadBoard([6, 6])
    board.add(Ticket(sample, key, 1000.0) for sample in range(3) for key in "abcd")
    assert {tuple(ticket.key for ticket in new) for new in board.place().values()} == {
        tuple("aaaccc"), tuple("bbbddd")}  # fmt: skip


def test_a_lost_replica_gives_back_what_it_had():
    board = LoadBoard([4, 4])
    tickets = [Ticket(None, f"{number}", 1.0) for number in range(8)]
    board.add(tickets)
    board.place()
    lost = board.lose(0)
    assert len(lost) == 4 and {ticket.moves for ticket in lost} == {1} and board.replicas == (1,)
    board.add(lost)
    assert board.place() == {} and board.waiting == 4
    board.withdraw(lost[0])
    assert board.waiting == 3
