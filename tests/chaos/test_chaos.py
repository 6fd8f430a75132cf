"""A run under a sequence of faults equals an undisturbed run, bit for bit.

Before a release one short journey with a small GRPO job. Longer, with actor, critic and reference::

    RELEASE=1 CHAOS_MINUTES=20 CHAOS_SEED=7 CHAOS_CONFIG=quickstart bash launch/test.sh tests/chaos -s
"""

import os
import time
from random import Random

import pytest
from chaos_campaign import PATIENT_WATCHDOG_S, WATCHDOG_S, Campaign, arguments_of, make_task
from chaos_faults import FAULTS, NO_FORK_SERVER

SEED = int(os.environ.get("CHAOS_SEED", "4"))
MINUTES = float(os.environ.get("CHAOS_MINUTES", "0"))
CONFIG = os.environ.get("CHAOS_CONFIG", "")
SHORT = (
    "SIGKILL of all processes",
    "SIGKILL of a worker in a save",
    "SIGHUP",
    "a second SIGTERM in the final save",
    "full disk under the run folder",
    NO_FORK_SERVER,
)
"""Faults of the short journey, of which it draws some. A run ends, or is at its next step, soon after them, on any
machine; freezes, Ray's processes, second runs and a lost reaper are for long campaigns.
"""
ONE_DEVICE = ("trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1")


@pytest.mark.release(twin="tests/e2e/test_e2e_ppo.py::test_killed_run_resumes_bit_exact")
@pytest.mark.timeout(600 + 120 * MINUTES)
def test_a_run_through_faults_equals_an_undisturbed_run(tmp_path, drivers, shared_server):
    steps, faults = (8, 5) if MINUTES else (5, 3)
    watchdog_s = WATCHDOG_S if MINUTES else PATIENT_WATCHDOG_S
    arguments = arguments_of(CONFIG or "quickstart_grpo", make_task(tmp_path / "task"), steps, watchdog_s)
    campaign = Campaign(tmp_path, [*arguments, *(() if CONFIG else ONE_DEVICE)], steps, Random(SEED))
    if not MINUTES:
        campaign.faults = [fault for fault in FAULTS if fault.name in SHORT]
        campaign.share_at_start, campaign.drivers, campaign.workers = 0.0, drivers, shared_server
    deadline, journeys = time.monotonic() + 60.0 * MINUTES, 0
    expected = campaign.undisturbed()
    while not journeys or time.monotonic() < deadline:
        journeys += 1
        campaign.journey(journeys, faults, expected)
    print(campaign.table())
    assert campaign.struck.total() >= 1, campaign.log
