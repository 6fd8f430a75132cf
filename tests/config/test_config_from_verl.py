"""verl's run scripts: the share that megarl accepts, and the generated page.

``verl_facts.json`` holds the overrides of verl's scripts with Megatron (each with its scripts, for
``INFER_BACKEND=sglang``) and the defaults of verl's configuration, both at the commit in the file.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from list_verl_keys import SHARES, render_verl_page, shared_keys

from megarl.config import TrainConfig, plan_batches, render_plan
from megarl.config.build import build
from megarl.config.compose import ConfigRequest, compose
from megarl.config.keys import walk
from megarl.config.problems import InvalidConfigError
from megarl.config.verl.table import table_of
from megarl.ops.jobs.command import run_job

ROOT = Path(__file__).resolve().parents[2]
FACTS: dict[str, Any] = json.loads((Path(__file__).parent / "verl_facts.json").read_text(encoding="utf-8"))
KNOWN = dict(walk(TrainConfig))
TABLE = table_of(TrainConfig)
FREE = tuple(f"{path}." for path, key in KNOWN.items() if key.is_mapping)


def key_of(override):
    return override.lstrip("+").partition("=")[0]


def overrides_of(script):
    number = FACTS["scripts"].index(script)
    return [override for override, users in FACTS["overrides"].items() if number in users]


def refused_of(values, overridden=()):
    """Codes of the problems of a configuration, by key."""
    try:
        build(TrainConfig, values, overridden=overridden)
    except InvalidConfigError as error:
        return {problem.path: problem.code for problem in error.problems}
    return {}


@pytest.fixture(scope="module")
def refused():
    """Refused keys by script; each override is parsed once and applied to the preset, without Hydra."""
    parsed = {o.input_line: o for o in OverridesParser.create().parse_overrides(list(FACTS["overrides"]))}
    preset = yaml.safe_load((ROOT / "configs" / "ppo_megatron_trainer.yaml").read_text(encoding="utf-8"))
    problems = {}
    for script in FACTS["scripts"]:
        values = copy.deepcopy(preset)
        for override in overrides_of(script):
            put(values, parsed[override].key_or_group, parsed[override].value())
        problems[script] = refused_of(values, [key_of(override) for override in overrides_of(script)])
    return problems


def put(values, path, value):
    *sections, name = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value


def shares(scripts, refused):
    """Accepted shares of the distinct overrides, of the distinct keys, and of the uses."""
    uses = [(override, key_of(override) in refused[script]) for script in scripts for override in overrides_of(script)]
    bad = {override for override, is_bad in uses if is_bad}
    keys = {key_of(override) for override, _ in uses}
    return (
        1 - len(bad) / len({override for override, _ in uses}),
        1 - len(set(map(key_of, bad))) / len(keys),
        1 - sum(is_bad for _, is_bad in uses) / len(uses),
    )


def test_most_overrides_of_verls_megatron_examples_are_accepted(refused, capsys):
    examples = [script for script in FACTS["scripts"] if script.startswith("examples/")]
    on_gpus = [script for script in examples if "ascend" not in script and "veomni" not in script]
    with_sglang = [script for script in on_gpus if "actor_rollout_ref.rollout.name=sglang" in overrides_of(script)]
    measured = {}
    for (name, *_), scripts in zip(SHARES, (examples, on_gpus, with_sglang), strict=True):
        measured[name] = shares(scripts, refused)
        with capsys.disabled():
            print(
                "\n{}: {} scripts; {:.1%} of overrides, {:.1%} of keys, {:.1%} of uses".format(
                    name, len(scripts), *measured[name]
                )
            )
    assert measured["all"][0] >= 0.8 and measured["all"][2] >= 0.9
    assert min(measured["on GPUs, generating with SGLang"]) >= 0.8
    rows = tuple(
        (name, len(scripts), *(round(100 * share) for share in measured[name]))
        for name, scripts in zip(measured, (examples, on_gpus, with_sglang), strict=True)
    )
    assert rows == SHARES, "update SHARES in tools/list_verl_keys.py"


def test_every_refusal_has_a_reason(refused):
    for script, problems in refused.items():
        passed = {key_of(override) for override in overrides_of(script)}
        for path, code in problems.items():
            assert code != "config.unknown-key", (script, path)
            assert path in passed or code.startswith(("batch.", "layout.", "data.no-")), (script, path, code)


@pytest.mark.parametrize(
    "script",
    [
        "examples/grpo_trainer/run_qwen3_8b_megatron.sh",
        "tests/special_npu/quick_start/run_qwen3_0_6b_megatron_sglang_ascend.sh",
    ],
)
def test_whole_scripts_are_accepted(script, refused):
    assert refused[script] == {}


def test_every_key_of_verl_has_a_rule():
    same = set(shared_keys(TrainConfig))
    keys = {*FACTS["defaults"], *map(key_of, FACTS["overrides"])}
    undecided = [key for key in keys - same if not key.startswith(FREE) and TABLE.rule_for(key) is None]
    assert not undecided, f"neither in tools/list_verl_keys.py nor in a rule: {sorted(undecided)}"


def test_shared_keys_are_listed():
    same = set(shared_keys(TrainConfig))
    both = {key for key in FACTS["defaults"] if key in KNOWN and KNOWN[key].section is None}
    assert both <= same, f"add to SHARED in tools/list_verl_keys.py and run from_verl: {sorted(both - same)}"


def test_shared_names_are_keys_of_megarl():
    for path in shared_keys(TrainConfig):
        assert path in KNOWN
        if not path.startswith(_OF_OTHER_VERSIONS):
            assert path in {*FACTS["defaults"], *map(key_of, FACTS["overrides"]), *_SECTIONS}


_SECTIONS = {
    *(f"{role}.megatron.override_transformer_config" for role in ("actor_rollout_ref.actor", "critic")),
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
}
# Keys of earlier or later versions of verl.
_OF_OTHER_VERSIONS = ("data.sampler.", "reward.custom_reward_function.reward_kwargs")
# Deliberately different defaults: derived from other keys in megarl, or without influence on the result.
_OTHER_BY_DESIGN = {
    "actor_rollout_ref.actor.use_prefix_grouper",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.seed",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    "actor_rollout_ref.rollout.agent.num_workers",
    "algorithm.rollout_correction.rollout_is_threshold",
    "critic.model.path",
    "trainer.device",
}


def test_the_preset_has_verls_defaults():
    overrides = ("actor_rollout_ref.model.path=model",)
    config = compose(ConfigRequest(TrainConfig, "ppo_megatron_trainer", overrides))
    wrong = {}
    for path in shared_keys(TrainConfig):
        theirs = FACTS["defaults"].get(path)
        if path in _OTHER_BY_DESIGN or theirs is None or "$" in str(theirs) or theirs in ("???", False, -1):
            continue
        ours: Any = config
        for segment in path.split("."):
            ours = getattr(ours, segment, None)
        if ours is not None and ours != theirs and [theirs] != ours:
            wrong[path] = (theirs, ours)
    assert wrong == {}
    assert TABLE.values.keys() <= KNOWN.keys()


_NEEDED: tuple[tuple[str, Any], ...] = (
    ("actor_rollout_ref.rollout.name", "sglang"),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 2),
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", 2),
)
"""Keys without a default in verl, which verl requires too."""


def test_every_default_of_verl_is_accepted():
    values = {"trainer": {"experiment_name": "x"}, "actor_rollout_ref": {"model": {"path": "model"}}}
    defaults = {path: value for path, value in FACTS["defaults"].items() if value != "???" and "$" not in str(value)}
    for path, value in defaults.items():
        if not path.endswith("model.path"):
            put(values, path, value)
    for path in _NEEDED:
        put(values, *path)
    assert len(defaults) > 600 and refused_of(values) == {}


COMPLETE = "examples/grpo_trainer/run_qwen3_8b_megatron.sh"


def printed(capsys, *arguments):
    assert run_job("train", ["--cfg", "job", *arguments]) == 0
    return capsys.readouterr().out


def test_command_lines_of_verl_print_one_configuration(tmp_path, monkeypatch, capsys):
    """By engine, by the name of the preset, with suffix, and with a folder that is missing or has no such file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user").mkdir()
    recipe = overrides_of(COMPLETE)
    rest = [override for override in recipe if key_of(override) != "model_engine"]
    by_engine = printed(capsys, *recipe)
    assert "total_epochs: 15" in by_engine and "adv_estimator: grpo" in by_engine
    assert "default_local_dir: checkpoints/verl_grpo_gsm8k_math/qwen3_8b_sglang_megatron" in by_engine
    assert printed(capsys, "--config-path=config", "--config-name=ppo_megatron_trainer.yaml", *rest) == by_engine
    assert printed(capsys, "--config-path", "user", "-cn", "ppo_megatron_trainer", *rest) == by_engine
    (tmp_path / "user" / "mine.yaml").write_text(
        "defaults: [ppo_megatron_trainer]\ntrainer: {total_epochs: 4}\n", encoding="utf-8"
    )
    mine = printed(capsys, "--config-path=user", "--config-name=mine", *(o for o in rest if "total_epochs" not in o))
    assert mine == by_engine.replace("total_epochs: 15", "total_epochs: 4")
    assert printed(capsys, *rest, "trainer.total_epochs=15") != by_engine  # without the engine: megarl's defaults


def test_plan_of_a_complete_recipe():
    """1024 prompts, 5 answers each; 8 GPUs with TP2 and PP2 leave 2 data-parallel ranks."""
    plan = plan_batches(compose(ConfigRequest(TrainConfig, "ppo_megatron_trainer", tuple(overrides_of(COMPLETE)))))
    update = plan.phase("actor")
    assert (plan.prompts_per_step, plan.samples_per_step) == (1024, 1024 * 5)
    assert (update.samples_per_mini_batch, update.samples_per_rank) == (256 * 5, 256 * 5 // 2)
    assert update.micro.max_tokens == 24576
    text = render_plan(plan)
    assert "1024 prompts x 5 samples each = 5120 samples" in text and text.count("TP2 PP2 DP2") == 3


def test_committed_page_is_up_to_date():
    page = (ROOT / "docs" / "reference" / "verl_keys.md").read_text(encoding="utf-8")
    assert page == render_verl_page(), "run: python tools/list_verl_keys.py > docs/reference/verl_keys.md"
