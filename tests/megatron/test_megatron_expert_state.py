"""Expert parallelism: training state and weights round-trip through files bit for bit."""

import engine_cases
import pytest
import torch
from engine_cases import Setup, assemble, engine, micro_batches, policy_loss, refusal
from family_cases import MODELS, in_checkpoint_names, reference
from safetensors.torch import load_file, save_file
from support.release import RELEASE, of_release
from support.valid_layouts import paired_layouts
from tiny_models import TEMPERATURE, model_config, rows, save_model

from megarl.megatron import OptimizerOptions, OutputOptions
from megarl.megatron.checkpoint.sharded import begin_save, load_sharded
from megarl.models import ParallelLayout

# Two replicas of each expert, whose optimizer state is divided over them; four ranks divide that of the rest.
EXPERTS_OVER_TP = ParallelLayout(tp=2, dp=2, ep=2, etp=1)
EXPERTS_OVER_DP = ParallelLayout(dp=2, ep=2)
RESUMED = {"deepseek_v3": MODELS["deepseek_v3"], "gpt_oss": {**MODELS["gpt_oss"], "num_hidden_layers": 2}}
ADAM = OptimizerOptions(lr=1e-2, weight_decay=0.1, eps=1e-5)  # a small eps amplifies rounding


def take_steps(built, setup, seeds):
    for seed in seeds:
        mine = micro_batches(rows(seed), setup, built.runtime.coordinate.dp, setup.layout.dp)
        built.forward_backward(mine, policy_loss, OutputOptions(temperature=TEMPERATURE, with_entropy=True))
        assert not built.optimizer_step().skipped


def train(place, path, setup, seeds, load=None, save=None):
    """Weights after some steps; with ``save`` a checkpoint is written one step before the end."""
    with engine(place, path, setup) as built:
        if load is not None:
            with torch.no_grad():
                for param in built.weights.named().values():
                    param.fill_(torch.nan)  # whatever is not loaded shows
            load_sharded(built, load)
        take_steps(built, setup, seeds[:-1])
        if save is not None:
            begin_save(built, save).finish()
        take_steps(built, setup, seeds[-1:])
        return built.weights.to_host()


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """Each model, and its weights after training in one process."""
    results = {}
    for model in RESUMED:
        folder, setup = tmp_path_factory.mktemp(model), Setup(ParallelLayout(), optimizer=ADAM)
        save_model(folder, **RESUMED[model])
        results[model] = folder, assemble(folder, setup, pool.run(train, 1, folder, setup, range(2)))
    return results


def resume_cases():
    """Pairs of layouts: one to train and resume in, one to resume in as well."""
    for model, every in (("deepseek_v3", 1 if RELEASE else 3), ("gpt_oss", 2 if RELEASE else 3)):
        layouts = paired_layouts(model_config(**RESUMED[model]), 4)
        for number, layout in enumerate(layouts[::every]):
            dtype = torch.bfloat16 if number % 2 else torch.float32
            name = f"{model} {str(dtype).removeprefix('torch.')} {layout.describe()}"
            yield pytest.param(model, dtype, layout, layouts[every * number - 1], id=name)


