"""Memory predicted by `megarl plan` against the real engine.

    python benchmarks/plan_memory.py            # on a CPU, in up to four processes
    python benchmarks/plan_memory.py --cuda     # on one GPU

On a CPU, this uses the engines of the plan's tests. States are the storages of weights, gradient buffers and optimizer
tensors. Activations are the peak of the tensors that autograd saves in a step, each storage once
(`tests/ops/plan/engine_memory.py`). The table shows each engine's rank with the largest difference.

On a GPU, models with about a billion weights train for two steps. `torch.cuda.max_memory_allocated` is compared with
the plan's states plus activations. It includes memory that CUDA libraries allocate through torch, but not their other
memory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("", "megatron", "ops/plan")]

import torch  # noqa: E402
from engine_cases import policy_loss  # noqa: E402
from engine_memory import measure  # noqa: E402
from machine import benchmark_parser, parse_sizes, processor  # noqa: E402
from memory_cases import CASES, MODELS, ROWS, expected  # noqa: E402
from support.distributed import ProcessPool  # noqa: E402
from tiny_models import rows_of, save_model  # noqa: E402

from megarl.base.ports import free_port  # noqa: E402
from megarl.config import MegatronConfig  # noqa: E402
from megarl.megatron import (  # noqa: E402
    MegatronEngine,
    MegatronOptions,
    OptimizerOptions,
    OutputOptions,
    PackedMicroBatch,
    RecomputeOptions,
    init_runtime,
    shutdown_runtime,
)
from megarl.models import ModelConfig, ParallelLayout, parse_model_config  # noqa: E402
from megarl.ops.plan.job import PlannedPass, PlannedRole  # noqa: E402
from megarl.ops.plan.pass_activations import role_activations  # noqa: E402
from megarl.ops.plan.states import StateCounter  # noqa: E402

BILLION: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
PROMPT, RESPONSE, ROWS_ON_GPU = 512, 1536, 4


class OnGpu(NamedTuple):
    """An engine on one GPU."""

    entropy: bool = False
    recompute: RecomputeOptions | None = None
    distributed: bool = True


GPU_CASES = {
    "plain": OnGpu(),
    "entropy": OnGpu(entropy=True),
    "plain optimizer": OnGpu(distributed=False),
    "full recomputation": OnGpu(recompute=RecomputeOptions()),
    "half of the layers": OnGpu(recompute=RecomputeOptions(method="block", num_layers=8)),
    "attention again": OnGpu(recompute=RecomputeOptions("selective")),
    "attention and MLP again": OnGpu(recompute=RecomputeOptions("selective", modules=("core_attn", "mlp"))),
}


def on_cpu(cases: int | None) -> None:
    pool = ProcessPool(4)
    print(f"{processor()}\n\n| engine | states, plan | real | activations, plan | real | off by |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in MODELS}
        for name, settings in MODELS.items():
            save_model(paths[name], **settings)
        for name, case in list(CASES.items())[:cases]:
            path, ranks = paths[case.model], case.setup.layout.world_size
            measured = pool.run(measure, ranks, path, case.setup, ROWS)
            pairs = [(expected(path, case.setup, ROWS, rank), real) for rank, real in enumerate(measured)]
            plan, real = max(pairs, key=lambda pair: abs(pair[0].saved / pair[1].saved - 1))
            sizes = f"{sum(plan[1:5]):,} | {sum(real[1:5]):,} | {plan.saved:,} | {real.saved:,}"
            print(f"| {name} | {sizes} | {100 * (plan.saved / real.saved - 1):+.1f} % |", flush=True)
    pool.close()


def on_gpu() -> None:
    print(f"{torch.cuda.get_device_name()}\n\n| engine | plan | max_memory_allocated | off by |\n|---|---|---|---|")
    model = parse_model_config(BILLION)
    for name, case in GPU_CASES.items():
        plan, real = predicted(model, case), allocated(model, case)
        print(f"| {name} | {plan / 1e9:.2f} GB | {real / 1e9:.2f} GB | {100 * (plan / real - 1):+.1f} % |", flush=True)


def predicted(model: ModelConfig, case: OnGpu) -> int:
    again = case.recompute
    megatron = MegatronConfig(
        use_distributed_optimizer=case.distributed,
        recompute_granularity=again.granularity if again else None,
        recompute_method=again.method if again else None,
        recompute_num_layers=again.num_layers if again else None,
        recompute_modules=list(again.modules) if again else [],
    )
    role = PlannedRole("actor", "megatron", model, ParallelLayout(), megatron, False, True, ())
    tokens, outputs = ROWS_ON_GPU * (PROMPT + RESPONSE), ROWS_ON_GPU * RESPONSE
    planned = PlannedPass("update", True, tokens, outputs, 2, 1, 0, case.entropy, longest=PROMPT + RESPONSE)
    return StateCounter(role).of(0).total + role_activations(role, planned, 0, fused=True).total


def allocated(model: ModelConfig, case: OnGpu) -> int:
    layout = ParallelLayout()
    runtime = init_runtime(layout, 0, 1, "127.0.0.1", free_port(), device="cuda")
    try:
        optimizer = OptimizerOptions(lr=1e-6, use_distributed_optimizer=case.distributed)
        options = MegatronOptions(torch.bfloat16, optimizer=optimizer, recompute=case.recompute)
        engine = MegatronEngine(model, layout, runtime, options)
        with torch.no_grad():
            for param in engine.weights.parameters().values():
                param.normal_(std=0.02)
            engine.optimizer.weights_changed()
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            batches = [_micro_batch(number) for number in range(2)]
            engine.forward_backward(
                batches, policy_loss if case.entropy else likelihood, OutputOptions(1.0, case.entropy)
            )
            engine.optimizer_step()
        return torch.cuda.max_memory_allocated()
    finally:
        shutdown_runtime()
        torch.cuda.empty_cache()


def likelihood(outputs: Any, micro_batch: PackedMicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(outputs.log_probs * micro_batch.columns["weights"]).sum()
    return loss, {"loss": loss}


def _micro_batch(seed: int) -> PackedMicroBatch:
    rows = rows_of([(PROMPT, RESPONSE)] * ROWS_ON_GPU, seed)
    columns = {"weights": torch.cat([row.weights for row in rows])}
    return PackedMicroBatch.from_rows([(row.prompt, row.response) for row in rows], columns)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--cuda", action="store_true", help="measure on one GPU")
    parser.add_argument("--cases", type=int, help="only the first cases")
    args = parse_sizes(parser, cases=1)
    on_gpu() if args.cuda else on_cpu(args.cases)


if __name__ == "__main__":
    main()
