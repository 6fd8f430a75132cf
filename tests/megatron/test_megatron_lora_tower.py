"""Adapters on a vision tower, and its weights trained in full beside adapters, against peft on transformers' model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine_cases import Setup, engine, policy_loss, refusal
from support.distributed import Place
from support.expected_errors import raises
from support.release import of_release
from support.vision_families import save_family
from tiny_models import TEMPERATURE, Row, save_model
from torch import Tensor
from vision_cases import LAYOUTS, Folder

from megarl.base.image_tokens import Image
from megarl.megatron import MegatronEngine, OptimizerOptions, OutputOptions, PackedMicroBatch, RecomputeOptions
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.adapters import AdapterMap, LoraOptions
from megarl.models.peft_folder import peft_config, peft_name
from tests.megatron.test_megatron_lora import pieces, saved_name, set_values, values_of, whole

EVERYWHERE = LoraOptions(rank=3, alpha=6.0, adapt_vision_tower=True)
DORA = replace(EVERYWHERE, kind="dora")
PROJECTION = replace(EVERYWHERE, freeze_vision_projection=False)
TOWER_IN_FULL = LoraOptions(rank=2, alpha=4.0, targets=("q_proj", "down_proj"), freeze_vision_model=False)
QKV = LoraOptions(rank=2, alpha=8.0, targets=("qkv", "q_proj", "mlp.0"), adapt_vision_tower=True)
ADAM = OptimizerOptions(lr=1e-2, weight_decay=0.0, clip_grad=0.5, eps=1e-3, use_distributed_optimizer=False)
CASES = {
    "single": ("qwen2_5_vl", LAYOUTS["single"], PROJECTION),
    "tp2": ("qwen2_5_vl", Setup(ParallelLayout(tp=2)), EVERYWHERE),
    "dora_tp2sp": ("qwen2_5_vl", LAYOUTS["tp2sp"], DORA),
    "in_full_pp2": ("qwen2_5_vl", Setup(ParallelLayout(pp=2)), TOWER_IN_FULL),
    "qkv_dp2": ("qwen2_5_vl", LAYOUTS["dp2"], QKV),
    "deepstack_tp2sp_recompute": (
        "qwen3_vl",
        LAYOUTS["tp2sp"]._replace(recompute=RecomputeOptions("full", "uniform", 1)),
        PROJECTION,
    ),
    "deepstack_dora": ("qwen3_vl", LAYOUTS["single"], DORA),
}
CI = ("single", "tp2", "dora_tp2sp", "in_full_pp2", "qkv_dp2", "deepstack_tp2sp_recompute")


def adapter_map(folder: Path, lora: LoraOptions) -> AdapterMap:
    return AdapterMap(WeightMap(read_model_config(folder).with_trained_tower()), lora)


class Theirs:
    """A model with peft's adapters of random values, as a folder of them is configured."""

    def __init__(self, folder: Folder, lora: LoraOptions) -> None:
        import peft

        self.folder, adapters = folder, adapter_map(folder.path, lora)
        config: Any = peft.LoraConfig(**{**peft_config(adapters, None), "inference_mode": False})
        model = peft.get_peft_model(folder.model, config).eval()
        named = {
            saved_name(name).replace("modules_to_save.", ""): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        values = new_values(adapters)
        self.values = {name: named.pop(peft_name(adapters.model, name)) for name in values}
        assert not named
        with torch.no_grad():
            for name, value in values.items():
                self.values[name].copy_(value)

    def step(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Log-probs and gradients, then a step of Adam."""
        outputs = [log_probs for log_probs, _ in self.folder.backward()]
        grads = {name: value.grad.clone() for name, value in self.values.items() if value.grad is not None}
        adam = torch.optim.AdamW(self.values.values(), lr=ADAM.lr, eps=ADAM.eps, weight_decay=0.0)
        torch.nn.utils.clip_grad_norm_(self.values.values(), ADAM.clip_grad)
        adam.step()
        return outputs, grads


@torch.no_grad()
def log_probs_of(folder: Folder) -> list[Tensor]:
    return [folder.outputs(row)[0] for row in folder.rows]


def new_values(adapters: AdapterMap) -> dict[str, Tensor]:
    return values_of(adapters.hf_shapes())


def batches(built: MegatronEngine, rows: list[Row], dp: int) -> list[PackedMicroBatch]:
    mine = rows[built.runtime.coordinate.dp :: dp]
    return [
        PackedMicroBatch.from_rows(
            [(r.prompt, r.response) for r in group], {"weights": torch.cat([r.weights for r in group])}
        )
        for group in (mine[:2], mine[2:])
    ]


class Answer(NamedTuple):
    """One rank's results: log-probs of its rows if it is on the last stage, and pieces of tensors."""

    start: list[Tensor]
    adapted: list[Tensor]
    off: list[Tensor]
    stepped: list[Tensor]
    grads: list[tuple[Any, Tensor]]
    weights: list[tuple[Any, Tensor]]


def log_probs(built: MegatronEngine, mine: list[PackedMicroBatch]) -> list[Tensor]:
    answers = built.forward(mine, OutputOptions(TEMPERATURE)) or []
    return [row for batch, answer in zip(mine, answers, strict=False) for row in batch.split(answer.log_probs)]


def stepped(place: Place, path: Path, setup: Setup, rows: list[Row], images: list[Image], target: Path) -> Answer:
    """A step of adapters with known values, then an export and a checkpoint."""
    with engine(place, path, setup) as built:
        built.set_images(path, {})
        built.take_images(images)
        mine = batches(built, rows, setup.layout.dp)
        start = log_probs(built, mine)
        set_values(built, new_values(built.trained_map))
        adapted = log_probs(built, mine)
        built.forward_backward(mine, policy_loss, OutputOptions(TEMPERATURE, with_entropy=True))
        grads = {name: param.main_grad.clone() for name, param in built.weights.parameters().items()}
        built.optimizer_step()
        after = log_probs(built, mine)
        with built.adapters_off():
            off = log_probs(built, mine)
        assert all(map(torch.equal, log_probs(built, mine), after))
        weights = {name: param.detach().clone() for name, param in built.weights.parameters().items()}
        built.export_hf(target / "merged", path)
        begin_save(built, target / "checkpoint", copy_from=path).finish()
        return Answer(start, adapted, off, after, pieces(built, grads), pieces(built, weights))


def resumed(place: Place, path: Path, setup: Setup, target: Path) -> list[tuple[Any, Tensor]]:
    with engine(place, path, setup) as built:
        load_sharded(built, target / "checkpoint")
        return pieces(built, {name: param.detach() for name, param in built.weights.parameters().items()})


@pytest.mark.parametrize("case", of_release(CI, [case for case in CASES if case not in CI]))
def test_a_step_equals_peft(pool, tmp_path, case):
    """Log-probs, gradients, a step, the base model, the merged model, and a checkpoint that another layout reads."""
    family, setup, lora = CASES[case]
    folder = Folder(tmp_path / "model", family)
    base = log_probs_of(folder)
    setup = setup._replace(optimizer=ADAM, lora=lora, trained_tower=True)
    theirs = Theirs(folder, lora)
    outputs, expected = theirs.step()
    layout = setup.layout
    answers = pool.run(stepped, layout.world_size, folder.path, setup, folder.rows, folder.images, tmp_path)

    after = log_probs_of(folder)
    for rank, answer in enumerate(answers):
        where = layout.coordinate(rank)
        mine = slice(where.dp, None, layout.dp) if where.pp == layout.pp - 1 else slice(0, 0)
        assert all(map(torch.equal, answer.start, answer.off))
        for ours, values in ((answer.off, base), (answer.adapted, outputs), (answer.stepped, after)):
            for one, other in zip(ours, values[mine], strict=True):
                assert (one - other).abs().max() < 1e-5
    shapes = adapter_map(folder.path, lora).hf_shapes()
    grads = whole(shapes, [part for answer in answers for part in answer.grads])
    scale = max(grad.abs().max().item() for grad in expected.values())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected.get(name, torch.zeros_like(grad)), rtol=1e-4, atol=1e-5 * scale)
    assert any("visual." in name and grad.any() for name, grad in grads.items())
    weights = whole(shapes, [part for answer in answers for part in answer.weights])
    for name, value in theirs.values.items():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-5)
    merged = Folder.__new__(Folder)
    vars(merged).update(vars(folder), model=type(folder.model).from_pretrained(tmp_path / "merged").eval())
    for values, others in zip(log_probs_of(merged), after, strict=True):
        assert (values - others).abs().max() < 1e-5
    other = Setup(ParallelLayout(tp=2) if layout.tp == 1 else ParallelLayout(), lora=lora, optimizer=ADAM)
    parts = pool.run(resumed, other.layout.world_size, folder.path, other._replace(trained_tower=True), tmp_path)
    for name, value in whole(shapes, [part for rank in parts for part in rank]).items():
        assert torch.equal(value, weights[name])