@pytest.mark.parametrize(("model", "dtype", "layout", "elsewhere"), resume_cases())
def test_resumed_training_is_bit_exact(
    pool,
    tmp_path,
    alone,
    model,
    dtype,
    layout,
    elsewhere,
):
    folder, expected = alone[model]
    setup = setup_of(layout, dtype)
    through = pool.run(train, layout.world_size, folder, setup, range(2), None, tmp_path / "state")
    resumed = pool.run(train, layout.world_size, folder, setup, range(1, 2), tmp_path / "state")
    for rank, (ours, theirs) in enumerate(zip(resumed, through, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), (rank, name)
    if dtype is torch.float32:
        other = setup_of(elsewhere, dtype)
        moved = pool.run(train, elsewhere.world_size, folder, other, range(1, 2), tmp_path / "state")
        for place, weights in ((setup, through), (other, moved)):
            assert_trained_alike(folder, model, assemble(folder, place, weights), expected)


def setup_of(layout, dtype):
    return Setup(layout, dtype=dtype, optimizer=ADAM, rows_per_micro_batch=2 if layout.vpp > 1 else 3)


def assert_trained_alike(folder, model, actual, expected):
    """Assert that weights are close to those of one process, and that all but the correction bias were trained."""
    start = in_checkpoint_names(load_file(folder / "model.safetensors"), MODELS[model]["family"])
    atol = 1e-2 * ADAM.lr  # of the smallest gradients
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(tensor, start[name]) == name.endswith("e_score_correction_bias"), name


NORMED = [ParallelLayout(tp=2, etp=1), ParallelLayout(tp=2, ep=2, etp=1), ParallelLayout(cp=2), EXPERTS_OVER_DP]


@pytest.mark.parametrize(
    ("layout", "distributed"),
    of_release([*((layout, True) for layout in NORMED), (NORMED[1], False)], [(layout, False) for layout in NORMED]),
    ids=lambda value: value.describe() if isinstance(value, ParallelLayout) else str(value),
)
def test_gradient_norm_has_each_bias_and_sink_once(pool, tmp_path, layout, distributed):
    theirs = reference(tmp_path, MODELS["gpt_oss"], rows())
    norm = torch.stack([grad.square().sum() for grad in theirs.grads.values()]).sum().sqrt().item()
    adam = OptimizerOptions(lr=1e-2, use_distributed_optimizer=distributed)
    setup = Setup(layout, optimizer=adam, rows_per_micro_batch=3 if layout.dp == 1 else 4)
    for answer in pool.run(engine_cases.train, layout.world_size, tmp_path, setup, [rows()]):
        assert answer.steps[0].grad_norm == pytest.approx(norm, rel=1e-5)


def export(place, path, setup, target):
    with engine(place, path, setup) as built:
        built.export_hf(target, source=path)


@pytest.mark.parametrize(
    ("model", "layout", "bias_dtype"),
    [
        ("mixtral", EXPERTS_OVER_DP, None),
        ("qwen2_moe", EXPERTS_OVER_TP, None),
        ("deepseek_v2", ParallelLayout(pp=2, dp=2, ep=2), None),
        ("deepseek_v3", EXPERTS_OVER_TP, torch.float32),
        ("deepseek_v3", ParallelLayout(pp=2), torch.bfloat16),
        ("gpt_oss", EXPERTS_OVER_TP, None),
        ("token_critic", ParallelLayout(tp=2), None),
    ],
)
def test_round_trip_is_bit_exact(pool, tmp_path, model, layout, bias_dtype):
    original = save_model(tmp_path / "in", **MODELS[model])
    file = tmp_path / "in" / "model.safetensors"
    before = {
        name: tensor.to(bias_dtype if name.endswith("e_score_correction_bias") else torch.bfloat16)
        for name, tensor in load_file(file).items()
    }
    save_file(before, file, metadata={"format": "pt"})
    setup = Setup(layout, value_head="critic" in MODELS[model], dtype=torch.bfloat16)
    pool.run(export, layout.world_size, tmp_path / "in", setup, tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype is tensor.dtype and torch.equal(after[name], tensor), name
    again = type(original).from_pretrained(tmp_path / "out")
    assert again.config.to_dict().keys() == original.config.to_dict().keys()


def build(place, path, setup):
    with engine(place, path, setup):
        pass


def test_expert_parallelism_of_a_dense_model_raises(pool, tmp_path):
    save_model(tmp_path, **MODELS["mistral"])
    for message in pool.run(refusal, 2, build, tmp_path, Setup(EXPERTS_OVER_DP)):
        assert "expert_model_parallel_size=2" in message and message.endswith("[layout.ep-without-experts]")
