"""The `distillation` section: teachers, their layouts, and the loss between teacher and student."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass

from megarl.base.algorithm_names import DISTILLATION_MODES, FORWARD_KL_TOPK, FULL_KL
from megarl.config.keys import derived_key, key, section
from megarl.config.schema.model import LogProbBatchConfig, MegatronConfig, OwnDevicesConfig


@dataclass(frozen=True)
class TeacherServerConfig:
    """SGLang servers of a teacher, which return log-probs of the policy's tokens; see docs/how_to/distillation.md."""

    urls: list[str] = key(
        [],
        "Servers with the same model, instead of `model_path`, such as http://10.0.0.3:30000; they keep running after "
        "the run.",
    )
    api_key_env: str | None = key(None, "Environment variable with the servers' API key; null = send none.")
    rows_per_request: int = key(4, "Responses per request.", at_least=1)
    max_concurrent: int = key(64, "Concurrent requests over all servers.", at_least=1)
    timeout_s: float = key(600.0, "Seconds for a request.", above=0)
    max_attempts: int = key(
        5, "Attempts per request, each at the next server, after waits of 1, 2, 4, ... 30 seconds.", at_least=1
    )


@dataclass(frozen=True)
class TeacherConfig(LogProbBatchConfig):
    """A teacher with the policy's tokenizer: a frozen model of any size and its Megatron layout, or servers."""

    model_path: str | None = key(
        None, "Folder of the teacher's Hugging Face model; required with `enabled`, without `server.urls`; null = none."
    )
    server: TeacherServerConfig = section(TeacherServerConfig)
    megatron: MegatronConfig = section(
        MegatronConfig,
        "Layout of the teacher, on the trainer's devices or those of `distillation.nnodes`. `param_offload` frees them "
        "between phases.",
        inherits=True,
    )
    # the last field: it hides the function of the same name
    key: str | None = derived_key("Value of `teacher_key` in this teacher's rows; auto = its name.")


@dataclass(frozen=True)
class DistillationLossConfig:
    """Loss between the distributions of teacher and student; formulas in docs/how_to/distillation.md."""

    loss_mode: str = key(
        "k3",
        "Divergence per token: an estimate of the KL from student to teacher at the sampled token (kl and k1, abs, mse "
        "and k2, low_var_kl and k3), full, the exact KL from student to teacher over the whole vocabulary, or "
        "forward_kl_topk, the KL from teacher to student over the teacher's `topk` most probable tokens.",
        choices=DISTILLATION_MODES,
    )
    topk: int = key(32, "Tokens per position of forward_kl_topk; at most the vocabulary.", at_least=1)
    use_task_rewards: bool = key(
        True, "Add the policy loss of the rewards; false = distillation only, and rewards are just metrics."
    )
    distillation_loss_coef: float = key(
        1.0, "Weight of the distillation loss when the policy loss is added.", at_least=0
    )
    loss_max_clamp: float | None = key(
        None, "Clamp each token's divergence to [-value, value]; null = no clamp.", above=0
    )
    log_prob_min_clamp: float | None = key(
        None, "Lower bound of the log-probs that forward_kl_topk compares; null = none.", at_most=0
    )
    use_policy_gradient: bool = key(
        False,
        "Use the negative divergence as advantage of PPO's clipped loss instead of its gradient; k1 requires it.",
    )
    clip_ratio: float = key(0.2, "Clip range of that loss; read if low or high is auto.", above=0)
    clip_ratio_low: float | None = derived_key("Clip range below 1; auto = `clip_ratio`.", above=0, at_most=1)
    clip_ratio_high: float | None = derived_key("Clip range above 1; auto = `clip_ratio`.", above=0)

    @property
    def teacher_topk(self) -> int:
        """Tokens per position that the teacher returns; 0 = the log-prob of the sampled token."""
        return self.topk if self.loss_mode == FORWARD_KL_TOPK else 0

    @property
    def reads_teacher_hidden(self) -> bool:
        """Whether the teacher returns its final hidden states, from which the actor computes the exact KL."""
        return self.loss_mode == FULL_KL


@dataclass(frozen=True)
class DistillationConfig(OwnDevicesConfig):
    """On-policy distillation: teachers grade every token that the policy generates."""

    enabled: bool = key(False, "Train the policy towards its teachers.")
    nnodes: int = key(
        0,
        "Nodes with devices of the teachers alone, which share them. The weights of a single teacher stay there: its "
        "`megatron.param_offload` has no effect. 0 = teachers share the trainer's devices.",
        at_least=0,
    )
    teacher_key: str = key("data_source", "Column of the data that selects a row's teacher, if there are several.")
    teacher_models: dict[str, TeacherConfig] = key({}, "Teachers by name; a name is free.")
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)

    @property
    def local_teachers(self) -> dict[str, TeacherConfig]:
        """Teachers that the run computes with Megatron, by name; the others are servers. Empty without `enabled`."""
        models = self.teacher_models if self.enabled else {}
        return {name: teacher for name, teacher in models.items() if not teacher.server.urls}

    @property
    def teacher_is_alone(self) -> bool:
        """Whether no other process uses the devices of the teacher."""
        return self.nnodes > 0 and len(self.local_teachers) == 1

    @property
    def teachers_by_key(self) -> dict[str, str]:
        """Name of each teacher by the value that selects it; without one, the name itself."""
        return {teacher.key or name: name for name, teacher in self.teacher_models.items()}
