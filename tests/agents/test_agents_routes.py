"""Experts of a conversation's tokens, gathered over its turns (routing replay R3)."""

import asyncio

import numpy as np
import pytest
from support.expected_errors import raises

from megarl.agents.routes import RouteRecord
from megarl.agents.trajectories import PackedSamples, trajectories_to_batch
from megarl.agents.types import FinishedSample, SampleId, Trajectory
from megarl.rollout.interface import Completion, SamplingParams

PARAMS = SamplingParams(max_new_tokens=9)


class Engine:
    """Returns set responses; the two experts of a token in the only layer are the weight version and the token."""

    def __init__(self):
        self.version, self.starts = 0, list[int | None]()

    async def respond(self, prompt_ids, params, *, seed, key, routes_from):
        self.starts.append(routes_from)
        tokens = [int(token) for token in key.split()]
        computed = [*prompt_ids, *tokens][routes_from:-1]
        routes = np.array([[[self.version, token]] for token in computed], np.int16).reshape(-1, 1, 2)
        return Completion("r", tokens, [0.0] * len(tokens), "stop", self.version, routes=routes)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def record(engine):
    return RouteRecord(engine.respond)


def generate(record, prompt, response):
    asyncio.run(record.generate(prompt, PARAMS, seed=0, key=" ".join(map(str, response))))


def trajectory(prompt, response, mask):
    return Trajectory(prompt, response, mask, [0.0] * len(response), "stop", 2)


def routes(record, *parts):
    result = record.add_to(trajectory(*parts))
    assert result.error is None and result.routes is not None
    return result.routes[:, 0].tolist()


def test_each_turn_extends_the_routes_of_the_turns_before(engine, record):
    """Tokens keep the experts that they had when they were generated; only new ones are requested."""
    generate(record, [1, 2], [3, 4])
    engine.version = 5
    generate(record, [1, 2, 3, 4, 7, 8], [9, 6])
    assert engine.starts == [0, 3]
    assert routes(record, [1, 2], [3, 4, 7, 8, 9, 6, 5], [1, 1, 0, 0, 1, 1, 0]) == [
        [0, 1], [0, 2], [0, 3], [5, 4], [5, 7], [5, 8], [5, 9],
    ]  # fmt: skip


def test_branches_and_shortened_trajectories_have_the_routes_of_their_tokens(engine, record):
    generate(record, [1, 2], [3, 4])
    generate(record, [1, 2], [5, 6, 7])
    generate(record, [1, 2, 3, 4, 8], [9])
    assert engine.starts == [0, 2, 3]
    assert routes(record, [1, 2], [5, 6, 7], [1, 1, 1]) == [[0, 1], [0, 2], [0, 5], [0, 6]]
    assert routes(record, [1, 2], [3, 4], [1, 1]) == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert routes(record, [1, 2, 3], [4, 8], [1, 0]) == [[0, 1], [0, 2], [0, 3], [0, 4], [0, 8]]


def test_a_rewritten_history_fails_by_name(record):
    generate(record, [1, 2], [3, 4])
    generate(record, [1, 2, 3, 4, 8], [9])
    failed = record.add_to(trajectory([1, 2], [3, 5, 8, 9], [1, 1, 0, 1]))
    assert failed.error is not None and "token 3 of the trajectory follows other tokens" in failed.error
    assert list(failed.response_mask) == [0, 0, 0, 0]
    # A changed token that nothing generated follows does no harm.
    assert record.add_to(trajectory([1, 2], [3, 5], [1, 0])).error is None


def test_routes_become_a_ragged_column(record):
    generate(record, [1, 2], [3, 4])
    whole = record.add_to(trajectory([1, 2], [3, 4], [1, 1]))
    failed = Trajectory([7, 8, 9], [], [], [], "error", 1, error="failed")
    samples = PackedSamples([FinishedSample(SampleId(0, n), row) for n, row in enumerate((whole, failed))])
    batch = trajectories_to_batch([sample.trajectory for sample in samples.unpack()], 0, with_routes=True)
    column = batch.tensors["routed_experts"]
    assert column.shape == (2, 5, 1, 2) and str(column.dtype) == "torch.int16"
    assert column[0, :, 0, 1].tolist() == [-1, 1, 2, 3, -1]  # padding, and the last token
    assert column[1].unique().tolist() == [-1]
    rows = batch.unpadded("routed_experts")
    assert [len(row) for row in rows] == [4, 4]


def test_an_engine_without_routes_is_an_error():
    with raises("rollout.no-routes") as caught:
        trajectories_to_batch([trajectory([1], [2], [1])], 0, with_routes=True)
    assert str(caught.value) == (
        "the rollout engine returned no experts, which actor.router_replay.mode=R3 replays; set R2 to replay those of "
        "the pass for old log-probs [rollout.no-routes]"
    )
