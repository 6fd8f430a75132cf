"""Low-rank adapters: outputs, loss, gradients, merged weights and checkpoints, against peft."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from engine_cases import Setup, engine, in_parts, micro_batches, policy_loss
from support.expected_errors import raises
from support.release import of_release
from tiny_models import TEMPERATURE, policy_reference, rows, save_model
from torch import Tensor

from megarl.megatron import OptimizerOptions, OutputOptions, RecomputeOptions
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.megatron.layers.lora import initial_a
from megarl.models import ParallelLayout, WeightMap, read_model_config
from megarl.models.adapters import AdapterMap, LoraOptions

ALL = LoraOptions(rank=3, alpha=6.0)
DORA = replace(ALL, kind="dora")
QUERY_VALUE = LoraOptions(rank=2, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"), rank_stabilized=True)
ADAM = OptimizerOptions(lr=1e-2, weight_decay=0.0, clip_grad=0.5, eps=1e-3)
LAYOUTS = {
    "tp1_some": Setup(ParallelLayout(), lora=QUERY_VALUE),
    "tp2": Setup(ParallelLayout(tp=2), lora=ALL),
    "tp2sp_some": Setup(ParallelLayout(tp=2), sequence_parallel=True, lora=QUERY_VALUE),
    "cp2_recompute": Setup(ParallelLayout(cp=2), lora=ALL, recompute=RecomputeOptions()),
    "tp2pp2sp": Setup(ParallelLayout(tp=2, pp=2), sequence_parallel=True, lora=ALL),
    "pp2vpp2": Setup(ParallelLayout(pp=2, vpp=2), rows_per_micro_batch=2, lora=ALL),
    "dora_tp1_some": Setup(ParallelLayout(), lora=replace(QUERY_VALUE, kind="dora")),
    "dora_tp2": Setup(ParallelLayout(tp=2), lora=DORA),
    "dora_tp2sp_some": Setup(ParallelLayout(tp=2), sequence_parallel=True, lora=replace(QUERY_VALUE, kind="dora")),
    "dora_pp2_recompute": Setup(ParallelLayout(pp=2), lora=DORA, recompute=RecomputeOptions()),
    "dora_tp2pp2sp": Setup(ParallelLayout(tp=2, pp=2), sequence_parallel=True, lora=DORA),
}
CI = ("cp2_recompute", "pp2vpp2", "dora_tp2sp_some", "dora_tp2pp2sp")
"""DoRA contains LoRA."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_model(path, "qwen2", tied=True, num_hidden_layers=4, initializer_range=0.12)
    return path


def values_of(shapes):
    """Large values for every A and B, and for magnitudes."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: 0.2 * torch.randn(shape, generator=generator) + (1 if "magnitude" in name else 0)
        for name, shape in shapes.items()
    }


def peft_model(path, lora, targets, **changes):
    """The model of a folder with new adapters of peft."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rank_stabilized,
        use_dora=lora.has_magnitudes,
        target_modules=targets,
        **changes,
    )
    return peft.get_peft_model(model, config).eval()


def saved_name(name):
    """The name that a parameter of peft's model has in a saved folder."""
    return name.replace("magnitude_vector.default.weight", "magnitude_vector").replace(".default", "")


class PeftLora:
    """The model with peft's adapters, for torch.

    Attributes:
        model: peft's model.
        values: its trained parameters, by their names in a saved folder.
    """

    def __init__(self, path, lora, values):
        self.model = peft_model(
            path, lora, [name.removesuffix(".lora_A.weight") for name in values if ".lora_A" in name]
        )
        params = {saved_name(name): param for name, param in self.model.named_parameters() if param.requires_grad}
        self.values = {name: params[f"base_model.model.{name}"] for name in values}
        assert len(params) == len(values)
        with torch.no_grad():
            for name, value in values.items():
                self.values[name].copy_(value)

    def loss(self, batch):
        total = torch.zeros(())
        for row in batch:
            log_probs, entropy = policy_reference(self.model, row)
            total = total - (log_probs * row.weights).sum() - 0.3 * (entropy * row.weights).sum()
        return total


class Answer(NamedTuple):
    """One rank's results of :func:`adapted_step`; tensors by their part of the whole tensor."""

    grads: list[tuple[Any, Tensor]]
    buffered: int
    loss: float
    grad_norm: float
    start: Tensor | None
    off: Tensor | None
    trained: Tensor | None
    weights: list[tuple[Any, Tensor]]


