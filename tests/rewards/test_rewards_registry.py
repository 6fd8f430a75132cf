"""Reward functions by name, file and dotted path, and their signatures."""

import subprocess
import sys

import pytest
from support.expected_errors import raises

from megarl.base.errors import RewardError
from megarl.rewards import custom_reward_spec, exact_integer, load_reward_function, register_reward
from megarl.rewards.registry import REWARDS

GOOD = """
from dataclasses import dataclass

@dataclass
class Answer:
    text: str

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(Answer(solution_str).text == ground_truth)

def with_more(data_source, solution_str, ground_truth, extra_info, bonus=1.0, **kwargs):
    return bonus

def other_names(source, answer, truth, info):
    return 0.0

async def asynchronous(data_source, solution_str, ground_truth, extra_info):
    return 0.0

number = 3
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "my-reward.py"
    file.write_text(GOOD, encoding="utf-8")
    return str(file)


def test_find_by_name():
    assert load_reward_function("arithmetic") is exact_integer
    with raises("config.unknown-name", "reward_function='arithmetics'", "'arithmetic'", error=RewardError):
        load_reward_function("arithmetics")


def test_duplicate_name_is_refused():
    with raises("config.name-taken", "'arithmetic'", "megarl.rewards.rules", error=RewardError):
        register_reward("arithmetic")(lambda **kwargs: 0.0)
    assert register_reward("arithmetic")(exact_integer) is exact_integer
    assert REWARDS["arithmetic"] is exact_integer


def test_find_by_file(path):
    fn = load_reward_function(custom_reward_spec(path, "compute_score"))
    assert fn(data_source="x", solution_str="4", ground_truth="4", extra_info=None) == 1.0
    assert load_reward_function(f"{path}:compute_score") is fn  # one module per file
    assert load_reward_function(f"{path}:with_more")(data_source=0, solution_str=0, ground_truth=0, extra_info=0) == 1.0


def test_find_by_dotted_path():
    assert load_reward_function("megarl.rewards.rules.mathematics.exact_integer") is exact_integer


@pytest.mark.parametrize(
    ("function", "code", "values"),
    [
        ("compute", "config.user-code-function", ("'compute'", "'compute_score', ", "'other_names'")),
        ("number", "config.user-code-not-callable", ("int",)),
        ("other_names", "reward.wrong-signature", ("(source, answer, truth, info)", "data_source, solution_str")),
    ],
)
def test_invalid_function_is_refused(path, function, code, values):
    with raises(code, f"my-reward.py:{function}", *values, error=RewardError):
        load_reward_function(f"{path}:{function}")


def test_import_errors(tmp_path):
    with raises("config.user-code-file", f"{tmp_path}/nowhere.py", error=RewardError):
        load_reward_function(f"{tmp_path}/nowhere.py:compute_score")
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_package_here\n", encoding="utf-8")
    for _ in range(2):  # a failed import leaves nothing behind
        with raises("config.user-code-import", "broken.py", "ModuleNotFoundError", "no_such_package_here"):
            load_reward_function(f"{broken}:compute_score")
    exits = tmp_path / "exits.py"
    exits.write_text("raise SystemExit(0)\n", encoding="utf-8")
    with raises("config.user-code-import", "exits.py", "SystemExit"):
        load_reward_function(f"{exits}:compute_score")
    text = tmp_path / "reward.txt"
    text.write_text("x", encoding="utf-8")
    with raises("config.user-code-suffix", text):
        load_reward_function(f"{text}:compute_score")
    with raises("config.user-code-spec", "'reward.py'", "path.py:function"):
        load_reward_function("reward.py")
    with raises("config.user-code-import", "no_such_package", "ModuleNotFoundError"):
        load_reward_function("no_such_package.compute_score")
    with raises("config.user-code-function", "'megarl.rewards.rules.nothing'", "'nothing'"):
        load_reward_function("megarl.rewards.rules.nothing")


def test_check_imports_no_torch(path):
    code = (
        "import sys; from megarl.rewards import load_reward_function;"
        f"load_reward_function({path + ':compute_score'!r}); load_reward_function('arithmetic');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("29", "29", 1.0),
        (" 29\n", "29", 1.0),
        ("29", 29, 1.0),
        ("-3", "-3", 1.0),
        ("29.", "29", 0.0),
        ("029", "29", 0.0),
        ("2 9", "29", 0.0),
        ("is 29", "29", 0.0),
        ("", "0", 0.0),
    ],
)
def test_arithmetic(answer, truth, score):
    assert exact_integer("toy", answer, truth, {}) == {"score": score, "pred": answer.strip()}


def test_arithmetic_refuses_non_integer_ground_truth():
    with pytest.raises(ValueError, match="about 29"):
        exact_integer("toy", "29", "about 29", {})
