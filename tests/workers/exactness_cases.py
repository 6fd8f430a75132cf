"""Random layouts and micro-batches for one update, each rank's results, and the reference of plain transformers."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from role_processes import ACTOR, CRITIC, log_prob_settings, role_settings, with_offload
from safetensors.torch import load_file
from support.distributed import Place, ProcessPool
from support.whole_tensors import whole_tensors
from tiny_policies import (
    RESPONSE_WIDTH,
    ROW_LENGTHS,
    Trained,
    actor_tokens,
    critic_tokens,
    load_model,
    rows_of,
    save_model,
    sft_tokens,
    train,
    training_batch,
)
from torch import Tensor

from megarl.base.algorithm_names import LOSS_AGG_MODES
from megarl.base.errors import ConfigError
from megarl.cluster.partition import partition_rows
from megarl.data import DataProto
from megarl.megatron import MegatronEngine, shutdown_runtime
from megarl.models import ParallelLayout, check_layout, read_model_config
from megarl.workers.actor import ActorWorker
from megarl.workers.critic import CriticWorker
from megarl.workers.dispatch import WorkerPlace, read_marks
from megarl.workers.settings import MicroBatchBudget, UpdatePlan
from megarl.workers.supervised import SFTWorker

MINI_BATCH_ROWS = len(ROW_LENGTHS)
STEPS = 2
BUCKET_SIZE = 3000  # parameters; small, so that a model of this size has several
WORLDS = (4, 2, 4, 8, 2, 4, 1)
WORKERS = {"actor": ActorWorker, "critic": CriticWorker, "sft": SFTWorker}
VERBS = {"actor": "update_actor", "critic": "update_critic", "sft": "update_sft"}
TOKENS = {"actor": actor_tokens, "critic": critic_tokens, "sft": sft_tokens}

# Weights large enough that errors show, not so large that layers multiply what rounding leaves.
DENSE = {
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "initializer_range": 0.1,
}
EXPERTS = {
    **DENSE,
    "num_hidden_layers": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_experts": 4,
}
LATENTS = {
    **EXPERTS,
    "num_key_value_heads": 8,
    "head_dim": 4,  # the rotated part
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0]}
MODELS: dict[tuple[str, bool], dict[str, Any]] = {
    ("actor", False): {"family": "qwen3", "tie_word_embeddings": True, **DENSE},
    ("critic", False): {"family": "llama", "critic": True, **DENSE},
    ("sft", False): {"family": "qwen2", **DENSE},
    ("actor", True): {"family": "qwen2_moe", **SHARED},
    ("critic", True): {"family": "qwen3_moe", "critic": True, "norm_topk_prob": True, **EXPERTS},
    ("sft", True): {"family": "deepseek_v3", **LATENTS},
}

PIPELINES = [
    dict(
        zip(("vpp", "first_stage_layers", "last_stage_layers", "embedding_as_layer", "loss_as_layer"), cut, strict=True)
    )
    for cut in itertools.product((1, 2, 3, 4), (None, 1, 2, 3), (None, 1, 2, 3), (False, True), (False, True))
]


class Study(NamedTuple):
    """Results of two optimizer steps.

    On a rank, tensors are its shards by weight map name; otherwise whole tensors by Hugging Face name.
    """

    metrics: dict[str, float]
    grads: list[dict[str, Tensor]]  # of each step, before clipping
    weights: dict[str, Tensor]


class Case(NamedTuple):
    """One way to compute an update.

    Attributes:
        kind: role.
        experts: whether its model has experts.
        mode: aggregation of the loss.
        layout: parallel sizes.
        budget: micro-batch budget.
        order: seed of the shuffle within each mini-batch.
        megatron: keys of the role's Megatron section that must not change the results.
        offloads: whether everything is offloaded after a phase.
    """

    kind: str
    experts: bool
    mode: str
    layout: ParallelLayout
    budget: MicroBatchBudget
    order: int
    megatron: dict[str, Any]
    offloads: bool


class Subject:
    """A model of a role, a batch for it, and the results of plain transformers by aggregation."""

    def __init__(self, folder: Path, kind: str, experts: bool) -> None:
        self.path, self.kind, self.is_critic = folder, kind, kind == "critic"
        model = save_model(folder, **MODELS[kind, experts])
        self.config = read_model_config(folder)
        pair = (None, model) if self.is_critic else (model, None)
        self.batch = DataProto.concat([training_batch(*pair, seed=seed) for seed in range(STEPS)])
        if kind == "sft":
            self.batch = answer_greedily(model, self.batch, (1, 4, MINI_BATCH_ROWS + 3))
        self._known: dict[str, Study] = {}

    def reference(self, mode: str) -> Study:
        """Compute the reference once per aggregation."""
        if mode not in self._known:
            model = load_model(self.path, critic=self.is_critic)
            self._known[mode] = self._in_checkpoint_names(
                model, train(model, self.batch, TOKENS[self.kind], mode, MINI_BATCH_ROWS)
            )
        return self._known[mode]

    @staticmethod
    def _in_checkpoint_names(model: Any, trained: Trained) -> Study:
        """Trained weights and gradients in the names and shapes of transformers' files."""
        carrier = copy.deepcopy(model)
        grads = [on_disk(carrier, {name: grad[name] for name in grad}) for grad in trained.grads]
        return Study(trained.metrics, grads, on_disk(carrier, trained.weights))


