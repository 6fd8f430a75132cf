"""States of models with published sizes, and of layouts computed by hand."""

import pytest
from planned_jobs import megatron, train_job

from megarl.ops.plan.states import StateCounter, rollout_weight_bytes

# Parameters in the models' reports, and the unit of the last digit.
PUBLISHED = {"Qwen2.5-7B": (7.61e9, 1e7), "Llama-3-70B": (70.6e9, 1e8), "DeepSeek-V3": (671e9, 1e9)}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_single_rank_holds_the_published_parameters(model):
    parameters, unit = PUBLISHED[model]
    role = train_job(model, devices=1).role("actor")
    assert StateCounter(role).of(0).parameters == pytest.approx(parameters, abs=unit)


def test_mixed_precision_takes_eighteen_bytes_per_parameter_unless_the_optimizer_is_sharded():
    """bfloat16 weights 2, float32 gradients 4, float32 copies 4, two running means 8: 18, or 6 + 12 / d."""
    for dp, distributed in ((1, True), (8, True), (8, False)):
        role = train_job("Qwen2.5-7B", megatron(use_distributed_optimizer=distributed), devices=dp).role("actor")
        states = StateCounter(role).of(0)
        each = 6 + 12 / (dp if distributed else 1)
        assert states.total / states.parameters == pytest.approx(each, rel=1e-4)


def test_stages_and_tensor_ranks_divide_the_layers_and_the_vocabulary():
    role = train_job("Llama-3-70B", megatron(8, 4), nodes=4).role("actor")
    counter = StateCounter(role)
    sizes = [counter.of(role.layout.rank(pp=stage)).parameters for stage in range(4)]
    layer = (64 * 128 * 2 + 8 * 128 * 2 + 3 * 28672) * 8192 // 8 + 2 * 8192
    vocabulary = 128256 * 8192 // 8
    assert sizes == [20 * layer + vocabulary, 20 * layer, 20 * layer, 20 * layer + vocabulary + 8192]


def test_engine_ranks_hold_all_weights():
    model = train_job("Qwen2.5-7B", devices=1).role("actor").model
    whole = rollout_weight_bytes(model, 1, 0, "bfloat16")
    assert whole == 2 * 7615616512
    # norms are on both ranks
    norms = 2 * (28 * 2 + 1) * 3584
    assert sum(rollout_weight_bytes(model, 2, rank, "bfloat16") for rank in range(2)) == whole + norms


def test_an_engine_in_fp8_holds_a_byte_per_weight_of_linear_layers_and_a_scale_per_block():
    model = train_job("Qwen2.5-7B", devices=1).role("actor").model
    shapes = [(3584, 3584), (512, 3584), (512, 3584), (3584, 3584), (18944, 3584), (18944, 3584), (3584, 18944)]
    linear = 28 * sum(rows * columns for rows, columns in shapes)
    scales = 28 * sum(rows * columns // 128**2 for rows, columns in shapes)
    rest = 7615616512 - linear
    assert rollout_weight_bytes(model, 1, 0, "bfloat16", fp8=True) == linear + 4 * scales + 2 * rest
