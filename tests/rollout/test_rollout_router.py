"""The router over scripted replicas: dispatch, results, moved and aborted requests."""

import asyncio
import random
from itertools import pairwise

import pytest
from engine_stops import Stops
from support.engine_replica import EngineReplica

from megarl.base.errors import WeightSyncError
from megarl.rollout import (
    Completion,
    EngineOptions,
    Request,
    RequestRefused,
    RolloutError,
    SamplingParams,
    create_engine,
)
from megarl.rollout import router as router_module
from megarl.rollout.router import NoReplicaLeft, ReplicaLost, RequestGivenUp, Router

PARAMS = SamplingParams(1000)


class Scripted:
    """Answers a request with its prompt after a number of rounds: the prompt's first token."""

    def __init__(self, dies_after=None, hangs_after=None, error=None):
        self.dies_after, self.hangs_after, self.error = dies_after, hangs_after, error
        self.under_way, self.seen, self.aborted, self.rounds = {}, [], [], 0

    async def accept(self, client, requests, aborted):
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.seen += requests
        self.aborted += aborted
        self.under_way.update({request.request_id: [request.prompt_ids[0], request] for request in requests})
        for name in aborted:
            if name in self.under_way:
                self.under_way[name][0] = "abort"

    async def completions(self, client, wait_s):
        await asyncio.sleep(0)
        done = []
        while self.under_way and not done:
            self.rounds += 1
            if self.dies_after is not None and self.rounds > self.dies_after:
                raise ReplicaLost("its process was killed", code="worker.died")
            if self.hangs_after is not None and self.rounds > self.hangs_after:
                await asyncio.sleep(3600)
            for name, state in list(self.under_way.items()):
                if state[0] == "abort":
                    del self.under_way[name]
                    done.append(Completion(name, [], [], "abort", 1))
                    continue
                state[0] -= 1
                if state[0] <= 0:
                    del self.under_way[name]
                    done.append(Completion(name, list(state[1].prompt_ids), [0.0], "stop", 1))
            await asyncio.sleep(0)
        return done


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    monkeypatch.setattr(router_module, "REST_S", 0.0)
    monkeypatch.setattr(router_module, "WAIT_S", 0.0)


def ask_all(replicas, prompts, capacity=4, timeout_s=60.0):
    async def run():
        async with Router(dict(enumerate(replicas)), capacity, timeout_s) as router:
            answers = await asyncio.gather(
                *(router.generate(prompt, PARAMS, seed=0, key=f"{prompt[1:]}") for prompt in prompts),
                return_exceptions=True,
            )
        return answers, router.stats

    return asyncio.run(run())


def prompts_of(count, longest=30, seed=0):
    rng = random.Random(seed)
    return [[rng.randint(1, longest), number] for number in range(count)]


def test_every_request_is_answered_by_one_replica():
    replicas, prompts = [Scripted() for _ in range(3)], prompts_of(50)
    answers, stats = ask_all(replicas, prompts)
    assert [answer.token_ids for answer in answers] == prompts
    assert sum(len(replica.seen) for replica in replicas) == 50
    assert stats.lost == {} and stats.moved == 0 and stats.idle_while_waiting_s == 0
    assert set(stats.metrics()) == {
        "rollout/replica_utilization/mean", "rollout/replica_utilization/min", "rollout/idle_while_waiting_s",
        "rollout/replicas_lost", "rollout/requests_moved", "rollout/runners_lost",
        "rollout/discarded_tokens"}  # fmt: skip


def test_a_refused_request_fails_its_caller_only(make_folder):
    folder = make_folder()
    engine = create_engine("embedded", str(folder), EngineOptions(max_num_seqs=4))
    engine.load_hf(str(folder))

    async def run():
        async with Router({0: EngineReplica(engine)}, 8, 60.0) as router:
            asks = [router.generate(prompt, SamplingParams(9, ignore_eos=True), seed=0) for prompt in ([1], [50], [2])]
            first, refused, last = await asyncio.gather(*asks, return_exceptions=True)
            assert isinstance(refused, RequestRefused) and len(first.token_ids) == len(last.token_ids) == 9
            return await router.generate([3], SamplingParams(2, ignore_eos=True), seed=0)

    assert len(asyncio.run(run()).token_ids) == 2


