"""Traffic of a weight sync by megarl's reshard plan, by gathering, and at minimum; cost of planning.

    python benchmarks/reshard_plan.py [--gpus 512]

Nothing is sent here: the bytes follow from plan and layouts, all in bfloat16. A node has eight GPUs. In the rows
"same", rollout rank r shares its GPU with training rank r. In the rows "apart", the engines are on separate nodes.
Received bytes are those of the rank that receives most, without bytes on its GPU:

- everything: every rollout rank receives every full tensor, and keeps its shard;
- within TP: every training rank gathers its stage's tensors over the ranks that share them (experts over expert-tensor
  parallelism), then cuts and sends each engine rank its shard;
- megarl: by the plan;
- bound: a rank's shard minus the part held by the training rank on its GPU, from the rectangles of both. The script
  fails if megarl's plan differs from the bound for any rank.

Times come from a model: each GPU has a link of 450 GB/s to the others of its node and one of 50 GB/s to other nodes, in
each direction. All links are busy at once, and the sync takes as long as the busiest link, over all ranks and both
directions. "Everything" has two times: each rank fetches all bytes by itself, or each node fetches each byte once over
its eight links and distributes it inside, as a good collective does.

Planning time is the median of ``--runs`` in processor seconds. Memory is the peak of Python's and numpy's allocations
in a separate run. "plan MB" is the size of the pickled plan, "part MB" the size of the largest part sent to a rank,
"parts s" the time to cut the plan into parts, and the check is that of one engine rank's part. For the last row, 4,096
training ranks, only these are shown.
"""

from __future__ import annotations

import os
import pickle
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from machine import benchmark_parser, parse_sizes, processor

from megarl.models import LocalParam, ParallelLayout, Piece, WeightMap, parse_model_config
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import ReshardPlan, build_plan, receiver_plans, sender_plans
from megarl.sharding.verification import check_coverage

GPUS_PER_NODE, INSIDE, BETWEEN = 8, 450e9, 50e9
ELEMENT_BYTES, BUCKET_BYTES = 2, 512 * 2**20

# From the models' published config.json, only keys that determine shapes.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "Llama-3-70B": {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
    },
}


class Case(NamedTuple):
    """A sync to plan."""

    model: str
    train: ParallelLayout
    rollout: RolloutLayout
    apart: bool = False

    @property
    def placement(self) -> Placement:
        """Eight GPUs to a node; the engines on the trainer's GPUs, or behind them."""
        train, first = self.train.world_size, self.train.world_size if self.apart else 0
        first += -first % GPUS_PER_NODE
        return Placement.of_devices(range(train), range(first, first + self.rollout.world_size), GPUS_PER_NODE)


# 61 layers over 8 stages: 8 per stage, 5 in the last.
DEEPSEEK = ParallelLayout(tp=8, pp=8, dp=4, ep=8, etp=1, last_stage_layers=5)
CASES = [
    Case("Llama-3-8B", ParallelLayout(tp=4, dp=4), RolloutLayout(1, replicas=16)),
    Case("Qwen3-30B-A3B", ParallelLayout(tp=4, pp=2, dp=4, ep=8, etp=1), RolloutLayout(4, 4, 8)),
    Case("Llama-3-70B", ParallelLayout(tp=8, pp=4, dp=4), RolloutLayout(8, replicas=16)),
    Case("DeepSeek-V3", DEEPSEEK, RolloutLayout(16, 16, 16)),
    # Experts split over tensor parallelism, Megatron's default, on as few ranks as possible.
    Case("DeepSeek-V3", ParallelLayout(tp=8, pp=8, dp=8, ep=8, last_stage_layers=5), RolloutLayout(16, 16, 32)),
]
LARGEST = Case("DeepSeek-V3", DEEPSEEK._replace(dp=64), RolloutLayout(16, 16, 256))


class Traffic(NamedTuple):
    """Bytes per rank over links: ``[training ranks + rollout ranks]`` for separate engines, else ``[ranks]``."""

    inside_in: np.ndarray
    inside_out: np.ndarray
    between_in: np.ndarray
    between_out: np.ndarray

    @property
    def received(self) -> float:
        """Bytes of the rank that receives most."""
        return float((self.inside_in + self.between_in).max())

    @property
    def seconds(self) -> float:
        """Seconds of the busiest link."""
        inside, between = (self.inside_in, self.inside_out), (self.between_in, self.between_out)
        return float(max(max(x.max() for x in inside) / INSIDE, max(x.max() for x in between) / BETWEEN))


