"""Models, layouts and labelled weights for tests of resharding."""

import numpy as np
import torch
from hypothesis import strategies as st
from plan_cases import model

from megarl.models import ParallelLayout

ARCHITECTURES = ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"]
ARCHITECTURES += ["Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM"]


def weight_map_of(
    architecture="Qwen2ForCausalLM", *, layers=2, hidden=6, ffn=8, heads=4, groups=4, head_dim=2, vocab=37, tied=False
):
    sizes = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "groups": groups, "vocab": vocab}
    return model(architecture, **sizes, tied=tied, head_dim=head_dim)


@st.composite
def cases(draw):
    """A model, a training layout, an engine's tensor-parallel size, and a number of replicas."""
    tp, rollout_tp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 3, 4]))
    pp = draw(st.integers(1, 3))
    groups = int(np.lcm(tp, rollout_tp))
    ffn = groups * draw(st.integers(1, 2))
    weight_map = weight_map_of(
        draw(st.sampled_from(ARCHITECTURES)),
        layers=pp * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 5)),
        ffn=ffn,
        heads=groups * draw(st.integers(1, 2)),
        groups=groups,
        head_dim=draw(st.sampled_from([2, 4])),
        vocab=draw(st.integers(1, 150)),
        tied=draw(st.booleans()),
    )
    train = ParallelLayout(tp, pp, draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    if weight_map.config.experts is not None:
        ranks = train.ranks_per_stage
        etp = draw(st.sampled_from([n for n in range(1, ranks + 1) if not ranks % n and not ffn % n]))
        ep = draw(st.sampled_from([n for n in (1, 2, 4) if not ranks // etp % n]))
        train = train._replace(ep=ep, etp=etp)
    return weight_map, train, rollout_tp, draw(st.integers(1, 3))


def labelled_checkpoint(weight_map, dtype=torch.int64):
    """Every element has a unique non-zero value."""
    tensors, label = {}, 1
    for name, shape in weight_map.hf_shapes().items():
        size = int(np.prod(shape))
        tensors[name] = torch.arange(label, label + size).to(dtype).reshape(shape)
        label += size
    return tensors


def box(start, shape):
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def local_tensors(params, checkpoint, padding):
    """Local parameters built from their pieces; the value of the padding must never be sent."""
    local = {}
    for param in params:
        tensor = torch.full(param.shape, padding, dtype=next(iter(checkpoint.values())).dtype)
        for piece in param.pieces:
            tensor[box(piece.at, piece.local_shape)] = checkpoint[piece.hf_name][box(piece.start, piece.shape)]
        local[param.name] = tensor
    return local


def training_tensors(weight_map, layout, checkpoint, padding=-7):
    ranks = range(layout.world_size)
    return [local_tensors(weight_map.megatron_params(layout, rank), checkpoint, padding) for rank in ranks]


def rollout_tensors(weight_map, tp, replicas, checkpoint, padding=0, ep=1):
    shards = [local_tensors(weight_map.rollout_params(tp, rank, ep), checkpoint, padding) for rank in range(tp)]
    return [{name: t.clone() for name, t in shards[rank % tp].items()} for rank in range(tp * replicas)]
