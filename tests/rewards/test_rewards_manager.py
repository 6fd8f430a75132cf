"""The reward manager: scores, masks, failures, extra fields and length rewards."""

import logging
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from support.expected_errors import raises
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.base.errors import StepImpossible
from megarl.base.image_tokens import Image
from megarl.data import DataProto, attention_mask_of, pad_left, pad_right
from megarl.rewards import FailurePolicy, RewardManager, agent_score, exact_integer, in_driver
from megarl.rewards.shaping import LengthShaping, OverlongPenalty

EOS = 1
COUNTS = dict.fromkeys(
    [
        *("reward/failed", "reward/bad_samples", "reward/timeouts", "reward/infrastructure_failures"),
        *("reward/retries", "reward/processes_replaced"),
    ],
    0.0,
)


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {
        token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789 +=?abcdefghijklmnopqrstuvwxyz"])
    }
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture
def batch_of(tokenizer):
    def build(*rows, **non_tensors):
        """A batch of (prompt, response, ground truth); a response of None has no token at all."""
        prompts = [tokenizer(prompt)["input_ids"] for prompt, _, _ in rows]
        responses = [[] if text is None else [*tokenizer(text)["input_ids"], EOS] for _, text, _ in rows]
        left, right = pad_left(prompts), pad_right(responses)
        lengths = list(map(len, prompts)), list(map(len, responses))
        mask = attention_mask_of(*lengths, left.shape[1], right.shape[1])
        objects = {
            "data_source": ["toy"] * len(rows),
            "reward_model": [{"style": "rule", "ground_truth": truth} for _, _, truth in rows],
            **non_tensors,
        }
        return DataProto.from_dict({"prompts": left, "responses": right, "attention_mask": mask}, objects)

    return build


def fails_on(bad, how):
    """A reward function that fails for the responses ``bad``."""

    def fn(data_source, solution_str, ground_truth, extra_info):
        return how() if solution_str in bad else 0.5

    return fn


def divide():
    return 1 / 0


def test_score_is_at_the_last_response_token(tokenizer, batch_of):
    batch = batch_of(("1+1=", "2", "2"), ("10+10=", "200", "20"), ("5+7=", "12", "12"))
    scored = RewardManager(in_driver(exact_integer), tokenizer).score(batch)
    scores = scored.batch.batch["token_level_scores"]
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert scored.batch.batch["response_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 0]]
    assert scored.metrics == COUNTS
    assert scored.batch.non_tensor_batch["reward_failed"].tolist() == [False] * 3
    assert "token_level_scores" not in batch.batch


def test_function_gets_verls_arguments(tokenizer, batch_of):
    seen = []

    def fn(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, solution_str, ground_truth, dict(extra_info)))
        extra_info["touched"] = True
        return 0

    shared = {"index": 7}
    batch = batch_of(("1+1=", "2 ", "2"), ("1+1=", "3", "2"), extra_info=[shared, shared])
    RewardManager(in_driver(fn), tokenizer).score(batch)
    assert seen == [("toy", "2 ", "2", {"index": 7}), ("toy", "3", "2", {"index": 7})]
    assert shared == {"index": 7}
    seen.clear()
    RewardManager(in_driver(fn), tokenizer).score(batch_of(("1+1=", "2", "2"), extra_info=[None]))
    RewardManager(in_driver(fn), tokenizer).score(batch_of(("1+1=", "2", "2")))
    assert [info for *_, info in seen] == [{}, {}]


def test_prompts_show_where_images_are(tokenizer, batch_of):
    """The ids of images need 64 bits: some would be tokens of text in 32."""
    seen = []

    def fn(data_source, solution_str, ground_truth, extra_info, prompt_str):
        seen.append(prompt_str)
        return 0

    batch = batch_of(("1+", "2", "2"), ("1+", "2", "2"))
    images = [Image.of(bytes([number]), 2, 2).token_ids for number in range(2)]
    prompts = pad_left([[*ids, *row.tolist()] for ids, row in zip(images, batch.unpadded("prompts"), strict=True)])
    mask = torch.cat([torch.ones(2, 4, dtype=torch.int64), batch.padded("attention_mask")], 1)
    RewardManager(in_driver(fn), tokenizer).score(batch.with_columns({"prompts": prompts, "attention_mask": mask}))
    assert seen == ["<image>1+", "<image>1+"]


