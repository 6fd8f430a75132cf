"""Each family computes transformers' outputs, expert selection and gradients, in every layout."""

import pytest
import torch
from engine_cases import Setup, assemble
from family_cases import MODELS, reference, study
from support.release import of_release
from tiny_models import rows

from megarl.megatron import OptimizerOptions
from megarl.models import ParallelLayout

LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "tp2sp": ParallelLayout(tp=2),
    "cp2": ParallelLayout(cp=2),
    "tp2cp2sp": ParallelLayout(tp=2, cp=2),
    "tp2pp2sp": ParallelLayout(tp=2, pp=2),
    "pp2vpp2": ParallelLayout(pp=2, vpp=2),
    "dp2": ParallelLayout(dp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
    "tp2etp1": ParallelLayout(tp=2, etp=1),
    "tp2cp2ep2etp1": ParallelLayout(tp=2, cp=2, ep=2, etp=1),
    "tp2ep2etp1": ParallelLayout(tp=2, ep=2, etp=1),
    "tp2ep2dp2": ParallelLayout(tp=2, dp=2, ep=2),
    "pp2ep2dp2": ParallelLayout(pp=2, dp=2, ep=2),
    "cp2ep2": ParallelLayout(cp=2, ep=2),
    "dp4ep2etp2": ParallelLayout(dp=4, ep=2, etp=2),
}
CI = {
    "mistral": "tp2",
    "llama_yarn": "tp2",
    "mixtral": "ep2 dp4ep2etp2",
    "qwen2_moe": "tp2ep2dp2",
    "qwen3_moe": "ep2",
    "deepseek_v2": "tp2ep2etp1",
    "deepseek_v3": "ep2 cp2ep2",
    "deepseek_dense": "tp2",
    "glm4_moe": "tp2ep2etp1",
    "olmo2": "tp2pp2sp",
    "olmo3": "pp2vpp2 tp2cp2sp",
    "olmo_critic": "tp2sp",
    "olmoe": "ep2",
    "gemma3": "cp2 tp2pp2sp",
    "gemma_critic": "tp2",
    "qwen3_next": "ep2 tp2ep2etp1 pp2ep2dp2",
    "qwen3_next_dense": "tp2sp",
    "qwen3_next_critic": "tp2",
    "qwen3_5": "tp2pp2sp",
    "qwen3_5_moe": "tp2ep2etp1",
    "gpt_oss": "ep2 pp2vpp2 tp2cp2ep2etp1",
    "gpt_oss_critic": "tp2ep2etp1",
    "token_critic": "tp2",
    "expert_critic": "ep2",
}
"""Layouts by model: each mechanism of a family, in a layout that can break it."""
MORE = {
    "mistral": "tp1",
    "llama_yarn": "tp1",
    "mixtral": "tp1 tp2ep2etp1",
    "qwen2_moe": "tp1 ep2",
    "qwen3_moe": "tp1 pp2ep2dp2",
    "deepseek_v2": "tp1 ep2",
    "deepseek_v3": "tp1",
    "glm4_moe": "tp1 pp2ep2dp2",
    "olmo2": "tp1 tp2",
    "olmo3": "tp1 tp2 cp2 dp2 tp2pp2sp",
    "olmo_critic": "tp1",
    "olmoe": "tp1 tp2ep2etp1",
    "gemma3": "tp1 tp2sp pp2vpp2",
    "gemma_critic": "tp1",
    "qwen3_next": "tp1",
    "qwen3_next_dense": "tp1 tp2",
    "qwen3_next_critic": "tp1",
    "qwen3_5": "tp1 tp2 dp2 pp2vpp2",
    "qwen3_5_moe": "tp1 ep2",
    "gpt_oss": "tp1 cp2 cp2ep2 tp2etp1 tp2ep2etp1 pp2ep2dp2",
    "gpt_oss_critic": "tp1",
    "token_critic": "tp1",
}
CASES = [(model, layout) for table in of_release([CI], [MORE]) for model in table for layout in table[model].split()]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    built = {}
    for name, settings in MODELS.items():
        path = tmp_path_factory.mktemp(name)
        built[name] = path, reference(path, settings, rows())
    return built


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_family_equals_transformers(pool, references, model, layout):
    path, theirs = references[model]
    sizes = LAYOUTS[layout]
    # Without the distributed optimizer each data-parallel rank has the whole gradient.
    optimizer = OptimizerOptions(use_distributed_optimizer=False)
    one_by_one = sizes.tp == sizes.cp == 1
    setup = Setup(
        sizes,
        sequence_parallel=layout.endswith("sp"),
        value_head="critic" in MODELS[model],
        rows_per_micro_batch=1 if one_by_one else 3,
        optimizer=optimizer,
    )
    ours = pool.run(study, sizes.world_size, path, setup, rows())
    check_outputs(sizes, ours, theirs)
    if one_by_one and sizes.pp == 1:
        check_routing(sizes, ours, theirs)
    for answer in ours:
        assert {name: answer.metrics[name] for name in theirs.metrics} == pytest.approx(theirs.metrics, rel=1e-5)
    check_gradients(assemble(path, setup, [answer.grads for answer in ours]), theirs.grads)


def check_outputs(sizes, ours, theirs):
    for rank, answer in enumerate(ours):
        where = sizes.coordinate(rank)
        expected = theirs.outputs[where.dp :: sizes.dp] if where.pp == sizes.pp - 1 else []
        assert len(answer.outputs) == len(expected)
        for mine, reference_row in zip(answer.outputs, expected, strict=True):
            for values, reference_values in zip(mine, reference_row, strict=True):
                assert (values - reference_values).abs().max() < 1e-5


def check_routing(sizes, ours, theirs):
    """Same experts with the same weights, token by token."""
    lengths = [len(row.prompt) + len(row.response) for row in rows()]
    for rank, answer in enumerate(ours):
        assert len(answer.routing) == len(theirs.routing)
        for mine, whole in zip(answer.routing, theirs.routing, strict=True):
            expected = torch.cat(whole.split(lengths)[sizes.coordinate(rank).dp :: sizes.dp])
            assert torch.equal(mine != 0, expected != 0)
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def check_gradients(ours, theirs):
    scale = max(grad.abs().max().item() for grad in theirs.values())
    untrained = {name for name in ours if name.endswith("e_score_correction_bias")}
    assert ours.keys() - untrained == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )
