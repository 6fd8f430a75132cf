"""What is on devices in each phase, and in host memory between phases."""

from __future__ import annotations

from planned_jobs import OFFLOAD, megatron, train_job

from megarl.plan import plan_memory
from megarl.plan.memory import MemoryPlan

GIB = 2**30
TP8PP4 = megatron(8, 4, recompute_granularity="full")
ENGINES = {"actor_rollout_ref__rollout__tensor_model_parallel_size": 8}


def names(plan: MemoryPlan, phase: str) -> set[tuple[str, str]]:
    (found,) = (one for one in plan.phases if one.phase == phase)
    return {(component.owner, component.name) for component in found.components}


def test_what_is_offloaded_is_on_the_device_in_its_own_phases_only() -> None:
    away = plan_memory(train_job("Llama-3-70B", TP8PP4 | OFFLOAD, TP8PP4 | OFFLOAD, nodes=4, **ENGINES), 80 * GIB)
    assert names(away, "gen") == {("rollout", "weights"), ("rollout", "kv_cache")}
    assert {owner for owner, _ in names(away, "update_critic")} == {"critic"}
    assert {owner for owner, _ in names(away, "update_actor")} == {"actor"}
    assert names(away, "update_weights") == {("rollout", "weights"), ("actor", "weights"), ("sync", "buckets")}

    stays = plan_memory(train_job("Llama-3-70B", TP8PP4, TP8PP4, nodes=4, **ENGINES), 80 * GIB)
    assert {("critic", "optimizer"), ("actor", "gradients"), ("actor", "weights")} <= names(stays, "gen")
    assert stays.peak.nbytes > away.peak.nbytes and stays.host_bytes < away.host_bytes


def test_a_reference_in_the_actors_layout_is_in_host_memory_twice_while_it_computes() -> None:
    with_kl = {"actor_rollout_ref__actor__use_kl_loss": True}
    job = train_job("Qwen2.5-7B", megatron(4), **with_kl)
    plan = plan_memory(job, 80 * GIB)
    assert job.phases == ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
    weights = sum(2 * plan.roles["actor"].stages[0].states.parameters for _ in range(8))
    assert {c.name: c.nbytes for c in plan.host} == {"reference copy": weights, "swapped weights": weights}

    own = train_job("Qwen2.5-7B", megatron(4), actor_rollout_ref__ref__megatron=megatron(2), **with_kl)
    plan = plan_memory(own, 80 * GIB)
    assert ("reference", "weights") in names(plan, "gen") and not plan.host


def test_the_cache_is_what_the_fraction_leaves_behind_other_roles_and_weights() -> None:
    job = train_job(
        "Qwen2.5-7B",
        megatron(4) | OFFLOAD,
        actor_rollout_ref__rollout__engine_kwargs={"sglang": {"server_args": {"mem_fraction_static": 0.8}}},
    )
    room = plan_memory(job, 80 * GIB).kv
    assert room is not None
    # keys and values of 4 heads of 128 elements in 28 layers, 2 bytes each
    assert room.bytes_per_token == 28 * 2 * 4 * 128 * 2
    assert room.tokens == int((0.8 * 80 * GIB - 2 * 7615616512) / room.bytes_per_token)
    assert plan_memory(job).kv is None


def test_tokens_are_those_of_the_budget_or_of_the_samples_at_their_longest() -> None:
    fixed = {"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2}
    passes = {one.phase: one for one in train_job("Qwen2.5-7B", megatron(4), **fixed).role("actor").passes}
    assert (passes["update_actor"].tokens, passes["update_actor"].outputs) == (2 * 2048, 2 * 1024)
    assert passes["update_actor"].micro_batches == 2 * 32 // 2 // 2
    budget = train_job("Qwen2.5-7B", megatron(4)).role("actor").pass_of("update_actor")
    assert budget is not None and budget.tokens == 16384
    # each sample has a prompt of one token at least
    assert budget.outputs == 16384 - 16