@pytest.mark.parametrize(
    "value", [1, True, np.float32(1), np.bool_(True), np.array([1.0]), torch.tensor(1.0), torch.ones(1, 1), Fraction(1)]
)
def test_any_number_type_is_a_score(tokenizer, batch_of, value):
    for result in (value, {"score": value}):
        scored = RewardManager(in_driver(lambda *, _r=result, **kwargs: _r), tokenizer).score(batch_of(("1", "2", "2")))
        assert scored.batch.batch["token_level_scores"].tolist() == [[0.0, 1.0]]


def test_extra_fields_are_recorded(tokenizer, batch_of):
    def fn(data_source, solution_str, ground_truth, extra_info):
        extras = {"acc": solution_str == ground_truth, "pred": solution_str, "tags": [1, 2]}
        return {"score": -1.0, **extras, **({"length": 10} if solution_str == "2" else {})}

    scored = RewardManager(in_driver(fn), tokenizer).score(batch_of(("1", "2", "2"), ("1", "3", "2")))
    assert scored.metrics == {**COUNTS, "reward_extra/acc/mean": 0.5, "reward_extra/length/mean": 10.0}
    columns = {name: values.tolist() for name, values in scored.extra_columns.items()}
    assert columns == {
        "reward_failed": [False, False],
        "reward_failure": [None, None],
        "reward_extra_acc": [True, False],
        "reward_extra_pred": ["2", "3"],
        "reward_extra_tags": [[1, 2], [1, 2]],
        "reward_extra_length": [10, None],
    }
    assert scored.batch.non_tensor_batch["reward_extra_pred"].tolist() == ["2", "3"]
    assert scored.batch.batch["token_level_scores"].sum(-1).tolist() == [-1.0, -1.0]


FAILURES = [
    (divide, ("ZeroDivisionError: division by zero", "test_rewards_manager.py:")),
    (lambda: math.nan, (" nan;", "[reward.score-not-number]")),
    (lambda: -math.inf, (" -inf;", "[reward.score-not-number]")),
    (lambda: 1e300, (" 1e+300;", "[reward.score-not-number]")),
    (lambda: 10**400, ("[reward.score-not-number]",)),
    (lambda: None, (" None;", "[reward.score-not-number]")),
    (lambda: "1.0", (" '1.0';", "[reward.score-not-number]")),
    (lambda: torch.ones(2), (" tensor([1., 1.]);", "[reward.score-not-number]")),
    (lambda: {"reward": 1.0}, (["reward"], "[reward.no-score]")),
    (lambda: {"score": math.nan}, (" nan;", "[reward.score-not-number]")),
    (lambda: exit(0), ("SystemExit: 0",)),
]


@pytest.mark.parametrize(("how", "values"), FAILURES)
def test_failure_stops_and_shows_the_sample(tokenizer, batch_of, how, values):
    batch = batch_of(("1+1=", "2", "2"), ("3+4=", "oops", "7"))
    sample = ("row 1", "data_source: 'toy'", "prompt: '3+4='", "solution_str: 'oops'", "ground_truth: '7'")
    with raises("reward.row-failed", *sample, *values, "reward.on_error=mask", error=StepImpossible):
        RewardManager(in_driver(fails_on(["oops"], how)), tokenizer).score(batch)


def test_message_of_a_result_that_is_no_score(tokenizer, batch_of):
    with raises("reward.row-failed") as caught:
        RewardManager(in_driver(fails_on(["2"], lambda: None)), tokenizer).score(batch_of(("1+1=", "2", "2")))
    assert str(caught.value) == (
        "the reward of row 0 failed: the function returned None; it must return a finite number, or one under 'score' "
        "[reward.score-not-number]\n  data_source: 'toy'\n  prompt: '1+1='\n  solution_str: '2'\n  ground_truth: '2'\n"
        "  (reward.on_error=mask masks it) [reward.row-failed]"
    )


