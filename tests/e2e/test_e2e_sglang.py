"""PPO with SGLang, if installed: replicas of one rank and of two."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from make_arithmetic import build_model, build_tokenizer
from pausing_callback import INSPECTED, PAUSED
from route_recorder import assert_first_experts
from safetensors import safe_open
from support.cli_runs import START_S, RunFiles, assert_finite
from support.listeners import assert_on_loopback, listening_processes
from support.ray_nodes import TwoNodes

from megarl.cluster.fork_server import ENVIRONMENT, ForkServer
from megarl.rollout import create_engine
from megarl.rollout.sglang.options import SGLangOptions

pytestmark = pytest.mark.sglang
ACTOR = "actor_rollout_ref.actor.megatron"
ONE_PROCESS = [f"{ACTOR}.tensor_model_parallel_size=1", f"{ACTOR}.data_parallel_size=1"]
TWO_RANKS = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"


@pytest.fixture(scope="module")
def arguments(small, dense_reward):
    """Two steps with one replica and the fewest processes."""
    return [
        *("--config-name", "quickstart", *small, *dense_reward, "trainer.experiment_name=sglang"),
        *("trainer.total_training_steps=2", "data.train_batch_size=12", "trainer.test_freq=-1"),
        *("trainer.val_before_train=false", "critic.megatron.data_parallel_size=1", "sync.verify_freq=1"),
        *("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.replicas=1"),
    ]


def sent_bytes(model, ranks):
    """Bytes that one replica receives in float32: every weight once, norms once per rank."""
    with safe_open(model / "model.safetensors", "pt") as file:
        sizes = {name: prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return 4 * sum(size * (ranks if "norm" in name else 1) for name, size in sizes.items())


@pytest.mark.release(twin="tests/e2e/test_e2e_sglang.py::test_a_replica_whose_rank_dies_within_a_bucket_is_replaced")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(1, [f"{ACTOR}.tensor_model_parallel_size=2"]), (2, ONE_PROCESS)],
    ids=["one-rank", "two-ranks"],
)
def test_sglang_and_actor_log_probs_agree_before_and_after_an_update(ranks, layout, arguments, task, start):
    """Each rank receives its shard and nothing else. As for users, SGLang's processes are new interpreters."""
    run = start(
        *(*arguments, *layout, f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}"),
        f"trainer.callbacks=[{Path(__file__).with_name('pausing_callback.py')}:PauseAfterStep]",
        env={ENVIRONMENT: "1"},
        warm=True,
    )
    run.wait_until((run.folder / PAUSED).exists, 2 * START_S)  # SGLang starts two more processes
    listeners: set[tuple[str, str]] = set()

    def has_seen_scheduler():
        listeners.update(listening_processes(run.processes()))
        return any("sglang::scheduler" in command for command, _ in listeners)

    run.wait_until(has_seen_scheduler)  # the kernel's tables can change while they are read
    (run.folder / INSPECTED).touch()
    assert_on_loopback(listeners, "gcs_server", "ray::WorkerProcess", "sglang::scheduler")
    assert run.wait() == 0, run.output
    assert run.remaining() == []
    steps = RunFiles(run.folder, "sglang").steps
    assert list(steps) == [1, 2]
    for row in steps.values():
        assert_finite(row)
        assert row["training/rollout_log_probs_diff_max"] < 1e-5 and row["training/rollout_probs_diff_max"] < 1e-6
        assert row["weight_sync/bytes"] == sent_bytes(task / "model", ranks)
        assert row["actor/grad_norm"] > 0 and row["rollout/replicas_lost"] == 0


@pytest.fixture
def cluster_of_two():
    """Two Ray nodes on this machine, with one CPU slot each, as the environment of the jobs that join them.

    Their workers start SGLang's processes as new interpreters, whose names tell the reward function the ranks.
    """
    server = ForkServer()
    try:
        with TwoNodes(1, {ENVIRONMENT: server.address}) as nodes:
            yield nodes.environment
    finally:
        server.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "nodes",
    [
        1,
        pytest.param(
            2,
            marks=pytest.mark.release(
                twin="tests/e2e/test_e2e_sglang.py::test_a_replica_whose_rank_dies_within_a_bucket_is_replaced"
            ),
        ),
    ],
)
def test_a_replica_whose_rank_dies_within_a_bucket_is_replaced(nodes, arguments, task, start, request):
    """Training continues. On two nodes each has a rank of the actor and a rank of the replica."""
    deadly = f"reward.custom_reward_function.path={Path(__file__).with_name('deadly_rank_reward.py')}"
    layout, env = ONE_PROCESS, None
    if nodes == 2:
        layout = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"{ACTOR}.tensor_model_parallel_size=2"]
        env = request.getfixturevalue("cluster_of_two")
    run = start(
        *arguments,
        *layout,
        *(TWO_RANKS, deadly, "reward.custom_reward_function.name=score", "reward.num_workers=0"),
        env=env,
        warm=True,
    )
    assert run.wait(4 * START_S) == 0, run.output
    assert run.remaining() == []
    assert run.output.count("rollout replica 0 is lost and is replaced") == 1, run.output
    assert "rollout replica 0 is lost and is replaced: weight sync to version 2 failed at bucket 1 of 1" in run.output
    steps = RunFiles(run.folder, "sglang").steps
    assert list(steps) == [1, 2]
    for row in steps.values():
        assert_finite(row)
        assert row["training/rollout_log_probs_diff_max"] < 1e-5 and row["actor/grad_norm"] > 0
        assert row["weight_sync/bytes"] == sent_bytes(task / "model", 2)


