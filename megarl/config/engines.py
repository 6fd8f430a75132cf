"""Sections for one rollout engine each: what others do not have."""

# ruff: noqa: RUF009 -- `key` and `section` return dataclass fields
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.keys import key, section


@dataclass
class SGLangConfig:
    """SGLang; see docs/rollout.md."""

    mode: str = key(
        "in_process",
        "Where SGLang's front end runs: in the replica's process, or in a server that the replica starts.",
        choices=("in_process", "http"),
    )
    urls: list[str] = key(
        [],
        "Running servers to use instead, one per replica, wherever they are and over however many nodes; they go on "
        "when the run ends.",
    )
    host: str = key("127.0.0.1", "Where a server that the replica starts listens, on a free port.")
    weight_transport: str = key(
        "tensor",
        "How weights reach SGLang's ranks: each its own shard (tensor), or all of them everything, broadcast "
        "(distributed) or in a folder (disk).",
        choices=("tensor", "distributed", "disk"),
    )
    update_weights_bucket_megabytes: int = key(128, "Weights collected per rank before they are sent.", at_least=1)
    deterministic: bool | None = key(
        None, "SGLang's deterministic mode, without which it has no seeds; null = on a CPU only, since it costs speed."
    )
    stop_strings: bool | None = key(
        None, "SGLang decodes every answer, which stop strings need; null = if the model folder has a tokenizer."
    )
    start_timeout_s: float = key(600.0, "Seconds that SGLang may take to start.", above=0)
    call_timeout_s: float = key(600.0, "Seconds that a call may take that moves weights or memory.", above=0)
    server_args: dict[str, Any] = key(
        {}, "More of SGLang's server arguments by name, such as `mem_fraction_static`; checked against its own."
    )


@dataclass
class EngineKwargsConfig:
    """What only one engine has."""

    sglang: SGLangConfig = section(SGLangConfig)