def pieces(built, tensors):
    """Contributed rectangles of the adapters' tensors."""
    layout, rank = built.runtime.layout, built.runtime.rank
    return [
        (piece, tensors[param.name][tuple(slice(at, at + n) for at, n in zip(piece.at, piece.shape, strict=True))])
        for param, replica, _ in built.trained_map.contributions(layout, rank)
        if replica == 0
        for piece in param.pieces
    ]


def whole(shapes, parts):
    """Whole tensors; every element from one rank."""
    result, count = ({name: torch.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for piece, tensor in parts:
        window = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
        result[piece.hf_name][window] = tensor
        count[piece.hf_name][window] += 1
    assert all((numbers == 1).all() for numbers in count.values())
    return result


def log_probs(built, setup, batch):
    outputs = built.forward(micro_batches(batch, setup), OutputOptions(TEMPERATURE))
    return None if outputs is None else torch.cat([output.log_probs for output in outputs])


def backward(built, setup, batch):
    mine = micro_batches(batch, setup, built.runtime.coordinate.dp, setup.layout.dp)
    sums = built.forward_backward(mine, policy_loss, OutputOptions(TEMPERATURE, with_entropy=True))
    return sums["nll"] - 0.3 * sums["entropy"]


def set_values(built, values, skip=()):
    params = built.weights.parameters()
    for local in built.trained_map.megatron_params(built.runtime.layout, built.runtime.rank):
        for piece in (piece for piece in local.pieces if piece.hf_name not in skip):
            target = tuple(slice(at, at + n) for at, n in zip(piece.at, piece.shape, strict=True))
            source = tuple(slice(a, b) for a, b in zip(piece.start, piece.stop, strict=True))
            params[local.name].data[target] = values[piece.hf_name][source]
    built.weights_changed()


def adapted_step(place, path, setup, batch, folder):
    """One step from given adapters, then an export of the merged model and a checkpoint."""
    with engine(place, path, setup) as built:
        start = log_probs(built, setup, batch)
        set_values(built, values_of(built.trained_map.hf_shapes()))
        loss = backward(built, setup, batch)
        grads = {name: param.main_grad.clone() for name, param in built.weights.parameters().items()}
        norm = built.optimizer_step().grad_norm
        with built.adapters_off():
            off = log_probs(built, setup, batch)
        trained = log_probs(built, setup, batch)
        weights = {name: param.detach().clone() for name, param in built.weights.parameters().items()}
        buffered = sum(buffer.grad_data.numel() for chunk in built.chunks for buffer in chunk.buffers)
        answer = Answer(pieces(built, grads), buffered, loss, norm, start, off, trained, pieces(built, weights))
        built.export_hf(folder / "merged")
        begin_save(built, folder / "checkpoint").finish()
        return answer


def continued(place, path, setup, batch, folder):
    """The adapters after one more step from a checkpoint."""
    with engine(place, path, setup) as built:
        load_sharded(built, folder)
        backward(built, setup, batch)
        built.optimizer_step()
        return pieces(built, {name: param.detach().clone() for name, param in built.weights.parameters().items()})


@pytest.mark.parametrize("name", of_release(CI, [name for name in LAYOUTS if name not in CI]))
def test_steps_equal_peft(pool, path, tmp_path, name):
    """Loss, gradients, two steps over a checkpoint that another layout reads, the reference, and the merged model."""
    options = ADAM
    setup = LAYOUTS[name]._replace(optimizer=options)
    # The distributed optimizer leaves each data-parallel rank a part of the gradient.
    if setup.layout.dp > 1 or setup.layout.cp > 1:
        setup = setup._replace(optimizer=OptimizerOptions(**{**vars(ADAM), "use_distributed_optimizer": False}))
    lora, batches = setup.lora, [rows(1), rows(2)]
    shapes = AdapterMap(WeightMap(read_model_config(path)), lora).hf_shapes()
    theirs = PeftLora(path, lora, values_of(shapes))
    adam = torch.optim.AdamW(theirs.values.values(), lr=options.lr, eps=options.eps, weight_decay=0.0)
    loss = theirs.loss(batches[0])
    loss.backward()
    expected = {key: value.grad.clone() for key, value in theirs.values.items()}

    answers = pool.run(adapted_step, setup.layout.world_size, path, setup, batches[0], tmp_path)

    assert all(answer.loss == pytest.approx(loss.item(), rel=1e-5) for answer in answers)
    grads = whole(shapes, [part for answer in answers for part in answer.grads])
    largest = max(grad.abs().max().item() for grad in expected.values())
    for key, grad in expected.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-5, atol=1e-5 * largest, msg=lambda m, k=key: f"{k}: {m}")
    norm = torch.nn.utils.clip_grad_norm_(theirs.values.values(), options.clip_grad).item()
    assert all(answer.grad_norm == pytest.approx(norm, rel=1e-5) for answer in answers)
    adam.step()
    weights = whole(shapes, [part for answer in answers for part in answer.weights])
    for key, value in theirs.values.items():
        torch.testing.assert_close(weights[key], value.detach(), rtol=1e-5, atol=1e-6)
    if setup.layout.world_size == 1:
        trained = sum(value.numel() for value in expected.values())
        assert trained <= answers[0].buffered <= trained + 64 * len(expected), "each parameter is padded to 64"

    last = answers[-1]
    assert torch.equal(last.start, last.off), "B starts at zero, and adapters that are off have no effect"
    check_log_probs(path, last.off, batches[0])
    check_log_probs(tmp_path / "merged", last.trained, batches[0])
    assert (last.trained - last.off).abs().max() > 1e-2

    adam.zero_grad()
    theirs.loss(batches[1]).backward()
    torch.nn.utils.clip_grad_norm_(theirs.values.values(), options.clip_grad)
    adam.step()
    other = Setup(ParallelLayout(tp=2) if setup.layout.tp == 1 else ParallelLayout(dp=2), lora=lora, optimizer=ADAM)
    parts = pool.run(continued, 2, path, other, batches[1], tmp_path / "checkpoint")
    resumed = whole(shapes, [part for rank in parts for part in rank])
    for key, value in theirs.values.items():
        torch.testing.assert_close(resumed[key], value.detach(), rtol=1e-5, atol=2e-6)


def check_log_probs(folder, ours, batch):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for part, row in zip(in_parts(ours, batch), batch, strict=True):
            assert (part - policy_reference(model, row)[0]).abs().max() < 1e-5


def test_initial_values_do_not_depend_on_the_layout(path):
    adapters = AdapterMap(WeightMap(read_model_config(path)), ALL)
    drawn = []
    for layout in (ParallelLayout(), ParallelLayout(tp=2, pp=2)):
        parts = [
            (piece, initial_a(adapters, param)[piece.at[0] : piece.at[0] + piece.shape[0]])
            for rank in range(layout.world_size)
            for param, *_ in adapters.contributions(layout, rank)
            if param.name.endswith("lora_a")
            for piece in param.pieces
        ]
        drawn.append(whole({k: s for k, s in adapters.hf_shapes().items() if "lora_A" in k}, parts))
    for name, values in drawn[0].items():
        assert torch.equal(values, drawn[1][name])
        bound = values.shape[1] ** -0.5  # kaiming_uniform_(a=sqrt(5)), as peft
        assert 0.8 * bound < values.abs().max() <= bound
    assert len({tuple(values[0, :4].tolist()) for values in drawn[0].values()}) == len(drawn[0])


@pytest.mark.parametrize(
    ("changes", "fault", "named"),
    [
        ({"rank": 0}, "rank-below-one", ["lora_rank=0"]),
        ({"kind": "doras"}, "unknown-type", ["lora.type=doras", "lora, dora"]),
        ({"alpha": 0.0}, "alpha-not-positive", ["lora_alpha=0.0"]),
        ({"targets": ("embed_tokens",)}, "unsupported-target", ["target_modules", "'model.embed_tokens'"]),
        ({"targets": ("q_proj",), "excludes": ("self_attn.q_proj",)}, "no-target-left", ["['self_attn.q_proj']"]),
    ],
)
def test_wrong_options_are_rejected(path, changes, fault, named):
    with raises(f"adapter.{fault}", *named):
        AdapterMap(WeightMap(read_model_config(path)), LoraOptions(**{"rank": 2, "alpha": 4.0, **changes}))


def test_an_unknown_target_is_named_with_the_nearest(path):
    with raises("adapter.unknown-target") as caught:
        AdapterMap(WeightMap(read_model_config(path)), LoraOptions(rank=2, alpha=4.0, targets=("q_prj",)))
    assert str(caught.value) == (
        "target_modules: 'q_prj' matches no layer of the model; did you mean 'q_proj'? valid: o_proj, q_proj, k_proj, "
        "v_proj, gate_proj, up_proj, down_proj [adapter.unknown-target]"
    )