@pytest.mark.parametrize("how", [how for how, _ in FAILURES])
def test_masked_failure_is_excluded_and_counted(tokenizer, batch_of, how, caplog):
    batch = batch_of(("1+1=", "2", "2"), ("3+4=", "oops", "7"), ("1+1=", "22", "2"))
    with caplog.at_level(logging.WARNING):
        scored = RewardManager(in_driver(fails_on(["oops"], how)), tokenizer, FailurePolicy("mask")).score(batch)
    assert scored.metrics["reward/failed"] == 1.0
    assert scored.batch.batch["response_mask"].sum(-1).tolist() == [2, 0, 3]
    assert scored.batch.batch["token_level_scores"].sum(-1).tolist() == [0.5, 0.0, 0.5]
    assert scored.batch.non_tensor_batch["reward_failed"].tolist() == [False, True, False]
    assert "prompt: '3+4='" in caplog.text


def test_failed_rows_are_excluded_from_means(tokenizer, batch_of):
    def fn(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0 if solution_str == "2" else math.nan, "acc": 1.0}

    scored = RewardManager(in_driver(fn), tokenizer, FailurePolicy("mask")).score(
        batch_of(("1", "2", "2"), ("1", "3", "2"))
    )
    assert scored.metrics == {**COUNTS, "reward/failed": 1.0, "reward/bad_samples": 1.0, "reward_extra/acc/mean": 1.0}
    assert scored.extra_columns["reward_extra_acc"].tolist() == [1.0, None]


