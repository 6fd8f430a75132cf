"""The process pool that other tests use."""

import multiprocessing as mp
import os
import time

import pytest
from support.distributed import ProcessPool, RemoteError


@pytest.fixture(scope="module")
def pool():
    processes = ProcessPool(2)
    yield processes
    processes.close()


def identify(place, word):
    return place.rank, place.world_size, word, os.getpid()


def fail_on_rank_one(place):
    if place.rank == 1:
        raise ValueError("from rank one")
    time.sleep(1000)


def die(place):
    os._exit(3)


def sleep(place):
    time.sleep(60)


def test_results_are_ordered_by_rank_and_processes_are_kept(pool):
    first, second = pool.run(identify, 2, "a"), pool.run(identify, 2, "b")
    assert [answer[:3] for answer in first] == [(0, 2, "a"), (1, 2, "a")]
    assert [answer[3] for answer in first] == [answer[3] for answer in second]
    assert os.getpid() not in {answer[3] for answer in first}


def test_exception_is_raised_at_once_and_the_pool_recovers(pool):
    with pytest.raises(RemoteError, match=r"rank 1:[^$]*in fail_on_rank_one[^$]*ValueError: from rank one"):
        pool.run(fail_on_rank_one, 2)
    assert pool.run(identify, 1, "again")[0][:3] == (0, 1, "again")


def test_dead_and_slow_processes_are_reported(pool):
    with pytest.raises(RemoteError, match="rank 0 died"):
        pool.run(die, 1)
    (slow,) = pool.run(identify, 1, "warm")
    with pytest.raises(TimeoutError, match=r"ranks \[0\] did not answer within 0.5 s"):
        pool.run(sleep, 1, timeout=0.5)
    assert slow[3] not in {child.pid for child in mp.active_children()}
    (fresh,) = pool.run(identify, 1, "again")
    assert fresh[:3] == (0, 1, "again") and fresh[3] != slow[3]
