"""The agent runner over a real engine: a conversation that ends in an unusual way ends alone, and is never lost."""

import json
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from support.engine_replica import EngineReplica
from support.expected_errors import raises
from support.task_configs import arithmetic, train_config  # noqa: F401

from megarl.agents.runner import AgentRunner
from megarl.agents.types import ConversationGroup
from megarl.base.errors import RewardError
from megarl.data.tokenizers import load_tokenizer
from megarl.rollout import EngineOptions, SamplingParams, create_engine

LOOPS = Path(__file__).with_name("unruly_loops.py")
UNRULY = {
    "ReturnsNothing": "AttributeError",
    "Exits": "a library gives up",
    "ExitsInThread": "SystemExit: 3",
    "CancelsItself": "CancelledError",
    "OutsideTheVocabulary": "1000000 is no token id",
    "TooManyTokens": "max_model_len",
    "UnusableParameters": "top_k",
}


@pytest.fixture(scope="module")
def engine(arithmetic):  # noqa: F811
    engine = create_engine("embedded", str(arithmetic / "model"), EngineOptions(max_num_seqs=8))
    engine.load_hf(str(arithmetic / "model"))
    yield engine
    engine.shutdown()


@pytest.fixture
def runner_for(engine, arithmetic, train_config):  # noqa: F811
    """``runner_for({"key below rollout": value}, scorers)``: an open runner over the engine."""
    runners = []

    def make(changes=None, scorers=None):
        config = train_config({f"actor_rollout_ref.rollout.{name}": value for name, value in (changes or {}).items()})
        runner = AgentRunner(config, load_tokenizer(str(arithmetic / "model")))
        runner._scorers = scorers or {}
        runner.open({0: EngineReplica(engine)})
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()
        runner.shutdown()


def group(number, agent_name="single_turn_agent", **fields):
    params, seeds = [SamplingParams(5, ignore_eos=True)] * 2, [10 * number, 10 * number + 1]
    prompt = np.array([3, 4, 5], np.int32)
    return ConversationGroup(number, (), prompt, params, seeds, str(number), agent_name, **fields)


def lead(runner, groups):
    runner.submit(groups)
    ended = {}
    while len(ended) < sum(len(group.ids) for group in groups):
        samples = runner.finished(60.0)
        assert samples, "a sample is lost"
        ended |= samples
    return ended


def test_unusual_ends_of_conversations_end_them_alone(runner_for):
    runner = runner_for()
    names = ["single_turn_agent", *(f"{LOOPS}:{name}" for name in UNRULY)]
    ended = lead(runner, [group(number, name) for number, name in enumerate(names)])
    expected = [None, *UNRULY.values()]
    for (number, _), trajectory in ended.items():
        assert (trajectory.error is None) == (number == 0), trajectory.error
        assert number == 0 or expected[number] in trajectory.error
    assert [len(ended[0, sample].response_ids) for sample in range(2)] == [5, 5]
    again = lead(runner, [replace(group(20), seeds=group(0).seeds)])
    assert [again[20, n].response_ids for n in range(2)] == [ended[0, n].response_ids for n in range(2)]


class BrokenScorer:
    """Raises an error of a bug, or of the reward processes."""

    def __init__(self, error):
        self.error = error

    async def score(self, columns, trajectory):
        raise self.error


def test_an_exception_in_the_scorer_loses_no_sample(runner_for):
    ended = lead(
        runner_for(scorers={"broken": BrokenScorer(KeyError("columns"))}), [group(0, reward="broken"), group(1)]
    )
    assert ["KeyError" in str(ended[name].error) for name in sorted(ended)] == [True, True, False, False]


def test_reward_processes_that_do_not_start_end_all_conversations(runner_for):
    runner = runner_for(scorers={"broken": BrokenScorer(RewardError("no process", code="reward.processes-die"))})
    with raises("reward.processes-die", error=RewardError):
        lead(runner, [group(0, reward="broken")])


def test_a_group_that_cannot_start_is_an_error(runner_for):
    runner = runner_for()
    with pytest.raises(TypeError):
        lead(runner, [replace(group(0, with_turns=True), turns={0: None})])


HUGE = [2**31, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 1e308]


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "max_completion_tokens", "seed", "n", "temperature", "top_p"])
def test_no_number_of_a_request_harms_the_engine(runner_for, name):
    runner = runner_for({"endpoint.enable": True})
    post = httpx.Client(headers={"Authorization": f"Bearer {runner.endpoint.api_key}"}, verify=False, timeout=120).post
    for value in HUGE:
        body = {"messages": [{"role": "user", "content": "1+1="}], name: value}
        answer = post(f"{runner.endpoint.base_url}/chat/completions", content=json.dumps(body))
        assert answer.status_code in (200, 400) and (name == "seed" or answer.status_code == 400), (value, answer.text)
    ended = lead(runner, [group(0)])
    assert [ended[0, sample].error for sample in range(2)] == [None, None]
