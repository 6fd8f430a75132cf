"""Combination of function and reward-model scores, and the sequences of the reward model."""

import pytest
import torch
from support.expected_errors import raises
from transformers import AutoTokenizer

from megarl.base.image_tokens import Image
from megarl.config.schema.rewards import RewardConfig, ScoringModelConfig
from megarl.data import DataProto, attention_mask_of, pad_left, pad_right
from megarl.rewards import FailurePolicy, RewardManager, in_driver
from megarl.rewards.manager import NullReward
from megarl.samples.reward_phase import ModelScores, RewardPhase, SequenceReader
from megarl.trainer.records.sample_records import describe_samples

ANSWERS = ["12", "7", "oops", ""]
TRUTHS = ["12", "8", "3", "1"]
RM_SCORES = torch.tensor([0.5, -2.0, 4.0, 1.0])


class Fixed:
    """A reward model with fixed scores."""

    def __init__(self, scores):
        self.result = ModelScores(scores, truncated=1)

    def score(self, batch):
        return self.result


@pytest.fixture(scope="module")
def tokenizer(arithmetic):
    return AutoTokenizer.from_pretrained(arithmetic / "model")


@pytest.fixture
def batch(tokenizer):
    messages = [[{"role": "user", "content": f"What is {n} + 4?"}] for n in range(4)]
    prompts = [list(tokenizer.apply_chat_template(m, add_generation_prompt=True)["input_ids"]) for m in messages]
    answers = [tokenizer(text)["input_ids"] for text in ANSWERS]
    tensors = {"prompts": pad_left(prompts), "responses": pad_right(answers)}
    widths = [tensor.shape[1] for tensor in tensors.values()]
    tensors["attention_mask"] = attention_mask_of([*map(len, prompts)], [*map(len, answers)], *widths)
    facts = {"data_source": ["sums"] * 4, "reward_model": [{"ground_truth": truth} for truth in TRUTHS]}
    return DataProto.from_dict(tensors, {**facts, "raw_prompt": messages})


def compare(data_source, solution_str, ground_truth, extra_info):
    return 2.0 * (int(solution_str) == int(ground_truth))


def phase(functions, tokenizer, scores, **keys):
    section = RewardConfig(**{"on_error": "mask", "model": ScoringModelConfig(enable=True), **keys})
    return RewardPhase(functions, tokenizer, section, Fixed(scores))


def test_the_score_is_the_weighted_sum_at_the_last_token(tokenizer, batch):
    functions = RewardManager(in_driver(compare), tokenizer, FailurePolicy("mask"))
    scored = phase(functions, tokenizer, RM_SCORES, function_weight=3.0, model=ScoringModelConfig(weight=0.5)).score(
        batch
    )
    rows = scored.batch.tensors["token_level_scores"]
    assert rows.sum(-1).tolist() == [3 * 2.0 + 0.5 * 0.5, 3 * 0.0 - 0.5 * 2.0, 0.0, 0.0]
    assert rows[0].tolist()[:2] == [0.0, 6.25] and rows[1, 0] == -1.0  # answers of two tokens and of one
    assert scored.batch.tensors["response_mask"].any(-1).tolist() == [True, True, False, False]
    assert scored.metrics["reward/failed"] == 2 and scored.metrics["reward/rm_truncated"] == 1
    assert scored.metrics["reward/rm_score/mean"] == pytest.approx((0.5 - 2) / 2)
    assert scored.metrics["reward/function_score/max"] == 2
    samples = describe_samples(scored.batch, tokenizer, step=1)
    assert [sample["score"] for sample in samples] == [6.25, -1.0, None, None]
    assert [sample["rm_score"] for sample in samples] == [0.5, -2.0, None, None]
    assert [sample["function_score"] for sample in samples] == [2.0, 0.0, None, None]


def test_null_reward_leaves_the_model_score(tokenizer, batch):
    scored = phase(NullReward(), tokenizer, RM_SCORES, function_weight=0.0).score(batch)
    assert scored.batch.tensors["token_level_scores"].sum(-1).tolist() == [0.5, -2.0, 4.0, 0.0]
    assert scored.extra_columns["reward_failed"].tolist() == [False, False, False, True]  # no token to carry a score
    assert "reward/function_score/mean" not in scored.metrics


def test_a_non_finite_score_is_masked_or_raises(tokenizer, batch):
    scores = torch.tensor([0.5, torch.nan, 4.0, torch.inf])
    scored = phase(NullReward(), tokenizer, scores, function_weight=0.0).score(batch)
    assert scored.batch.tensors["token_level_scores"].sum(-1).tolist() == [0.5, 0.0, 4.0, 0.0]
    assert scored.metrics["reward/failed"] == 2 and scored.metrics["reward/rm_score/max"] == 4
    with raises("reward.model-score-not-finite", "row 1 is nan", "reward.on_error=mask"):
        phase(NullReward(), tokenizer, scores, function_weight=0.0, on_error="raise").score(batch)


def section(model, length=64, input_tokenizer=None):
    decoder = str(input_tokenizer) if input_tokenizer else None
    return ScoringModelConfig(enable=True, path=str(model), input_tokenizer=decoder, max_length=length)


