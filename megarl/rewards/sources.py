"""Which reward function suits which data: rows say in ``data_source`` where they come from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from megarl.errors import RewardFunctionError

_QUESTIONS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

DATA_SOURCES: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "numina_*": "math",
    "hiyouga/geometry3k": "math",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "searchR1_*": "search_em",
    **dict.fromkeys(_QUESTIONS, "search_em"),
    "arithmetic": "arithmetic",
    "facts": "search_em",
}
"""Names that data sets for verl and Search-R1 have, some as patterns, and the function that scores each."""


class SourceMap:
    """Finds the function of a data source.

    Args:
        own: functions by data source or pattern, which go before what is known.
    """

    def __init__(self, own: Mapping[str, str]) -> None:
        self.patterns = [*own.items(), *DATA_SOURCES.items()]
        self._found: dict[str, str] = {}

    def find(self, data_source: str) -> str:
        """The function's spec.

        Raises:
            RewardFunctionError: there is none for this source; names what is known.
        """
        if data_source not in self._found:
            matching = [spec for pattern, spec in self.patterns if fnmatchcase(data_source, pattern)]
            if not matching:
                known = ", ".join(sorted(dict(self.patterns)))
                raise RewardFunctionError(
                    f"no reward function is known for data_source={data_source!r}; known are {known}. Name one under "
                    "reward_model.data_sources, for all data in reward_model.name, or in custom_reward_function.path"
                )
            self._found[data_source] = matching[0]
        return self._found[data_source]

    def specs(self) -> list[str]:
        """All functions that it can find."""
        return list(dict.fromkeys(spec for _, spec in self.patterns))