def test_existing_response_mask_is_kept(tokenizer, batch_of):
    batch = batch_of(("1", "234", "2"), ("1", "xx", "2"))
    batch = batch.with_columns({"response_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]])})
    scored = RewardManager(in_driver(fails_on(["xx"], divide)), tokenizer, FailurePolicy("mask")).score(batch)
    assert scored.batch.batch["response_mask"].tolist() == [[1, 0, 1, 1], [0, 0, 0, 0]]


def test_empty_response_is_a_failure(tokenizer, batch_of):
    batch = batch_of(("1+1=", "2", "2"), ("3+4=", None, "7"))
    with raises("reward.row-failed", "row 1", "no token"):
        RewardManager(in_driver(exact_integer), tokenizer).score(batch)
    scored = RewardManager(in_driver(exact_integer), tokenizer, FailurePolicy("mask")).score(batch)
    assert scored.metrics["reward/failed"] == 1.0
    assert scored.batch.batch["token_level_scores"].tolist() == [[0, 1], [0, 0]]


def test_only_failures_stop_even_under_mask(tokenizer, batch_of):
    batch = batch_of(("1+1=", "2", "2"), ("3+4=", "2", "7"))
    with raises("reward.no-row-scored", "2 rows", "row 0", "ZeroDivision"):
        RewardManager(in_driver(fails_on(["2"], divide)), tokenizer, FailurePolicy("mask")).score(batch)


def test_long_samples_are_truncated_in_messages(tokenizer, batch_of):
    batch = batch_of(("1+1=", "a" * 30000, "2"))
    with raises("reward.row-failed") as caught:
        RewardManager(in_driver(exact_integer), tokenizer).score(batch_of(("1", "a" * 30000, "x")))
    assert len(str(caught.value)) < 10000
    assert RewardManager(in_driver(exact_integer), tokenizer).score(batch).metrics["reward/failed"] == 0


def test_invalid_arguments(tokenizer, batch_of):
    with raises("reward.unknown-on-error", "reward.on_error=ignore", "raise, mask"):
        FailurePolicy("ignore")
    with raises("reward.wrong-signature", "data_source, solution_str"):
        RewardManager(in_driver(lambda text: 0.0), tokenizer)
    batch = batch_of(("1", "2", "2"))
    with raises("reward.missing-column", ["data_source", "responses"]):
        RewardManager(in_driver(exact_integer), tokenizer).score(
            batch.select(["prompts", "attention_mask"], ["reward_model"])
        )
    for wrong in ({"style": "rule"}, None):
        broken = batch.with_columns(None, {"reward_model": [wrong]})
        with raises("reward.no-ground-truth") as caught:
            RewardManager(in_driver(exact_integer), tokenizer, FailurePolicy("mask")).score(broken)
        assert str(caught.value) == (
            f"column 'reward_model', row 0 is {wrong}; it must have a 'ground_truth' [reward.no-ground-truth]"
        )


def test_failed_conversation_is_masked_and_not_scored(tokenizer, batch_of):
    """Also under ``raise``: the reward function is not at fault."""
    batch = batch_of(("1+1=", "2", 2), ("1+2=", "", 3), agent_error=[None, "the search server is unreachable"])
    seen = []

    def fn(data_source, solution_str, ground_truth, extra_info):
        seen.append(solution_str)
        return 1.0

    scored = RewardManager(in_driver(fn), tokenizer, FailurePolicy("raise")).score(batch)
    assert seen == ["2"]
    assert scored.batch.tensors["response_mask"].tolist() == [[1, 1], [0, 0]]
    assert scored.extra_columns["reward_failed"].tolist() == [False, True] and scored.metrics["reward/failed"] == 1


def test_agent_result_reaches_the_reward_function(tokenizer, batch_of):
    results = [{"score": 0.25, "steps": 3.0}, {"score": -1}]
    info = [{"level": 1}, None]
    batch = batch_of(("1+1=", "2", 2), ("1+2=", "3", 3), agent_result=results, extra_info=info)
    scored = RewardManager(in_driver(agent_score), tokenizer).score(batch)
    assert scored.batch.batch["token_level_scores"].sum(-1).tolist() == [0.25, -1.0]
    assert scored.extra_columns["reward_extra_steps"].tolist() == [3.0, None]
    seen = []

    def fn(data_source, solution_str, ground_truth, extra_info):
        seen.append(extra_info)
        return 0.0

    RewardManager(in_driver(fn), tokenizer).score(batch)
    assert seen == [{"level": 1, "agent_result": results[0]}, {"agent_result": results[1]}]
    with raises("reward.row-failed", "[reward.agent-score]", {}):
        RewardManager(in_driver(agent_score), tokenizer).score(batch_of(("1", "2", 2), agent_result=[{}]))


def test_length_rewards_are_added(tokenizer, batch_of):
    rows = [("1", "1", "1"), ("1", "333", "3"), ("1", "55555", "x"), ("1", "1", "1")]
    batch = batch_of(*rows, uid=["a", "a", "a", "b"])
    shaping = LengthShaping(OverlongPenalty(max_resp_len=6, length=4, penalty_factor=2.0, log=True), length_weight=0.5)
    scored = RewardManager(in_driver(exact_integer_or_zero), tokenizer, shaping=shaping).score(batch)
    # lengths with end token 2, 4, 6, 2; Kimi: 0.5, 0, -0.5 and 0; DAPO: 0, -(4 - 2) / 4 * 2, -2 and 0
    assert scored.batch.batch["token_level_scores"].sum(-1).tolist() == [1.25, -1.0, -2.25, 1.0]
    assert scored.extra_columns["reward_extra_overlong"].tolist() == [False, True, True, False]
    assert scored.metrics["reward_extra/overlong_reward/mean"] == pytest.approx(-3 / 4)


def exact_integer_or_zero(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)


def test_max_failure_ratio(tokenizer, batch_of):
    batch = batch_of(*[("1", text, "1") for text in ("1", "2", "3", "4")])
    unreachable = fails_on(["2"], lambda: (_ for _ in ()).throw(ConnectionError("away")))
    manager = RewardManager(in_driver(unreachable), tokenizer, FailurePolicy("raise", 0.25))
    scored = manager.score(batch)  # an infrastructure failure is masked even under ``raise``
    assert scored.extra_columns["reward_failure"].tolist() == [None, "infrastructure", None, None]
    assert scored.metrics["reward/infrastructure_failures"] == scored.metrics["reward/failed"] == 1
    values = ("1 of 4 rows", "0 raised", "1 had an infrastructure failure", "reward.max_failure_ratio=0.2 ")
    with raises("reward.too-many-failures", *values, error=StepImpossible):
        RewardManager(in_driver(unreachable), tokenizer, FailurePolicy("raise", 0.2)).score(batch)
    lost = batch.with_columns(None, {"agent_error": ["gone", "gone", None, None]})
    assert manager.score(lost).metrics["reward/failed"] == 2  # failed conversations do not count in the ratio
