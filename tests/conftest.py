"""Hooks and fixtures of all tests: seeds, log handlers, servers, processes; and the selection of ``test.sh --fast``."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.distributed import ProcessPool
from support.release import leave_out_release_tests
from support.sglang_imports import import_tested_models_only
from support.shared_servers import open_drivers, open_workers, share_servers
from support.warm_drivers import Drivers

from megarl.cluster.fork_server import fork_server

# By default hypothesis fails an example of more than 0.2 s, or a slow generation; a busy machine needs more.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a missing folder must not reach the network
import_tested_models_only()

# A background job of a shell ignores Ctrl-C, one under nohup SIGHUP, and so would the signal tests of this process.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

TESTS = Path(__file__).parent
SLOW_FIXTURES = {"pool", "start", "task", "arithmetic", "engine_for", "new_engine"}
SLOW = (
    "agents/test_agents_runner.py",
    "chaos",
    "e2e",
    "examples",
    "cluster",
    "workers",
    "megatron",
    "convert/test_convert_roles.py",
    "data/test_data_tokenizers.py",
    "docs/test_docs_site.py",
    "docs/test_docs_tools.py",
    "ops/acceptance/test_acceptance_jobs.py",
    "models/test_models_foreign_files.py",
    "ops/acceptance/test_acceptance_stages.py",
    "ops/doctor",
    "ops/launch",
    "ops/plan/test_plan_engine_memory.py",
    "rewards/test_rewards_code.py",
    "rewards/test_rewards_hacks.py",
    "rewards/test_rewards_pool.py",
    "rewards/test_rewards_sandbox_local.py",
    "rollout/test_rollout_sglang_forks.py",
    "tracking/test_tracking_backends.py",
    "tracking/test_tracking_subprocess_tracker.py",
    "test_distributed_pool.py",
    "test_launch_background_stage.py",
)
"""Folders and files below tests/ that start processes or take seconds per test."""
LONGEST = (
    "ops/launch/test_launch_cluster.py",
    "e2e/test_e2e_async.py",
    "e2e/test_e2e_docs.py",
    "cluster/test_cluster_session.py",
    "e2e/test_e2e_ppo.py",
    "e2e/test_e2e_failures.py",
    "workers/test_workers_exactness.py",
    "test_cli.py",
    "megatron/test_megatron_checkpoint.py",
    "megatron/test_megatron_families.py",
    "ops/acceptance/test_acceptance_stages.py",
    "e2e/test_e2e_elastic.py",
    "e2e/test_e2e_bad_input.py",
    "sharding/test_sharding_manager.py",
    "samples/test_samples_service.py",
    "cluster/test_cluster_fork_server.py",
    "megatron/test_megatron_expert_state.py",
    "tracking/test_tracking_subprocess_tracker.py",
    "ops/plan/test_plan_engine_memory.py",
    "e2e/test_e2e_grpo.py",
    "config/test_config_compose.py",
    "config/test_config_sweeps.py",
    "cluster/test_cluster_sharding_manager.py",
    "sharding/test_sharding_transports.py",
    "rewards/test_rewards_hacks.py",
    "ops/launch/test_launch_train.py",
    "e2e/test_e2e_pools.py",
    "trainer/test_trainer_watchdog.py",
    "ops/dry_run/test_dry_run_train.py",
    "trainer/test_trainer_preference.py",
    "megatron/test_megatron_parity.py",
    "workers/test_workers_rollout.py",
    "megatron/test_megatron_checkpoint_offload.py",
    "ops/plan/test_plan_command.py",
    "rewards/test_rewards_pool.py",
    "workers/test_workers_distillation.py",
    "cluster/test_cluster_agent_runners.py",
    "workers/test_workers_router_replay.py",
    "rollout/test_rollout_quantization.py",
    "base/test_base_compilers.py",
    "ops/launch/test_launch_command.py",
    "e2e/test_e2e_external_agent.py",
    "cluster/test_cluster_worker_group.py",
    "convert/test_convert_roles.py",
    "tracking/test_tracking_backends.py",
    "trainer/test_trainer_train_reward_model.py",
    "test_benchmarks.py",
)
"""Files that take more than 25 s, about by decreasing time: they run first, so that no process ends with one."""


# Collections would visit the objects of all imported modules again and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage again, except objects of imported modules."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of a release; mark tests that start processes as ``slow``; put the longest files first."""
    leave_out_release_tests(config, items)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.relative_to(TESTS).as_posix(), len(places)))
    for item in items:
        path = item.path.relative_to(TESTS).as_posix()
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & SLOW_FIXTURES or any(path == entry or path.startswith(f"{entry}/") for entry in SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules
def pytest_runtest_setup() -> None:
    """Seed torch, so that the numbers of a test do not depend on the tests before it in this process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    """Start what the processes of a run of all tests share; other runs start it if a test needs it."""
    config = node.config
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and "not slow" not in config.option.markexpr:
        share_servers(node)


@pytest.fixture(autouse=True)
def root_log_handlers() -> Iterator[None]:
    """Removes the log handlers of a test that runs a command, whose output closes with the test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for added in set(root.handlers).difference(before):
        root.removeHandler(added)
    root.setLevel(level)


@pytest.fixture(scope="session")
def drivers(request: pytest.FixtureRequest) -> Iterator[Drivers]:
    """Forks the drivers of jobs."""
    with open_drivers(request.config) as opened:
        yield opened


@pytest.fixture(scope="session")
def shared_server(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Environment of jobs whose workers are forks of one server."""
    with open_workers(request.config) as environment:
        yield environment


@pytest.fixture(scope="module")
def forked_workers(shared_server: dict[str, str]) -> Iterator[None]:
    """Lets the workers of this process's Ray sessions be forks of the shared server: each saves 3 s of imports."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in shared_server.items():
            patch.setenv(name, value)
        with fork_server():
            yield


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Up to eight processes, started on demand and kept for later tests."""
    processes = ProcessPool(8)
    yield processes
    processes.close()
