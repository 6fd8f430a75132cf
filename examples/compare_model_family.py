"""Compare the family of examples/model_family.py with transformers; docs/how_to/add_a_model.md explains each part.

python examples/compare_model_family.py
"""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from megarl.base.user_code import import_file
from megarl.megatron import MegatronEngine, MegatronOptions, PackedMicroBatch, init_runtime, shutdown_runtime
from megarl.models import ParallelLayout, WeightMap, read_model_config


def tiny_model() -> transformers.PreTrainedModel:
    """Build a random model with every part of the family."""
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
    """Return the largest difference of log-probs between megarl and transformers, in float32; checks all shapes first.

    Args:
        port: a free port.
    """
    import_file(str(Path(__file__).with_name("model_family.py")))
    reference = tiny_model()
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        config = read_model_config(folder)
        saved = {name: tuple(tensor.shape) for name, tensor in load_file(f"{folder}/model.safetensors").items()}
        assert WeightMap(config).hf_shapes() == saved

        layout = ParallelLayout()
        runtime = init_runtime(layout, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port, device="cpu")
        engine = MegatronEngine(config, layout, runtime, MegatronOptions())
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
