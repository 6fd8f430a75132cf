"""GRPO with an external agent over the HTTP endpoint, and requests of an unrelated client, from the command line.

The model has experts, and their routes are replayed from the engine (R3), over both turns of a conversation.
"""

import json
import stat
from pathlib import Path

import numpy as np
import pytest
from http_agents import chat
from support.cli_runs import RunFiles, assert_finite, read_jsonl

from megarl.data.rollout_dump import RolloutDump

AGENT = Path(__file__).with_name("http_agents.py")


@pytest.fixture(scope="module")
def client_responses():
    """Responses to requests of a client outside any trajectory."""
    return []


@pytest.fixture(scope="module")
def run(
    small,
    mixture,
    start,
    client_responses,
    tmp_path_factory,
):
    folder = tmp_path_factory.mktemp("turns")
    turns, answered = folder / "turns.jsonl", folder / "answered"
    rollout = "actor_rollout_ref.rollout"
    run = start(
        *("--config-name", "quickstart_grpo", *small, "trainer.experiment_name=external"),
        *("trainer.total_training_steps=2", f"{rollout}.agent.external_agent={AGENT}:two_turns"),
        *("reward.name=agent_score", "data.max_response_length=120", "trainer.rollout_data_dir=rollouts"),
        *(f"{rollout}.calculate_log_probs=true", "trainer.test_freq=-1", "trainer.val_before_train=false"),
        *(f"actor_rollout_ref.model.path={mixture}", "actor_rollout_ref.actor.router_replay.mode=R3"),
        env={"MEGARL_E2E_TURNS": str(turns), "MEGARL_E2E_ANSWERED": str(answered)},
        warm=True,
    )
    access = run.folder / "outputs" / "external" / "endpoint.json"
    run.wait_until(access.exists)
    assert stat.S_IMODE(access.stat().st_mode) == 0o600
    run.wait_until(lambda: access.stat().st_size > 0)
    endpoint = json.loads(access.read_text(encoding="utf-8"))
    message = {"role": "user", "content": "1+1"}
    client_responses.append(chat(endpoint["base_url"], endpoint["api_key"], [message], max_tokens=4))
    answered.touch()
    assert run.wait() == 0, run.output
    assert not access.exists() and endpoint["api_key"] not in run.output
    for file in (run.folder / "outputs").rglob("*"):
        assert not file.is_file() or endpoint["api_key"].encode() not in file.read_bytes(), file
    turns.rename(run.folder / "turns.jsonl")
    return RunFiles(run.folder, "external")


def test_step_metrics_of_external_agents_and_other_clients(run, client_responses):
    for row in run.steps.values():
        assert_finite(row)
        assert row["num_turns/mean"] == 4 and row["agent/branches_dropped/mean"] == 0
        assert row["agent/failed"] == row["reward/failed"] > 0 and row["reward_extra/requests/mean"] == 2
        assert 0 < row["state_tokens/coverage"] < 1
    assert sum(row["endpoint/requests"] for row in run.steps.values()) == 1
    (response,) = client_responses
    assert response["choices"][0]["message"]["role"] == "assistant" and response["weight_version"] >= 0


def test_engine_and_actor_log_probs_agree(run):
    """A token too many or too few in the actor's context would change the log-probs."""
    for row in run.steps.values():
        assert row["training/rollout_probs_diff_max"] < 1e-4


def test_training_uses_exactly_the_tokens_sent_to_the_agent(run):
    sent = []
    for (prompt, first, first_log_probs, _), (context, second, second_log_probs, _) in read_jsonl(
        run.folder / "turns.jsonl"
    ):
        assert context[: len(prompt) + len(first)] == prompt + first
        between = context[len(prompt) + len(first) :]
        mask = [1] * len(first) + [0] * len(between) + [1] * len(second)
        sent.append((context + second, mask, np.float32([*first_log_probs, *second_log_probs]).tolist()))
    trained = [row for step in run.steps for row in rows(RolloutDump.load(run.folder / "rollouts" / f"{step}.npz"))]
    assert sorted(trained) == sorted(sent)


def rows(dump):
    """Tokens, response mask and rollout log-probs of the trajectories that did not fail."""
    return [
        ([*prompt.tolist(), *response.tolist()], mask.astype(int).tolist(), log_probs[mask].tolist())
        for prompt, response, mask, log_probs in zip(
            dump.prompts, dump.responses, dump.generated, dump.rollout_log_probs, strict=True
        )
        if mask.any()
    ]


def test_external_agents_train_asynchronously(small, start, tmp_path):
    """Requests in flight wait during a weight sync, and go on with the new weights."""
    rollout = "actor_rollout_ref.rollout"
    run = start(
        *("--config-name", "quickstart_async", *small, "trainer.experiment_name=external"),
        *("trainer.total_training_steps=3", f"{rollout}.agent.external_agent={AGENT}:two_turns"),
        *("reward.name=agent_score", "data.max_response_length=120", f"{rollout}.max_num_seqs=2"),
        *("trainer.test_freq=-1", "trainer.val_before_train=false", "async_training.mode=colocated"),
        *("async_training.sync_interval=1", f"{rollout}.nnodes=0"),
        f"actor_rollout_ref.model.external_lib=[{Path(__file__).with_name('slow_engine.py')}]",
        env={"MEGARL_E2E_TURNS": str(tmp_path / "turns.jsonl"), "MEGARL_E2E_ANSWERED": str(tmp_path)},
        warm=True,
    )
    assert run.wait() == 0, run.output
    steps = RunFiles(run.folder, "external").steps
    assert len(steps) == 3
    for row in steps.values():
        assert_finite(row)
        assert row["num_turns/mean"] == 4 and row["reward_extra/requests/mean"] == 2
        assert row["training/off_policy/trajectory_staleness_worst"] <= 1
    assert sum(row["fully_async/partial/total_partial_num"] for row in steps.values()) > 0
