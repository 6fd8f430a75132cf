"""Writes the page for users of verl: ``python -m megarl.config.from_verl > docs/from_verl.md``."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from megarl.config.problems import show
from megarl.config.verl.names import same_names
from megarl.config.verl.rules import Backend, Feature, NoEffect, Only, Refused, Renamed, Rule
from megarl.config.verl.table import VALUE_RULES, rules

_ROLES = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.model",
    "critic.model",
    "critic",
    "reward_model",
)
_POLICY = "actor_rollout_ref."
_MIDDLE: dict[type, str] = {Renamed: "here", Only: "values", Feature: "off at", Backend: "backend"}
_TITLES: dict[type, tuple[str, str]] = {
    Renamed: ("Translated", "Named otherwise here. A key that both say must have one value."),
    Only: ("Accepted at the values that megarl has anyway", "Any other value is refused."),
    NoEffect: ("Accepted without effect", "At every value: it could not change what is learned. Told once per run."),
    Feature: ("Accepted while its feature is off", "Where the switch is on, both are refused."),
    Backend: ("Of other backends", "Refused by name: megarl trains with Megatron-Core and generates with SGLang."),
    Refused: ("Not here", "Refused by name, with what is nearest."),
}

_INTRODUCTION = """\
# From verl

Generated from `megarl/config/verl/` by `python -m megarl.config.from_verl > docs/from_verl.md`; do not edit.

A run script for verl with Megatron starts megarl with one line changed:

```
-python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer' \\
+python3 -m megarl.train --config-path=config --config-name='ppo_megatron_trainer' \\
     algorithm.adv_estimator=grpo ...
```

Overrides stay as they are, with or without verl's leading `+`. `--config-name=ppo_megatron_trainer`, or
`model_engine=megatron` as newer scripts have it, begins from verl's defaults where they differ from megarl's
(`configs/ppo_megatron_trainer.yaml`); the folder in `--config-path` is passed over where there is none such. Every key
of verl's is accepted with its meaning, or translated, or refused by its name before any process starts. What was
translated or has no effect is told once, on standard error; `--cfg job` prints what came of it.

Two things are not in the overrides: `actor_rollout_ref.model.path` must be a folder on disk, for nothing is downloaded,
and `actor_rollout_ref.rollout.name` must be `sglang` (or `embedded`, on a CPU), as scripts set it by
`INFER_BACKEND=sglang`.

## How much of verl's scripts is accepted

Of the run scripts with Megatron among verl's examples, at the commit that the tests name and with
`INFER_BACKEND=sglang`. An override is a key with its value; a key counts if it is accepted at every value that the
scripts give it.

@SHARES@

The remainder is refused by name. It is what megarl has not: layers that predict several tokens (MTP), distillation
from a teacher, training behind generation, LoRA, replay of the router's choices, losses that balance experts, initial
weights from Megatron's checkpoints, Megatron's FSDP, engines that span nodes; and what belongs to vLLM,
TensorRT-LLM, VeOmni and Ascend NPUs.

## What differs

- `data.train_batch_size` and `ppo_mini_batch_size` count prompts, as in verl, where the latter is multiplied by
  `rollout.n` and divided over ranks; here it never depends on the layout. `ppo_micro_batch_size_per_gpu` and
  `log_prob_micro_batch_size_per_gpu` count samples per data-parallel rank. Where none of these is set micro-batches are
  cut by tokens, which verl does with `use_dynamic_bsz=True` only; neither changes the result.
- Batches have to divide; where they do not, the numbers that would are told.
- Losses are divided by counts over the whole mini-batch and all ranks. In `token-mean` a micro-batch therefore weighs
  as many tokens as it has, and results do not depend on how micro-batches are cut, nor on padding.
- `trainer.critic_warmup=N` leaves the actor as it is for N steps, for N - 1 in verl.
- `trainer.balance_batch` orders samples so that mini-batches are alike as well, and data-parallel ranks have different
  numbers of samples where that makes their work equal.
- `actor_rollout_ref.ref.megatron` gives the reference workers of its own, and what is left out of it is the actor's, as
  in verl. Without any of its keys the reference's weights are swapped into the actor's model, which takes less memory.
- `total_training_steps` of an optimizer counts optimizer steps, warm-up among them.
- `val_kwargs.temperature=0` is greedy, and several greedy answers to a prompt are refused.
- Rows that are too long stop the run with `data.truncation=error`, as in verl; `filter_overlong_prompts` counts what it
  drops. Data sets are weighted by `data.mixture`; `data.sampler` and `data.custom_cls` take classes of one's own.
- `algorithm.filter_groups` generates until `train_batch_size` prompts have answers that differ in `metric` (`score`
  where none is named), `data.gen_batch_size` prompts at a time. Too few after `max_num_gen_batches` save and stop the
  run, or fill the step (`on_shortage`).
