"""The simulation of asynchronous training against closed forms, bounds and limits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.ops.plan.asynchronous import (
    SimulatedBatch,
    SimulatedMode,
    SimulatedRates,
    _Engines,
    best_split,
    compare_modes,
    simulate,
)
from megarl.ops.plan.flops import FlopCount
from megarl.ops.plan.generation import GenerationTime
from megarl.ops.plan.lengths import Quantiles
from megarl.ops.plan.pass_times import PassTime, TimeBreakdown

RATES = SimulatedRates(decode_s=0.01, sequence_s=0.002, slots=1000, token_s=0.004, update_s=0.5, sync_s=2.0)
BATCH = SimulatedBatch(prompts=8, samples=4, lengths=Quantiles.log_normal(300, 1.0, 2400))


def modes_of(devices: int, replica_devices: int, max_staleness: float, sync_interval: int) -> list[SimulatedMode]:
    """Return the modes to compare; those with separate devices get half of them for each side."""
    replicas = devices // replica_devices
    half = max(1, replicas // 2)
    apart = devices - half * replica_devices
    return [
        SimulatedMode("sync", replicas, devices, shares_devices=True),
        SimulatedMode("one step off", half, apart, max_staleness=1, drains=True),
        SimulatedMode("colocated", replicas, devices, max_staleness, shares_devices=True),
        SimulatedMode("disaggregated", half, apart, max_staleness, sync_interval),
    ]


@st.composite
def cases(draw):
    """Rates and a batch."""
    rates = SimulatedRates(
        decode_s=draw(st.floats(0.001, 0.1)),
        sequence_s=draw(st.sampled_from([0.0, 0.001, 0.01])),
        slots=1000,
        token_s=draw(st.floats(1e-4, 0.02)),
        update_s=draw(st.floats(0, 1)),
        sync_s=draw(st.floats(0, 3)),
    )
    lengths = Quantiles.log_normal(draw(st.integers(50, 400)), draw(st.floats(0.0, 1.2)), 2000)
    return rates, SimulatedBatch(draw(st.sampled_from([4, 8])), draw(st.sampled_from([1, 4])), lengths)


def generation_s(lengths, rates, replicas):
    """All at once: between two ends the step time follows the number that still runs."""
    seconds, done = 0.0, 0
    for ended, length in enumerate(sorted(lengths)):
        load = max(1.0, (len(lengths) - ended) / replicas)
        seconds += (length - done) * (rates.decode_s + rates.sequence_s * load)
        done = length
    return seconds


@settings(max_examples=15, deadline=None)
@given(cases(), st.integers(1, 4))
def test_sync_equals_the_closed_form(case, replicas):
    rates, batch = case
    run = simulate(SimulatedMode("sync", replicas, 4, shares_devices=True), rates, batch, steps=3, warmup=1)
    expected = train = 0.0
    for step in (1, 2, 3):
        lengths = [length for row in batch.of_step(step) for length in row]
        update = rates.update_s + sum(lengths) * rates.token_s / 4
        train += update
        expected += generation_s(lengths, rates, replicas) + update + rates.sync_s
    assert run.step_s == pytest.approx(expected / 3, rel=1e-9)
    assert run.trainer_idle == pytest.approx(1 - train / expected, rel=1e-6, abs=1e-9)
    assert run.mean_staleness == run.max_staleness == 0


@settings(max_examples=15, deadline=None)
@given(cases(), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([1, 2, 4]))
def test_bound_of_staleness_and_idle_ratios_of_all_modes(case, staleness, interval):
    rates, batch = case
    for mode in modes_of(4, 1, staleness, interval):
        run = simulate(mode, rates, batch, steps=3, warmup=2)
        assert run.max_staleness <= math.ceil(mode.max_staleness)
        assert 0 <= run.mean_staleness <= run.max_staleness
        assert -1e-9 <= run.engine_idle < 1 and -1e-9 <= run.trainer_idle < 1


@settings(max_examples=10, deadline=None, derandomize=True)
@given(cases(), st.sampled_from(["colocated", "disaggregated"]))
def test_more_staleness_is_never_slower(case, name):
    """With a step time that does not depend on the load, so that earlier admission delays no other response."""
    rates, batch = replace(case[0], sequence_s=0.0), case[1]
    times = []
    for staleness in (0.0, 1.0, 2.0, 4.0):
        (mode,) = [mode for mode in modes_of(4, 1, staleness, 1) if mode.name == name]
        times.append(simulate(mode, rates, batch, steps=24, warmup=6).step_s)
    for slow, fast in pairwise(times):
        assert fast <= slow * 1.01  # the window of measured steps cuts differently


def test_one_step_off_takes_the_longer_side():
    """Generation of a step beside the update of the one before."""
    mode = SimulatedMode("one step off", 2, 2, max_staleness=1, drains=True)
    run = simulate(mode, RATES, BATCH, steps=3, warmup=2)
    expected = 0.0
    for step in (3, 4, 5):  # the update of step k runs beside the generation of step k + 1
        lengths = [length for row in BATCH.of_step(step) for length in row]
        before = [length for row in BATCH.of_step(step - 1) for length in row]
        update = RATES.update_s + sum(before) * RATES.token_s / 2
        expected += max(generation_s(lengths, RATES, 2), update) + RATES.sync_s
    assert run.step_s == pytest.approx(expected / 3, rel=1e-9)
    assert run.mean_staleness == run.max_staleness == 1


def test_staleness_0_is_synchronous_in_every_mode():
    sync = simulate(SimulatedMode("sync", 4, 4, shares_devices=True), RATES, BATCH)
    apart = simulate(SimulatedMode("disaggregated", 4, 4), RATES, BATCH)
    assert apart.step_s == pytest.approx(sync.step_s) and apart.max_staleness == 0


def test_slots_limit_the_running_sequences():
    """One slot: the responses run one after the other."""
    rates = replace(RATES, slots=1)
    run = simulate(SimulatedMode("sync", 1, 1, shares_devices=True), rates, BATCH, steps=1, warmup=0)
    tokens = sum(map(sum, BATCH.of_step(0)))
    assert run.step_s == pytest.approx(tokens * 0.012 + 0.5 + tokens * 0.004 + 2.0)


def test_best_split_balances_both_sides():
    """Without tails and load: the split at which the update takes as long as the generation."""
    rates = SimulatedRates(decode_s=0.0, sequence_s=0.001, slots=1000, token_s=0.001)
    batch = SimulatedBatch(16, 4, Quantiles.constant(100))
    run = best_split(SimulatedMode("disaggregated", 1, 1, max_staleness=2), 16, 1, rates, batch)
    assert run is not None
    assert run.mode.replicas == run.mode.trainers == 8
    assert run.trainer_idle == pytest.approx(0, abs=0.01) and run.engine_idle == pytest.approx(0, abs=0.01)


def test_split_keeps_the_units_of_both_pools():
    """Of 24 devices, engines of two on nodes of 8 and a trainer of 16: only 8 and 16 are left."""
    mode = SimulatedMode("disaggregated", 1, 1, max_staleness=1, drains=True)
    run = best_split(mode, 24, 2, RATES, BATCH, units=(8, 16))
    assert run is not None and (run.mode.replicas, run.mode.trainers) == (4, 16)
    assert best_split(mode, 24, 2, RATES, BATCH, units=(8, 24)) is None


def test_overlap_compares_the_same_devices():
    mode = SimulatedMode("disaggregated", 2, 4, max_staleness=1, drains=True)
    overlap = compare_modes(mode, RATES, BATCH, 2, (1, 1))
    assert overlap.run == simulate(mode, RATES, BATCH)
    assert overlap.others["synchronous"] == simulate(SimulatedMode("sync", 4, 8, shares_devices=True), RATES, BATCH)
    assert overlap.others["fastest_split"].step_s <= overlap.run.step_s
    assert set(overlap.others) == {"synchronous", "fastest_split"}
    hybrid = compare_modes(replace(mode, hybrid=2), RATES, BATCH, 2, (1, 1), min_replicas=1)
    assert hybrid.others["without_hybrid_rollout"] == overlap.run
    assert hybrid.others["min_replicas"].step_s > hybrid.run.step_s
    assert hybrid.others["fastest_split"].mode.hybrid == hybrid.others["fastest_split"].mode.trainers // 2


@pytest.mark.parametrize("switch_s", [0.0, 0.5, 100.0])
def test_hybrid_replicas_shorten_the_wait_unless_a_switch_takes_longer(switch_s):
    """One replica and two hybrid ones; responses of 10 s, one after the other, on a trainer that needs no time."""
    rates = SimulatedRates(decode_s=0.01, sequence_s=0.0, slots=1, switch_s=switch_s)
    batch = SimulatedBatch(prompts=6, samples=1, lengths=Quantiles.constant(1000))
    mode = SimulatedMode("disaggregated", 1, 2, hybrid=2)
    run = simulate(mode, rates, batch, steps=40, warmup=2)
    alone = simulate(replace(mode, hybrid=0), rates, batch, steps=40, warmup=2)
    assert alone.step_s == pytest.approx(60)
    # 60 s without, 20 s and a switch with hybrid replicas, which save 40 s: worth it up to that time
    assert run.step_s == pytest.approx(20 + switch_s if switch_s < 40 else 60)


def test_sequences_of_leaving_replicas_continue_after_their_last_token():
    """Two replicas for 10 s; then one decodes the other 500 tokens of a response, and a third one, in any order."""
    engines = _Engines(2, SimulatedRates(decode_s=0.01, sequence_s=0.0, slots=1))
    engines.submit([(0, 0, 1000), (1, 0, 1500), (2, 0, 100)])
    ends: dict[int, float] = {}
    while not engines.is_empty:
        engines.advance(engines.next_end())
        ends[engines.pop()[0]] = engines.now
        if len(ends) == 1:
            engines.resize(1)
    assert ends[0] == pytest.approx(10) and max(ends.values()) == pytest.approx(16)


@pytest.mark.parametrize(("wave", "share"), [(None, 0), (4, 0), (2, 0.5), (1, 0.75)])
def test_engines_generate_during_a_rolling_sync(wave, share):
    """Training is instant. Three responses of 5 s run; during a sync of 2 s the trained one is not replaced yet."""
    rates = SimulatedRates(decode_s=0.01, sequence_s=0.0, slots=1000, sync_s=2.0)
    batch = SimulatedBatch(prompts=1, samples=1, lengths=Quantiles.log_normal(500, 0.0, 500))
    run = simulate(SimulatedMode("disaggregated", 4, 4, max_staleness=2, sync_wave=wave), rates, batch, steps=600)
    # A step generates one response: 3 (step_s - 2) + 2 x 2 share = 5.
    assert run.step_s == pytest.approx(2 + (5 - 4 * share) / 3, rel=1e-3)


@pytest.mark.parametrize("slots", [4, 1000])
def test_rates_of_a_timed_generation_repeat_it(slots):
    """A queue with steps of 10 ms plus 2 ms per sequence: the fit finds both, and keeps the sum with prefill."""
    lengths = [length for row in BATCH.of_step(0) for length in row]
    decode_s = running_steps = steps = 0.0
    running, waiting = [], sorted(lengths, reverse=True)
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        count = min(running)
        decode_s += count * (0.01 + 0.002 * len(running))
        steps, running_steps = steps + count, running_steps + count * len(running)
        running = [left - count for left in running if left > count]
    timed = PassTime("gen", "rollout", TimeBreakdown(compute=decode_s), FlopCount())
    generated = GenerationTime(0.0, decode_s, int(steps), running_steps / steps, timed)
    rates = SimulatedRates.of_generation(generated, 0.012, slots)
    assert (rates.decode_s, rates.sequence_s) == (pytest.approx(0.01), pytest.approx(0.002))
    with_prefill = SimulatedRates.of_generation(generated._replace(prefill_s=steps * 0.001), 0.012, slots)
    mean = with_prefill.decode_s + with_prefill.sequence_s * running_steps / steps
    assert mean * steps == pytest.approx(decode_s + steps * 0.001)
