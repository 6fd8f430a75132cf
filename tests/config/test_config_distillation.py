"""Keys of on-policy distillation: bad values are rejected by name, verl's are translated, plans know the teachers."""

import json
from dataclasses import replace

import pytest
from config_cases import check_problem
from support.expected_errors import raises

from megarl.base.errors import ModelError
from megarl.config import TrainConfig, plan_batches, render_plan
from megarl.config.build import build
from megarl.config.problems import InvalidConfigError
from megarl.ops.plan.flops import lengths_of
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.job import planned_job
from megarl.ops.plan.memory import plan_memory
from megarl.ops.plan.pass_activations import pass_activations
from megarl.ops.plan.step_costs import step_cost
from megarl.trainer.jobs.early_checks import check_teachers
from megarl.workers.settings import HiddenForm, hidden_forms, layout_of, needed_store_bytes, teacher_heads

POLICY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def model(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(POLICY | changes), encoding="utf-8")
    return str(folder)


def config(policy, teachers, loss=None, **keys):
    values = {
        "data": {"train_files": "x.parquet", "train_batch_size": 8, "max_prompt_length": 8, "max_response_length": 8},
        "actor_rollout_ref": {
            "model": {"path": policy},
            "actor": {"ppo_mini_batch_size": 4, **keys.pop("actor", {})},
            "rollout": {"n": keys.pop("n", 2), "name": "embedded", **keys.pop("rollout", {})},
        },
        "algorithm": {"adv_estimator": "grpo", **keys.pop("algorithm", {})},
        "distillation": {
            "enabled": True,
            "teacher_models": teachers,
            "distillation_loss": loss or {},
            **keys.pop("distillation", {}),
        },
        "reward": {"name": "arithmetic"},
        "trainer": {"experiment_name": "x", "device": "cpu", "n_gpus_per_node": 2, "nnodes": 1},
    }
    return build(TrainConfig, values)


@pytest.mark.parametrize(
    ("teachers", "loss", "keys", "path", "expected"),
    [
        ({}, {}, {}, "distillation.teacher_models", "teacher.no-teacher"),
        ({"t": {}}, {}, {}, "distillation.teacher_models.t.model_path", "teacher.no-model-path"),
        ({"t": {"model_pth": "x"}}, {}, {}, "distillation.teacher_models.t.model_pth", "config.unknown-key"),
        ({"t": "x"}, {}, {}, "distillation.teacher_models.t", "config.section-needs-keys"),
        (
            {"a": {"model_path": "x", "key": "b"}, "b": {"model_path": "y"}},
            {},
            {},
            "distillation.teacher_models.b.key",
            "teacher.duplicate-key",
        ),
        (None, {"topk": 0}, {}, "distillation.distillation_loss.topk", "config.value-out-of-limits: >= 1"),
        (
            None,
            {"loss_mode": "k1"},
            {},
            "distillation.distillation_loss.loss_mode",
            "teacher.loss-without-gradient: use_policy_gradient=true",
        ),
        (
            None,
            {"loss_mode": "jsd"},
            {},
            "distillation.distillation_loss.loss_mode",
            "config.value-out-of-limits: forward_kl_topk",
        ),
        (
            None,
            {"loss_mode": "full", "use_policy_gradient": True},
            {},
            "distillation.distillation_loss.use_policy_gradient",
            "teacher.full-kl-policy-gradient",
        ),
        (
            {"a": {"model_path": "x"}, "b": {"server": {"urls": ["http://h:1"]}}},
            {"loss_mode": "full"},
            {},
            "distillation.distillation_loss.loss_mode",
            "teacher.full-kl-needs-model: teacher_models.b",
        ),
        (
            None,
            {"loss_mode": "full"},
            {"actor": {"use_kl_loss": True, "kl_loss_type": "full"}},
            "actor_rollout_ref.actor.kl_loss_type",
            "teacher.second-full-kl",
        ),
        (
            None,
            {"loss_mode": "forward_kl_topk", "use_policy_gradient": True},
            {},
            "distillation.distillation_loss.use_policy_gradient",
            "teacher.topk-policy-gradient",
        ),
        (
            {"t": {"server": {"urls": ["10.0.0.3:30000"]}}},
            {},
            {},
            "distillation.teacher_models.t.server.urls",
            "config.bad-url",
        ),
        (
            {"t": {"model_path": "x", "server": {"urls": ["http://h:1"]}}},
            {},
            {},
            "distillation.teacher_models.t.model_path",
            "teacher.no-effect-on-servers",
        ),
        (
            {"t": {"server": {"urls": ["http://h:1"]}, "megatron": {"tensor_model_parallel_size": 2}}},
            {},
            {},
            "distillation.teacher_models.t.megatron",
            "teacher.no-effect-on-servers",
        ),
        (
            {"t": {"server": {"urls": ["http://h:1"]}}},
            {"loss_mode": "full"},
            {},
            "distillation.distillation_loss.loss_mode",
            "teacher.full-kl-needs-model",
        ),
        (
            {"t": {"server": {"urls": ["http://h:1"]}}},
            {},
            {"rollout": {"temperature": 0.7}},
            "actor_rollout_ref.rollout.temperature",
            "teacher.server-temperature",
        ),
        (
            {"t": {"server": {"urls": ["http://h:1"]}}},
            {},
            {"distillation": {"nnodes": 1}},
            "distillation.nnodes",
            "layout.unused-devices",
        ),
        (
            None,
            {"use_task_rewards": False},
            {"actor": {"use_kl_loss": True}},
            "actor_rollout_ref.actor.use_kl_loss",
            "teacher.no-task-rewards: use_task_rewards=false",
        ),
        (
            None,
            {"use_task_rewards": False},
            {"algorithm": {"adv_estimator": "gae"}},
            "algorithm.adv_estimator",
            "teacher.unused-critic",
        ),
        (None, {}, {"n": 1}, "actor_rollout_ref.rollout.n", "algorithm.group-of-one"),
        (
            {"t": {"model_path": "x", "megatron": {"tensor_model_parallel_size": 3}}},
            {},
            {},
            "distillation.teacher_models.t.megatron.tensor_model_parallel_size",
            "layout.replicas-do-not-divide",
        ),
        (
            {"t": {"model_path": "x", "inference": {"quantization": "fp8"}}},
            {},
            {},
            "distillation.teacher_models.t.inference.quantization",
            "config.verl-key",
        ),
    ],
)
def test_bad_values_are_rejected(teachers, loss, keys, path, expected):
    with pytest.raises(InvalidConfigError) as caught:
        config("policy", {"t": {"model_path": "x"}} if teachers is None else teachers, loss, **keys)
    check_problem({problem.path: problem for problem in caught.value.problems}[path], expected)