@pytest.mark.release(
    twin="tests/rollout/test_rollout_sglang_experts.py::test_routes_over_http_equal_those_in_process_and_transformers"
)
def test_routes_of_a_server_are_replayed_also_in_interrupted_responses(small, dense_reward, mixture, start):
    """An asynchronous job with partial rollouts and routing replay R3, whose replica is a server."""
    steps = 3
    run = start(
        *("--config-name", "quickstart_async", *small, *dense_reward, "trainer.experiment_name=routes"),
        *(f"actor_rollout_ref.model.path={mixture}", "actor_rollout_ref.actor.router_replay.mode=R3"),
        f"trainer.callbacks=[{Path(__file__).with_name('route_recorder.py')}:RouteRecorder]",
        *("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.engine_kwargs.sglang.mode=http"),
        *("data.max_response_length=40", "actor_rollout_ref.rollout.max_num_seqs=4", "sync.verify_freq=1"),
        *("async_training.max_staleness=2", "actor_rollout_ref.actor.optim.lr=2e-2"),
        *(f"trainer.total_training_steps={steps}", "trainer.val_before_train=false", "trainer.test_freq=-1"),
    )
    assert run.wait(3 * START_S) == 0, run.output
    files = RunFiles(run.folder, "routes")
    assert sum(row["rollout_service/interrupted"] for row in files.steps.values()) > 0
    rows = [row for step in files.steps for row in torch.load(files.newest / f"routes-{step}.pt")]
    assert len(rows) == steps * 24 * 2
    counts = assert_first_experts(rows, mixture)
    assert counts.unchanged > 0 and counts.interrupted > 0 and counts.changed > 0


@pytest.fixture
def teacher(tmp_path):
    """A model of another size than the policy's, with its tokenizer."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, 3, 64, 2, "qwen2").save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.fixture
def teacher_url(teacher):
    """URL of a server with the teacher's weights and the key ``secret``."""
    engine = create_engine("sglang", str(teacher), SGLangOptions(mode="http", api_key="secret", max_num_seqs=64))
    engine.wake()
    engine.load_hf(str(teacher))
    yield engine.url
    engine.shutdown()


@pytest.mark.release(twin="tests/rollout/test_rollout_sglang_teacher.py::test_worker_returns_the_columns_of_the_rows")
def test_a_teacher_behind_sglang_gives_the_metrics_of_a_teacher_of_the_run(arguments, teacher, teacher_url, start):
    """The exact top-k tokens and their log-probs come over HTTP."""
    section = "distillation.teacher_models.t"
    common = [
        *arguments,
        *ONE_PROCESS,
        *(
            "actor_rollout_ref.rollout.name=embedded",
            "algorithm.adv_estimator=grpo",
            "algorithm.use_kl_in_reward=false",
        ),
        *("distillation.enabled=true", "distillation.distillation_loss.loss_mode=forward_kl_topk"),
        *("distillation.distillation_loss.topk=4", "distillation.distillation_loss.use_task_rewards=false"),
    ]
    env = {"TEACHER_KEY": "secret"}
    served = start(
        *common,
        f"{section}.server.urls=[{teacher_url}]",
        f"{section}.server.api_key_env=TEACHER_KEY",
        env=env,
        warm=True,
    )
    assert served.wait(2 * START_S) == 0, served.output
    assert f"teacher_t: SGLang at {teacher_url}" in served.output
    over_http = RunFiles(served.folder, "sglang").steps
    local = start(*common, f"{section}.model_path={teacher}", f"{section}.megatron.dtype=float32", env=env, warm=True)
    assert local.wait(2 * START_S) == 0, local.output
    in_the_run = RunFiles(local.folder, "sglang").steps
    assert list(over_http) == list(in_the_run) == [1, 2]
    for step, row in in_the_run.items():
        assert over_http[step]["distillation/retries/t"] == 0
        for name in ("loss", "student_mass", "teacher_mass"):
            name = f"actor/distillation/{name}"
            assert row[name] > 0 and over_http[step][name] == pytest.approx(row[name], rel=1e-4), (step, name)
        assert over_http[step]["actor/grad_norm"] == pytest.approx(row["actor/grad_norm"], rel=1e-4)
