"""Device memory in each phase, host memory, and KV cache."""

import pytest
from planned_jobs import OFFLOAD, megatron, train_job

from megarl.ops.plan.memory import plan_memory
from megarl.ops.plan.states import StateCounter
from megarl.rollout.settings import default_fraction

GIB = 2**30
TP8PP4 = megatron(8, 4, recompute_granularity="full")
ENGINES = {"actor_rollout_ref__rollout__tensor_model_parallel_size": 8}


def names(plan, phase):
    (memory,) = (candidate for candidate in plan.phases if candidate.phase == phase)
    return {(component.owner, component.name) for component in memory.components}


def host_copies(plan):
    """Bytes in host memory by name, without the token columns of a step."""
    return {component.name: component.nbytes for component in plan.host if component.owner != "driver"}


def test_token_columns_of_a_step_are_in_host_memory():
    (component,) = plan_memory(train_job("Llama-3-70B", TP8PP4, TP8PP4, nodes=4, **ENGINES)).host
    assert (component.owner, component.name) == ("driver", "token columns") and component.nbytes > 0


def test_offloaded_states_are_on_the_device_only_in_their_phases():
    offloaded = plan_memory(train_job("Llama-3-70B", TP8PP4 | OFFLOAD, TP8PP4 | OFFLOAD, nodes=4, **ENGINES), 80 * GIB)
    assert names(offloaded, "gen") == {("rollout", "weights"), ("rollout", "kv_cache")}
    assert {owner for owner, _ in names(offloaded, "update_critic")} == {"critic"}
    assert {owner for owner, _ in names(offloaded, "update_actor")} == {"actor"}
    assert names(offloaded, "update_weights") == {("rollout", "weights"), ("actor", "weights"), ("sync", "buckets")}

    resident = plan_memory(train_job("Llama-3-70B", TP8PP4, TP8PP4, nodes=4, **ENGINES), 80 * GIB)
    assert {("critic", "optimizer"), ("actor", "gradients"), ("actor", "weights")} <= names(resident, "gen")
    peaks = [max(phase.nbytes for phase in plan.phases) for plan in (resident, offloaded)]
    assert peaks[0] > peaks[1] and resident.host_bytes < offloaded.host_bytes


def test_a_swapped_reference_is_in_host_memory_beside_the_weights_of_the_actor():
    with_kl = {"actor_rollout_ref__actor__use_kl_loss": True}
    job = train_job("Qwen2.5-7B", megatron(4), **with_kl)
    plan = plan_memory(job, 80 * GIB)
    assert job.phases == ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
    rank = 2 * 7615616512 / 4  # bfloat16 on 4 tensor-parallel ranks; norms are on each
    copies = host_copies(plan)
    assert copies.keys() == {"reference copy", "swapped weights"}
    # One copy in chunks of 256 MiB on each of 8 ranks.
    assert all(8 * rank <= nbytes <= 8 * (1.01 * rank + 2**28) and nbytes % 2**28 == 0 for nbytes in copies.values())

    offloaded = plan_memory(train_job("Qwen2.5-7B", megatron(4, param_offload=True), **with_kl), 80 * GIB)
    assert host_copies(offloaded) == {
        "reference copy": copies["reference copy"],
        "weights": copies["swapped weights"],  # an offload's copy of the weights serves the swap
    }

    separate = train_job("Qwen2.5-7B", megatron(4), actor_rollout_ref__ref__megatron=megatron(2), **with_kl)
    plan = plan_memory(separate, 80 * GIB)
    assert ("reference", "weights") in names(plan, "gen") and not host_copies(plan)


