"""Stack frames between a verb and the optimizer: a newcomer steps through few of them in a debugger."""

from __future__ import annotations

import traceback
from pathlib import Path

from role_processes import MINI_BATCH_ROWS, actor_arguments

import megarl
from megarl.megatron import shutdown_runtime
from megarl.megatron.engine.optimizer import Optimizer
from megarl.models import ParallelLayout
from megarl.workers.actor import ActorWorker
from megarl.workers.dispatch import WorkerPlace


def frames_at_optimizer_step(place, arguments, batch):
    """Names of megarl's frames at the first ``Optimizer.step`` of ``update_actor``, outermost first."""
    worker = ActorWorker(WorkerPlace(place.rank, place.world_size, "127.0.0.1", place.port), **arguments)
    stacks: list[list[str]] = []
    original = Optimizer.step

    def step(self, *args):
        package = str(Path(megarl.__file__).parent)
        stacks.append([frame.name for frame in traceback.extract_stack() if frame.filename.startswith(package)])
        return original(self, *args)

    try:
        worker.init_model()
        Optimizer.step = step  # type: ignore[method-assign]
        worker.update_actor(batch)
    finally:
        Optimizer.step = original  # type: ignore[method-assign]
        shutdown_runtime()
    return stacks[0]


def test_three_frames_lead_from_update_actor_to_the_optimizer(role_pool, models):
    arguments = actor_arguments(models.policy_path, ParallelLayout())
    batch = models.batch[range(MINI_BATCH_ROWS)]
    (frames,) = role_pool.run(frames_at_optimizer_step, 1, arguments, batch)
    assert frames == ["update_actor", "update", "optimizer_step"]
