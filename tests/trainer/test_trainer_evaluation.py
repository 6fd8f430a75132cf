"""What of an evaluation needs no process: what it says it does, and what it refuses before it starts any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from megarl.config import EvaluateConfig
from megarl.errors import CheckpointError, ConfigError, DataError, MegarlError, RewardError
from megarl.trainer.evaluation import run
from megarl.trainer.frozen_policy import FrozenPolicy

ROLLOUT = "actor_rollout_ref.rollout"
SAMPLED = {f"{ROLLOUT}.val_kwargs.n": 4, f"{ROLLOUT}.val_kwargs.temperature": 0.7, f"{ROLLOUT}.val_kwargs.top_k": 20}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "step 0: 1 answer per prompt, greedy"),
        (SAMPLED, "step 0: 4 answers per prompt, temperature 0.7, top_p 1, top_k 20"),
    ],
)
def test_it_says_how_answers_are_sampled(
    evaluate_config: Callable[..., EvaluateConfig], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = evaluate_config(changes)
    path = config.actor_rollout_ref.model.path
    assert FrozenPolicy(config, tmp_path).describe() == f"{path}, {words}"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"actor_rollout_ref.model.path": "/nowhere"}, CheckpointError, "actor_rollout_ref.model.path=/nowhere"),
        ({"data.val_files": ["/no.parquet"]}, DataError, r"data\.val_files: /no\.parquet"),
        ({"data.prompt_key": "question"}, DataError, "'question'"),
        ({"data.max_prompt_length": 1}, DataError, "data.max_prompt_length"),
        ({"custom_reward_function.path": "/no.py"}, RewardError, r"/no\.py"),
        ({f"{ROLLOUT}.agent.default_agent_loop": "nobody"}, ConfigError, "nobody"),
        ({"actor_rollout_ref.model.tokenizer_path": "/nowhere"}, MegarlError, "/nowhere"),
    ],
)
def test_what_is_wrong_is_named_before_a_process_is_started(
    evaluate_config: Callable[..., EvaluateConfig],
    changes: dict[str, Any],
    error: type[MegarlError],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message):
        run(evaluate_config(changes), tmp_path)
    assert not ray.is_initialized() and not list(tmp_path.iterdir())


def test_a_loop_that_a_row_names_and_nobody_has_is_refused_with_the_row(
    evaluate_config: Callable[..., EvaluateConfig], arithmetic: Path, tmp_path: Path
) -> None:
    rows = pq.read_table(arithmetic / "data" / "test.parquet").to_pylist()
    rows = [{**row, "agent_name": "nobody" if number == 3 else None} for number, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "named.parquet")
    with pytest.raises(ConfigError, match=r"named\.parquet, row 3: agent_name='nobody'"):
        run(evaluate_config({"data.val_files": [str(tmp_path / "named.parquet")]}), tmp_path)
    assert not ray.is_initialized()