def test_one_response_per_prompt_is_enough_without_rewards():
    assert config("policy", {"t": {"model_path": "x"}}, {"use_task_rewards": False}, n=1).samples_per_prompt == 1


def test_verls_engine_keys_become_the_teachers_layout(tmp_path):
    inference = {"name": "vllm", "tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.4, "dtype": "float32"}
    path = model(tmp_path / "teacher", hidden_size=64, num_hidden_layers=4)
    teachers = {"big": {"model_path": path, "num_replicas": 1, "inference": inference}}
    built = config(model(tmp_path / "policy"), teachers)
    assert layout_of(built.distillation.teacher_models["big"].megatron).tp == 2
    phase = plan_batches(built).phase("teacher_big")
    assert (phase.data_parallel_size, phase.samples_per_mini_batch) == (1, 16)
    assert "teacher big" in render_plan(plan_batches(built))
    role = planned_job(built, device="cpu").role("teacher_big")
    assert role.model.num_layers == 4 and not role.trains and [p.phase for p in role.passes] == ["teacher"]


def test_exact_kl_needs_all_tokens_of_the_policy(tmp_path):
    policy, loss = model(tmp_path / "policy"), {"loss_mode": "full"}
    small = {"t": {"model_path": model(tmp_path / "small", vocab_size=299)}}
    with raises("teacher.fewer-tokens", "loss_mode=full", "teacher_models.t.model_path=", 299, "300 tokens"):
        check_teachers(config(policy, small, loss), weights=False)
    large = {"t": {"model_path": model(tmp_path / "large", vocab_size=400)}}
    assert len(check_teachers(config(policy, large, loss), weights=False)) == 1


def test_plan_counts_output_layer_and_hidden_states_of_the_teacher(tmp_path):
    path = model(tmp_path / "teacher", hidden_size=64, num_hidden_layers=4)
    teachers = {"t": {"model_path": path, "megatron": {"dtype": "bfloat16"}}}
    policy, layout = model(tmp_path / "policy"), {"megatron": {"tensor_model_parallel_size": 2}}
    built = config(policy, teachers, {"loss_mode": "full"}, actor=layout)
    plan = plan_memory(planned_job(built, device="cpu"))
    (head,) = {c.nbytes for phase in plan.phases for c in phase.components if c.name == "teacher heads"}
    assert head == 320 // 2 * 64 * 2  # 300 tokens are padded to a multiple of 32
    rows, response = 8 * 2, 8
    topk = config(policy, teachers, {"loss_mode": "forward_kl_topk", "topk": 5})
    single = config(policy, teachers, {"loss_mode": "k3"})
    base = needed_store_bytes(single) - rows * response * 4
    assert needed_store_bytes(built) - base == rows * response * 64 * 2
    assert needed_store_bytes(topk) - base == rows * response * 5 * 8


def test_plan_counts_output_layers_of_all_teachers_and_the_widest_hidden_states(tmp_path):
    teachers = {
        "wide": {"model_path": model(tmp_path / "wide", hidden_size=64), "megatron": {"dtype": "bfloat16"}},
        "exact": {"model_path": model(tmp_path / "exact", vocab_size=400), "megatron": {"dtype": "float32"}},
    }
    policy = model(tmp_path / "policy")
    built = config(policy, teachers, {"loss_mode": "full"}, actor={"megatron": {"tensor_model_parallel_size": 2}})
    forms = hidden_forms(built.distillation)
    assert forms == {"wide": HiddenForm(64, "float32", 0), "exact": HiddenForm(64, "float32", 1)}
    assert [head.row_bytes for head in teacher_heads(built.distillation)] == [64 * 2, 32 * 4]
    job = planned_job(built, device="cpu")
    (heads,) = {c.nbytes for phase in plan_memory(job).phases for c in phase.components if c.name == "teacher heads"}
    assert heads == 320 // 2 * (64 * 2 + 32 * 4)
    layout = {"megatron": {"tensor_model_parallel_size": 2, "param_offload": True}}
    offloading = plan_memory(planned_job(config(policy, teachers, {"loss_mode": "full"}, actor=layout), device="cpu"))
    having = {phase.phase for phase in offloading.phases if any(c.name == "teacher heads" for c in phase.components)}
    assert having == {"update_actor"}
    assert {c.nbytes for c in offloading.host if c.name == "teacher heads"} == {2 * heads}
    single = config(policy, {"t": teachers["wide"]}, {"loss_mode": "k3"})
    assert needed_store_bytes(built) - needed_store_bytes(single) == 8 * 2 * 8 * (64 * 4 + 2 - 4)


def test_a_pass_for_hidden_states_computes_no_logits(tmp_path):
    """Neither in memory nor in time; the update reads the states of its tokens, and copies them once."""
    path, policy = model(tmp_path / "teacher", hidden_size=64, vocab_size=4000), model(tmp_path / "policy")
    teachers = {"t": {"model_path": path, "megatron": {"dtype": "bfloat16"}}}
    full, k3 = (planned_job(config(policy, teachers, {"loss_mode": mode}), device="cpu") for mode in ("full", "k3"))
    activations = {}
    for job in (full, k3):
        (planned,) = job.role("teacher_t").passes
        activations[planned.hidden_only] = pass_activations(job, job.role("teacher_t"), planned, 0), planned.outputs
    (without, outputs), (with_logits, _) = activations[True], activations[False]
    assert without.logits == outputs * 64 * 2 < with_logits.logits / 10
    update = full.role("actor").pass_of("update_actor")
    assert update is not None and update.full_kl and update.kl_hidden_bytes == 64 * 2
    plain = replace(update, kl_hidden_bytes=0)
    ends = [pass_activations(full, full.role("actor"), planned, 0).ends for planned in (update, plain)]
    assert ends[0] - ends[1] == 2 * update.outputs * 64 * 2
    hardware = read_hardware("h100")
    flops = [
        {cost.phase: cost.flops for cost in step_cost(job, hardware, lengths_of(job.config)).phases}["teacher"]
        for job in (full, k3)
    ]
    assert flops[1] - flops[0] == 2 * 16 * 8 * 64 * 4000


def test_a_server_needs_no_devices(tmp_path):
    served = {"server": {"urls": ["http://h:1"], "api_key_env": "KEY"}, "key": "code"}
    teachers = {"small": {"model_path": model(tmp_path / "teacher")}, "large": served}
    built = config(model(tmp_path / "policy"), teachers)
    assert list(built.distillation.local_teachers) == ["small"]
    assert built.distillation.teachers_by_key == {"small": "small", "code": "large"}
    roles = [role.name for role in planned_job(built, device="cpu").roles]
    assert "teacher_small" in roles and "teacher_large" not in roles
    assert len(check_teachers(built, weights=False)) == 1
    topk = {"loss_mode": "forward_kl_topk", "topk": 301}
    with raises("teacher.topk-tokens", "topk=301", "300 tokens"):
        check_teachers(config(str(tmp_path / "policy"), {"large": served}, topk), weights=False)


def test_teachers_are_checked_against_the_policy(tmp_path):
    policy = model(tmp_path / "policy")
    small = {"t": {"model_path": model(tmp_path / "small", vocab_size=16)}}
    with raises("teacher.topk-tokens", "topk=32", "16 tokens"):
        check_teachers(config(policy, small, {"loss_mode": "forward_kl_topk"}), weights=False)
    assert len(check_teachers(config(policy, small), weights=False)) == 1
    scalar = {"t": {"model_path": model(tmp_path / "rm", architectures=["Qwen2ForSequenceClassification"])}}
    with raises("teacher.scalar-head", "distillation.teacher_models.t.model_path=", error=ModelError):
        check_teachers(config(policy, scalar), weights=False)