def test_skewed_lengths_leave_no_replica_idle():
    """Rounds have equal durations, so their number is the time; replicas end within one longest response."""
    rng = random.Random(1)
    prompts = [[min(400, max(1, round(20 * rng.lognormvariate(0, 1.2)))), number] for number in range(200)]
    replicas = [Scripted() for _ in range(4)]
    ask_all(replicas, prompts, capacity=8)
    # Places of 4 x 8 for the sum of lengths. While requests wait no place is empty, so the last one begins by then.
    least, longest = sum(prompt[0] for prompt in prompts) / 32, max(prompt[0] for prompt in prompts)
    rounds = [replica.rounds for replica in replicas]
    assert max(rounds) <= least + longest + 5 and max(rounds) - min(rounds) <= longest + 5


@pytest.mark.parametrize("how", ["dies_after", "hangs_after"])
def test_requests_of_a_lost_replica_are_answered_once_by_others(how):
    replicas, prompts = [Scripted(), Scripted(**{how: 3}), Scripted()], prompts_of(40)
    # A replica that works must answer in time, too.
    answers, stats = ask_all(replicas, prompts, timeout_s=1.0 if how == "hangs_after" else 60.0)
    assert [answer.token_ids for answer in answers] == prompts
    assert list(stats.lost) == [1] and stats.moved == len(replicas[1].under_way) > 0
    assert ("killed" if how == "dies_after" else "no answer within 1 s") in stats.lost[1]


def test_every_request_fails_if_all_replicas_are_lost():
    answers, stats = ask_all([Scripted(dies_after=1), Scripted(dies_after=2)], prompts_of(9))
    assert any(isinstance(answer, NoReplicaLeft) for answer in answers) and len(stats.lost) == 2
    assert all(isinstance(a, NoReplicaLeft | RequestGivenUp) or a.finish_reason == "stop" for a in answers)
    left = next(answer for answer in answers if isinstance(answer, NoReplicaLeft))
    assert str(left) == ("all 2 rollout replicas are lost; the last: its process was killed [rollout.no-replica-left]")


def test_a_request_that_kills_replicas_is_given_up():
    class Fragile(Scripted):
        async def accept(self, client, requests, aborted):
            if any(request.prompt_ids == [666, 0] for request in requests):
                raise ReplicaLost("segmentation fault", code="worker.died")
            await super().accept(client, requests, aborted)

    answers, stats = ask_all([Fragile() for _ in range(5)], [[666, 0], *prompts_of(10)[1:]])
    assert isinstance(answers[0], RequestGivenUp) and answers[0].code == "rollout.request-given-up"
    assert "3 rollout replicas" in answers[0].text and "segmentation fault" in answers[0].text
    assert len(stats.lost) == 3
    assert all(answer.finish_reason == "stop" for answer in answers[1:])


@pytest.mark.parametrize(
    "error",
    [
        WeightSyncError("serves nothing", code="engine.stale-weights"),
        RolloutError("prompt is empty", code="rollout.empty-prompt"),
    ],
)
def test_other_errors_end_the_router(error):
    answers, stats = ask_all([Scripted(error=error), Scripted(error=error)], prompts_of(5))
    assert all(answer is error or str(answer) == str(error) for answer in answers) and not stats.lost


@pytest.fixture(scope="module")
def engine(make_folder):
    folder = make_folder(max_position_embeddings=4096)
    engine = create_engine("embedded", str(folder), EngineOptions(max_num_seqs=4))
    engine.load_hf(str(folder), 1)
    yield engine
    engine.shutdown()


