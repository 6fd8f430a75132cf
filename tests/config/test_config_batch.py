"""Batch arithmetic, compared with counting samples one by one."""

import re

import pytest
from config_cases import SFT, TRAIN, check_problem, problems_of, with_keys
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from megarl.config import SFTConfig, TrainConfig
from megarl.config.batch import plan_batches, render_plan, token_store_bytes
from megarl.config.build import build
from megarl.config.problems import InvalidConfigError

ACTOR = "actor_rollout_ref.actor"
NO_SHRINKING = tuple(set(Phase) - {Phase.shrink, Phase.explain})
"""A failing example has a few small numbers; shrinking it would take minutes and show no more."""


def distribute(plan, name):
    """Distribute a training step's samples by hand; return the optimizer steps, and fail at an uneven share."""
    phase = plan.phase(name)
    steps = 0
    for _ in range(phase.epochs):
        samples = [(p, a) for p in range(plan.prompts_per_step) for a in range(plan.samples_per_prompt)]
        while samples:
            mini, samples = samples[: phase.samples_per_mini_batch], samples[phase.samples_per_mini_batch :]
            shares = [mini[rank :: phase.data_parallel_size] for rank in range(phase.data_parallel_size)]
            for share in shares:
                assert len(share) == phase.samples_per_rank
                if phase.micro.samples is not None:
                    cuts = [share[i : i + phase.micro.samples] for i in range(0, len(share), phase.micro.samples)]
                    assert {len(cut) for cut in cuts} == {phase.micro.samples}
                    assert len(cuts) == phase.micro_batches_per_rank
            steps += 1
    return steps


@settings(max_examples=30, phases=NO_SHRINKING)
@given(
    prompts=st.integers(1, 48), mini=st.integers(1, 48), n=st.integers(1, 4), devices=st.sampled_from([1, 2, 3, 4, 6]),
    micro=st.integers(1, 12), epochs=st.integers(1, 3),
)  # fmt: skip
def test_a_plan_is_valid_exactly_if_every_share_is_even(prompts, mini, n, devices, micro, epochs):
    values = {
        "data.train_batch_size": prompts,
        f"{ACTOR}.ppo_mini_batch_size": mini,
        f"{ACTOR}.ppo_epochs": epochs,
        f"{ACTOR}.use_dynamic_bsz": False,
        f"{ACTOR}.micro_batch_size_per_gpu": micro,
        "actor_rollout_ref.rollout.n": n,
        "trainer.n_gpus_per_node": devices,
    }
    even = prompts % mini == 0 and mini * n % devices == 0 and (mini * n // devices) % micro == 0
    if not even:
        with pytest.raises(InvalidConfigError):
            build(TrainConfig, with_keys(values))
        return
    plan = plan_batches(build(TrainConfig, with_keys(values)))
    assert plan.samples_per_step == prompts * n
    for name in ("actor", "critic"):
        assert distribute(plan, name) == plan.phase(name).optimizer_steps == epochs * (prompts // mini)
    assert plan.phase("old_log_prob").optimizer_steps == 0
    assert distribute(plan, "old_log_prob") == 1


@settings(max_examples=20, phases=NO_SHRINKING)
@given(mini=st.integers(1, 64), n=st.integers(1, 6), devices=st.integers(2, 12))
def test_suggested_sizes_are_valid(mini, n, devices):
    path = f"{ACTOR}.ppo_mini_batch_size"
    values = {
        path: mini,
        "data.train_batch_size": mini,
        "actor_rollout_ref.rollout.n": n,
        "trainer.n_gpus_per_node": devices,
    }
    if mini * n % devices == 0:
        return
    text = problems_of(values)[path].text
    suggested = [int(number) for number in re.findall(r"\d+", text.split("nearest that do:")[1])]
    assert suggested
    for number in suggested:
        build(TrainConfig, with_keys({**values, path: number, "data.train_batch_size": number}))


@pytest.mark.parametrize(
    ("values", "response_bytes"),
    [
        # Ids 4, mask 1; log-probs of engine and actor, entropy, score, reward, advantage and return 4 each.
        ({"algorithm.adv_estimator": "grpo"}, 33),
        ({"algorithm.adv_estimator": "gae"}, 33 + 4),  # values
        ({"algorithm.adv_estimator": "gae", "algorithm.use_kl_in_reward": True}, 33 + 8),  # and the reference
    ],
)
def test_token_columns_of_a_step_in_the_object_store(values, response_bytes):
    sizes = {
        "data.train_batch_size": 8,
        f"{ACTOR}.ppo_mini_batch_size": 8,
        "actor_rollout_ref.rollout.n": 4,
        "data.max_prompt_length": 100,
        "data.max_response_length": 1000,
    }
    config = build(TrainConfig, with_keys({**sizes, **values}))
    assert token_store_bytes(config) == 32 * (100 * 4 + 1000 * response_bytes)


def test_roles_have_separate_layouts():
    values = {
        "data.train_batch_size": 16,
        f"{ACTOR}.ppo_mini_batch_size": 8,
        f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
        "critic.ppo_mini_batch_size": 4,
        "critic.ppo_epochs": 2,
        "critic.megatron.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.n": 3,
        "actor_rollout_ref.ref.megatron": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4},
        "algorithm.use_kl_in_reward": True,
        "trainer.n_gpus_per_node": 4,
    }
    plan = plan_batches(build(TrainConfig, with_keys(values)))
    actor, critic, reference = plan.phase("actor"), plan.phase("critic"), plan.phase("ref_log_prob")
    assert (actor.layout, critic.layout, reference.layout) == ("TP2 PP1 DP2", "TP1 PP1 DP4", "TP1 PP4 DP1")
    assert (actor.mini_batches, actor.samples_per_mini_batch, actor.samples_per_rank) == (2, 24, 12)
    assert (critic.optimizer_steps, critic.samples_per_mini_batch, critic.samples_per_rank) == (8, 12, 3)
    assert reference.samples_per_rank == 48 and reference.optimizer_steps == 0
    assert actor.micro.max_tokens == 16384 and actor.micro_batches_per_rank is None


def test_phases_follow_the_algorithm():
    grpo = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8}
    names = [phase.name for phase in plan_batches(build(TrainConfig, with_keys(grpo))).phases]
    assert names == ["old_log_prob", "actor"]


