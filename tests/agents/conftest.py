"""Fixtures of the agent tests: a tiny random model folder, and one torch thread."""

import pytest
import torch
import transformers


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_folder(tmp_path):
    """``make_folder(**config fields)``: folder of a tiny random Qwen2 model."""

    def make(**fields):
        settings = {
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 50,
            "max_position_embeddings": 128,
            "eos_token_id": 7,
            "pad_token_id": 0,
            "bos_token_id": None,
        }
        torch.manual_seed(0)
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(settings | fields)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.15 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return make
