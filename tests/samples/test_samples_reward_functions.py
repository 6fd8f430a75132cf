"""Reward functions from the configuration."""

import sys
from collections.abc import Callable

import pytest
from support.expected_errors import raises

from megarl.base.errors import RewardError
from megarl.config import TrainConfig
from megarl.config.problems import InvalidConfigError
from megarl.rewards.calling import RewardTask
from megarl.samples.reward_functions import check_rewards, reward_plan, val_reward_config

Build = Callable[..., TrainConfig]
OWN = """
def mine(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    return 0.5 + bonus

def many(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0] * len(solution_strs)
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN, encoding="utf-8")
    return str(file)


def functions_for(config, data_source):
    """By label: the function's name and its weight."""
    plan = reward_plan(config)
    return {term.label: (plan.functions[term.function(data_source)].spec, term.weight) for term in plan.terms}


def score(config, text, truth="1", data_source="s"):
    """What the named functions give to one answer, called here."""
    plan, total = reward_plan(config), 0.0
    for term in plan.terms:
        found = []
        loaded = plan.functions[term.function(data_source)].load()
        loaded.run([RewardTask(data_source, text, truth, {}, "p")], lambda place, outcome, f=found: f.append(outcome))
        assert found[0].failure is None, found
        total += term.weight * found[0].score
    return total


def test_one_function_by_name_and_by_file(train_config, own):
    assert functions_for(train_config({"reward.name": "gsm8k"}), "any") == {"gsm8k": ("gsm8k", 1.0)}
    custom = {"reward.custom_reward_function.path": own, "reward.custom_reward_function.name": "mine"}
    assert functions_for(train_config(custom), "any") == {"custom": (f"{own}:mine", 1.0)}
    assert score(train_config(custom), "x") == 0.5
    assert score(train_config({**custom, "reward.custom_reward_function.reward_kwargs": {"bonus": 2}}), "x") == 2.5
    assert functions_for(train_config({"reward.name": f"{own}:mine"}), "any") == {"mine": (f"{own}:mine", 1.0)}


@pytest.mark.parametrize(
    ("data_source", "function"),
    [
        *(("openai/gsm8k", "gsm8k"), ("lighteval/MATH", "math"), ("DigitalLearningGmbH/MATH-lighteval", "math")),
        *(("HuggingFaceH4/MATH-500", "math"), ("math_dapo", "math_dapo"), ("aime2025", "math_dapo")),
        *(("searchR1_nq", "search_em"), ("hotpotqa", "search_em"), ("taco", "code"), ("arithmetic", "arithmetic")),
        *(("numina_olympiads", "math"), ("school/sums", "arithmetic"), ("openai/other", "math")),
    ],
)
def test_user_functions_by_data_source_come_first(train_config, data_source, function):
    own = {"reward.name": "auto", "reward.data_sources": {"school/*": "arithmetic", "openai/o*": "math"}}
    assert functions_for(train_config(own), data_source) == {"auto": (function, 1.0)}


def test_an_unknown_data_source_is_named(train_config):
    named = ("data_source='mine/x'", "openai/gsm8k", "reward.data_sources")
    with raises("reward.unknown-data-source", *named):
        functions_for(train_config({"reward.name": "auto"}), "mine/x")


def test_several_functions_by_weight(train_config, own):
    changes = {
        "reward.custom_reward_function.path": own,
        "reward.custom_reward_function.name": "mine",
        "reward.functions": {"gsm8k": 1.0, "format": 0.2, "custom": -2},
        "reward.function_kwargs": {"gsm8k": {"method": "flexible"}},
    }
    config = train_config(changes)
    assert functions_for(config, "s") == {
        "gsm8k": ("gsm8k", 1.0),
        "format": ("format", 0.2),
        "custom": (f"{own}:mine", -2.0),
    }
    assert score(config, "<think>a</think><answer>it is 1</answer>") == pytest.approx(1 + 0.2 - 2 * 0.5)


JUDGE = {"reward.name": "judge", "reward.judge.base_url": "http://h/v1", "reward.judge.model": "m"}


def test_a_judge_reads_its_template_from_a_file(train_config, tmp_path):
    file = tmp_path / "template.txt"
    file.write_text("Grade {response}", encoding="utf-8")
    (spec,) = reward_plan(train_config({**JUDGE, "reward.judge.template_path": str(file)})).functions
    assert spec.kwargs["template"] == "Grade {response}" and spec.kwargs["score_range"] == [0.0, 10.0]
    assert spec.timeout_s and spec.timeout_s > 60  # its own limit is the endpoint's