def test_the_same_tokenizer_reads_token_ids_directly(tokenizer, batch, arithmetic):
    sequences, cut = SequenceReader(section(arithmetic / "model"), tokenizer).read(batch)
    assert cut == 0 and all(torch.equal(sequences.tensors[name], batch.tensors[name]) for name in sequences.tensors)
    shortened, cut = SequenceReader(section(arithmetic / "model", 5), tokenizer).read(batch)
    assert cut == 4
    whole = torch.cat([batch.tensors["prompts"], batch.tensors["responses"]], 1)
    real = [row[mask.bool()].tolist() for row, mask in zip(whole, batch.tensors["attention_mask"], strict=True)]
    kept = torch.cat([shortened.tensors["prompts"], shortened.tensors["responses"]], 1)
    assert kept.tolist() == [row[-5:] for row in real]


def test_a_reward_model_sees_whole_prompts_with_images(tokenizer, batch, arithmetic):
    images = [(Image.of(b"a", 1, 1),), (), None, ()]
    with_images = batch.with_columns({}, {"images": images})
    model = arithmetic / "model"
    sequences, _ = SequenceReader(section(model), tokenizer, 64).read(with_images)
    assert sequences.non_tensor_batch["images"].tolist() == images and set(sequences.non_tensor_batch) == {"images"}
    assert SequenceReader(section(model), tokenizer).read(batch)[0].non_tensor_batch == {}
    with raises("reward.cuts-images", "reward.model.max_length=64", 65):
        SequenceReader(section(model), tokenizer, 65)
    with raises("reward.no-images", f"reward.model.input_tokenizer={model}"):
        SequenceReader(section(model, input_tokenizer=model), tokenizer, 64)


def test_another_tokenizer_reads_the_conversation_in_its_template(tokenizer, batch, arithmetic, tmp_path):
    other = AutoTokenizer.from_pretrained(arithmetic / "model")
    other.add_tokens(["<judge>"])
    other.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}<judge>"
    other.save_pretrained(tmp_path)
    suggested = f"reward.model.input_tokenizer={tokenizer.name_or_path}"
    with raises("reward.other-vocabulary", f"reward.model.path={tmp_path}", suggested):
        SequenceReader(section(tmp_path), tokenizer)
    with raises("reward.input-tokenizer", f"reward.model.input_tokenizer={tmp_path}"):
        SequenceReader(section(tmp_path, input_tokenizer=tmp_path), tokenizer)
    reader = SequenceReader(section(tmp_path, input_tokenizer=arithmetic / "model"), tokenizer)
    sequences, _ = reader.read(batch)
    assert (sequences.tensors["responses"] == other.convert_tokens_to_ids("<judge>")).all()
    lengths = sequences.tensors["attention_mask"].sum(-1).tolist()
    for row, answer in enumerate(ANSWERS):
        ids = sequences.tensors["prompts"][row, -(lengths[row] - 1) :].tolist()
        assert ids == other(f"user: What is {row} + 4?\nassistant: {answer}\n")["input_ids"]


def test_megabytes_of_a_prompt_are_cut_before_the_reward_model_reads_them(
    tokenizer,
    batch,
    arithmetic,
    tmp_path,
    monkeypatch,
):
    """A policy's prompt can be truncated; ``raw_prompt`` is not."""
    other = AutoTokenizer.from_pretrained(arithmetic / "model")
    other.add_tokens(["<judge>"])
    other.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}<judge>"
    other.save_pretrained(tmp_path)
    text, lengths, kind = "1 + 2 " * 50_000, list[int](), type(other)
    batch.non_tensor_batch["raw_prompt"][0] = [{"role": "user", "content": text}]
    reader = SequenceReader(section(tmp_path, 12, input_tokenizer=arithmetic / "model"), tokenizer)
    expected = other(f"{text} {ANSWERS[0]} <judge>", add_special_tokens=False)["input_ids"][-12:]
    encode = kind.__call__

    def counting(self, text, *args, **kwargs):
        lengths.extend([len(text)] if isinstance(text, str) else map(len, text))
        return encode(self, text, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counting)
    sequences, cut = reader.read(batch)
    assert [*sequences.tensors["prompts"][0].tolist(), *sequences.tensors["responses"][0].tolist()] == expected
    assert cut >= 1 and max(lengths) < 20_000


def test_a_response_cannot_write_control_tokens_of_the_reward_model(tokenizer, batch, arithmetic, tmp_path):
    other = AutoTokenizer.from_pretrained(arithmetic / "model")
    other.add_tokens(["12"], special_tokens=True)
    other.chat_template = "{% for m in messages %}{{ m['content'] }}12{% endfor %}"
    other.save_pretrained(tmp_path)
    sequences, _ = SequenceReader(section(tmp_path, input_tokenizer=arithmetic / "model"), tokenizer).read(batch)
    end, one, two = other.convert_tokens_to_ids(["12", "1", "2"])
    assert ANSWERS[0] == "12" and sequences.tensors["prompts"][0].tolist()[-3:] == [end, one, two]
    assert sequences.tensors["responses"][0].tolist() == [end]
