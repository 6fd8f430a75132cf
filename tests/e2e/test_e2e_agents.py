"""PPO over conversations with a search between the policy's turns, from the command line."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_runs import CliRun, RunFiles, assert_finite, read_jsonl

from megarl.retrieval.corpus import Document
from megarl.retrieval.index import BM25Index
from megarl.retrieval.server import RetrievalServer

LOOP = Path(__file__).with_name("agent_loops.py")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    documents = [Document(str(number), f"Sums\n{number} + {number} is {2 * number}") for number in range(100)]
    with RetrievalServer(BM25Index(documents), port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


@pytest.fixture(scope="module")
def run(small: list[str], start: Callable[..., CliRun], url: str, tmp_path_factory: pytest.TempPathFactory) -> RunFiles:
    loops = tmp_path_factory.mktemp("loops") / "loops.yaml"
    loops.write_text(json.dumps([{"name": "told", "_target_": f"{LOOP}:ToldAnyway"}]))
    agent = "actor_rollout_ref.rollout.agent"
    run = start(
        *("--config-name", "quickstart", *small, "trainer.experiment_name=agents", "trainer.total_training_steps=2"),
        *(f"{agent}.agent_loop_config_path={loops}", f"{agent}.default_agent_loop=told", f"retriever.url={url}"),
        *("retriever.topk=1", "data.max_response_length=120", "trainer.rollout_data_dir=rollouts"),
        *("actor_rollout_ref.rollout.calculate_log_probs=true", "trainer.save_freq=-1"),
    )
    assert run.wait() == 0, run.output
    return RunFiles(run.folder, "agents")


def test_a_step_tells_of_its_conversations(run: RunFiles) -> None:
    for row in run.steps.values():
        assert_finite(row)
        assert row["num_turns/mean"] == 4 and row["agent/asked/mean"] == 1
        assert 0 < row["state_tokens/coverage"] < 1
        assert row["agent/failed"] == row["reward/failed"] > 0
        assert {"critic/vf_loss", "actor/pg_loss", "actor/reward_kl_penalty"} <= row.keys()


def test_the_engine_and_the_actor_agree_on_what_the_policy_wrote_behind_what_it_was_told(run: RunFiles) -> None:
    """A token more or less in the actor's context than in the engine's would show here."""
    for row in run.steps.values():
        assert row["training/rollout_probs_diff_max"] < 1e-4


def test_dumps_tell_what_was_found_and_what_was_lost(run: RunFiles) -> None:
    samples = [sample for step in run.steps for sample in read_jsonl(run.folder / "rollouts" / f"{step}.jsonl")]
    lost = [sample for sample in samples if "agent_error" in sample]
    assert all("this one is lost" in sample["agent_error"] and sample["score"] is None for sample in lost)
    assert len(lost) == sum(row["agent/failed"] for row in run.steps.values())
    for sample in samples:
        if sample not in lost:
            ((begin, end),) = sample["masked"]
            assert sample["output"][begin:end].strip().startswith("<information>")
            assert sample["output"][begin:end].strip().endswith("</information>")
