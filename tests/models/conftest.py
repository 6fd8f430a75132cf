"""Tiny random models as transformers itself saves them; built once per session."""

import pytest
import torch


@pytest.fixture(scope="session")
def real_model_folder(tmp_path_factory):
    made = {}

    def make(family="qwen2", tied=False):
        if (family, tied) not in made:
            import transformers

            prefix = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family]
            torch.manual_seed(0)
            config = getattr(transformers, f"{prefix}Config")(
                num_hidden_layers=2,
                hidden_size=32,
                intermediate_size=48,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=50,
                max_position_embeddings=64,
                tie_word_embeddings=tied,
                **({} if family == "qwen2" else {"head_dim": 16}),
            )
            model = getattr(transformers, f"{prefix}ForCausalLM")(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            folder = tmp_path_factory.mktemp(f"{family}-{'tied' if tied else 'untied'}")
            model.save_pretrained(folder)
            made[family, tied] = folder
        return made[family, tied]

    return make
