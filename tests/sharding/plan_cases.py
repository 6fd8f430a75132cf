"""Random models, layouts and placements for tests of the reshard plan, and hand-written plans."""

from dataclasses import dataclass
from math import lcm

import numpy as np
from hypothesis import strategies as st

from megarl.models import ParallelLayout, WeightMap, parse_model_config
from megarl.sharding.placement import Placement, RolloutLayout
from megarl.sharding.plan import Bucket

DENSE = ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "Olmo3ForCausalLM", "Gemma3ForCausalLM"]
DENSE += ["Qwen3_5ForCausalLM"]
MIXTURES = ["Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"]
MIXTURES += ["Qwen3NextForCausalLM", "GptOssForCausalLM"]
LINEAR = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM")
EXPERTS = 4


@dataclass(frozen=True)
class ListedPlan:
    """A plan as a list of buckets, with the methods that senders and receivers use."""

    buckets: tuple[Bucket, ...]
    float32_params: frozenset = frozenset()

    def sent_by(self, rank):
        return [Bucket(tuple(m for m in b.ops if m.src_rank == rank), b.nbytes) for b in self.buckets]

    def received_by(self, rank):
        return [Bucket(tuple(m for m in b.ops if m.dst_rank == rank), b.nbytes) for b in self.buckets]

    def imported_by(self, rank):
        return range(len(self.buckets))


@dataclass(frozen=True)
class Case:
    """All arguments of a plan except the sizes."""

    weight_map: WeightMap
    train: ParallelLayout
    rollout: RolloutLayout
    placement: Placement | None


def model(architecture, *, layers, hidden, ffn, heads, groups, vocab, tied, head_dim=2):
    return WeightMap(
        parse_model_config(
            {
                "architectures": [architecture],
                "num_hidden_layers": layers,
                "hidden_size": hidden,
                "intermediate_size": ffn,
                "num_attention_heads": heads,
                "num_key_value_heads": groups,
                "head_dim": head_dim,
                "vocab_size": vocab,
                "max_position_embeddings": 64,
                "tie_word_embeddings": tied,
                # Mixtures: experts in every other layer, or in all but the first; Deepseek's latents besides.
                **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], EXPERTS),
                "num_experts_per_tok": 2,
                "moe_intermediate_size": ffn,
                "shared_expert_intermediate_size": ffn,
                "decoder_sparse_step": 2,
                "first_k_dense_replace": 1,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "q_lora_rank": 3,
                "kv_lora_rank": 2,
                "qk_nope_head_dim": 1,
                "qk_rope_head_dim": 2,
                "v_head_dim": 2,
                **(linear_layers(layers, heads) if architecture in LINEAR else {}),
                **(
                    {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default"}} if "Gpt" in architecture else {}
                ),
            }
        )
    )


def linear_layers(layers, heads):
    """Gated delta nets in every other layer, with two value heads per key head."""
    kinds = ["full_attention", "linear_attention"]
    return {
        "layer_types": [kinds[layer % 2] for layer in range(layers)],
        "linear_num_key_heads": heads,
        "linear_num_value_heads": 2 * heads,
        "linear_key_head_dim": 2,
        "linear_value_head_dim": 1,
        "partial_rotary_factor": 1.0,
    }


@st.composite
def layouts(draw, experts):
    """A training layout and a rollout layout."""
    train = ParallelLayout(
        tp=draw(st.sampled_from([1, 2, 3, 4])),
        pp=draw(st.integers(1, 3)),
        dp=draw(st.integers(1, 3)),
        cp=draw(st.integers(1, 2)),
        vpp=draw(st.sampled_from([1, 1, 2])),
    )
    rollout = RolloutLayout(
        draw(st.sampled_from([1, 2, 3, 4])),
        replicas=draw(st.integers(1, 3)),
        vocab_multiple=draw(st.sampled_from([1, 12])),
    )
    if experts:
        ranks = train.ranks_per_stage
        etp = draw(st.sampled_from([n for n in range(1, 5) if not ranks % n]))
        ep = draw(st.sampled_from([n for n in (1, 2, 4) if not ranks // etp % n]))
        train = train._replace(ep=ep, etp=etp)
        rollout = rollout._replace(ep=draw(st.sampled_from([n for n in (1, 2, 4) if not rollout.tp % n])))
    return train, rollout


@st.composite
def placements(draw, train, rollout):
    """None, or a random placement: a device may hold several ranks of a role or none."""
    if draw(st.booleans()):
        return None
    devices = st.integers(0, draw(st.integers(0, train.world_size)))
    slots = [draw(st.lists(devices, min_size=n, max_size=n)) for n in (train.world_size, rollout.world_size)]
    return Placement.of_devices(*slots, devices_per_node=draw(st.integers(1, 4)))


@st.composite
def plan_cases(draw):
    """All arguments of a plan except the sizes, for a model of any family."""
    architecture = draw(st.sampled_from(DENSE + MIXTURES))
    train, rollout = draw(layouts(architecture in MIXTURES))
    if architecture == "GptOssForCausalLM":
        train = train._replace(ep=1 if train.ranks_per_stage % train.ep else train.ep, etp=1)
    common = lcm(train.tp, rollout.tp)
    # Key-value heads that each training rank has some of, and that engine ranks divide or share.
    groups = draw(
        st.sampled_from(
            [
                g
                for g in range(train.tp, common + 1, train.tp)
                if not common % g and not max(g, rollout.tp) % min(g, rollout.tp)
            ]
        )
    )
    weight_map = model(
        architecture,
        layers=train.pp * train.vpp * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 4)),
        ffn=lcm(common, train.expert_tp),
        heads=common,
        groups=groups,
        vocab=draw(st.integers(1, 100)),
        tied=draw(st.booleans()) and architecture in DENSE,
    )
    return Case(weight_map, train, rollout, draw(placements(train, rollout)))


def labels(weight_map):
    """A unique non-zero number for each element of the checkpoint, by tensor."""
    tensors, first = {}, 1
    for name, shape in weight_map.hf_shapes().items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(first, first + size).reshape(shape)
        first += size
    return tensors


def box(start, shape):
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def labelled(params, numbers, padding=0):
    """A rank's tensors; each element has the number of its checkpoint element."""
    local = {}
    for param in params:
        local[param.name] = np.full(param.shape, padding)
        for piece in param.pieces:
            local[param.name][box(piece.at, piece.local_shape)] = numbers[piece.hf_name][box(piece.start, piece.shape)]
    return local


def held_in_training(case, numbers):
    """Each training rank's tensors; padding has an unexpected number."""
    ranks = range(case.train.world_size)
    return [labelled(case.weight_map.megatron_params(case.train, rank), numbers, padding=-1) for rank in ranks]


def rollout_params(case, rank):
    tp, ep, _, multiple = case.rollout
    return case.weight_map.rollout_params(tp, rank % tp, ep, multiple)
