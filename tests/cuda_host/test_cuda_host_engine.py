"""The training engine of every family in both number formats: passes, optimizer, offload, copies of weights."""

import json
import sys
from functools import cache

import pytest
import torch

from megarl.megatron import MegatronOptions, OptimizerOptions, OutputOptions, PackedMicroBatch, RecomputeOptions
from megarl.megatron.engine.offload import PARTS
from megarl.megatron.engine.options import OverlapOptions
from megarl.models.adapters import LoraOptions
from megarl.ops.acceptance.models import _WIDTH, FAMILIES, VOCABULARY, SingleRankEngine

CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float32)
LENGTHS = [(20, 50), (7, 90), (20, 64), (1, 15)]
ENTROPY = OutputOptions(with_entropy=True, with_sum_pi_squared=True)


@cache
def fields(family):
    """``config.json`` of a small model."""
    import transformers

    name = "".join(word.capitalize() for word in family.split("_"))
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{name}Config")(**{**_WIDTH, **sizes, **tokens, **FAMILIES[family]})
    values = {**config.to_dict(), "architectures": [f"{name.removesuffix('Text')}ForCausalLM"]}
    return json.loads(json.dumps(values, default=str))


def micro_batch(*, share_prompts):
    rows = [(torch.arange(prompt), torch.arange(response)) for prompt, response in LENGTHS]
    columns = {"weights": torch.ones(sum(response for _, response in LENGTHS))}
    return PackedMicroBatch.from_rows(rows, columns, share_prompts=share_prompts)


def loss(outputs, micro_batch):
    value = -(outputs.log_probs * micro_batch.columns["weights"]).sum() - outputs.entropy.sum()
    return value, {"loss": value}


def train(engine, *, share_prompts=False):
    batch = micro_batch(share_prompts=share_prompts)
    outputs = engine.forward([batch, batch], ENTROPY)
    assert [output.log_probs.shape for output in outputs] == [(219,)] * 2
    assert all(output.entropy.is_cuda for output in outputs)
    engine.forward_backward([batch, batch], loss, OutputOptions(with_entropy=True))
    engine.optimizer_step()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("family", FAMILIES)
def test_engine(family, dtype, chosen_attention):
    options = MegatronOptions(dtype=dtype, optimizer=OptimizerOptions(), offload=PARTS)
    with SingleRankEngine(fields(family), options, CUDA) as engine:
        assert "torch._dynamo" in sys.modules, "imported within a pass"
        for share in (False, True):
            train(engine, share_prompts=share)
        assert engine.hidden([micro_batch(share_prompts=False)]) is not None
        engine.offload_manager.offload()
        assert set(engine.offload_manager.offloaded) == set(PARTS)
        engine.offload_manager.onload(*PARTS)
        with engine.swapped_weights(engine.copy_weights()):
            engine.forward([micro_batch(share_prompts=False)])
        packs = "varlen_attn" in engine.describe() or "flash kernels" in engine.describe()
    assert chosen_attention <= {"FLASH_ATTENTION", "EFFICIENT_ATTENTION"}
    assert packs == (dtype is torch.bfloat16 and not family.startswith("deepseek"))
    assert not (packs and chosen_attention), "described as packed, computed length by length"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [
        {"recompute": RecomputeOptions("full")},
        {"recompute": RecomputeOptions("selective", modules=("core_attn", "mlp"))},
        {"recompute": RecomputeOptions("selective", modules=("moe",))},
        {"overlap": OverlapOptions(grad_reduce=True, param_gather=True)},
        {"lora": LoraOptions(rank=4, alpha=8)},
    ],
    ids=["full", "selective", "moe", "overlap", "lora"],
)
def test_options(family, options):
    with SingleRankEngine(
        fields(family), MegatronOptions(dtype=torch.bfloat16, optimizer=OptimizerOptions(), **options), CUDA
    ) as engine:
        train(engine)


def test_value_head():
    options = MegatronOptions(dtype=torch.bfloat16, optimizer=OptimizerOptions(), value_head=True)
    with SingleRankEngine(fields("qwen2"), options, CUDA) as engine:
        (outputs,) = engine.forward([micro_batch(share_prompts=False)], OutputOptions())
        assert outputs.values.shape == (219,) and outputs.values.is_cuda