def answer_greedily(model: Any, batch: DataProto, rows: tuple[int, ...]) -> DataProto:
    """Return the batch with responses of ``rows`` by greedy decoding."""
    responses = batch.padded("responses")
    for number in rows:
        row = rows_of(batch)[number]
        for index in range(len(row.response)):
            with torch.no_grad():
                logits = model(torch.cat([row.prompt, row.response[:index]])[None]).logits[0, -1]
            row.response[index] = responses[number, index] = logits.argmax()
    return batch.with_columns({"responses": responses})


@torch.no_grad()
def on_disk(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Trained parameters as saved by transformers; overwrites the model."""
    for name, param in model.named_parameters():
        param.copy_(tensors[name])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (file,) = Path(folder).glob("*.safetensors")
        saved = load_file(file)
    return {name: tensor for name, tensor in saved.items() if not name.endswith("e_score_correction_bias")}


# ---- drawing


def draw(number: int, subjects: dict[tuple[str, bool], Subject]) -> Case:
    """The ``number``-th case: twelve without experts, twelve with, and so on."""
    rng = random.Random(number)
    kind, experts = list(WORKERS)[number % 3], number // 12 % 2 == 1
    model = subjects[kind, experts].config
    layout = draw_layout(rng, WORLDS[number % len(WORLDS)], model)
    longest = max(map(sum, ROW_LENGTHS))
    cut = {"size": rng.randint(1, 8)} if rng.random() < 0.5 else {"max_tokens": rng.randint(longest, 5 * longest)}
    distributed = rng.random() < 0.7
    megatron = {
        "sequence_parallel": rng.random() < 0.5,
        "use_distributed_optimizer": distributed,
        "overlap_grad_reduce": rng.random() < 0.5,
        **draw_recomputation(rng, experts),
    }
    megatron["overlap_param_gather"] = distributed and megatron["overlap_grad_reduce"] and rng.random() < 0.7
    return Case(
        kind,
        experts,
        LOSS_AGG_MODES[number % len(LOSS_AGG_MODES)],
        layout,
        MicroBatchBudget(
            **cut,
            multiple=layout.pp if layout.vpp > 1 else 1,
            share_prompts=layout.cp == 1 and number // 4 % 2 == 0,
        ),
        rng.randrange(1000),
        megatron,
        rng.random() < 0.3,
    )


def draw_layout(rng: random.Random, world: int, model: Any) -> ParallelLayout:
    """Draw a layout that the model and the number of processes allow; each size is equally likely."""
    powers = [2**n for n in range(world.bit_length())]
    while True:
        tp, cp, pp = (rng.choice(powers) for _ in range(3))
        if world % (tp * cp * pp) == 0:
            sizes = ParallelLayout(tp=tp, cp=cp, pp=pp, dp=world // (tp * cp * pp))
            layouts = [sizes] if pp == 1 else fitting(model, [sizes._replace(**cut) for cut in PIPELINES])
            if layouts:
                vpp = rng.choice(sorted({layout.vpp for layout in layouts}))
                layout = rng.choice([layout for layout in layouts if layout.vpp == vpp])
                choices = [(ep, etp) for ep in powers for etp in (0, *powers)] if model.experts else [(1, 0)]
                layouts = fitting(model, [layout._replace(ep=ep, etp=etp) for ep, etp in choices])
                if layouts:
                    return rng.choice(layouts)


def fitting(model: Any, layouts: list[ParallelLayout]) -> list[ParallelLayout]:
    fine = []
    for layout in layouts:
        with contextlib.suppress(ConfigError):
            check_layout(model, layout, "megatron")
            fine.append(layout)
    return fine


def draw_recomputation(rng: random.Random, experts: bool) -> dict[str, Any]:
    granularity = rng.choice((None, "full", "selective"))
    if granularity == "full":
        return {"recompute_granularity": granularity, "recompute_method": rng.choice(("uniform", "block"))}
    if granularity == "selective":
        names = ("core_attn", "layernorm", "moe" if experts else "mlp")
        modules = [name for name in names if rng.random() < 0.6] or ["core_attn"]
        return {"recompute_granularity": granularity, "recompute_modules": modules}
    return {}


# ---- running


def arguments_of(case: Case, path: Path) -> dict[str, Any]:
    plan = UpdatePlan(MINI_BATCH_ROWS, 1, case.budget, case.mode, RESPONSE_WIDTH)
    arguments: dict[str, Any] = {
        "settings": role_settings(path, case.layout, megatron=case.megatron),
        "plan": plan,
    }
    if case.kind == "actor":
        arguments |= {"config": ACTOR, "log_prob": log_prob_settings(), "reference": None}
    if case.kind == "critic":
        arguments |= {"config": CRITIC}
    return with_offload(arguments) if case.offloads else arguments


def run(pool: ProcessPool, subject: Subject, case: Case) -> list[Study]:
    """Run the update like the driver; results by rank."""
    rows = np.arange(MINI_BATCH_ROWS * STEPS).reshape(STEPS, -1)
    shuffled = subject.batch[np.random.default_rng(case.order).permuted(rows, axis=1).flatten()]
    mark = read_marks(WORKERS[case.kind])[VERBS[case.kind]]
    dp, equal = case.layout.dp, mark.equal_rows
    partition = partition_rows(shuffled, dp, MINI_BATCH_ROWS, equal=equal, budget=case.budget)
    chunks = partition.split(mark.read(shuffled))
    return pool.run(study, case.layout.world_size, case, arguments_of(case, subject.path), chunks, timeout=300)


def study(place: Place, case: Case, arguments: dict[str, Any], chunks: list[DataProto]) -> Study:
    """One rank's part of the update."""
    worker = WORKERS[case.kind](WorkerPlace(place.rank, place.world_size, "127.0.0.1", place.port), **arguments)
    try:
        options = worker._engine_options()
        small_buckets = replace(options, overlap=replace(options.overlap, bucket_size=BUCKET_SIZE))
        worker._engine_options = lambda: small_buckets
        worker.init_model()
        engine, grads = worker.engine, []
        forward_backward = engine.forward_backward

        def watched(*args: Any, **kwargs: Any) -> dict[str, float]:
            metrics = forward_backward(*args, **kwargs)
            grads.append(whole_gradients(engine))
            return metrics

        engine.forward_backward = watched
        metrics = getattr(worker, VERBS[case.kind])(chunks[worker.runtime.coordinate.dp])
        return Study(metrics, grads, engine.weights.to_host())
    finally:
        shutdown_runtime()


def whole_gradients(engine: MegatronEngine) -> dict[str, Tensor]:
    """Gradients of this rank's weights, including parts that the distributed optimizer leaves on other ranks."""
    for buckets, group in sharded_buckets(engine):
        for bucket in buckets:
            own = bucket.grad_data.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
    params = engine.weights.parameters()
    return {n: p.main_grad.clone() if p.requires_grad else torch.zeros_like(p) for n, p in params.items()}


def sharded_buckets(engine: MegatronEngine) -> Iterator[tuple[list[Any], dist.ProcessGroup]]:
    for chunk in engine.chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.ddp_config.use_distributed_optimizer:
                yield group.buckets, group.intra_distributed_optimizer_instance_group


def whole(subject: Subject, case: Case, ranks: list[Study]) -> Study:
    """Merge the results of the ranks; replicated metrics and weights must agree."""
    for rank in ranks:
        assert rank.metrics == ranks[0].metrics

    def gathered(local: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        tensors = whole_tensors(subject.path, case.layout, local, value_head=subject.is_critic)
        return {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}

    grads = [gathered([rank.grads[step] for rank in ranks]) for step in range(STEPS)]
    return Study(ranks[0].metrics, grads, gathered([rank.weights for rank in ranks]))
