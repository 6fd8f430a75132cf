"""The optimizer's options from a configuration, and the marks of the verbs."""

import subprocess
import sys

import pytest

from megarl.base.ports import free_port
from megarl.config import MegatronConfig, OptimConfig
from megarl.workers.actor import ActorWorker
from megarl.workers.base import offloaded_parts, optimizer_options
from megarl.workers.critic import CriticWorker
from megarl.workers.dispatch import Dispatch, read_marks
from megarl.workers.frozen import ReferenceWorker
from megarl.workers.rollout import RolloutWorker
from megarl.workers.supervised import SFTWorker


@pytest.mark.parametrize(
    ("optim", "warmup", "total"),
    [
        ({}, 0, 40),
        ({"lr_warmup_steps_ratio": 0.25}, 10, 40),
        ({"lr_warmup_steps_ratio": 0.25, "total_training_steps": 100}, 25, 100),
        ({"lr_warmup_steps": 7, "lr_warmup_steps_ratio": 0.25}, 7, 40),
        ({"lr_warmup_steps": 0, "lr_warmup_steps_ratio": 0.25}, 0, 40),
    ],
)
def test_lengths_of_the_schedule(optim, warmup, total):
    options = optimizer_options(OptimConfig(**optim), MegatronConfig(), total_updates=40)
    assert (options.warmup_steps, options.total_steps) == (warmup, total)


@pytest.mark.parametrize(
    ("optim", "decay"),
    [
        ({}, 4),
        ({"lr_wsd_decay_steps_ratio": 0.5, "total_training_steps": 20}, 10),
        ({"lr_wsd_decay_steps_ratio": 0.01}, 1),
        ({"lr_wsd_decay_steps": 7, "lr_wsd_decay_steps_ratio": 0.5}, 7),
    ],
)
def test_lengths_of_the_decay(optim, decay):
    config = OptimConfig(lr_decay_style="wsd", lr_wsd_decay_style="cosine", **optim)
    options = optimizer_options(config, MegatronConfig(), total_updates=40)
    assert (options.wsd_decay_steps, options.wsd_decay_style) == (decay, "cosine")


def test_only_configured_parts_are_offloaded():
    assert offloaded_parts(MegatronConfig()) == ()
    for part in ("param", "grad", "optimizer"):
        assert offloaded_parts(MegatronConfig(**{f"{part}_offload": True})) == (part,)


def test_every_optimizer_setting_reaches_the_engine():
    optim = OptimConfig(
        lr=2e-3,
        betas=[0.8, 0.95],
        eps=1e-6,
        weight_decay=0.3,
        clip_grad=0.7,
        lr_decay_style="cosine",
        min_lr=1e-4,
    )
    options = optimizer_options(optim, MegatronConfig(use_distributed_optimizer=False), total_updates=40)
    assert (options.lr, options.betas, options.eps, options.weight_decay) == (2e-3, (0.8, 0.95), 1e-6, 0.3)
    assert (options.clip_grad, options.decay_style, options.min_lr) == (0.7, "cosine", 1e-4)
    assert not options.use_distributed_optimizer


@pytest.mark.parametrize("worker", [ActorWorker, CriticWorker, ReferenceWorker, SFTWorker])
def test_split_verbs_declare_their_columns(worker):
    """A verb without declared columns would receive every column of the batch."""
    marks = [mark for mark in read_marks(worker).values() if mark.dispatch is Dispatch.SPLIT]
    assert marks
    for mark in marks:
        assert mark.columns is not None and {"prompts", "responses", "attention_mask"} <= set(mark.columns)
        assert mark.equal_rows == mark.phase.startswith("update")
        assert not mark.equal_rows or {"response_mask", "uid", "index"} <= set(mark.columns)


def test_exchange_is_a_verb_of_one_rank():
    assert read_marks(RolloutWorker)["accept"].dispatch is Dispatch.RANK


TIMEOUTS = (
    "import sys, torch.distributed as dist\n"
    "from megarl.config import MegatronConfig\n"
    "from megarl.models import ParallelLayout\n"
    "from megarl.workers.base import MegatronWorker\n"
    "from megarl.workers.dispatch import WorkerPlace\n"
    "from megarl.workers.settings import RoleSettings\n"
    "settings = RoleSettings('model', ParallelLayout(), MegatronConfig(), None, 0, 'cpu', 1, nccl_timeout=4321)\n"
    "worker = MegatronWorker(WorkerPlace(0, 1, '127.0.0.1', int(sys.argv[1])), settings=settings)\n"
    "groups = dist.group.WORLD, worker.runtime.tp_group, worker.runtime.dp_cp_group\n"
    "print(*(int(group._get_backend(worker.runtime.device).options._timeout.total_seconds()) for group in groups))\n"
)


def test_process_groups_have_the_configured_timeout():
    """In another process, since a process has one set of process groups."""
    command = [sys.executable, "-c", TIMEOUTS, str(free_port())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["4321", "4320", "4320"]  # Megatron's groups: whole minutes