- Checkpoints are megarl's own: `global_step_N` folders of which a reader sees all or nothing, readable in any layout;
  `hf_model` among `save_contents` writes a Hugging Face folder beside them. A checkpoint of verl's is not resumed from;
  `megarl convert` makes a Hugging Face folder of its Megatron checkpoint. `resume_mode=auto` continues exactly, with
  random states and the position in the data; `must` is megarl's own.
- `trainer.logger` takes console, jsonl, tensorboard and wandb; metrics have verl's names (`actor/pg_loss`,
  `critic/rewards/mean`, `timing_s/gen`, ...). `val-core/<data_source>/reward/mean@N` is the mean over answers.
- `custom_reward_function` has verl's signature. A reward that raises stops the run or masks the sample
  (`reward_model.on_error`); it never counts as 0. `reward_model.reward_manager` takes naive, batch, dapo and prime.
- `reward_model.enable` is for a model with a head that scores, which runs on Megatron beside the other roles: its
  layout is `reward_model.megatron`, whatever engine verl's keys give it. A model that writes its verdict is a server's:
  `reward_model.judge.base_url` with `reward_model.name=judge`.
- `override_transformer_config` is checked against the installed Megatron-Core's `TransformerConfig`: names and types
  before anything starts. Fields that the model, the layout or another key says are refused, with that key.
"""


SHARES = (
    ("all", 31, 87, 73, 94),
    ("on GPUs", 27, 89, 75, 95),
    ("on GPUs, generating with SGLang", 9, 92, 86, 95),
)
"""Scripts, and the shares in percent of overrides, keys and uses that are accepted; measured by the tests."""


def render_page() -> str:
    """The whole page as Markdown."""
    groups: dict[type, dict[str, Rule]] = defaultdict(dict)
    for path, rule in rules().items():
        groups[type(rule)][path] = rule
    parts = [
        _INTRODUCTION.replace("@SHARES@", _shares()),
        "## Keys\n\n### The same",
        _same(),
        "### Values of these that differ",
        _values(),
    ]
    for kind, (title, text) in _TITLES.items():
        parts += [f"### {title}", text, _table(kind, groups[kind])]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _shares() -> str:
    lines = ["| scripts | number | overrides | keys | uses |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {number} | {a} % | {b} % | {c} % |" for name, number, a, b, c in SHARES)])


def _same() -> str:
    lines = [f"| `{section}` | {' '.join(f'`{name}`' for name in names)} |" for section, names in same_names()]
    return "\n".join(["| section | keys |", "|---|---|", *lines])


def _values() -> str:
    rows = ["| key | value | here |", "|---|---|---|"]
    for path, words in VALUE_RULES.items():
        rows += [_row(path, f"`{show(value)}`", f"`{show(other)}`") for value, other in words.meanings.items()]
        rows += [_row(path, f"`{show(value)}`", f"refused: {why}") for value, why in words.refused.items()]
    return "\n".join(rows)


def _table(kind: type, group: dict[str, Rule]) -> str:
    """Rules of one kind; a key that several roles have is one row."""
    merged: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for path, rule in group.items():
        role = next((role for role in _ROLES if path.startswith(f"{role}.")), "")
        name = path.removeprefix(f"{role}.")
        middle, text = (cell.replace(f"{role}.", "") if role else cell for cell in _cells(rule))
        merged[name if role else path, middle, text].append(role)
    rows = [f"| {_keys(roles, name)} | {middle} | {text} |" for (name, middle, text), roles in merged.items()]
    return "\n".join([f"| key | {_MIDDLE.get(kind, '')} | |", "|---|---|---|", *rows])


def _keys(roles: list[str], name: str) -> str:
    """The key of several roles, written once for those below the same section."""
    below = [role.removeprefix(_POLICY) for role in roles if role.startswith(_POLICY)]
    others = [f"`{role}.{name}`" if role else f"`{name}`" for role in roles if not role.startswith(_POLICY)]
    if not below:
        return ", ".join(others)
    section = below[0] if len(below) == 1 else f"{{{','.join(below)}}}"
    return ", ".join([f"`{_POLICY}{section}.{name}`", *others])


def _cells(rule: Rule) -> tuple[str, str]:
    if isinstance(rule, Renamed):
        words = [f"{show(value)} is {show(other)}" for value, other in rule.values.items()]
        words += [f"{show(value)} needs nothing" for value in rule.left_out]
        return f"`{rule.to}`", _sentence([*words, *([rule.why] if rule.why else [])])
    if isinstance(rule, Only):
        return " or ".join(f"`{show(value)}`" for value in rule.values) or "`null`", rule.why
    if isinstance(rule, Feature):
        off: list[Any] = list(rule.off) or [None]
        return f"`{rule.switch}={show(off[0])}`", rule.why
    if isinstance(rule, Backend):
        return rule.name, rule.nearest
    return "", rule.why


def _sentence(words: list[str]) -> str:
    return "; ".join(words)


def _row(path: str, *cells: str) -> str:
    return f"| `{path}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(render_page(), end="")
