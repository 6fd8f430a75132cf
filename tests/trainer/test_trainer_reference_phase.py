"""Quality blend and alignment bonus of the reference, against loops over rows with a transformers model."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from support.expected_errors import raises

from megarl.config.batch import plan_batches
from megarl.config.schema.algorithm import AlgorithmConfig, RefAlignmentConfig, RefQualityConfig, ReprAlignConfig
from megarl.data import DataProto
from megarl.models import ParallelLayout
from megarl.trainer.jobs.preflight import check_schedules
from megarl.trainer.phases.advantage_phase import AdvantagePhase, RewardShaping
from megarl.trainer.phases.model_passes import AlignmentPhase, ground_truth_text

QUALITY = RefQualityConfig(enable=True, max_weight=0.4, warmup_ratio=0.5, schedule="linear")
ALIGN = ReprAlignConfig(
    enable=True,
    ref_alignment=RefAlignmentConfig(
        enable=True, max_weight=0.6, warmup_ratio=0.4, schedule="step", steps=2, entropy_high_threshold=1.0
    ),
)
STEPS = 20
TRUTHS = ["12", ["12", "zwölf"], {"target": np.array(["7"], dtype=object)}, "  ", 41, "12"]
# Token ids of two prompts and the responses. The reward of the sixth row failed; a tool ends the fifth row.
PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9], [8, 9], [5, 6, 7]]
ANSWERS = [[10, 11, 12, 13], [14, 15], [16], [17, 18], [19, 20, 21], [22]]
MASK = [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
LAST = [3, 1, 0, 1, 2, 0]
SCORES = [1.0, 0.0, -2.0, 0.5, 1.0, 0.0]
KEPT, COMPARED = [0, 1, 2, 3, 4], [0, 1, 2, 4]


def batch(**changes):
    generator = torch.Generator().manual_seed(2)
    prompts, responses, scores = torch.zeros(6, 3).long(), torch.zeros(6, 4).long(), torch.zeros(6, 4)
    attention = torch.zeros(6, 7).long()
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        prompts[row, 3 - len(prompt) :], responses[row, : len(answer)] = torch.tensor(prompt), torch.tensor(answer)
        attention[row, 3 - len(prompt) : 3 + len(answer)] = 1
        scores[row, LAST[row]] = SCORES[row]
    mask = torch.tensor(MASK)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "attention_mask": attention,
        "response_mask": mask,
        "token_level_scores": scores,
        "ref_log_prob": torch.where(mask.bool(), -3 * torch.rand(6, 4, generator=generator), math.nan),
        "entropys": torch.where(mask.bool(), 1 + torch.rand(6, 4, generator=generator), 1e9),
        **changes,
    }
    return DataProto.from_dict(
        tensors, {"uid": list("aabbba"), "reward_model": [{"ground_truth": truth} for truth in TRUTHS]}
    )


class Reference:
    """The quickstart's model in transformers, as the reference role with a layout."""

    def __init__(self, folder, layout):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.layout = layout
        self.requests: list[DataProto] = []

    @torch.no_grad()
    def mean_state(self, prompt, answer, mask):
        states = self.model(torch.tensor([[*prompt, *answer]]), output_hidden_states=True).hidden_states[-1][0]
        kept = [state for state, chosen in zip(states[len(prompt) :], mask, strict=True) if chosen]
        return sum(kept) / len(kept) if kept else torch.zeros(states.shape[1])

    def compute_ref_representations(self, batch):
        self.requests.append(batch)
        vectors = []
        for row in batch:
            real = row.tensors["attention_mask"][0].bool()
            width = row.tensors["prompts"].shape[1]
            prompt, answer, mask = (
                row.tensors[name][0][kept].tolist()
                for name, kept in (
                    ("prompts", real[:width]), ("responses", real[width:]), ("response_mask", real[width:]),
                )
            )  # fmt: skip
            vectors.append(self.mean_state(prompt, answer, mask))
        return DataProto.from_dict({"representations": torch.stack(vectors)})


@pytest.fixture(scope="module")
def tokenizer(arithmetic):
    return transformers.AutoTokenizer.from_pretrained(arithmetic / "model")


def shaping(**sections):
    return RewardShaping(AlgorithmConfig(**sections), STEPS)


def alignment(reference, tokenizer, *, max_length=8):
    schedule = shaping(repr_align=ALIGN).alignment
    assert schedule is not None
    return AlignmentPhase(reference, schedule, ALIGN.ref_alignment.entropy_high_threshold, tokenizer, max_length)


def test_without_shaping_the_scores_are_the_rewards():
    metrics: dict[str, float] = {}
    idle = shaping()
    given = batch()
    assert idle.shape(given, 3, metrics) is given
    assert not metrics and idle.alignment is None


