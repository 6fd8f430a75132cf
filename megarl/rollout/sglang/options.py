"""What an SGLang engine is built with, besides what every engine is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.rollout.interface import EngineOptions

MODES = ("in_process", "http")
TRANSPORTS = ("tensor", "distributed", "disk")


@dataclass(frozen=True)
class SGLangOptions(EngineOptions):
    """Options of :class:`megarl.rollout.sglang.engine.SGLangEngine`.

    Attributes:
        mode: ``in_process`` runs SGLang's front end in the caller's process (one engine per process, which may not run
            an event loop of its own in the same thread); ``http`` starts a server of its own.
        url: of a server that somebody else started and ends; ``mode`` is then ``http``.
        host: where a server of one's own listens.
        port: its port; 0 = a free one.
        server_args: more of SGLang's ``ServerArgs`` by field name; those that the engine must set itself are refused.
        weight_transport: how :meth:`update_weights` reaches SGLang's ranks. ``tensor``: each rank is given its own
            shard through memory that it shares with this process, or inside the request where there is none;
            ``distributed``: whole tensors, broadcast in a process group; ``disk``: whole tensors, in a folder.
        bucket_bytes: bytes that are collected per rank before they are sent.
        deterministic: SGLang's deterministic mode, in which a request's seed decides its tokens. None: on a CPU only;
            on a GPU it costs speed, and without it SGLang draws from one generator for all requests.
        stop_strings: requests may have stop strings; SGLang then loads the folder's tokenizer and decodes every answer.
            None: if the folder has a tokenizer.
        start_timeout_s: seconds after which a start counts as failed.
        call_timeout_s: seconds after which a call that moves weights or memory counts as failed.
    """

    mode: str = "in_process"
    url: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    server_args: Mapping[str, Any] = field(default_factory=dict)
    weight_transport: str = "tensor"
    bucket_bytes: int = 2**27
    deterministic: bool | None = None
    stop_strings: bool | None = None
    start_timeout_s: float = 600.0
    call_timeout_s: float = 600.0

    def device_of(self, rank: int) -> str:
        """Where a rank computes, or where its weights are handed on from, if its server is somebody else's."""
        return self.device if self.url is not None else super().device_of(rank)

    @property
    def is_cpu(self) -> bool:
        """Whether SGLang computes on the CPU."""
        return self.device == "cpu"

    @property
    def seeded(self) -> bool:
        """Whether a request's seed decides its tokens."""
        return self.is_cpu if self.deterministic is None else self.deterministic
