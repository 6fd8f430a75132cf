"""Sections of a Megatron model: path, devices, parallel layout, optimizer, micro-batches and checkpoint contents."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megarl.config.keys import REQUIRED, derived_key, key, section

DTYPES = ("float32", "bfloat16")
RESUMABLE = ("model", "optimizer", "extra")
"""Checkpoint contents that an exact resume needs."""
HF_MODEL = "hf_model"
REPLICA_SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
}
"""Keys of the layout whose product is the number of devices of one model replica, with their names in messages."""


@dataclass(frozen=True)
class OwnDevicesConfig:
    """Devices that no other role uses (a resource pool of the role)."""

    nnodes: int = key(
        0,
        "Nodes with devices of this role alone (its resource pool), where weights stay on the devices: "
        "`megatron.param_offload` has no effect. 0 = the role shares the trainer's devices. See "
        "docs/how_to/layouts.md.",
        at_least=0,
    )
    n_gpus_per_node: int | None = derived_key(
        "Devices of the role on each of `nnodes` nodes; auto = `trainer.n_gpus_per_node`.", at_least=1
    )

    @property
    def own_devices(self) -> int:
        """Devices of the role alone; 0 = the role shares the trainer's devices."""
        return self.nnodes * (self.n_gpus_per_node or 0)

    @property
    def device_groups(self) -> list[int]:
        """Sizes of the groups of devices that are reserved together, each on one node."""
        return [self.n_gpus_per_node or 1] * self.nnodes

    @property
    def required_groups(self) -> int | None:
        """Groups that the run needs to start; None = all."""
        return None


@dataclass(frozen=True)
class ModelPathConfig:
    """Model, tokenizer and code to import."""

    path: str = key(REQUIRED, "Folder of the Hugging Face model: config.json, safetensors and tokenizer.")
    tokenizer_path: str | None = derived_key("Folder of the tokenizer; auto = `path`.")
    external_lib: list[str] | None = key(
        None,
        "User modules that every process of the run imports first, each as `path.py` or `package.module`; they may "
        "register model families (docs/how_to/add_a_model.md); null = none.",
    )

    @property
    def user_modules(self) -> tuple[str, ...]:
        """The modules of ``external_lib``; empty if it is null."""
        return tuple(self.external_lib or ())


@dataclass(frozen=True)
class LoraConfig:
    """Further settings of low-rank adapters; the main ones are keys of the model's section."""

    type: str = key(
        "lora",
        "Kind of adapters: `W + scale * B A` (lora), or each row of this sum rescaled to a trained magnitude (dora, "
        "weight-decomposed).",
        choices=("lora", "dora"),
    )
    use_rslora: bool = key(False, "Scale adapters by `lora_alpha / sqrt(lora_rank)` (rank-stabilized LoRA).")
    lora_A_init_method: str = key(
        "kaiming",
        "Initial values of A: uniform as in peft (kaiming), or normal as in Megatron-Bridge (xavier). B starts at 0.",
        choices=("kaiming", "xavier"),
    )
    adapt_vision_tower: bool = key(
        False,
        "Select `target_modules` also in the vision tower of a model with images; false = in the decoder alone. With "
        "all-linear these are all linear layers of the tower that are not trained in full.",
    )
    freeze_vision_model: bool = key(
        True,
        "Leave the weights of the vision tower's patch embedding and blocks; false = train them in full beside the "
        "adapters.",
    )
    freeze_vision_projection: bool = key(
        True,
        "Leave the weights of the vision tower's mergers, which project features to the decoder; false = train them "
        "in full beside the adapters.",
    )
    reference: str = key(
        "base",
        "Reference policy of the KL term: the model without adapters (base), or with those of `lora_adapter_path` "
        "(adapter). Both share the actor's weights.",
        choices=("base", "adapter"),
    )


@dataclass(frozen=True)
class AdapterKeys:
    """Low-rank adapters (LoRA) of a role that trains; see docs/how_to/lora.md."""

    lora_rank: int = key(0, "Rank of low-rank adapters, which alone are trained; 0 = train all weights.", at_least=0)
    lora_alpha: float = key(16.0, "The adapters' output is multiplied by `lora_alpha / lora_rank`.", above=0)
    target_modules: list[str] = key(
        ["all-linear"],
        "Layers with adapters: Hugging Face modules or their last parts, such as q_proj; Megatron's layers, such as "
        "linear_qkv; or all-linear = attention, MLP and experts, without router and output layer.",
    )
    exclude_modules: list[str] | None = key(
        None, "Layers without adapters among `target_modules`, by the same names; null = none."
    )
    lora_adapter_path: str | None = key(
        None,
        "Folder of adapters in peft's format to continue from, with the rank, scale and layers set here; null = new "
        "adapters.",
    )
    lora: LoraConfig = section(LoraConfig)

    @property
    def trains_tower(self) -> bool:
        """Whether a vision tower has trained adapters or weights."""
        unfrozen = not (self.lora.freeze_vision_model and self.lora.freeze_vision_projection)
        return bool(self.lora_rank) and (self.lora.adapt_vision_tower or unfrozen)