def test_interrupted_requests_go_on_after_their_tokens(engine, monkeypatch):
    """Three requests run, a fourth waits, one is cancelled during an interruption: no token changes."""
    prompts, params = [[3, 11, n] for n in range(4)], SamplingParams(200, ignore_eos=True)
    whole = [engine.generate([Request("r", prompt, params, n)])[0] for n, prompt in enumerate(prompts)]

    replica = EngineReplica(engine)
    stops = Stops(monkeypatch, 12, 12, lambda: replica._server._aborted)

    async def run():
        async with Router({0: replica}, 3, 60.0) as router:
            callers = [asyncio.create_task(router.generate(p, params, seed=n)) for n, p in enumerate(prompts)]
            cancelled = asyncio.create_task(router.generate([5], params, seed=9))
            found = []
            for turn in range(12):
                await asyncio.to_thread(stops.wait)
                async with router.interrupted() as requests:
                    lengths = {request.seed: len(request.prior_ids) for request in requests}
                    found.append(lengths)
                    assert not router._scheduler.held(0)
                    await asyncio.sleep(0.01)
                    now = {request.seed: len(request.prior_ids) for request in requests}
                    assert now == lengths, "no token is generated within the context"
                if turn == 6:
                    cancelled.cancel()
            return await asyncio.gather(*callers), found

    answers, found = asyncio.run(run())
    assert [(a.token_ids, a.log_probs) for a in answers] == [
        (a.token_ids, pytest.approx(a.log_probs, abs=1e-4)) for a in whole
    ]
    assert set(found[0]) == {0, 1, 2, 3, 9} and 9 not in found[-1]
    assert any(0 < tokens < 200 for lengths in found for tokens in lengths.values())
    for earlier, later in pairwise(found):
        assert all(later[seed] >= tokens for seed, tokens in earlier.items() if seed in later)


def test_an_interruption_survives_the_loss_of_a_replica():
    replicas = [Scripted(), Scripted(dies_after=2)]

    async def run():
        async with Router(dict(enumerate(replicas)), 4, 60.0) as router:
            callers = [asyncio.create_task(router.generate([30, n], PARAMS, seed=n)) for n in range(6)]
            await asyncio.sleep(0)
            async with router.interrupted() as requests:
                assert sorted(request.seed for request in requests) == [0, 1, 2, 3, 4, 5]
            return [answer.token_ids for answer in await asyncio.gather(*callers)], router.stats

    answers, stats = asyncio.run(run())
    assert answers == [[30, n] for n in range(6)] and list(stats.lost) in ([], [1])


def test_requests_go_on_while_replicas_join_and_leave(engine, monkeypatch):
    """Both numbers are one engine, so that a moved request must continue after its tokens to be the same."""
    prompts, params = [[3, 11, n] for n in range(4)], SamplingParams(300, ignore_eos=True)
    whole = [engine.generate([Request("r", prompt, params, n)])[0] for n, prompt in enumerate(prompts)]
    server = EngineReplica(engine)
    stops = Stops(monkeypatch, 20, 1, lambda: server._server._aborted)

    class Counted:
        """The same engine, with its requests."""

        def __init__(self):
            self.priors = []

        async def accept(self, client, requests, aborted):
            self.priors += [len(request.prior_ids) for request in requests]
            await server.accept(client, requests, aborted)

        async def completions(self, client, wait_s):
            return await server.completions(client, wait_s)

    async def run():
        first, second = Counted(), Counted()
        async with Router({0: first}, 4, 60.0) as router:
            callers = [asyncio.create_task(router.generate(p, params, seed=n)) for n, p in enumerate(prompts)]
            await asyncio.to_thread(stops.wait)
            await router.set_replicas({0: first, 5: second})
            assert router._scheduler.replicas == (0, 5) and not second.priors
            await router.set_replicas({5: second})
            assert router._scheduler.replicas == (5,) and not any(caller.done() for caller in callers)
            answers = await asyncio.gather(*callers)
            return answers, first.priors, second.priors, router.stats

    answers, first, second, stats = asyncio.run(run())
    assert [(a.token_ids, a.log_probs) for a in answers] == [
        (a.token_ids, pytest.approx(a.log_probs, abs=1e-4)) for a in whole
    ]
    assert first == [0] * 4 and len(second) == 4 and all(0 < tokens < 300 for tokens in second)
    assert not stats.lost and not stats.moved and set(stats.busy_s) == {0, 5}


