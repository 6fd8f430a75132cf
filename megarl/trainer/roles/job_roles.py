"""Worker groups of a training job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.cluster.role_groups import (
    ActorGroup,
    CriticGroup,
    MegatronGroup,
    ReferenceGroup,
    RewardModelGroup,
    RolloutGroup,
    TeacherGroup,
)
from megarl.samples.replicas import Replicas


@dataclass
class Roles:
    """Worker groups of a training job; a role that the algorithm does not need is None.

    Attributes:
        reference: computes log-probs and representations; the actor's group if the actor holds the reference's weights.
        reward_model: scores samples.
        teachers: grade tokens in distillation, by the value that selects them; empty without distillation.
        replicas: rollout replicas, which get the actor's weights.
    """

    actor: ActorGroup
    critic: CriticGroup | None
    reference: ReferenceGroup | None
    reward_model: RewardModelGroup | None
    teachers: dict[str, TeacherGroup]
    replicas: Replicas

    def describe(self) -> str:
        """Describe each group, one line each: layout and kernels of Megatron workers, and the rollout engine."""
        groups: dict[str, MegatronGroup | RolloutGroup] = {**self._trainers(), "rollout": self.replicas.group}
        return "\n".join(f"{name}: {group.describe()}" for name, group in groups.items())

    def _trainers(self) -> dict[str, MegatronGroup]:
        """Groups of Megatron workers by name; a group that is both actor and reference counts once."""
        groups: dict[str, MegatronGroup | None] = {"actor": self.actor, "critic": self.critic, **self._frozen()}
        return {name: group for name, group in groups.items() if group}

    def _frozen(self) -> dict[str, MegatronGroup | None]:
        reference = None if self.reference is self.actor else self.reference
        teachers = {teacher.role: teacher for teacher in self.teachers.values()}
        return {"reference": reference, "reward_model": self.reward_model, **teachers}

    def frozen(self) -> list[MegatronGroup]:
        """Return the groups of Megatron workers that do not train."""
        return [group for group in self._frozen().values() if group]

    def learners(self) -> Iterator[ActorGroup | CriticGroup]:
        """Yield the groups that train, whose state a checkpoint holds."""
        yield self.actor
        if self.critic:
            yield self.critic