@dataclass(frozen=True)
class TrainedModelConfig(AdapterKeys, ModelPathConfig):
    """Model, tokenizer, code to import, and adapters."""


@dataclass(frozen=True)
class MegatronConfig:
    """Parallel layout, number format and memory of one role's Megatron model."""

    tensor_model_parallel_size: int = key(1, "Tensor parallelism: devices that share each layer.", at_least=1)
    pipeline_model_parallel_size: int = key(1, "Pipeline parallelism: stages that share the layers.", at_least=1)
    virtual_pipeline_model_parallel_size: int | None = key(
        None, "Chunks of layers per stage (interleaved schedule); null = a single one.", at_least=1
    )
    context_parallel_size: int = key(1, "Context parallelism: devices that share each sequence.", at_least=1)
    expert_model_parallel_size: int = key(
        1, "Expert parallelism: groups of devices that share the experts of a mixture-of-experts model.", at_least=1
    )
    expert_tensor_parallel_size: int | None = derived_key(
        "Devices that share each expert; auto = `tensor_model_parallel_size`.", at_least=1
    )
    data_parallel_size: int | None = derived_key(
        "Replicas of the model; auto = the role's devices divided by the other sizes.", at_least=1
    )
    num_layers_in_first_pipeline_stage: int | None = key(
        None, "Layers of the first stage; null = like the other stages.", at_least=1
    )
    num_layers_in_last_pipeline_stage: int | None = key(
        None, "Layers of the last stage; null = like the other stages.", at_least=1
    )
    account_for_embedding_in_pipeline_split: bool = key(
        False, "Count the embedding as one layer in the split over pipeline stages."
    )
    account_for_loss_in_pipeline_split: bool = key(
        False, "Count the output layer as one layer in the split over pipeline stages."
    )
    sequence_parallel: bool = key(
        True, "Split activations over the tensor-parallel ranks by sequence; no effect at tensor parallel 1."
    )
    use_distributed_optimizer: bool = key(True, "Shard optimizer state over the data-parallel ranks.")
    overlap_grad_reduce: bool = key(False, "Reduce gradients over data-parallel ranks during the backward pass.")
    overlap_param_gather: bool = key(
        False, "Gather updated weights during the next forward pass; needs `use_distributed_optimizer`."
    )
    recompute_granularity: str | None = key(
        None,
        "Activations to recompute in the backward pass instead of keeping them: whole layers (full), or "
        "`recompute_modules` (selective); null = none.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = derived_key(
        "With granularity full: recompute in groups of `recompute_num_layers` layers (uniform), or only the first "
        "`recompute_num_layers` layers of each stage (block); auto = uniform.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = derived_key("See `recompute_method`; auto = 1.", at_least=1)
    recompute_modules: list[str] = key(
        ["core_attn"],
        "Modules to recompute with granularity selective; moe_act needs Transformer Engine's experts, which neither "
        "float32 nor LoRA uses.",
        choices=("core_attn", "mlp", "moe", "moe_act", "layernorm"),
    )
    param_offload: bool = key(False, "Keep weights in host memory between the role's phases.")
    grad_offload: bool = key(False, "Release the memory of gradient buffers between the role's phases.")
    optimizer_offload: bool = key(False, "Keep optimizer state in host memory between the role's phases.")
    dtype: str = key("bfloat16", "Number format of weights and activations.", choices=DTYPES)
    override_transformer_config: dict[str, Any] = key(
        {},
        "Fields of Megatron-Core's TransformerConfig by name, such as `attention_backend`; checked against the "
        "installed version. Other fields than the supported ones are rejected, with the reason.",
    )

    @property
    def devices_per_replica(self) -> int:
        """Devices that hold the model once: tensor x pipeline x context parallel size."""
        sizes = (self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.context_parallel_size)
        return math.prod(sizes)

    @property
    def layout(self) -> str:
        """The layout in short, such as ``TP2 PP1 DP4 CP2``."""
        text = f"TP{self.tensor_model_parallel_size} PP{self.pipeline_model_parallel_size} DP{self.data_parallel_size}"
        optional = {
            "CP": self.context_parallel_size,
            "EP": self.expert_model_parallel_size,
            "VPP": self.virtual_pipeline_model_parallel_size or 1,
        }
        return text + "".join(f" {name}{size}" for name, size in optional.items() if size > 1)


@dataclass(frozen=True)
class OptimConfig:
    """Adam, its learning-rate schedule, and the handling of bad gradients."""

    lr: float = key(1e-6, "Peak learning rate.", at_least=0)
    betas: list[float] = key([0.9, 0.999], "Decay of Adam's two running means.", length=2, at_least=0, at_most=1)
    eps: float = key(1e-8, "Added to Adam's denominator.", above=0)
    weight_decay: float = key(0.01, "Decoupled weight decay.", at_least=0)
    clip_grad: float = key(1.0, "Largest global gradient norm; 0 = no clipping.", at_least=0)
    lr_warmup_steps: int = key(
        -1, "Optimizer steps of linear warm-up; -1 = use `lr_warmup_steps_ratio`.", at_least=0, allowed=(-1,)
    )
    lr_warmup_steps_ratio: float = key(
        0.0, "Warm-up as a share of `total_training_steps`; read if `lr_warmup_steps` is -1.", at_least=0, at_most=1
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
        "With wsd: decay as a share of `total_training_steps`; read if `lr_wsd_decay_steps` is -1.",
        above=0,
        at_most=1,
    )
    lr_wsd_decay_style: str = key(
        "exponential", "With wsd: shape of the decay.", choices=("linear", "cosine", "exponential")
    )
    min_lr: float = key(0.0, "Learning rate at the end of the decay.", at_least=0)
    total_training_steps: int | None = derived_key(
        "Optimizer steps of the schedule, at most those of the run; auto = those of the run.", at_least=1
    )
    max_skipped_steps: int = key(
        3,
        "Consecutive optimizer steps that may be skipped for a non-finite gradient (a metric counts them); one more "
        "stops the run.",
        at_least=0,
    )


@dataclass(frozen=True)
class UpdateBatchConfig:
    """Micro-batches of an update; their size never changes the result."""

    use_dynamic_bsz: bool | None = derived_key(
        "Fill micro-batches up to `max_token_len_per_gpu` tokens instead of a fixed number of samples; "
        "auto = true unless `micro_batch_size_per_gpu` is set.",
    )
    max_token_len_per_gpu: int = key(
        16384, "Tokens (prompt and response) per micro-batch and device; read with `use_dynamic_bsz`.", at_least=1
    )
    micro_batch_size_per_gpu: int | None = key(
        None,
        "Samples per micro-batch and data-parallel rank; required without `use_dynamic_bsz`; null = none.",
        at_least=1,
    )
    use_prefix_grouper: bool = key(
        True,
        "Keep samples of one prompt in one micro-batch if that saves work, and compute the prompt, and any longer "
        "beginning that sequences of a micro-batch have in common, once for all of them; no effect with context "
        "parallelism.",
    )


@dataclass(frozen=True)
class LogProbBatchConfig:
    """Micro-batches of passes that only compute log-probs; auto = as in the actor's update."""

    use_dynamic_bsz: bool | None = derived_key(
        "Cut micro-batches by tokens instead of samples; auto = the actor's `use_dynamic_bsz`, or if that is auto "
        "too, true unless `micro_batch_size_per_gpu` is set.",
    )
    max_token_len_per_gpu: int | None = derived_key(
        "Tokens per micro-batch and device; auto = the actor's `max_token_len_per_gpu`.", at_least=1
    )
    micro_batch_size_per_gpu: int | None = derived_key(
        "Samples per micro-batch and data-parallel rank; auto = the actor's `micro_batch_size_per_gpu`.",
        at_least=1,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Contents of a role's checkpoints."""

    save_contents: list[str] = key(
        [*RESUMABLE],
        "Contents to save: model = weights; optimizer = optimizer state and schedule position; extra = random states "
        "of every rank; hf_model = a Hugging Face folder `huggingface/` for other programs. An exact resume needs the "
        "first three.",
        choices=(*RESUMABLE, HF_MODEL),
    )
    load_contents: list[str] = key(
        [*RESUMABLE],
        "Contents to restore: without optimizer, Adam and the learning rate restart; without extra, the random states "
        "do.",
        choices=RESUMABLE,
    )
    async_save: bool = key(
        False,
        "Copy the state to host memory (as many bytes as on the device) and write it during training. The driver then "
        "makes a Hugging Face export from the files of the checkpoint.",
    )

    @property
    def missing_contents(self) -> list[str]:
        """Contents that an exact resume needs and that checkpoints will not hold."""
        return [name for name in RESUMABLE if name not in self.save_contents]
