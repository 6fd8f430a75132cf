"""The results of an update do not depend on the layout, the micro-batches and the order of rows.

Cases are drawn by their number, so a failure is reproducible. ``MEGARL_EXACTNESS_CASES=500 pytest
tests/workers/test_workers_exactness.py`` draws more than CI does.
"""

import os

import pytest
import torch
from exactness_cases import MODELS, Case, Subject, draw, run, whole
from role_processes import ACTOR
from support.release import of_release

from megarl.models import ParallelLayout
from megarl.workers.settings import MicroBatchBudget

COUNT = os.environ.get("MEGARL_EXACTNESS_CASES")
CASES = range(int(COUNT)) if COUNT else (0, 1, 3, 7, 8, 11, 12, 14, 16, 17, 21)
"""By default those that have each kind of parallelism, pipeline, recomputation and offload with each role."""
PREFIXES = {"actor": "actor", "critic": "critic", "sft": "train"}

TWICE = {
    "dense": Case(
        kind="actor",
        experts=False,
        mode="token-mean",
        layout=ParallelLayout(tp=2, pp=2, vpp=3),
        budget=MicroBatchBudget(max_tokens=30, multiple=2),
        order=1,
        megatron={"sequence_parallel": True, "recompute_granularity": "full"},
        offloads=True,
    ),
    "experts": Case(
        kind="sft",
        experts=True,
        mode="seq-mean-token-mean",
        layout=ParallelLayout(dp=2, cp=2, ep=2),
        budget=MicroBatchBudget(size=2),
        order=1,
        megatron={"overlap_grad_reduce": True, "overlap_param_gather": True},
        offloads=False,
    ),
}


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    return {key: Subject(tmp_path_factory.mktemp(key[0]), *key) for key in MODELS}


@pytest.mark.parametrize("number", CASES)
def test_any_layout_equals_plain_transformers(pool, subjects, number):
    case = draw(number, subjects)
    print(case)
    subject = subjects[case.kind, case.experts]
    ours, theirs = whole(subject, case, run(pool, subject, case)), subject.reference(case.mode)
    prefix = PREFIXES[case.kind]
    # The loads of experts are compared with transformers in tests/megatron/test_megatron_routing.py.
    others = ("perf/", f"{prefix}/expert_load/")
    metrics = {name: value for name, value in ours.metrics.items() if not name.startswith(others)}
    expected = {f"{prefix}/{name}": value for name, value in theirs.metrics.items()}
    expected |= {f"{prefix}/skipped_steps": 0.0, f"{prefix}/empty_steps": 0.0}
    if case.kind == "actor":
        expected["actor/kl_coef"] = ACTOR.kl_loss_coef
    for step, (mine, reference) in enumerate(zip(ours.grads, theirs.grads, strict=True)):
        check_same(mine, reference, f"gradient of step {step}")
    check_same(ours.weights, theirs.weights, "weight")
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)


def check_same(ours, theirs, what):
    """Each tensor within 1e-5 of its scale."""
    assert ours.keys() == theirs.keys()
    worst = {n: ((ours[n] - t).abs().max() / t.abs().max()).item() for n, t in theirs.items()}
    name = max(worst, key=worst.__getitem__)
    assert worst[name] < 1e-5, f"{what} {name}: {worst[name]:.1e} of its scale {theirs[name].abs().max():.1e}"


@pytest.mark.parametrize("name", of_release(["experts"], ["dense"]))
def test_update_is_deterministic(pool, subjects, name):
    case = TWICE[name]
    once, again = (run(pool, subjects[case.kind, case.experts], case) for _ in range(2))
    for first, second in zip(once, again, strict=True):
        assert first.metrics == second.metrics
        for ours, others in zip((*first.grads, first.weights), (*second.grads, second.weights), strict=True):
            assert ours.keys() == others.keys()
            assert all(
                torch.equal(tensor.view(torch.int32), others[name].view(torch.int32)) for name, tensor in ours.items()
            )
