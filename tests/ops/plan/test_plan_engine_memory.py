"""Planned bytes against the real engine on a CPU: states equal to the byte, activations within ten percent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_memory import Measured, hidden_peak, measure, peaks
from memory_cases import CASES, MODELS, ROWS, expected, planned_pass, planned_role
from support.release import of_release
from tiny_models import save_model

from megarl.ops.plan.pass_activations import role_activations

ACTIVATIONS, EVERYTHING = 0.1, 0.2


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    paths = {}
    for name, settings in MODELS.items():
        paths[name] = tmp_path_factory.mktemp(name)
        save_model(paths[name], **settings)
    return paths


MORE = ("one", "experts", "experts_ep2", "sinks", "sinks_bfloat16_ep2", "sinks_cp2", "latent", "linear", "window")
MORE += ("output_norms", "output_norms_cp2", "adapters_tp2_bfloat16", "selective_attention", "dp2_plain_optimizer")
MORE += ("linear_bfloat16", "sinks_core_attention")


@pytest.mark.parametrize("name", of_release([name for name in CASES if name not in MORE], MORE))
def test_planned_bytes_equal_the_engines(pool, models, name):
    case = CASES[name]
    path = models[case.model]
    measured: list[Measured] = pool.run(measure, case.setup.layout.world_size, path, case.setup, ROWS)
    for rank, real in enumerate(measured):
        plan = expected(path, case.setup, ROWS, rank)
        assert plan[:5] == real[:5], f"rank {rank}: {plan._fields[:5]}"
        assert plan.saved == pytest.approx(real.saved, rel=ACTIVATIONS), f"rank {rank}: {real.at_peak}"


@pytest.mark.parametrize("name", ["one_bfloat16", "pp2_tied", "full_uniform_two", "experts_bfloat16"])
def test_peak_memory_is_close_to_the_engines(pool, models, name):
    case = CASES[name]
    setup, path = case.setup, models[case.model]
    role = planned_role(path, setup)
    for rank, real in enumerate(pool.run(peaks, setup.layout.world_size, path, setup, ROWS)):
        stage = setup.layout.coordinate(rank).pp
        for updates, most in zip((False, True), real, strict=True):
            plan = role_activations(role, planned_pass(setup, ROWS, updates), stage, fused=False)
            assert plan.total == pytest.approx(most, rel=EVERYTHING), f"rank {rank}, updates {updates}: {plan}"


@pytest.mark.parametrize("name", ["one_bfloat16", "tp2_sequence_parallel", "pp2_tied"])
def test_a_forward_pass_holds_the_logits_of_one_micro_batch(pool, tmp_path, name):
    """Four micro-batches, with a vocabulary so large that the logits dominate."""
    case = CASES[name]
    setup = case.setup
    save_model(tmp_path, **{**MODELS[case.model], "vocab_size": 8192})
    role = planned_role(tmp_path, setup)
    for rank, (most, _) in enumerate(pool.run(peaks, setup.layout.world_size, tmp_path, setup, ROWS)):
        stage = setup.layout.coordinate(rank).pp
        plan = role_activations(role, planned_pass(setup, ROWS, updates=False), stage, fused=False)
        if stage == setup.layout.pp - 1:
            assert plan.logits == pytest.approx(most, rel=0.02), f"rank {rank}"


@pytest.mark.parametrize("name", ["one_bfloat16", "cp2"])
def test_a_pass_for_hidden_states_holds_no_logits(pool, tmp_path, name):
    """With a vocabulary whose logits would take several times the memory of the pass."""
    case = CASES[name]
    setup = case.setup
    save_model(tmp_path, **{**MODELS[case.model], "vocab_size": 8192})
    role, planned = planned_role(tmp_path, setup), planned_pass(setup, ROWS, updates=False)
    logits = role_activations(role, planned, 0, fused=False).logits
    plan = role_activations(role, replace(planned, hidden_only=True), 0, fused=False)
    for most in pool.run(hidden_peak, setup.layout.world_size, tmp_path, setup, ROWS):
        assert plan.total == pytest.approx(most, rel=EVERYTHING)
        assert most < logits / 4
