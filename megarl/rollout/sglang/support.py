"""The tokens that SGLang sampled each token from (``return_sampling_mask``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.config.schema.rollout import SUPPORT_KEY
from megarl.rollout.interface import Request, RequestRefused, RolloutError, no_support


def parse_support(request: Request, meta: Mapping[str, Any], tokens: Sequence[int]) -> tuple[np.ndarray, list[float]]:
    """Read the support of a response, and the log-probs over it.

    Args:
        meta: ``meta_info`` of SGLang's response.

    Returns:
        int32 ``[tokens, SamplingParams.support]``, -1 = none, and a log-prob per token.

    Raises:
        RolloutError: SGLang returned none, or not one with the token for each token.
        RequestRefused: more tokens than the request allows are equally probable.
    """
    name, width = f"request '{request.request_id}'", request.params.support
    support = no_support(len(tokens), width)
    if not tokens:
        return support, []
    sets, log_probs = (meta.get(f"output_token_sampling_{part}") for part in ("mask", "logprobs"))
    if sets is None or log_probs is None:
        raise RolloutError(
            f"{name}: SGLang returned no sampling mask, as {SUPPORT_KEY}.enable=true requests; newer versions do",
            code="sglang.no-support",
        )
    if not len(sets) == len(log_probs) == len(tokens) or any(
        token not in ids for token, ids in zip(tokens, sets, strict=True)
    ):
        raise RolloutError(
            f"{name}: SGLang returned {len(sets)} sampling masks for {len(tokens)} tokens, or one without its token",
            code="sglang.malformed-support",
        )
    for row, ids in zip(support, sets, strict=True):
        if len(ids) > width:
            raise RequestRefused(
                f"{name}: SGLang sampled from {len(ids)} tokens, some with equal probabilities, and the support has "
                f"room for {width}; raise {SUPPORT_KEY}.max_tokens",
                code="sglang.support-too-large",
            )
        row[: len(ids)] = ids
    return support, [float(value) for value in log_probs]