@pytest.mark.parametrize(("step", "weight"), [(1, 0.04), (5, 0.2), (10, 0.4), (20, 0.4)])
def test_reference_quality_is_blended_in_at_the_last_token(step, weight):
    metrics: dict[str, float] = {}
    given = batch()
    result = shaping(ref_quality_score=QUALITY).shape(given, step, metrics).tensors
    rewards, changes, qualities = result["token_level_rewards"], [], []
    for row in KEPT:
        log_probs = [given.tensors["ref_log_prob"][row, t].item() for t in range(4) if MASK[row][t]]
        quality = math.prod(math.exp(value) for value in log_probs) ** (1 / len(log_probs))
        expected = (1 - weight) * SCORES[row] + weight * quality
        assert rewards[row, LAST[row]].item() == pytest.approx(expected, rel=1e-6)
        assert rewards[row].count_nonzero() == 1
        changes.append(expected - SCORES[row])
        qualities.append(quality)
    assert not rewards[5].any(), "a row without a trained token is unchanged"
    assert torch.equal(result["token_level_scores"], given.tensors["token_level_scores"])
    assert metrics == pytest.approx(
        {
            "ref_quality/weight": weight,
            "ref_quality/left_out": 1,
            "ref_quality/quality/mean": sum(qualities) / 5,
            "ref_quality/quality/max": max(qualities),
            "ref_quality/quality/min": min(qualities),
            "ref_quality/reward_change/mean": sum(changes) / 5,
            "ref_quality/reward_change/max": max(changes),
            "ref_quality/reward_change/min": min(changes),
        },
        abs=1e-6,
    )


def test_advantages_are_estimated_from_shaped_rewards():
    config = AlgorithmConfig(adv_estimator="grpo", norm_adv_by_std_in_grpo=False, ref_quality_score=QUALITY)
    metrics: dict[str, float] = {}
    shaped = shaping(ref_quality_score=QUALITY).shape(batch(), 10, metrics)
    result = AdvantagePhase(config).compute(shaped, metrics).tensors
    rewards = shaped.tensors["token_level_rewards"].sum(-1)
    assert torch.equal(result["token_level_rewards"], shaped.tensors["token_level_rewards"])
    assert (result["advantages"][0, 0] - result["advantages"][1, 0]).item() == pytest.approx(
        (rewards[0] - rewards[1]).item(), rel=1e-5
    )


def test_nan_log_probs_of_the_reference_are_an_error():
    broken = batch(ref_log_prob=torch.full((6, 4), math.nan))
    with raises("algorithm.ref-log-prob-nan", "ref_log_prob of row 0", "algorithm.ref_quality_score"):
        shaping(ref_quality_score=QUALITY).shape(broken, 1, {})


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(dp=4), ParallelLayout(pp=2, dp=2, vpp=2)])
def test_alignment_bonus_is_the_cosine_of_response_and_ground_truth(arithmetic, tokenizer, layout):
    reference, metrics = Reference(arithmetic / "model", layout), {}
    compared = alignment(reference, tokenizer).run(batch(), 5, metrics)
    result = shaping(repr_align=ALIGN).shape(compared, 5, metrics)
    texts, bonuses, cosines = ["12", "12", "7", "", "41", "12"], [], []
    for row in KEPT:
        cosine = 0.0
        if row in COMPARED:
            truth = tokenizer.encode(texts[row], add_special_tokens=False)
            answer = reference.mean_state(PROMPTS[row], ANSWERS[row], MASK[row][: len(ANSWERS[row])])
            target = reference.mean_state(PROMPTS[row], truth, [1] * len(truth))
            cosine = (answer @ target / answer.norm() / target.norm()).item()
            assert 0.01 < abs(cosine) <= 1
            cosines.append(cosine)
        bonuses.append(0.3 * cosine)  # the first of two stairs of 0.6
        rewards = result.tensors["token_level_rewards"][row]
        assert rewards[LAST[row]].item() == pytest.approx(SCORES[row] + 0.3 * cosine, abs=1e-6)
        assert rewards.count_nonzero() <= 1
    assert not result.tensors["token_level_rewards"][5].any()
    assert metrics == pytest.approx(
        {
            "repr_align/weight": 0.3,
            "repr_align/fired": 1,
            "repr_align/similarity/mean": sum(cosines) / 4,
            "repr_align/similarity/max": max(cosines),
            "repr_align/similarity/min": min(cosines),
            "repr_align/reward_added/mean": sum(bonuses) / 5,
            "repr_align/reward_added/max": max(bonuses),
            "repr_align/reward_added/min": min(bonuses),
            "repr_align/empty_ground_truths": 1,
            "repr_align/cut_ground_truths": 0,
        },
        abs=1e-6,
    )
    # Six responses and three ground truths, each once per prompt.
    (request,) = reference.requests
    assert len(request) == {1: 9, 4: 12, 2: 12}[layout.dp]


def test_rows_and_ground_truths_keep_their_images(arithmetic, tokenizer):
    reference = Reference(arithmetic / "model", ParallelLayout())
    pictures = [[f"picture {row}"] for row in range(6)]
    alignment(reference, tokenizer).run(batch().with_columns({}, {"images": pictures}), 5, {})
    (request,) = reference.requests
    assert list(request.non_tensor_batch["images"]) == [*pictures, pictures[0], pictures[2], pictures[4]]


