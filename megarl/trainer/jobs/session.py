"""Job session: opens and closes console, devices, tracing, stop handling and resume of all five jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from megarl.algorithms import KLController
from megarl.base.errors import RayLost
from megarl.base.files import PRIVATE_UMASK
from megarl.base.logs import LOGS_FOLDER, ProcessLogs
from megarl.base.provenance import command_with
from megarl.base.run_clock import run_started
from megarl.cluster.resources import PlacedPool
from megarl.cluster.session import RaySession, local_store_bytes
from megarl.config.keys import with_values
from megarl.config.schema.jobs import JobT, SupervisedConfig, TrainConfig, own_pools
from megarl.config.stored import stored_config
from megarl.data.loader import PromptQueue
from megarl.tracing import PHASE, span
from megarl.tracking import Console
from megarl.trainer.records.reporting import RunReporter
from megarl.trainer.records.tracing import RunTracing, role_profiles
from megarl.trainer.records.watchdog import LaterLimits
from megarl.trainer.roles.devices import JobPools, reserve_pools
from megarl.trainer.roles.worker_groups import Progress
from megarl.trainer.state.checkpoint_manifest import identify_run
from megarl.trainer.state.run_state import Resume, RunState, find_resume
from megarl.trainer.state.stopping import CTRL_C, KILLED, RAY_LOST, StopCondition, ends_on_signals, process_deadlines
from megarl.workers.settings import needed_store_bytes

ContextT = TypeVar("ContextT", bound=AbstractContextManager[object])


@contextmanager
def open_job(config: JobT, output_dir: Path, **console: Any) -> Iterator[JobSession[JobT]]:
    """Open the console of a job and the checkpoint to resume from; close everything at the end of the block.

    Raises:
        ConfigError: a deadline in the environment is malformed.
        CheckpointError: the checkpoint to resume from is missing, corrupt or of another model.
    """
    run = config.trainer
    with ExitStack() as stack:
        view = stack.enter_context(Console(quiet=run.quiet, **console))
        yield JobSession(config, output_dir, view, stack)


class JobSession(Generic[JobT]):
    """Resources of a job; :func:`open_job` opens it.

    Before :meth:`start` only this process works: a job checks its inputs and loads its data. Then :meth:`start` starts
    the processes, and :meth:`starting_workers` encloses the start of the worker groups.

    Attributes:
        resume: checkpoint that a training job resumes from; None = start at step 0.
        run_id: ID of the run; a resumed run keeps it.
        started: time at which the command was entered, of ``time.monotonic``.
        tracing: timeline, profilers and watchdog; set by :meth:`start`.
        pools: devices of the roles; set by :meth:`start`.
    """

    tracing: RunTracing
    pools: JobPools
    _ray: RaySession

    def __init__(self, config: JobT, output_dir: Path, console: Console, stack: ExitStack) -> None:
        self.config: Final = config
        self.output_dir = output_dir
        self.console = console
        umask = PRIVATE_UMASK if config.trainer.private_files else None
        self.logs = ProcessLogs(output_dir.resolve() / LOGS_FOLDER, config.trainer.log_level, umask)
        self.stop = StopCondition()
        self.resume: Resume | None = None
        self.started = run_started()
        self._stack = stack
        self._saves = False
        if isinstance(config, TrainConfig | SupervisedConfig):
            run = config.trainer
            self.stop = StopCondition(process_deadlines(run.max_wall_seconds, self.started), run.esi_redundant_time)
            self.resume = find_resume(config)
            self._saves = run.save_freq > 0
        self.run_id = identify_run(self.resume.path if self.resume else None)

    def start(self, *resources: AbstractContextManager[object] | None) -> PlacedPool:
        """Open the job's other resources, a Ray session with the devices, and tracing.

        Args:
            *resources: such as reward processes; None is skipped.

        Returns:
            The trainer's devices, for roles without a pool of their own; see ``pools``.

        Raises:
            ResourceError: the cluster lacks the devices.
            ConfigError: a profiler needs CUDA, and the run is on CPU.
        """
        for resource in resources:
            if resource is not None:
                self._stack.enter_context(resource)
        config, run = self.config, self.config.trainer
        with self.console.phase("start Ray", announce=True):
            needed = needed_store_bytes(config) if isinstance(config, TrainConfig) else 0
            opened = RaySession(
                logs=self.logs, dashboard=run.ray_dashboard, object_store_bytes=local_store_bytes(needed)
            )
            ray = self._stack.enter_context(opened)
        if warning := ray.spills(needed):
            self.console.warn(warning)
        if ray.dashboard_url:
            self.console.message(f"Ray's dashboard: {ray.dashboard_url} (its token is in {ray.token_file})")
        self._ray = ray
        go_on = f"go on from {self.resume.path}" if self.resume else "start again"
        ray.last_words(f"Ended before the first step ({KILLED}). To {go_on}:\n  {command_with([])}")
        self.pools = reserve_pools(ray, run, own_pools(config))
        pool = self.pools.trainer
        profiles, profiler = {}, None
        if isinstance(config, TrainConfig):
            profiles = role_profiles(config, self.output_dir, pool.pool.device)
            profiler = config.global_profiler
        tracing = RunTracing(run, self.output_dir, self.console.warn, pool, profiles, profiler, LaterLimits.of(config))
        self.tracing = self._stack.enter_context(tracing)
        return pool

    def state(self, prompts: PromptQueue, total_steps: int, kl_controller: KLController | None = None) -> RunState:
        """Build the state of a training run, with the checkpoint to resume from; ``prompts`` are at its position."""
        assert isinstance(self.config, TrainConfig | SupervisedConfig), "a training job"
        return RunState(
            self.config, prompts, kl_controller, total_steps, self.resume, self.stop, self.console.message, self.run_id
        )

    def reporter(self, state: RunState) -> RunReporter:
        """Build the reporter of a training run; the end of each phase commits a save that is written."""
        resumed = (self.resume.path, self.resume.state.step) if self.resume else None
        return RunReporter(
            self.config.trainer,
            self.recorded_config(),
            self.output_dir,
            self.console,
            resumed,
            on_phase_end=state.saver.advance,
            run_id=self.run_id,
            started=self.started,
        )

    def recorded_config(self) -> dict[str, Any]:
        """Return the configuration in its stored form, with the device type that :meth:`start` found."""
        return stored_config(with_values(self.config, {"trainer.device": self.pools.trainer.pool.device}))

    def enter(self, resource: ContextT) -> ContextT:
        """Open a resource on the devices; it is closed before them."""
        self._stack.enter_context(resource)
        return resource

    @contextmanager
    def starting_workers(self) -> Iterator[Progress]:
        """Show and time the start of the workers; yields a function that shows the number of workers that are ready."""
        with self.console.phase("start workers", announce=True) as phase, span("start_workers", PHASE):
            yield phase.update

    @contextmanager
    def training(self, state: RunState, reporter: RunReporter) -> Iterator[None]:
        """Handle the signals that end training: a run that saves finishes its step; otherwise Ctrl-C ends it at once.

        Args:
            reporter: of the run; it writes the summary in any case.

        Raises:
            KeyboardInterrupt: training was ended by Ctrl-C; the summary is written.
            RayLost: the GCS or the raylet died; the summary is written.
        """

        def leave_words() -> None:
            self._ray.last_words(state.describe_interruption(KILLED), reporter.interrupted(KILLED))

        state.on_step_begin = leave_words
        with ExitStack() as stack:
            if self._saves:
                stack.enter_context(ends_on_signals(self.stop, self.console.warn))
            try:
                yield
                self._ray.finish()
            except BaseException as error:
                lost = None if isinstance(error, SystemExit) else self._ray.lost()
                if lost is not None:
                    reporter.finish(None, stopped=RAY_LOST)
                    text = f"{state.describe_interruption(RAY_LOST)}\n{lost} died"
                    raise RayLost(text, code="ray.process-died") from error
                if not isinstance(error, KeyboardInterrupt):
                    raise
                # A second Ctrl-C must not wait for anything; a stall is reported by the watchdog.
                if self.stop.requested is None and not self.tracing.is_stalled:
                    self.console.warn(state.describe_interruption())
                    reporter.finish(None, stopped=CTRL_C)
                raise
        if self.stop.requested == CTRL_C:
            raise KeyboardInterrupt