def test_engines_on_their_own_devices_leave_the_memory_of_the_trainer():
    """2 devices train, and an engine of 2 devices has half of the weights on each, at SGLang's own memory fraction."""
    own = {
        "devices": 2,
        "async_training__mode": "disaggregated",
        "actor_rollout_ref__rollout__nnodes": 1,
        "actor_rollout_ref__rollout__n_gpus_per_node": 4,
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 64,
    }
    job = train_job("Qwen2.5-7B", megatron(2), **own)
    assert job.devices == 6 and list(job.engine_devices) == [2, 3, 4, 5]
    plan = plan_memory(job, 80 * GIB)
    owners = {phase.phase: {part.owner for part in phase.components} for phase in plan.phases}
    assert owners["gen"] == {"rollout"} and owners["update_actor"] == owners["old_log_prob"] == {"actor"}
    gen = {part.name: part.nbytes for phase in plan.phases if phase.phase == "gen" for part in phase.components}
    assert gen["weights"] == pytest.approx(7615616512, rel=1e-3)  # 2 bytes of each second parameter
    assert plan.kv is not None
    fraction = round(1 - max(10 * 1024, 512 + 1.5 * 8192 + 2 * 256 + 256) / (80 * 1024), 3)  # SGLang's formula, in MiB
    assert plan.kv.tokens == int(fraction * 80 * GIB - gen["weights"]) // plan.kv.bytes_per_token


def test_hybrid_replicas_need_memory_on_the_trainers_devices_while_they_generate():
    """Each of two devices has half of 7.6 billion parameters: 2 bytes of weights each, 4 of gradients, 12 of states."""
    keys = {
        "devices": 2,
        "async_training__mode": "disaggregated",
        "async_training__hybrid_rollout": True,
        "actor_rollout_ref__rollout__nnodes": 1,
        "actor_rollout_ref__rollout__n_gpus_per_node": 4,
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 64,
    }
    job = train_job("Qwen2.5-7B", megatron(2, param_offload=False, grad_offload=False, optimizer_offload=False), **keys)
    assert list(job.hybrid_devices) == [0, 1] and list(job.engine_devices) == [2, 3, 4, 5]
    plan = plan_memory(job, 80 * GIB)
    (gen,) = [phase for phase in plan.phases if phase.phase == "gen"]
    parts = {(part.owner, part.name): part.nbytes for part in gen.components}
    half = 7615616512 / 2
    expected = {
        ("actor", "weights"): 2,
        ("actor", "gradients"): 4,
        ("actor", "optimizer"): 12,
        ("rollout", "weights"): 2,
    }
    assert gen.device == 0 and parts == pytest.approx({k: n * half for k, n in expected.items()}, rel=1e-3)
    (update,) = [phase for phase in plan.phases if phase.phase == "update_actor"]
    assert {part.owner for part in update.components} == {"actor"}


def test_pools_share_a_node_that_has_enough_devices():
    def slots(devices, engines, node_size, nodes=1):
        job = train_job(
            "Qwen2.5-7B",
            nodes=nodes,
            devices=devices,
            async_training__mode="disaggregated",
            actor_rollout_ref__rollout__nnodes=nodes,
            actor_rollout_ref__rollout__n_gpus_per_node=engines,
            actor_rollout_ref__actor__ppo_mini_batch_size=64,
        )
        return [tuple(job.slot(device, node_size)) for device in range(job.devices)]

    assert slots(2, 1, 4) == [(0, 0), (0, 1), (0, 2)]
    assert slots(2, 1, 2) == [(0, 0), (0, 1), (1, 0)]
    assert slots(2, 1, 8, nodes=2) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]


def test_the_proximal_policy_of_a_sync_interval_is_in_host_memory():
    interval = {
        "async_training__mode": "disaggregated",
        "async_training__sync_interval": 2,
        "actor_rollout_ref__rollout__nnodes": 1,
        "actor_rollout_ref__rollout__calculate_log_probs": True,
        "algorithm__rollout_correction__rollout_is": "token",
        "actor_rollout_ref__actor__ppo_mini_batch_size": 64,
        "data__train_batch_size": 128,
    }
    plan = plan_memory(train_job("Qwen2.5-7B", megatron(4), **interval), 80 * GIB)
    copies = host_copies(plan)
    assert copies.keys() == {"proximal copy", "swapped weights"}
    assert copies["proximal copy"] >= 8 * 2 * 7615616512 / 4
    estimated = train_job("Qwen2.5-7B", megatron(4), **interval, async_training__proximal="loglinear")
    assert not host_copies(plan_memory(estimated, 80 * GIB))
    adapters = train_job("Qwen2.5-7B", megatron(4), **interval, actor_rollout_ref__model__lora_rank=8)
    assert not host_copies(plan_memory(adapters, 80 * GIB))