def weight_map_of(case: Case) -> WeightMap:
    """Return the weight map of the case's model."""
    return WeightMap(parse_model_config(MODELS[case.model]))


def plan_of(case: Case, weight_map: WeightMap) -> ReshardPlan:
    """Return the case's plan."""
    return build_plan(weight_map, case.train, case.rollout, BUCKET_BYTES, ELEMENT_BYTES, case.placement)


def element_bytes(weight_map: WeightMap, hf_name: str) -> int:
    """Return the size of a tensor's element in transit."""
    return 4 if weight_map.is_float32(hf_name) else ELEMENT_BYTES


def megarl_traffic(case: Case, plan: ReshardPlan) -> Traffic:
    """Return the traffic of the plan."""
    placement = case.placement
    everyone = np.array([*placement.train, *placement.rollout]) @ (GPUS_PER_NODE, 1)
    source, destination, nbytes = plan.pair_nbytes()
    source, destination = everyone[source], everyone[case.train.world_size + destination]
    inside = (source // GPUS_PER_NODE == destination // GPUS_PER_NODE) & (source != destination)
    between = source // GPUS_PER_NODE != destination // GPUS_PER_NODE
    count = int(everyone.max()) + 1
    return Traffic(
        *(
            np.bincount(rank[which], nbytes[which], minlength=count)
            for which in (inside, between)
            for rank in (destination, source)
        )
    )


def everything(case: Case, weight_map: WeightMap) -> tuple[float, float, float]:
    """Return the bytes if every rank receives the whole model, and seconds by rank alone and by node."""
    model_bytes = shard_bytes(weight_map, [Piece(n, (0,) * len(s), s, ()) for n, s in weight_map.hf_shapes().items()])
    if case.apart:
        return model_bytes, model_bytes / BETWEEN, max(model_bytes / GPUS_PER_NODE / BETWEEN, model_bytes / INSIDE)
    ranks = range(case.train.world_size)
    held = [{p for param in weight_map.megatron_params(case.train, r) for p in param.pieces} for r in ranks]
    own = min(shard_bytes(weight_map, {p._replace(at=()) for p in pieces}) for pieces in held)
    nodes = [held[first : first + GPUS_PER_NODE] for first in ranks[::GPUS_PER_NODE]]
    near = min(shard_bytes(weight_map, {p._replace(at=()) for p in set().union(*node)}) for node in nodes)
    alone = max((model_bytes - near) / BETWEEN, (near - own) / INSIDE)
    return model_bytes - own, alone, max((model_bytes - near) / GPUS_PER_NODE / BETWEEN, (model_bytes - own) / INSIDE)


def shard_bytes(weight_map: WeightMap, pieces: Iterable[Piece]) -> int:
    """Return the total size of different rectangles."""
    return sum(prod(piece.shape) * element_bytes(weight_map, piece.hf_name) for piece in pieces)


def within_tp_traffic(case: Case, weight_map: WeightMap, ours: Traffic) -> Traffic:
    """Return the traffic if training ranks first gather the full tensors of their stage."""
    train = case.train
    gathered = np.zeros(len(ours.inside_in))
    for rank in range(train.world_size):
        stage = set(train.stage_layers(weight_map.config.num_layers, train.coordinate(rank).pp))
        gathered[rank] = sum(
            (len(pattern.sources) - 1)
            * len(stage.intersection(pattern.layers))
            * max(1, pattern.experts // train.ep)
            * shard_bytes(weight_map, pattern.sources[0])
            for pattern in weight_map.patterns(train, case.rollout.tp, case.rollout.ep)
            if len(pattern.layers) > 1
        )
    return ours._replace(inside_in=ours.inside_in + gathered, inside_out=ours.inside_out + gathered)


def overlap(weight_map: WeightMap, shard: list[LocalParam], held_params: list[LocalParam]) -> int:
    """Return the bytes of a shard that are among the held parameters."""
    pieces = defaultdict(set)
    for param in held_params:
        for piece in param.pieces:
            pieces[piece.hf_name].add((piece.start, piece.stop))
    total = 0
    for param in shard:
        for piece in param.pieces:
            for start, stop in pieces.get(piece.hf_name, ()):
                sides = [min(b, d) - max(a, c) for a, b, c, d in zip(piece.start, piece.stop, start, stop, strict=True)]
                total += prod(max(0, side) for side in sides) * element_bytes(weight_map, piece.hf_name)
    return total


def bounds(case: Case, weight_map: WeightMap) -> np.ndarray:
    """Return the minimum bytes that each rollout rank must receive."""
    layout = case.rollout
    shards = [weight_map.rollout_params(layout.tp, rank, layout.ep) for rank in range(layout.tp)]
    sizes = [overlap(weight_map, shard, shard) for shard in shards]
    result = np.array([sizes[rank % layout.tp] for rank in range(layout.world_size)])
    if not case.apart:
        for rank in range(min(layout.world_size, case.train.world_size)):
            held = weight_map.megatron_params(case.train, rank)
            result[rank] -= overlap(weight_map, shards[rank % layout.tp], held)
    return result


class Cost(NamedTuple):
    """Time and memory of planning."""

    seconds: float
    megabytes: float
    pickled: int
    largest_part: int
    parts_seconds: float
    coverage_seconds: float


def planning_cost(case: Case, weight_map: WeightMap, runs: int) -> Cost:
    """Return time and memory of planning, size of the plan, and time of one rank's coverage check."""
    seconds = []
    for _ in range(runs):
        started = time.process_time()
        plan = plan_of(case, weight_map)
        seconds.append(time.process_time() - started)
    pickled = len(pickle.dumps(plan, 5))
    started = time.process_time()
    parts = [*sender_plans(plan, case.train.world_size), *receiver_plans(plan)]
    cutting = time.process_time() - started
    largest = max(len(pickle.dumps(part, 5)) for part in parts)
    del parts
    started = time.process_time()
    check_coverage(plan, {0: weight_map.rollout_params(case.rollout.tp, 0, case.rollout.ep)})
    coverage = time.process_time() - started
    del plan
    tracemalloc.start()
    plan_of(case, weight_map)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Cost(statistics.median(seconds), peak / 1e6, pickled, largest, cutting, coverage)


def row(case: Case, weight_map: WeightMap, runs: int) -> list[str]:
    """Return one line of the table."""
    traffic = moved(case, weight_map) if case is not LARGEST else ["-"] * 8
    cost = planning_cost(case, weight_map, runs)
    return [
        case.model,
        f"{case.train.describe()} -> {case.rollout.describe()}",
        "apart" if case.apart else "same",
        *traffic,
        f"{cost.seconds:.2f}",
        f"{cost.megabytes:.0f}",
        f"{cost.pickled / 1e6:.1f}",
        f"{cost.largest_part / 1e6:.2f}",
        f"{cost.parts_seconds:.2f}",
        f"{cost.coverage_seconds:.2f}",
    ]


def moved(case: Case, weight_map: WeightMap) -> list[str]:
    """Return bytes and times of all methods."""
    ours = megarl_traffic(case, plan_of(case, weight_map))
    bound = bounds(case, weight_map)
    received = ours.inside_in + ours.between_in
    np.testing.assert_array_equal(received[-len(bound) :] if case.apart else received[: len(bound)], bound)
    gathered = within_tp_traffic(case, weight_map, ours)
    model_bytes, alone, shared = everything(case, weight_map)
    return [
        *(f"{x / 1e9:.2f}" for x in (model_bytes, gathered.received, ours.received, bound.max())),
        *(f"{1e3 * x:.0f}" for x in (alone, shared, gathered.seconds, ours.seconds)),
    ]


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print a Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for cells in (head, ["-" * width for width in widths], *rows):
        print(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |", flush=True
        )


def main() -> None:
    """Print the table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--runs", type=int, default=3, help="plans per case; the median counts")
    parser.add_argument("--gpus", type=int, nargs="+", help="only cases with so many training ranks")
    options = parse_sizes(parser, runs=1, gpus=[8])
    runs = options.runs
    print(f"{processor()}, one thread, buckets of {BUCKET_BYTES // 2**20} MiB\n")
    head = ["model", "layouts", "GPUs", "everything GB", "within TP GB", "megarl GB", "bound GB"]
    head += ["everything, alone ms", "everything, by node ms", "within TP ms", "megarl ms"]
    head += ["plan s", "peak MB", "plan MB", "part MB", "parts s", "one rank's check s"]
    cases = [*(case._replace(apart=apart) for case in CASES for apart in (False, True)), LARGEST]
    if options.gpus:
        cases = [case for case in cases if case.train.world_size in options.gpus]
    maps = {case.model: weight_map_of(case) for case in cases}
    print_table(head, [row(case, maps[case.model], runs) for case in cases])


if __name__ == "__main__":
    main()