def test_fine_tuning_plan():
    values = {
        "data.train_batch_size": 32,
        "data.use_dynamic_bsz": False,
        "data.micro_batch_size_per_gpu": 2,
        "trainer.n_gpus_per_node": 4,
        "megatron.tensor_model_parallel_size": 2,
    }
    plan = plan_batches(build(SFTConfig, with_keys(values, SFT)))
    phase = plan.phase("sft")
    assert (phase.samples_per_rank, phase.micro_batches_per_rank, phase.optimizer_steps) == (16, 8, 1)
    assert render_plan(plan).splitlines()[0] == "One training step: 32 samples"


def test_table_names_its_units():
    values = {"data.train_batch_size": 512, "actor_rollout_ref.rollout.n": 4}
    table = render_plan(plan_batches(build(TrainConfig, with_keys(values))))
    lines = table.splitlines()
    assert lines[0] == "One training step: 512 prompts x 4 samples each = 2048 samples"
    rows = {re.split(r"\s{2,}", line.strip())[0]: re.split(r"\s{2,}", line.strip())[1:] for line in lines[2:]}
    assert rows["prompts per mini-batch"] == ["-", "256", "256"]
    assert rows["samples per mini-batch"] == ["-", "1024", "1024"]
    assert rows["samples per DP rank at a time"] == ["256", "128", "128"]
    assert rows["optimizer steps per training step"] == ["-", "2", "2"]
    assert len({len(line) for line in lines[1:]}) == 1
    assert TRAIN["trainer"] == {"experiment_name": "test"}


def test_one_sample_is_singular():
    plan = plan_batches(build(TrainConfig, with_keys({"data.train_batch_size": 256})))
    assert render_plan(plan).splitlines()[0] == "One training step: 256 prompts x 1 sample each = 256 samples"


INTERLEAVED = {
    "trainer.n_gpus_per_node": 2,
    f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
    f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": 2,
    "data.max_prompt_length": 60,
    "data.max_response_length": 40,
}


@pytest.mark.parametrize(
    ("samples", "budget", "fits"),
    [(4, 100, True), (3, 100, False), (3, 200, True), (1, 1000, False), (5, 199, False), (5, 200, True)],
)
def test_interleaved_stages_need_a_multiple_of_micro_batches(samples, budget, fits):
    values = {
        **INTERLEAVED,
        "data.train_batch_size": samples,
        f"{ACTOR}.ppo_mini_batch_size": samples,
        f"{ACTOR}.max_token_len_per_gpu": budget,
        "critic.megatron.pipeline_model_parallel_size": 2,
    }
    if fits:
        assert plan_batches(build(TrainConfig, with_keys(values))).phase("actor").micro.multiple == 2
        return
    problem = problems_of(values)[f"{ACTOR}.max_token_len_per_gpu"]
    check_problem(problem, f"batch.micro-batches-vpp: {samples} samples")
    assert "2 interleaved pipeline stages" in problem.text


def test_interleaved_stages_and_micro_batches_of_fixed_size():
    path = f"{ACTOR}.micro_batch_size_per_gpu"
    values = {
        **INTERLEAVED,
        "data.train_batch_size": 12,
        f"{ACTOR}.ppo_mini_batch_size": 12,
        f"{ACTOR}.use_dynamic_bsz": False,
    }
    problem = problems_of({**values, path: 4})[path]
    check_problem(problem, "batch.micro-batch-division: 2 and 3")
    assert "a multiple of 2 micro-batches" in problem.text
    assert plan_batches(build(TrainConfig, with_keys({**values, path: 3}))).phase("actor").micro_batches_per_rank == 4


def test_devices_that_share_sequences_share_the_budget():
    values = {
        "trainer.n_gpus_per_node": 2,
        f"{ACTOR}.megatron.context_parallel_size": 2,
        "critic.megatron.context_parallel_size": 2,
        "data.max_prompt_length": 60,
        "data.max_response_length": 40,
    }
    path = f"{ACTOR}.max_token_len_per_gpu"
    assert plan_batches(build(TrainConfig, with_keys({**values, path: 50}))).phase("actor").micro.max_tokens == 100
    check_problem(problems_of({**values, path: 49})[path], "batch.token-budget: = 100 tokens, on 2 devices: 50 on each")
