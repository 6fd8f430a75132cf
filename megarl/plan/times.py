"""Seconds of a training step, phase by phase: what its passes, its generation and its weight sync take."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.batch import MicroBatches
from megarl.plan.flops import Work
from megarl.plan.generation import Decoder, Generated, time_generation
from megarl.plan.hardware import Hardware
from megarl.plan.job import PlannedJob, PlannedPass, PlannedRole
from megarl.plan.lengths import Lengths
from megarl.plan.pass_times import Cost, PassModel, PassTime, weights_copy_s

_BATCHES = {
    "reward": "reward_model",
    "old_log_prob": "old_log_prob",
    "ref": "ref_log_prob",
    "values": "critic",
    "update_critic": "critic",
    "update_actor": "actor",
}
"""Under which name the batch arithmetic knows the pass of a phase."""


@dataclass(frozen=True)
class StepTime:
    """A training step.

    Attributes:
        phases: in their order.
        tokens: of prompts and answers.
        devices: of the job.
        peak_flops: of one device, FLOP/s, in the number format of the role that learns.
        generated: what generation is made of; None without a rollout of the job's own.
    """

    phases: tuple[PassTime, ...]
    tokens: float
    devices: int
    peak_flops: float
    generated: Generated | None

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(phase.cost.seconds for phase in self.phases)

    @property
    def throughput(self) -> float:
        """Tokens, of prompts and answers, per second and device: the metric ``perf/throughput``."""
        return self.tokens / (self.seconds * self.devices)

    @property
    def mfu(self) -> float:
        """Share of the peak that the models' own operations make up, over the whole step."""
        return sum(phase.work.total for phase in self.phases) / (self.seconds * self.devices * self.peak_flops)

    def mfu_of(self, phase: PassTime) -> float:
        """The same of a phase."""
        seconds = phase.cost.seconds
        return phase.work.total / (seconds * self.devices * self.peak_flops) if seconds else 0.0

    @property
    def limit(self) -> tuple[str, str]:
        """The phase and the cause that most seconds go to."""
        phase = max(self.phases, key=lambda one: one.cost.seconds)
        return phase.phase, largest_cause(phase.cost)


def largest_cause(cost: Cost) -> str:
    """The name of the cause that most seconds go to."""
    return max(Cost._fields, key=lambda name: getattr(cost, name))


def time_step(
    job: PlannedJob, hardware: Hardware, lengths: Lengths, sync_s: float = 0.0, kv_tokens: float | None = None
) -> StepTime:
    """Times a training step.

    Args:
        job: the job.
        hardware: what it runs on.
        lengths: of its samples.
        sync_s: seconds that a weight sync's links take.
        kv_tokens: tokens that a replica's cache has room for; None = enough.
    """
    role = job.roles[0]
    generated = _generation(job, hardware, lengths, kv_tokens)
    timed = {"gen": generated.time} if generated else {}
    for one in job.roles:
        model = PassModel(one, hardware, lengths, job.devices_per_node)
        timed |= {p.phase: model.time(p, micro_batches_of(job, one, p)) for p in one.passes}
    if job.rollout is not None:
        timed["update_weights"] = _sync(job, hardware, sync_s)
    samples = job.batches.samples_per_step
    return StepTime(
        phases=tuple(timed[phase] for phase in job.phases if phase in timed),
        tokens=samples * (lengths.prompts.mean + lengths.responses.mean),
        devices=job.devices,
        peak_flops=hardware.peak_flops(role.megatron.dtype),
        generated=generated,
    )


def micro_batches_of(job: PlannedJob, role: PlannedRole, one: PlannedPass) -> MicroBatches:
    """How a role's samples are cut in one of its passes."""
    return job.batches.phase(_BATCHES.get(one.phase, role.name)).micro


def generation_s(job: PlannedJob, hardware: Hardware, lengths: Lengths) -> float:
    """Seconds of generation alone, with room enough for the cache."""
    generated = _generation(job, hardware, lengths, None)
    return generated.time.cost.seconds if generated else 0.0


def _generation(job: PlannedJob, hardware: Hardware, lengths: Lengths, kv_tokens: float | None) -> Generated | None:
    rollout = job.rollout
    if rollout is None or rollout.is_elsewhere:
        return None
    decoder = Decoder(rollout, hardware, job.devices_per_node, on_cpu=job.device == "cpu")
    return time_generation(rollout, decoder, lengths, float("inf") if kv_tokens is None else kv_tokens)


def _sync(job: PlannedJob, hardware: Hardware, seconds: float) -> PassTime:
    """The links, and the actor's weights out of host memory and back where they rest there."""
    actor = job.role("actor")
    host = 2 * weights_copy_s(actor, hardware) if actor.megatron.param_offload else 0.0
    return PassTime("update_weights", "actor", Cost(network=seconds, host=host), Work())