def test_magnitudes_of_adapters_are_trained_parameters():
    """Rows of Qwen2.5-7B's linear layers at TP=4: column-parallel rows are divided, row-parallel rows are not."""

    def parameters(kind):
        adapters = {"lora_rank": 8, "lora__type": kind}
        job = train_job("Qwen2.5-7B", megatron(4), **{f"actor_rollout_ref__model__{k}": v for k, v in adapters.items()})
        return StateCounter(job.role("actor")).of(0).parameters

    column = (3584 + 2 * 512 + 2 * 18944) // 4
    assert parameters("dora") - parameters("lora") == 28 * (column + 2 * 3584)


def test_background_save_copies_states_that_are_not_offloaded():
    saves = {"trainer__save_freq": 10, "actor_rollout_ref__actor__checkpoint__async_save": True}

    def copies(**options):
        plan = plan_memory(train_job("Qwen2.5-7B", megatron(4, **options), **saves), 80 * GIB)
        return host_copies(plan)

    # Weights 2, main weights 4, two moments 8: each byte is written by one of 8 ranks, in chunks of 256 MiB.
    for options in ({}, {"use_distributed_optimizer": False}):
        assert copies(**options)["checkpoint copy"] == pytest.approx(14 * 7615616512, rel=0.03)
    assert copies(optimizer_offload=True)["checkpoint copy"] == pytest.approx(2 * 7615616512, rel=0.15)
    assert not copies(optimizer_offload=True, param_offload=True).get("checkpoint copy")


def test_replayed_routes_are_in_host_memory_of_every_rank():
    """128 samples of 2048 tokens over two data-parallel ranks; 48 layers, 8 experts per token, two bytes each."""
    for mode, expected in (("R2", 8 * 64 * 2048 * 48 * 8 * 2), ("R3", 8 * 64 * 2048 * 48 * 8 * 2), ("disabled", 0)):
        job = train_job("Qwen3-30B-A3B", megatron(4), actor_rollout_ref__actor__router_replay={"mode": mode})
        assert host_copies(plan_memory(job, 80 * GIB)).get("routes", 0) == expected


def test_kv_cache_takes_the_static_fraction_without_weights():
    job = train_job(
        "Qwen2.5-7B",
        megatron(4) | OFFLOAD,
        actor_rollout_ref__rollout__engine_kwargs={"sglang": {"server_args": {"mem_fraction_static": 0.8}}},
    )
    kv = plan_memory(job, 80 * GIB).kv
    assert kv is not None
    # keys and values of 4 heads of 128 elements in 28 layers, 2 bytes each
    assert kv.bytes_per_token == 28 * 2 * 4 * 128 * 2
    assert kv.tokens == int((0.8 * 80 * GIB - 2 * 7615616512) / kv.bytes_per_token)
    assert plan_memory(job).kv is None


def test_micro_batch_tokens_follow_the_budget_or_the_sample_count():
    fixed = {"actor_rollout_ref__actor__micro_batch_size_per_gpu": 2}
    passes = {planned.phase: planned for planned in train_job("Qwen2.5-7B", megatron(4), **fixed).role("actor").passes}
    assert (passes["update_actor"].tokens, passes["update_actor"].outputs) == (2 * 2048, 2 * 1024)
    assert passes["update_actor"].micro_batches == 2 * 32 // 2 // 2
    budget = train_job("Qwen2.5-7B", megatron(4)).role("actor").pass_of("update_actor")
    assert budget is not None and budget.tokens == 16384
    # each sample has a prompt of at least one token
    assert budget.outputs == 16384 - 16


# By hand from SGLang's rule: 512 MiB, 1.5 MiB per prefill token, 2 MiB per sequence in graphs, 128 MiB per rank.
@pytest.mark.parametrize(
    ("gib", "tp", "reserved_mib"),
    [
        (24, 1, 512 + 1.5 * 2048 + 2 * 24 + 128),
        (40, 8, 512 + 1.5 * 4096 + 2 * 160 + 1024),
        (80, 8, 512 + 1.5 * 8192 + 2 * 512 + 1024),
        (141, 1, 512 + 1.5 * 8192 + 2 * 256 + 128),
        (192, 1, 512 + 1.5 * 16384 + 2 * 512 + 128),
    ],
)
def test_default_memory_fraction_equals_sglangs(gib, tp, reserved_mib):
    assert default_fraction(gib * GIB, tp) == pytest.approx(1 - reserved_mib / 1024 / gib, abs=5e-4)


