"""Times predicted by ``megarl plan`` against published measurements.

Training: Korthikanti et al. (https://arxiv.org/abs/2205.05198, table 5), iteration times of GPT models on A100, with
selective and with full recomputation. Their MLP has two matrices of four times the hidden size, here three of 8/3.
Whole GRPO steps on H100: NeMo-RL's performance summary (version 0.4, on-policy rows), with its layouts, sizes and mean
lengths. The distribution of lengths is not published and taken as log-normal with sigma 0.5. Nothing is run here.

    python benchmarks/plan_published_times.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import MegatronConfig, TrainConfig
from megarl.config.batch import MicroBatches
from megarl.config.build import build
from megarl.models import ModelConfig, ParallelLayout, parse_model_config
from megarl.ops.plan import plan_memory, planned_job
from megarl.ops.plan.hardware import read_hardware
from megarl.ops.plan.job import PlannedPass, PlannedRole
from megarl.ops.plan.lengths import Lengths, Quantiles
from megarl.ops.plan.pass_times import PassTimer
from megarl.ops.plan.step_times import plan_sync, time_step


class Iteration(NamedTuple):
    """A training iteration of a GPT model on A100, with sequences of 2,048 tokens."""

    name: str
    layers: int
    hidden: int
    heads: int
    layout: ParallelLayout
    batch: int
    micro_batch: int
    selective_s: float
    full_s: float


ITERATIONS = [
    Iteration("GPT 22B", 48, 6144, 64, ParallelLayout(tp=8), 4, 4, 1.10, 1.42),
    Iteration("GPT 175B", 96, 12288, 96, ParallelLayout(tp=8, pp=8, vpp=3), 64, 1, 13.75, 18.13),
    Iteration("GPT 530B", 105, 20480, 128, ParallelLayout(tp=8, pp=35, vpp=3), 280, 1, 37.83, 49.05),
    Iteration("GPT 1T", 128, 25600, 160, ParallelLayout(tp=8, pp=64), 512, 1, 71.49, 94.42),
]


class Step(NamedTuple):
    """A GRPO step on H100."""

    name: str
    devices: int
    samples: int
    mini_batch: int
    mean: int
    longest: int
    rollout_tp: int
    megatron: dict[str, int]
    seconds: float


LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen3-32B": {
        **QWEN3,
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
    },
    "Qwen3-30B-A3B": {
        **QWEN3_MOE,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
    },
}
TP, PP, EP, ETP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
STEPS = [
    Step("Llama-3.1-8B", 16, 2048, 512, 1060, 4096, 1, {PP: 2}, 97.7),
    Step("Qwen3-32B", 32, 2048, 512, 3206, 4096, 4, {TP: 4, PP: 4}, 393),
    Step("Qwen3-30B-A3B", 32, 2048, 512, 3154, 4096, 4, {TP: 2, EP: 8, ETP: 1}, 225),
]
PROMPT = 128  # approximate tokens of a problem of OpenMathInstruct-2


def gpt(case: Iteration) -> ModelConfig:
    """Return a model with the same number of FLOPs."""
    return parse_model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": case.layers,
            "hidden_size": case.hidden,
            "intermediate_size": 8 * case.hidden // 3,
            "num_attention_heads": case.heads,
            "vocab_size": 51200,
            "max_position_embeddings": 2048,
        }
    )


def iteration_s(case: Iteration, recompute: str) -> float:
    """Return the predicted seconds of an iteration."""
    planned = PlannedPass("update", True, 2048, 2047, 1, 1, case.batch)
    megatron = MegatronConfig(recompute_granularity=recompute)
    role = PlannedRole("sft", "megatron", gpt(case), case.layout, megatron, False, True, (planned,))
    lengths = Lengths(Quantiles.constant(1), Quantiles.constant(2047), "2,048 tokens")
    micro = MicroBatches(samples=case.micro_batch, multiple=case.layout.pp if case.layout.vpp > 1 else 1)
    return PassTimer(role, read_hardware("a100"), lengths, 8).time(planned, micro).cost.seconds


def step_times(case: Step, folder: Path) -> dict[str, float]:
    """Return the predicted seconds of a step's phases, and of the whole step as ``step``."""
    model = folder / case.name
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({**MODELS[case.name], "max_position_embeddings": 32768}), encoding="utf-8"
    )
    config = build(
        TrainConfig,
        {
            "data": {
                "train_files": ["none"],
                "train_batch_size": case.samples // 16,
                "max_prompt_length": PROMPT,
                "max_response_length": case.longest - PROMPT,
            },
            "actor_rollout_ref": {
                "model": {"path": str(model)},
                "actor": {
                    "ppo_mini_batch_size": case.mini_batch // 16,
                    "max_token_len_per_gpu": case.longest,
                    "use_kl_loss": True,
                    "megatron": {**case.megatron, "param_offload": True, "optimizer_offload": True,
                                 "grad_offload": True, "recompute_granularity": "full"},
                },
                "rollout": {"name": "sglang", "n": 16, "tensor_model_parallel_size": case.rollout_tp,
                            "max_num_seqs": 1024},
            },
            "algorithm": {"adv_estimator": "grpo"},
            "trainer": {"nnodes": case.devices // 8, "experiment_name": "published", "device": "cuda"},
        },
    )  # fmt: skip
    hardware, job = read_hardware("h100"), planned_job(config)
    answers = Quantiles.log_normal(case.mean - PROMPT, 0.5, case.longest - PROMPT)
    lengths = Lengths(Quantiles.constant(PROMPT), answers, "published mean")
    memory, sync = plan_memory(job, int(hardware.memory_bytes)), plan_sync(job, hardware)
    assert sync is not None and memory.kv is not None
    step = time_step(job, hardware, lengths, sync.seconds, memory.kv.tokens)
    return {phase.phase: phase.cost.seconds for phase in step.phases} | {"step": step.seconds}


def main() -> None:
    """Print both tables."""
    print("| model | devices | recomputation | published s | predicted s | distance |\n|---|---|---|---|---|---|")
    for case in ITERATIONS:
        for recompute, published in (("selective", case.selective_s), ("full", case.full_s)):
            ours = iteration_s(case, recompute)
            print(f"| {case.name} | {case.layout.world_size} A100 | {recompute} | {published} | {ours:.2f} | "
                  f"{ours / published - 1:+.0%} |")  # fmt: skip
    print(
        "\n| model | devices | published step s | predicted step s | distance | predicted phases |\n" + "|---" * 6 + "|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for case in STEPS:
            times = step_times(case, Path(folder))
            total = times.pop("step")
            phases = ", ".join(f"{name} {seconds:.0f}" for name, seconds in times.items())
            print(f"| {case.name} | {case.devices} H100 | {case.seconds} | {total:.0f} | "
                  f"{total / case.seconds - 1:+.0%} | {phases} |")  # fmt: skip


if __name__ == "__main__":
    main()
