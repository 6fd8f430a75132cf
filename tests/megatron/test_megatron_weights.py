"""Weights round-trip through Hugging Face folders bit for bit, and can be swapped temporarily."""

import pytest
import torch
from engine_cases import Setup, engine, forward, micro_batches, policy_loss, refusal
from family_cases import LINEAR
from safetensors.torch import load_file, save_file
from tiny_models import TEMPERATURE, rows, save_model

from megarl.megatron import MegatronEngine, OptimizerOptions, OutputOptions
from megarl.models import ParallelLayout


def export(place, path, setup, target):
    with engine(place, path, setup) as built:
        built.export_hf(target, source=path)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({"family": "qwen2", "tied": True}, ParallelLayout(tp=2, pp=2)),
        ({"family": "qwen3"}, ParallelLayout(tp=2, dp=2)),
        ({"family": "llama", "num_hidden_layers": 4}, ParallelLayout(pp=2, vpp=2)),
        ({"family": "qwen2", "critic": True}, ParallelLayout(tp=2, pp=2)),
        ({"family": "olmo3"}, ParallelLayout(tp=2, pp=2)),
        ({"family": "qwen3_next", "num_experts": 0, "num_hidden_layers": 4, **LINEAR}, ParallelLayout(tp=2, pp=2)),
        ({"family": "qwen3_5_text", "num_hidden_layers": 4, **LINEAR}, ParallelLayout(tp=2, pp=2)),
        ({"family": "gemma3_text", "tied": True, "head_dim": 16}, ParallelLayout(tp=2, pp=2)),
        ({"family": "gpt_oss", "head_dim": 12, "num_local_experts": 4}, ParallelLayout(tp=2, pp=2, ep=2, etp=1)),
    ],
    ids=lambda value: value.describe() if isinstance(value, ParallelLayout) else value["family"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact(pool, tmp_path, model, layout, dtype):
    original = save_model(tmp_path / "in", **model)
    if dtype is torch.bfloat16:
        original.to(dtype).save_pretrained(tmp_path / "in")
    setup = Setup(layout, value_head=model.get("critic", False), dtype=dtype, sequence_parallel=layout.tp > 1)
    pool.run(export, layout.world_size, tmp_path / "in", setup, tmp_path / "out")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("in", "out"))
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert after[name].dtype is dtype
        assert torch.equal(after[name], tensor), name
    reloaded = type(original).from_pretrained(tmp_path / "out")
    assert torch.equal(next(reloaded.parameters()), next(original.parameters()))


def build(place, path, setup):
    with engine(place, path, setup):
        pass


def test_tied_output_layer_that_is_not_the_embedding_raises(pool, tmp_path):
    save_model(tmp_path, "qwen2", tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, tmp_path / "model.safetensors")
    for message in pool.run(refusal, 2, build, tmp_path, Setup(ParallelLayout(tp=2))):
        assert "lm_head.weight" in message and message.endswith("[model.tied-head-differs]")


def test_export_keeps_an_existing_folder(pool, tmp_path):
    save_model(tmp_path, "llama")
    (message,) = pool.run(refusal, 1, export, tmp_path, Setup(ParallelLayout()), tmp_path)
    assert str(tmp_path) in message and message.endswith("[checkpoint.export-exists]")


def test_folder_without_a_tensor_raises(pool, tmp_path):
    save_model(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (message,) = pool.run(refusal, 1, forward, tmp_path, Setup(ParallelLayout()), rows())
    assert "model.layers.1.mlp.up_proj.weight" in message and message.endswith("[model.missing-tensor]")


def swap(place, path, setup):
    """Log-probs of the initial weights, the trained ones, the initial ones swapped in, and the trained ones again."""
    batch = rows()
    with engine(place, path, setup) as built:
        mine = micro_batches(batch, setup, built.runtime.coordinate.dp, setup.layout.dp)

        def say():
            outputs = built.forward(micro_batches(batch, setup), OutputOptions(temperature=TEMPERATURE))
            return torch.cat([output.log_probs for output in outputs])

        def step():
            built.forward_backward(mine, policy_loss, OutputOptions(with_entropy=True))
            built.optimizer_step()

        first, snapshot = say(), built.copy_weights()
        step()
        trained = say()
        with built.swapped_weights(snapshot):
            swapped = say()
        again = say()
        with pytest.raises(RuntimeError, match="inside"), built.swapped_weights(snapshot):
            raise RuntimeError("inside")
        after_error = say()
        step()
        with pytest.raises(ValueError, match="0 bytes"), built.swapped_weights(snapshot._replace(sizes=[])):
            pass
        return {
            "logs": [first, trained, swapped, again, after_error],
            "second_step": built.weights.to_host(),
            "description": built.describe(),
        }


def steps(place, path, setup, count):
    with engine(place, path, setup) as built:
        mine = micro_batches(rows(), setup, built.runtime.coordinate.dp, setup.layout.dp)
        for _ in range(count):
            built.forward_backward(mine, policy_loss, OutputOptions(with_entropy=True))
            built.optimizer_step()
        return built.weights.to_host()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swapped_weights_are_restored_exactly(pool, tmp_path, dtype):
    save_model(tmp_path, "qwen2", tied=True)
    setup = Setup(ParallelLayout(tp=2, dp=2), dtype=dtype, optimizer=OptimizerOptions(lr=1e-2))
    answers = pool.run(swap, 4, tmp_path, setup)
    undisturbed = pool.run(steps, 4, tmp_path, setup, 2)
    for answer, plain in zip(answers, undisturbed, strict=True):
        first, trained, swapped, again, after_error = answer["logs"]
        assert torch.equal(swapped, first)
        assert torch.equal(again, trained) and torch.equal(after_error, trained)
        assert not torch.equal(first, trained)
        for name, tensor in plain.items():
            assert torch.equal(answer["second_step"][name], tensor), name
    kernels = "layers: torch, attention: torch's, length by length, Adam: torch's, Megatron-Core 0."
    assert answers[0]["description"].startswith(f"TP2 PP1 DP2 on cpu in {str(dtype).removeprefix('torch.')}; {kernels}")


def step_without_optimizer(place, path):
    with engine(place, path, Setup(ParallelLayout())) as built:
        built.optimizer_step()


def forward_of_nothing(place, path):
    with engine(place, path, Setup(ParallelLayout())) as built:
        built.forward([])


def another_layout(place, path):
    with engine(place, path, Setup(ParallelLayout())) as built:
        MegatronEngine(built.model, ParallelLayout(tp=2), built.runtime, built.options)


@pytest.mark.parametrize(
    ("case", "code", "named"),
    [
        (step_without_optimizer, "engine.no-optimizer", "optimizer=None"),
        (forward_of_nothing, "batch.no-micro-batch", "micro-batch"),
        (another_layout, "layout.process-group", "TP2 PP1 DP1 is not that of the process group: TP1 PP1 DP1"),
    ],
)
def test_misuse_raises(pool, tmp_path, case, code, named):
    save_model(tmp_path, "llama")
    (message,) = pool.run(refusal, 1, case, tmp_path)
    assert named in message and message.endswith(f"[{code}]"), message