def test_another_process_takes_the_place_of_the_only_replica():
    """Requests of the old process begin again on the new one, and the loss is counted and handled."""
    old, new = Scripted(), Scripted()

    async def run():
        async with Router({0: old}, 4, 60.0) as router:
            callers = [asyncio.create_task(router.generate([10**6, n], PARAMS, seed=n)) for n in range(2)]
            short = asyncio.create_task(router.generate([5, 7], PARAMS, seed=9))
            await asyncio.sleep(0)
            await router.set_replicas({0: new})
            answer = await asyncio.wait_for(short, 60.0)
            for caller in callers:
                caller.cancel()
        return answer.token_ids, router.stats

    answer, stats = asyncio.run(run())
    assert answer == [5, 7] and len(new.seen) == 3 and not new.under_way
    assert list(stats.lost) == [0] and stats.handled == {0} and not stats.to_replace
    assert stats.metrics()["rollout/replicas_lost"] == 1


def test_requests_wait_for_another_replica_if_the_caller_replaces_the_last_one():
    new = Scripted()

    async def run():
        async with Router({0: Scripted(dies_after=1)}, 4, 60.0, waits_for_replicas=True) as router:
            callers = [asyncio.create_task(router.generate([5, n], PARAMS, seed=n)) for n in range(3)]
            while router.no_replica is None:
                await asyncio.sleep(0)
            callers.append(asyncio.create_task(router.generate([5, 3], PARAMS, seed=3)))  # a later one waits too
            await asyncio.sleep(0)
            assert "the only replica is lost" in str(router.no_replica) and not any(c.done() for c in callers)
            await router.set_replicas({0: new})
            return [answer.token_ids for answer in await asyncio.gather(*callers)], router

    answers, router = asyncio.run(asyncio.wait_for(run(), 60.0))
    assert answers == [[5, n] for n in range(4)] and len(new.seen) == 4
    assert router.no_replica is None and router.stats.handled == {0}


def test_a_replica_that_dies_while_it_leaves_loses_no_request():
    replicas = {0: Scripted(), 1: Scripted(dies_after=2)}

    async def run():
        async with Router(replicas, 4, 60.0) as router:
            callers = [asyncio.create_task(router.generate([30, n], PARAMS, seed=n)) for n in range(6)]
            await asyncio.sleep(0)
            await asyncio.wait_for(router.set_replicas({0: replicas[0]}), 60.0)
            return [answer.token_ids for answer in await asyncio.gather(*callers)], router.stats

    answers, stats = asyncio.run(run())
    assert answers == [[30, n] for n in range(6)] and not stats.to_replace


def test_cancelling_a_caller_aborts_its_request():
    replica = Scripted()

    async def run():
        async with Router({0: replica}, 1, 60.0) as router:
            running = asyncio.create_task(router.generate([10**6, 1], PARAMS, seed=0))
            waiting = asyncio.create_task(router.generate([10**6, 2], PARAMS, seed=0))
            while not replica.seen:
                await asyncio.sleep(0)
            running.cancel()
            waiting.cancel()
            answer = await asyncio.wait_for(router.generate([3, 3], PARAMS, seed=0), 60.0)
            return answer.token_ids

    assert asyncio.run(run()) == [3, 3]
    assert [request.prompt_ids[1] for request in replica.seen] == [1, 3] or len(replica.seen) == 2
    assert replica.aborted == [replica.seen[0].request_id]


def test_replicas_have_no_running_requests_after_the_last_caller():
    """Leftover requests would block weight updates and collide with the next router's ids."""
    replicas = [Scripted(), Scripted()]

    async def run():
        async with Router(dict(enumerate(replicas)), 2, 60.0) as router:
            callers = [asyncio.create_task(router.generate([10**6, n], PARAMS, seed=0)) for n in range(6)]
            while not all(replica.under_way for replica in replicas):
                await asyncio.sleep(0)
            for caller in callers:
                caller.cancel()
        return router.stats

    stats = asyncio.run(run())
    assert all(replica.seen and not replica.under_way for replica in replicas) and not stats.lost
    assert asyncio.run(run()).lost == {}


def test_losing_a_replica_while_aborting_does_not_block():
    replica = Scripted(hangs_after=2)

    async def run():
        async with Router({0: replica}, 2, 0.1) as router:
            caller = asyncio.create_task(router.generate([10**6, 1], PARAMS, seed=0))
            await asyncio.sleep(0.02)
            caller.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
