"""The tables of verl's keys, by job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from megarl.config.schema.jobs import EvaluateConfig, GenerateConfig, SFTConfig, TrainConfig
from megarl.config.verl.role_rules import role_rules, supervised_role_rules
from megarl.config.verl.rules import Renamed, Rule, Values
from megarl.config.verl.run_rules import REWARDS, SEARCH_AGENT, SFT_VALUES, VALUES, run_rules, sft_rules


@dataclass(frozen=True)
class VerlTable:
    """The keys of one of verl's programs that megarl's schema lacks, or whose values differ."""

    rules: Mapping[str, Rule] = field(default_factory=dict)
    """By path; ``*`` at the end of a path matches any rest, ``<name>`` the name of a section in :attr:`named`."""
    values: Mapping[str, Values] = field(default_factory=dict)  # keys of both with different values
    groups: Mapping[str, str] = field(default_factory=dict)  # Hydra groups of verl, with the choice that megarl is
    selector: str = ""  # key whose presence selects verl's defaults
    preset: str = ""  # configuration with verl's defaults
    named: tuple[str, ...] = ()  # sections whose entries have free names

    @cached_property
    def patterns(self) -> list[str]:
        """Prefixes of the paths that end in ``*``, the longest first."""
        return sorted((path[:-1] for path in self.rules if path.endswith("*")), key=len, reverse=True)

    def rule_for(self, path: str) -> Rule | None:
        """Find the rule for a key of verl, by its path or its longest prefix; None without one.

        The rule of a translated key names the full key of megarl.
        """
        for section in self.named:
            name, dot, rest = path.removeprefix(f"{section}.").partition(".")
            if path.startswith(f"{section}.") and dot and name != "<name>":
                rule = self.rule_for(f"{section}.<name>.{rest}")
                return replace(rule, to=rule.to.replace("<name>", name)) if isinstance(rule, Renamed) else rule
        exact = self.rules.get(path)
        if exact is not None:
            return exact
        for start in self.patterns:
            if path.startswith(start) or path == start.removesuffix("."):
                rule = self.rules[f"{start}*"]
                if isinstance(rule, Renamed):
                    if path.startswith(f"{rule.to}."):
                        return None  # the target section holds megarl's keys
                    return replace(rule, to=rule.to + path.removeprefix(start.removesuffix(".")))
                return rule
        return None

    def current_name(self, path: str) -> str:
        """Return megarl's name for a key, which is the path itself for a key that no rule translates."""
        rule = self.rule_for(path)
        return self.current_name(rule.to) if isinstance(rule, Renamed) else path


_TABLES: dict[type, VerlTable] = {
    TrainConfig: VerlTable(
        run_rules() | role_rules(),
        VALUES,
        selector="model_engine",
        preset="ppo_megatron_trainer",
        named=("distillation.teacher_models",),
    ),
    SFTConfig: VerlTable(
        sft_rules() | supervised_role_rules(),
        SFT_VALUES,
        groups={"engine": "megatron", "optim": "megatron", "model": "hf_model"},
        selector="engine",
        preset="sft_trainer_engine",
    ),
    EvaluateConfig: VerlTable(REWARDS | SEARCH_AGENT),
    GenerateConfig: VerlTable(SEARCH_AGENT),
}
_NO_TABLE = VerlTable()


def table_of(schema: type) -> VerlTable:
    """Return the table of a job's configuration class; empty for a job without a counterpart in verl."""
    return _TABLES.get(schema, _NO_TABLE)