@pytest.mark.parametrize(
    ("changes", "code", "named"),
    [
        ({"reward.name": "own.py:score"}, "config.user-code-file", "own.py"),
        ({"reward.functions": {"gsm8q": 1}}, "config.unknown-name", "'gsm8k'"),
        (
            {"reward.function_kwargs": {"gsm8k": {"metod": 1}}, "reward.name": "gsm8k"},
            "reward.wrong-signature",
            "'metod'",
        ),
        (
            {"reward.num_workers": 0, "reward.name": "math"},
            "reward.needs-process",
            "reward.num_workers=0",
        ),
        (
            {"reward.reward_manager.name": "batch", "reward.name": "gsm8k"},
            "reward.manager-signature",
            "reward.reward_manager.name=batch",
        ),
        (
            {**JUDGE, "reward.judge.api_key_env": "NO_SUCH_KEY"},
            "judge.api-key-unset",
            "reward.judge.api_key_env=NO_SUCH_KEY",
        ),
        ({"reward.functions": {"a.score": 1, "b.score": 1}}, "reward.duplicate-function", "'score'"),
    ],
)
def test_invalid_functions_are_errors(train_config, changes, code, named):
    with raises(code, named):
        check_rewards(train_config(changes))


def test_missing_library_of_a_function_is_an_error(train_config, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with raises("packages.not-installed", "reward function 'math'", "'math_verify'", "-e '.[math]'"):
        check_rewards(train_config({"reward.name": "math"}))


def test_the_verl_batch_manager_needs_a_batch_function(train_config, own):
    batch = {"reward.reward_manager.name": "batch", "reward.custom_reward_function.path": own}
    check_rewards(train_config({**batch, "reward.custom_reward_function.name": "many"}))
    wrong = train_config({**batch, "reward.reward_manager.name": "dapo", "reward.custom_reward_function.name": "many"})
    with raises("reward.manager-signature", "reward.reward_manager.name=dapo", "(data_sources, ...)", "set batch"):
        check_rewards(wrong)


@pytest.mark.parametrize(
    ("changes", "path", "code"),
    [
        ({"reward.functions": {"gsm8k": "much"}}, "reward.functions", "reward.weight-not-number"),
        ({"reward.functions": {"custom": 1}}, "reward.functions", "reward.custom-without-function"),
        (
            {"reward.functions": {"gsm8k": 1}, "reward.custom_reward_function.path": "x.py"},
            "reward.functions",
            "reward.custom-without-weight",
        ),
        ({"reward.data_sources": {"a": 1}}, "reward.data_sources", "reward.data-source-function"),
        ({"reward.function_kwargs": {"gsm8k": 1}}, "reward.function_kwargs", "reward.function-kwargs"),
        (
            {"reward.reward_kwargs.overlong_buffer_cfg.enable": True},
            "reward.reward_kwargs.overlong_buffer_cfg.len",
            "reward.overlong-buffer",
        ),
        ({"reward.sandbox.url": "host:1"}, "reward.sandbox.url", "config.bad-url"),
        ({"reward.name": "judge"}, "reward.judge.base_url", "judge.not-configured"),
        ({"reward.judge.score_range": [1, 1]}, "reward.judge.score_range", "judge.score-range"),
        ({"reward.judge.score_pattern": "("}, "reward.judge.score_pattern", "judge.bad-pattern"),
        ({"reward.judge.score_pattern": "x"}, "reward.judge.score_pattern", "judge.pattern-without-group"),
        ({"reward.judge.template_path": "/no"}, "reward.judge.template_path", "config.no-such-file"),
        ({"reward.reward_manager.name": "remote"}, "reward.reward_manager.name", "config.value-out-of-limits"),
    ],
)
def test_contradicting_keys_are_errors(train_config, changes, path, code):
    with pytest.raises(InvalidConfigError) as caught:
        train_config(changes)
    assert (path, code) in {(problem.path, problem.code) for problem in caught.value.problems}


def test_validation_has_its_own_reward_function(train_config, own):
    training = {"reward.functions": {"gsm8k": 1.0, "format": 0.2}, "reward.reward_kwargs.max_resp_len": 9}
    assert val_reward_config(train_config(training)) is None
    keys = {
        "reward.validation_function.path": own,
        "reward.validation_function.name": "mine",
        "reward.validation_function.reward_kwargs": {"bonus": 1},
    }
    config = train_config(training | keys)
    validation = val_reward_config(config)
    assert validation is not None and functions_for(config, "s") == {"gsm8k": ("gsm8k", 1.0), "format": ("format", 0.2)}
    assert functions_for(validation, "s") == {"custom": (f"{own}:mine", 1.0)} and score(validation, "x") == 1.5
    check_rewards(config)
    with raises("config.user-code-function", "nothing", error=RewardError):
        check_rewards(train_config(keys | {"reward.validation_function.name": "nothing"}))
    with raises("data.no-val-files", "reward.validation_function.path"):
        train_config(keys | {"data.val_files": []})
