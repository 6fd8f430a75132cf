"""A model family of one's own, dots.llm1, and its comparison with transformers; docs/add_a_model.md explains each part.

python examples/model_family.py

To train with it, put the class into a file of ``megarl/models/families/`` that its ``__init__.py`` imports.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

from megarl.errors import ModelError
from megarl.megatron import EngineOptions, MegatronEngine, PackedMicroBatch, init_runtime, shutdown_runtime
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models import declaration as d
from megarl.models.registry import count, refuse_settings, register_family
from megarl.models.traits import Experts, Traits


@register_family("Dots1ForCausalLM")
class Dots1:
    """dots.llm1: norms on q and k; a sigmoid router with a correction of the choice, and shared experts."""

    name = "dots1"
    layer = (
        d.INPUT_NORM,
        d.ATTENTION_OUTPUT,
        d.QKV_WEIGHT,
        d.Q_NORM,
        d.K_NORM,
        d.MLP_NORM,
        d.GATE_UP,
        d.DOWN,
        *d.experts_of("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        *d.shared_experts_of("mlp.shared_experts"),
        d.CORRECTION_BIAS,
    )

    def traits(self, raw: Mapping[str, Any]) -> Traits:
        """Dense first layers, then experts."""
        refuse_settings(raw, hidden_act="silu", attention_bias=False)
        if "sliding_attention" in (raw.get("layer_types") or []):
            raise ModelError("config.json: layer_types has 'sliding_attention', only 'full_attention' is supported")
        width, dense = count(raw, "moe_intermediate_size"), count(raw, "first_k_dense_replace", 0, least=0)
        experts = Experts(
            count=count(raw, "n_routed_experts"),
            per_token=count(raw, "num_experts_per_tok"),
            ffn_hidden_size=width,
            layers=tuple(layer >= dense for layer in range(count(raw, "num_hidden_layers"))),
            shared_ffn_hidden_size=width * count(raw, "n_shared_experts"),
            score="sigmoid",
            normalize=bool(raw.get("norm_topk_prob", False)),
            scaling=float(raw.get("routed_scaling_factor", 1.0)),
            groups=count(raw, "n_group", 1),
            groups_per_token=count(raw, "topk_group", 1),
            group_best=2,
            correction_bias=True,
        )
        return Traits(qk_norm=True, experts=experts)


def tiny_model() -> transformers.PreTrainedModel:
    """A random model with every part that the family has."""
    torch.manual_seed(0)
    return transformers.Dots1ForCausalLM(
        transformers.Dots1Config(
            vocab_size=101,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_shared_experts=2,
            first_k_dense_replace=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
    ).eval()


def largest_difference(port: int) -> float:
    """Between the log-probs of megarl's model and of transformers', in float32, after the shapes of all tensors.

    Args:
        port: any free one.
    """
    reference = tiny_model()
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        config = read_model_config(folder)
        saved = {name: tuple(tensor.shape) for name, tensor in load_file(f"{folder}/model.safetensors").items()}
        assert WeightMap(config).hf_shapes() == saved

        layout = ParallelLayout()
        runtime = init_runtime(layout, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port, device="cpu")
        engine = MegatronEngine(config, layout, runtime, EngineOptions())
        engine.load_hf(folder)
    prompt, response = torch.tensor([3, 14, 15]), torch.tensor([92, 65, 35, 89])
    (outputs,) = engine.forward([PackedMicroBatch.from_rows([(prompt, response)])])
    shutdown_runtime()
    with torch.no_grad():
        logits = reference(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
    return float((outputs.log_probs - expected).abs().max())


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        number = free.getsockname()[1]
    difference = largest_difference(number)
    print(f"largest difference of log-probs: {difference:.1e}")
    assert difference < 1e-5
