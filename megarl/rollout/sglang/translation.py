"""Requests in SGLang's words, and its answers in ours."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megarl.rollout.interface import Completion, Request, RolloutError, SamplingParams

BROKEN = "NaN happened"
"""What SGLang reports as the stop string of an answer that it ended because of a token that does not exist."""


def payload_of(request: Request, rid: str, eos: frozenset[int], every_token: int) -> dict[str, Any]:
    """The fields with which SGLang generates one request.

    Args:
        request: the request.
        rid: SGLang's name for it; none may begin with another, since SGLang aborts by the beginning of a name.
        eos: tokens that end every answer.
        every_token: size of the vocabulary if SGLang runs in its deterministic mode, the only one in which it knows
            seeds; else 0. In that mode a batch in which some request filters by rank draws by rank, another one by
            token, so that a seed would mean another token in other company: here every request filters by rank, if
            only by one that lets all pass.
    """
    params = request.params
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": every_token if every_token and params.top_k == -1 else params.top_k,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if not params.ignore_eos:
        sampling["stop_token_ids"] = sorted(eos.union(params.stop_token_ids))
    if params.stop:
        sampling["stop"] = list(params.stop)
    if every_token:
        sampling["sampling_seed"] = request.seed
    return {"input_ids": list(request.prompt_ids), "sampling_params": sampling, "return_logprob": True, "rid": rid}


@dataclass(frozen=True)
class Reading:
    """What is needed to read an answer.

    Attributes:
        eos: tokens that end every answer.
        version: weights that the engine believes it serves.
    """

    eos: frozenset[int]
    version: int


def completion_of(request: Request, answer: dict[str, Any], reading: Reading) -> Completion:
    """What SGLang answered.

    Raises:
        RolloutError: log-probs are not finite or not one per token, tokens are missing, or SGLang failed on it.
    """
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    tokens, log_probs = [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs]
    reason = meta.get("finish_reason") or {}
    _check(request, answer, tokens, log_probs, reason)
    versions = _versions(meta, len(tokens), reading.version)
    oldest = min(versions, default=reading.version)
    return Completion(
        request.request_id,
        tokens,
        log_probs,
        _finish_reason(request.params, tokens, reason.get("type"), reading.eos),
        oldest,
        versions if len(set(versions)) > 1 else (),
    )


def _check(
    request: Request, answer: dict[str, Any], tokens: list[int], log_probs: list[float], reason: dict[str, Any]
) -> None:
    name = f"request '{request.request_id}'"
    if reason.get("matched") == BROKEN and BROKEN not in request.params.stop:
        raise RolloutError(f"{name}: the weights give log-probs that are not finite")
    generated = answer.get("output_ids")
    if generated is not None and list(generated) != tokens:
        raise RolloutError(f"{name}: SGLang returned {len(generated)} tokens and log-probs of {len(tokens)}")
    if not all(map(math.isfinite, log_probs)):
        raise RolloutError(f"{name}: the weights give log-probs that are not finite")
    if reason.get("type") == "length" and len(tokens) != request.params.max_new_tokens:
        raise RolloutError(
            f"{name}: SGLang ended it after {len(tokens)} of max_new_tokens={request.params.max_new_tokens} tokens; "
            "its cache is too small for it (rollout.engine_kwargs.sglang.server_args.max_total_tokens)"
        )


def _finish_reason(params: SamplingParams, tokens: list[int], kind: str | None, eos: Iterable[int]) -> Any:
    """``stop`` also at a stop token that is the last one allowed, which some versions call ``length``."""
    if kind == "length" and tokens and not params.ignore_eos and tokens[-1] in {*eos, *params.stop_token_ids}:
        return "stop"
    if kind not in ("stop", "length", "abort"):
        raise RolloutError(f"SGLang gave finish_reason {kind!r}, expected stop, length or abort")
    return kind


def _versions(meta: dict[str, Any], count: int, version: int) -> tuple[int, ...]:
    """The weight version of each token; SGLang's spans where it reports them, else its one version, else ours."""
    spans = meta.get("weight_versions")
    if spans:
        versions = [version] * count
        for span in spans:
            versions[span["start"] : span["end"]] = [_number(span["version"], version)] * (span["end"] - span["start"])
        return tuple(versions[:count])
    return (_number(meta.get("weight_version"), version),) * count


def _number(name: Any, version: int) -> int:
    return int(name) if isinstance(name, str) and name.lstrip("-").isdigit() else version
