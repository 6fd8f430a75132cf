"""Sections that several roles or both jobs have; each is declared once and reused."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.keys import REQUIRED, key, section
from megarl.config.tracing import TimelineConfig, WatchdogConfig

DTYPES = ("float32", "bfloat16")


@dataclass
class ModelPathConfig:
    """Where a model comes from."""

    path: str = key(REQUIRED, "Folder of the Hugging Face model: config.json, safetensors and tokenizer.")
    tokenizer_path: str | None = key(None, "Folder of the tokenizer; null = `path`.")
    external_lib: list[str] | None = key(
        None,
        "Modules of your own that every process of the run imports first, each as `path.py` or `package.module`; they "
        "may register model families (docs/add_a_model.md).",
    )

    @property
    def own_modules(self) -> tuple[str, ...]:
        """What ``external_lib`` names; nothing where it is null."""
        return tuple(self.external_lib or ())


@dataclass
class MegatronConfig:
    """Parallel layout, number format and memory of one role's Megatron model."""

    tensor_model_parallel_size: int = key(1, "Devices over which each layer is split.", at_least=1)
    pipeline_model_parallel_size: int = key(1, "Pipeline stages over which the layers are split.", at_least=1)
    virtual_pipeline_model_parallel_size: int | None = key(
        None, "Chunks of layers per stage (interleaved schedule); null = 1.", at_least=1
    )
    context_parallel_size: int = key(1, "Devices over which each sequence is split.", at_least=1)
    expert_model_parallel_size: int = key(
        1, "Groups of devices over which the experts of a mixture-of-experts model are divided.", at_least=1
    )
    expert_tensor_parallel_size: int | None = key(
        None, "Devices over which each expert is split; null = `tensor_model_parallel_size`.", at_least=1
    )
    data_parallel_size: int | None = key(
        None, "Replicas of the model; null = what the other sizes leave of the trainer's devices.", at_least=1
    )
    num_layers_in_first_pipeline_stage: int | None = key(
        None, "Layers of the first stage; null = as many as the others.", at_least=1
    )
    num_layers_in_last_pipeline_stage: int | None = key(
        None, "Layers of the last stage; null = as many as the others.", at_least=1
    )
    account_for_embedding_in_pipeline_split: bool = key(
        False, "Count the embedding as one layer where layers are divided over stages."
    )
    account_for_loss_in_pipeline_split: bool = key(
        False, "Count the output layer as one layer where layers are divided over stages."
    )
    sequence_parallel: bool = key(
        True, "Split activations between the tensor-parallel ranks by sequence; no effect at tensor parallel 1."
    )
    use_distributed_optimizer: bool = key(True, "Shard optimizer state over the data-parallel ranks.")
    overlap_grad_reduce: bool = key(False, "Sum gradients over data-parallel ranks while the backward still runs.")
    overlap_param_gather: bool = key(
        False, "Gather updated weights while the next forward already runs; needs `use_distributed_optimizer`."
    )
    recompute_granularity: str | None = key(
        None,
        "Activations to compute again in the backward instead of keeping them: whole layers, or `recompute_modules`; "
        "null = none.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = key(
        None,
        "With granularity full: recompute in groups of `recompute_num_layers` layers, or only the first that many of "
        "each stage; null = uniform.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = key(None, "See `recompute_method`; null = 1.", at_least=1)
    recompute_modules: list[str] = key(
        ["core_attn"],
        "With granularity selective: what is computed again.",
        choices=("core_attn", "mlp", "moe", "moe_act", "layernorm", "mla_up_proj"),
    )
    param_offload: bool = key(False, "Keep weights in host memory between the role's phases.")
    grad_offload: bool = key(False, "Give the gradient buffers' memory back between the role's phases.")
    optimizer_offload: bool = key(False, "Keep optimizer state in host memory between the role's phases.")
    dtype: str = key("bfloat16", "Number format of weights and activations.", choices=DTYPES)
    override_transformer_config: dict[str, Any] = key(
        {},
        "Fields of Megatron-Core's TransformerConfig by name, such as `attention_backend`, that say how the model is "
        "computed; checked against the installed one. What the model, the layout or a key above says is refused.",
    )


@dataclass
class OptimConfig:
    """Adam, its learning-rate schedule, and what happens to bad gradients."""

    lr: float = key(1e-6, "Peak learning rate.", at_least=0)
    betas: list[float] = key([0.9, 0.999], "Decay of Adam's two running means.", length=2, at_least=0, at_most=1)
    eps: float = key(1e-8, "Added to Adam's denominator.", above=0)
    weight_decay: float = key(0.01, "Decoupled weight decay.", at_least=0)
    clip_grad: float = key(1.0, "Largest global gradient norm; 0 = no clipping.", at_least=0)
    lr_warmup_steps: int = key(
        -1, "Optimizer steps of linear warm-up; -1 = use `lr_warmup_steps_ratio`.", at_least=0, allowed=(-1,)
    )
    lr_warmup_steps_ratio: float = key(
        0.0, "Warm-up as a share of `total_training_steps`; read where `lr_warmup_steps` is -1.", at_least=0, at_most=1
    )
    lr_decay_style: str = key(
        "constant",
        "Shape of the learning rate after warm-up; wsd = constant, then a decay over the last steps.",
        choices=("constant", "linear", "cosine", "wsd"),
    )
    lr_wsd_decay_steps: int = key(
        -1, "With wsd: optimizer steps of the decay; -1 = use `lr_wsd_decay_steps_ratio`.", at_least=1, allowed=(-1,)
    )
    lr_wsd_decay_steps_ratio: float = key(
        0.1,
        "With wsd: the decay as a share of `total_training_steps`; read where `lr_wsd_decay_steps` is -1.",
        above=0,
        at_most=1,
    )
    lr_wsd_decay_style: str = key(
        "exponential", "With wsd: shape of the decay.", choices=("linear", "cosine", "exponential")
    )
    min_lr: float = key(0.0, "Learning rate at the end of the decay.", at_least=0)
    total_training_steps: int | None = key(
        None, "Optimizer steps over which the schedule runs, at most the run's own; null = the run's own.", at_least=1
    )
    max_skipped_steps: int = key(
        3,
        "Optimizer steps in a row that may be skipped for a non-finite gradient (each is counted in a metric); "
        "one more stops the run.",
        at_least=0,
    )


@dataclass
class UpdateBatchConfig:
    """How one optimizer step's samples are cut to fit a device; it never changes the result."""

    use_dynamic_bsz: bool | None = key(
        None,
        "Fill micro-batches up to `ppo_max_token_len_per_gpu` tokens instead of a fixed number of samples; "
        "null = unless `ppo_micro_batch_size_per_gpu` is set.",
    )
    ppo_max_token_len_per_gpu: int = key(
        16384, "Tokens (prompt and response) per micro-batch and device; read with `use_dynamic_bsz`.", at_least=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per micro-batch and data-parallel rank; required without `use_dynamic_bsz`.", at_least=1
    )
    use_prefix_grouper: bool = key(
        True,
        "Keep samples of one prompt together where that is less work, and compute the prompt once for all of them in a "
        "micro-batch; no effect with context parallelism or Transformer Engine's layers.",
    )


@dataclass
class LogProbBatchConfig:
    """How samples are cut to fit a device where only log-probs are computed; null = as the actor's update."""

    log_prob_use_dynamic_bsz: bool | None = key(
        None,
        "Cut by tokens instead of samples; null = the actor's `use_dynamic_bsz`, and where that is null, too: unless "
        "`log_prob_micro_batch_size_per_gpu` is set.",
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        None, "Tokens per micro-batch and device; null = the actor's `ppo_max_token_len_per_gpu`.", at_least=1
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per micro-batch and data-parallel rank; null = the actor's `ppo_micro_batch_size_per_gpu`.",
        at_least=1,
    )


@dataclass
class RowConfig:
    """How a row of the data becomes tokens."""

    prompt_key: str = key("prompt", "Column that holds the chat messages.")
    system_prompt: str | None = key(
        None, "System message of the rows that have none, neither as first message nor in a column `system`."
    )
    apply_chat_template_kwargs: dict[str, Any] = key({}, "Extra arguments for the tokenizer's chat template.")
    filter_overlong_prompts_workers: int | None = key(
        None,
        "Processes that measure rows in tokens, for `filter_overlong_prompts` and `truncation: error`; null = one per "
        "16,384 rows, at most half of the cores.",
        at_least=1,
    )
    cache_dir: str | None = key(
        None,
        "Folder that keeps large files as rows that can be mapped, and the lengths of rows (see docs/data.md); null = "
        "`$XDG_CACHE_HOME/megarl/data`, or in `~/.cache`.",
    )


@dataclass
class CurriculumConfig:
    """Rows from easy to hard."""

    column: str | None = key(
        None, "Column of numbers, or `column.field`, by which rows are ordered, the lowest first; null = they are not."
    )
    epochs: int = key(1, "Epochs with that order; those after them are as `data.shuffle` says.", at_least=1)


@dataclass
class DataSourceConfig(RowConfig):
    """Data files to train on and the order in which they are read."""

    train_files: list[str] = key(
        REQUIRED,
        "Files to train on: parquet, JSONL, or folders of Hugging Face datasets; patterns, `~` and `$NAME` are filled "
        "in (see docs/data.md); [] with `mixture`.",
    )
    mixture: dict[str, Any] = key(
        {},
        "Data sets to mix, with `train_files: []`: by name, `files` and `weight`, a number, or numbers by step as "
        "`{1: 0.2, 100: 1}`, linear in between.",
    )
    curriculum: CurriculumConfig = section(CurriculumConfig)
    train_batch_size: int = key(1024, "Rows of the data per training step.", at_least=1)
    train_max_samples: int = key(
        -1, "Rows to train on, drawn with `seed`, or the first without `shuffle`; -1 = all.", at_least=1, allowed=(-1,)
    )
    shuffle: bool = key(True, "Draw rows in a random order, a new one in each epoch.")
    seed: int | None = key(None, "Seed of the order; null = `trainer.seed`.")


@dataclass
class RunConfig:
    """Name, devices and records of a run."""

    project_name: str = key("megarl", "Project under which trackers file the run.")
    experiment_name: str = key(REQUIRED, "Name of the run; its files go to `outputs/<experiment_name>/<time>`.")
    logger: list[str] = key(
        ["console", "jsonl"],
        "Where metrics go, any number of them; see docs/watching.md.",
        choices=("console", "jsonl", "mlflow", "swanlab", "tensorboard", "wandb"),
        custom="class",
    )
    tracker_timeout_s: float = key(
        60.0,
        "Seconds that wandb, swanlab, mlflow and others in processes of their own may take for a call, and to send "
        "what is outstanding when the run ends; beyond it they are given up, and the run goes on.",
        above=0,
    )
    log_level: str = key(
        "INFO",
        "What the files in `logs/` of the run's folder hold: `driver.log`, and one per role and rank.",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
    )
    quiet: bool = key(False, "Print only warnings, errors and the closing summary; `--quiet` sets it.")
    nnodes: int = key(1, "Machines.", at_least=1)
    n_gpus_per_node: int = key(8, "Devices per machine: GPUs, or process slots where `device` is cpu.", at_least=1)
    device: str = key("auto", "What to compute on; auto = CUDA where there is one.", choices=("auto", "cpu", "cuda"))
    sweep_metric: str | None = key(
        None,
        "Metric, at its last value, that the runs of a sweep are judged by; null = mean of the last validation, or "
        "without one the score, or the loss (see docs/sweeps.md).",
    )
    seed: int = key(1, "Seed of everything that has no seed of its own.", at_least=0)
    timeline: TimelineConfig = section(TimelineConfig)
    watchdog: WatchdogConfig = section(WatchdogConfig)

    @property
    def num_devices(self) -> int:
        """Devices of the whole pool."""
        return self.nnodes * self.n_gpus_per_node


@dataclass
class TrainingRunConfig(RunConfig):
    """Length, devices, checkpoints and records of a run that learns."""

    total_epochs: int = key(1, "Passes over the training data.", at_least=1)
    total_training_steps: int | None = key(
        None, "Training steps, in place of `total_epochs`; null = as many as the epochs give.", at_least=1
    )
    hf_export_dir: str | None = key(
        None,
        "Folder for the final model in Hugging Face format; null = none is written, or in `megarl.sft` "
        "and `megarl.reward_model` `outputs/<experiment_name>/hf`.",
    )
    save_freq: int = key(-1, "Save every so many steps, and after the last; -1 = never.", at_least=1, allowed=(-1,))
    resume_mode: str = key(
        "auto",
        "Continue from the newest checkpoint in `default_local_dir` (auto: or start anew where none was ever saved; "
        "must: or stop), start anew, or continue from `resume_from_path`.",
        choices=("auto", "must", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(None, "Checkpoint folder to continue from, with `resume_mode: resume_path`.")
    default_local_dir: str | None = key(
        None, "Folder of the checkpoints; null = `outputs/<experiment_name>/checkpoints`."
    )
    max_wall_seconds: float | None = key(
        None,
        "Wall-clock limit of the run, in seconds from its start: it saves and ends in time, with exit status 0, after "
        "the last step that fits; null = none but those that the scheduler tells (see docs/checkpoints.md).",
        above=0,
    )
    hardware: str | None = key(
        None,
        "Kind of node that `megarl plan` and the dry run plan for: a name, such as h100, or a file of your own (see "
        "docs/plan.md); null = h100, or cpu where `device` is cpu.",
    )
    dry_run: bool = key(
        False,
        "Go through everything but the model's mathematics and end (see docs/dry_run.md): models, layouts, data, "
        "rewards, memory, resharding, checkpoints, trackers. No GPU, no Ray, and of a model only config.json and "
        "tokenizer are needed.",
    )
    esi_redundant_time: float = key(
        0.0,
        "Seconds to spare where the run saves ahead of a deadline: of `max_wall_seconds`, of an elastic instance, of a "
        "Slurm job.",
        at_least=0,
    )