def test_the_learning_rate_of_the_tower_is_that_of_its_adapters(pool, tmp_path):
    """The first step of Adam is the learning rate, whatever the gradient's size."""
    folder = Folder(tmp_path / "model", "qwen2_5_vl")
    optimizer = OptimizerOptions(lr=1e-2, weight_decay=0, eps=1e-20, vision_lr_factor=0.1)
    setup = Setup(ParallelLayout(), optimizer=optimizer, lora=EVERYWHERE, trained_tower=True)
    (answer,) = pool.run(stepped, 1, folder.path, setup, folder.rows, folder.images, tmp_path)
    adapters = adapter_map(folder.path, EVERYWHERE)
    before, after = new_values(adapters), whole(adapters.hf_shapes(), answer.weights)
    for name in before:
        rate = 1e-3 if name.startswith("visual.") else 1e-2
        torch.testing.assert_close((after[name] - before[name]).abs().max().item(), rate, rtol=1e-3, atol=0)


def test_a_checkpoint_of_other_keys_is_refused(pool, tmp_path):
    folder = Folder(tmp_path / "model", "qwen2_5_vl")
    setup = Setup(ParallelLayout(), optimizer=ADAM, lora=EVERYWHERE, trained_tower=True)
    pool.run(stepped, 1, folder.path, setup, folder.rows, folder.images, tmp_path)
    for lora, key in ((PROJECTION, "freeze_vision_projection=True"), (TOWER_IN_FULL, "lora_rank=3")):
        (error,) = pool.run(refusal, 1, resumed, folder.path, setup._replace(lora=lora), tmp_path)
        assert "resume.other-adapters" in error and key in error


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"targets": ("q_proj",)}, "['q_proj']"),
        ({"excludes": ("qkv", "proj", "gate_proj", "up_proj", "down_proj", "mlp.0", "mlp.2")}, "mlp.2"),
        ({"freeze_vision_model": False, "freeze_vision_projection": False}, "there is none"),
        ({"targets": ("patch_embed.proj",)}, "patch_embed.proj"),
    ],
)
def test_keys_without_effect_on_the_tower_are_refused(tmp_path, changes, named):
    save_family(tmp_path, "qwen2_5_vl")
    with raises("adapter.no-tower-target", "lora.adapt_vision_tower=true", named):
        adapter_map(tmp_path, replace(EVERYWHERE, **changes))


@pytest.mark.parametrize("key", ["adapt_vision_tower", "freeze_vision_model", "freeze_vision_projection"])
def test_a_model_of_text_has_no_tower_to_adapt(tmp_path, key):
    save_model(tmp_path, "qwen2")
    value = key == "adapt_vision_tower"
    with raises("image.no-tower", f"lora.{key}={str(value).lower()}"):
        adapter_map(tmp_path, LoraOptions(2, 4.0, **{key: value}))