def test_kv_cache_on_a_cpu_has_megarls_size():
    kv = plan_memory(train_job("Qwen2.5-7B", megatron(4), trainer__device="cpu")).kv
    assert kv is not None and kv.tokens == 2**16


def test_the_optimizer_of_a_single_step_is_onloaded_after_the_activations():
    offloaded = megatron(4, 2, param_offload=True, optimizer_offload=True)
    one_step = {"actor_rollout_ref__actor__ppo_mini_batch_size": 64}
    single = names(plan_memory(train_job("Qwen2.5-7B", offloaded, **one_step), 80 * GIB), "update_actor")
    several = names(plan_memory(train_job("Qwen2.5-7B", offloaded), 80 * GIB), "update_actor")
    assert ("actor", "activations") in several and ("actor", "optimizer") in several
    assert (("actor", "activations") in single) != (("actor", "optimizer") in single)


def test_offloaded_states_take_whole_chunks_of_host_memory():
    job = train_job("Qwen2.5-7B", megatron(4) | OFFLOAD)
    host = host_copies(plan_memory(job))
    stage = plan_memory(job).roles["actor"].stages[0]
    for name, size in (("weights", stage.states.weights), ("optimizer", stage.states.optimizer)):
        assert host[name] % (8 * 2**28) == 0 and 8 * size <= host[name] < 8 * (size + 2**28)


def test_roles_on_their_own_devices_leave_the_memory_of_the_trainer():
    """Actor on devices 0 to 7, critic on 8 to 15."""
    shared = plan_memory(train_job("Qwen2.5-7B", megatron(4), megatron(4)), 80 * GIB)
    job = train_job("Qwen2.5-7B", megatron(4), megatron(4), critic__nnodes=1, critic__n_gpus_per_node=8)
    assert job.devices == 16 and [job.rank_on(job.role("critic"), device) for device in (7, 8, 15)] == [None, 0, 7]
    assert tuple(job.slot(8, 8)) == (1, 0) and tuple(job.slot(8, 16)) == (0, 8)

    plan = plan_memory(job, 80 * GIB)
    owners = {phase.phase: {part.owner for part in phase.components} for phase in plan.phases}
    assert owners["values"] == owners["update_critic"] == {"critic"}
    assert "critic" not in owners["update_actor"] | owners["old_log_prob"] | owners["gen"]
    apart, together = (next(p for p in one.phases if p.phase == "update_critic") for one in (plan, shared))
    assert apart.device >= 8
    beside = {part.name: part.nbytes for part in together.components if part.owner != "critic"}
    assert together.nbytes - apart.nbytes == sum(beside.values()) > plan.roles["actor"].largest.states.weights


def test_an_engine_in_fp8_holds_half_the_bytes_of_its_layers():
    fp8 = {"actor_rollout_ref__rollout__quantization": "fp8"}

    def sizes(phase, **keys):
        plan = plan_memory(train_job("Llama-3-70B", TP8PP4, TP8PP4, nodes=4, **ENGINES, **keys), 80 * GIB)
        (memory,) = (candidate for candidate in plan.phases if candidate.phase == phase)
        return {part.name: part.nbytes for part in memory.components if part.owner in ("rollout", "sync")}

    plain, quantized = sizes("gen"), sizes("gen", **fp8)
    head = 2 * 2 * 128256 * 8192 // 8  # embedding and output layer
    assert quantized["weights"] == pytest.approx((plain["weights"] - head) / 2 + head, rel=1e-3)
    assert "matrices before FP8" not in sizes("update_weights")
    assert 0 < sizes("update_weights", **fp8)["matrices before FP8"] <= 3 * 256 * 2**20
    embedded = train_job("Qwen2.5-7B", devices=1, actor_rollout_ref__rollout__name="embedded", **fp8).rollout
    assert embedded is not None and not embedded.holds_fp8
