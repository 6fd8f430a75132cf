"""GRPO over conversations that a program leads by HTTP, and a client that asks from outside, from the command line."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import CliRun, RunFiles, assert_finite, read_jsonl
from http_agents import ask

from megarl.data.rollout_dump import RolloutDump

AGENT = Path(__file__).with_name("http_agents.py")


@pytest.fixture(scope="module")
def outside() -> list[dict[str, Any]]:
    """What a client was answered that belongs to no conversation."""
    return []


@pytest.fixture(scope="module")
def run(
    small: list[str],
    start: Callable[..., CliRun],
    outside: list[dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> RunFiles:
    seen = tmp_path_factory.mktemp("seen") / "turns.jsonl"
    rollout = "actor_rollout_ref.rollout"
    run = start(
        *("--config-name", "quickstart_grpo", *small, "trainer.experiment_name=external"),
        *("trainer.total_training_steps=2", f"{rollout}.agent.external_agent={AGENT}:asks_twice"),
        *("reward_model.name=agent_score", "data.max_response_length=120", "trainer.rollout_data_dir=rollouts"),
        *(f"{rollout}.calculate_log_probs=true", "trainer.test_freq=-1", "trainer.val_before_train=false"),
        env={"MEGARL_E2E_SEEN": str(seen)},
    )
    access = run.folder / "outputs" / "external" / "endpoint.json"
    run.wait_until(access.exists)
    assert stat.S_IMODE(access.stat().st_mode) == 0o600
    run.wait_until(lambda: access.stat().st_size > 0)
    told = json.loads(access.read_text())
    outside.append(ask(told["base_url"], told["api_key"], [{"role": "user", "content": "1+1"}], max_tokens=4))
    assert run.wait() == 0, run.output
    assert not access.exists() and told["api_key"] not in run.output
    for file in (run.folder / "outputs").rglob("*"):
        assert not file.is_file() or told["api_key"].encode() not in file.read_bytes(), file
    os.rename(seen, run.folder / "seen.jsonl")
    return RunFiles(run.folder, "external")


def test_a_step_tells_of_its_conversations_and_of_requests_from_outside(
    run: RunFiles, outside: list[dict[str, Any]]
) -> None:
    for row in run.steps.values():
        assert_finite(row)
        assert row["num_turns/mean"] == 4 and row["agent/branches_dropped/mean"] == 0
        assert row["agent/failed"] == row["reward/failed"] > 0 and row["reward_extra/asked/mean"] == 2
        assert 0 < row["state_tokens/coverage"] < 1
    assert sum(row["endpoint/requests"] for row in run.steps.values()) == 1
    assert outside[0]["choices"][0]["message"]["role"] == "assistant" and outside[0]["weight_version"] >= 0


def test_the_engine_and_the_actor_agree_on_what_the_policy_wrote(run: RunFiles) -> None:
    """A token more or less in the actor's context than in the engine's would show here."""
    for row in run.steps.values():
        assert row["training/rollout_probs_diff_max"] < 1e-4


def test_what_is_trained_on_is_what_the_agent_was_told(run: RunFiles) -> None:
    told = []
    for (prompt, first, log_probs, _), (context, second, more, _) in read_jsonl(run.folder / "seen.jsonl"):
        assert context[: len(prompt) + len(first)] == prompt + first
        between = context[len(prompt) + len(first) :]
        written = [1] * len(first) + [0] * len(between) + [1] * len(second)
        told.append((context + second, written, np.float32([*log_probs, *more]).tolist()))
    trained = [row for step in run.steps for row in rows(RolloutDump.load(run.folder / "rollouts" / f"{step}.npz"))]
    assert sorted(trained) == sorted(told)


def rows(dump: RolloutDump) -> list[tuple[list[int], list[int], list[float]]]:
    """Of conversations that did not fail: all tokens, who wrote those of the response, log-probs of the policy's."""
    return [
        ([*prompt.tolist(), *response.tolist()], written.astype(int).tolist(), log_probs[written].tolist())
        for prompt, response, written, log_probs in zip(
            dump.prompts, dump.responses, dump.generated, dump.rollout_log_probs, strict=True
        )
        if written.any()
    ]
