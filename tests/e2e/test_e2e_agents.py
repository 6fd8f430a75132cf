"""PPO with a search agent, from the command line: two turns with a search result between them."""

import json
import threading
from pathlib import Path

import pytest
from retrieval_server import BM25Index, Document, RetrievalServer
from support.cli_runs import RunFiles, assert_finite, read_jsonl

LOOP = Path(__file__).with_name("agent_loops.py")


@pytest.fixture(scope="module")
def url():
    documents = [Document(str(number), f"Sums\n{number} + {number} is {2 * number}") for number in range(100)]
    with RetrievalServer(BM25Index(documents), port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url
        server.shutdown()


@pytest.fixture(scope="module")
def run(small, start, url, tmp_path_factory):
    loops = tmp_path_factory.mktemp("loops") / "loops.yaml"
    loops.write_text(json.dumps([{"name": "search_once", "_target_": f"{LOOP}:SearchOnce"}]), encoding="utf-8")
    agent, search = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn.search"
    run = start(
        *("--config-name", "quickstart", *small, "trainer.experiment_name=agents", "trainer.total_training_steps=2"),
        *(f"{agent}.agent_loop_config_path={loops}", f"{agent}.default_agent_loop=search_once", f"{search}.url={url}"),
        *(f"{search}.topk=1", "data.max_response_length=120", "trainer.rollout_data_dir=rollouts"),
        *("trainer.val_before_train=false", "trainer.test_freq=-1"),
        *("actor_rollout_ref.rollout.calculate_log_probs=true", "trainer.save_freq=-1"),
    )
    assert run.wait() == 0, run.output
    return RunFiles(run.folder, "agents")


def test_step_metrics_of_agent_trajectories(run):
    for row in run.steps.values():
        assert_finite(row)
        assert row["num_turns/mean"] == 4 and row["agent/turns/mean"] == 1
        assert 0 < row["state_tokens/coverage"] < 1
        assert row["agent/failed"] == row["reward/failed"] > 0
        assert {"critic/vf_loss", "actor/pg_loss", "actor/reward_kl_penalty"} <= row.keys()


def test_engine_and_actor_log_probs_agree_after_a_tool_result(run):
    """A token too many or too few in the actor's context would change the log-probs."""
    for row in run.steps.values():
        assert row["training/rollout_probs_diff_max"] < 1e-4


def test_rollout_dumps_mark_search_results_and_failed_trajectories(run):
    samples = [sample for step in run.steps for sample in read_jsonl(run.folder / "rollouts" / f"{step}.jsonl")]
    failed = [sample for sample in samples if "agent_error" in sample]
    assert all("simulated agent failure" in sample["agent_error"] and sample["score"] is None for sample in failed)
    assert len(failed) == sum(row["agent/failed"] for row in run.steps.values())
    for sample in samples:
        if sample not in failed:
            ((begin, end),) = sample["masked"]
            assert sample["output"][begin:end].strip().startswith("<information>")
            assert sample["output"][begin:end].strip().endswith("</information>")