def test_quality_is_blended_before_the_alignment_bonus(arithmetic, tokenizer):
    reference = Reference(arithmetic / "model", ParallelLayout())
    both, metrics = shaping(ref_quality_score=QUALITY, repr_align=ALIGN), {}
    compared = alignment(reference, tokenizer).run(batch(), 20, metrics)
    rewards = both.shape(compared, 20, metrics).tensors["token_level_rewards"].sum(-1)
    blended = shaping(ref_quality_score=QUALITY).shape(batch(), 20, {}).tensors["token_level_rewards"]
    similarity = compared.tensors["ref_similarity"]
    assert torch.allclose(rewards, blended.sum(-1) + 0.6 * similarity * torch.tensor([1, 1, 1, 1, 1, 0]), atol=1e-6)


def test_alignment_is_active_at_high_entropy_and_nonzero_weight(tokenizer):
    phase = alignment(None, tokenizer)
    assert phase.name == "repr_align"
    low = batch(entropys=torch.where(torch.tensor(MASK).bool(), 1.0, 1e9))
    assert phase.is_active(batch(), 4), "the mean inside the mask is above 1"
    assert not phase.is_active(low, 4), "1 is not above 1"
    assert not phase.is_active(batch(), 3), "the first stair begins at step 4"
    metrics: dict[str, float] = {}
    result = shaping(repr_align=ALIGN).shape(low, 8, metrics).tensors
    assert torch.equal(result["token_level_rewards"], result["token_level_scores"])
    assert metrics["repr_align/fired"] == metrics["repr_align/reward_added/mean"] == 0
    assert metrics["repr_align/weight"] == 0.6


def test_long_ground_truths_are_truncated_and_counted(arithmetic, tokenizer):
    reference, metrics = Reference(arithmetic / "model", ParallelLayout()), {}
    alignment(reference, tokenizer, max_length=1).run(batch(), 5, metrics)
    lengths = [len(tokenizer.encode(text, add_special_tokens=False)) for text in ("12", "7", "41")]
    assert max(lengths) > 1 and metrics["repr_align/cut_ground_truths"] == sum(length > 1 for length in lengths)
    assert reference.requests[0].tensors["attention_mask"][6:, -4:].sum(-1).tolist() == [1, 1, 1]


def test_megabytes_of_a_ground_truth_are_not_tokenized(arithmetic, tokenizer, monkeypatch):
    reference, metrics, lengths = Reference(arithmetic / "model", ParallelLayout()), {}, list[int]()
    long = batch().with_columns({}, {"reward_model": [{"ground_truth": "1 + 2 " * 50_000}] * 6})
    head, encode = tokenizer.encode("1 + 2 1", add_special_tokens=False)[:3], tokenizer.encode
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, **options: lengths.append(len(text)) or encode(text, **options)
    )
    alignment(reference, tokenizer, max_length=3).run(long, 5, metrics)
    assert metrics["repr_align/cut_ground_truths"] == len(set(map(tuple, PROMPTS)))
    assert reference.requests[0].tensors["responses"][6, :3].tolist() == head and max(lengths) < 20_000


def test_without_ground_truths_the_reference_is_not_called(arithmetic, tokenizer):
    reference, metrics = Reference(arithmetic / "model", ParallelLayout()), {}
    empty = batch().with_columns({}, {"reward_model": [{"ground_truth": None}] * 6})
    compared = alignment(reference, tokenizer).run(empty, 5, metrics)
    assert not reference.requests and not compared.tensors["ref_similarity"].any()
    assert metrics == {"repr_align/empty_ground_truths": 5, "repr_align/cut_ground_truths": 0}


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        ("a", "a"), (None, ""), (" \n", ""), ([], ""), (["x", "y"], "x"), (("z",), "z"), (3, "3"), (2.5, "2.5"),
        ({"target": ["Paris", "paris"]}, "Paris"), ({"a": 1}, "{'a': 1}"), (np.array(["q"], dtype=object), "q"),
        ([["in", "side"]], "in"),
    ],
)  # fmt: skip
def test_ground_truth_as_text(truth, text):
    assert ground_truth_text(truth) == text


@pytest.mark.parametrize(
    ("changes", "key", "code", "named"),
    [
        ({"schedule": "step", "steps": 8, "warmup_ratio": 0.7}, "steps", "algorithm.too-many-stairs", "at most 7"),
        ({"schedule": "megarl.nowhere.shape"}, "schedule", "config.user-code-import", "megarl.nowhere"),
    ],
)
@pytest.mark.parametrize("section", ["algorithm.ref_quality_score", "algorithm.repr_align.ref_alignment"])
def test_schedule_errors_name_the_key(train_config, section, changes, key, code, named):
    on = {"algorithm.repr_align.enable": True} if "repr" in section else {}
    keys = {f"{section}.{name}": value for name, value in {"enable": True, **changes}.items()}
    config = train_config({**on, **keys})
    with raises(code, f"{section}.{key}=", named):
        check_schedules(config, plan_batches(config), 10)
    validation = train_config({**on, **keys, "trainer.val_only": True})
    check_schedules(validation, plan_batches(validation), 10)
    off = train_config({**keys, f"{section}.enable": False})
    check_schedules(off, plan_batches(off), 10)
