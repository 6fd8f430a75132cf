"""Running SGLang servers as a teacher: log-probs of given tokens, over HTTP.

A request has whole sequences and asks for no new token. SGLang then returns, for each token from ``logprob_start_len``
on, its log-prob given the tokens before it, ``[log-prob, id, text]``; the first has none. So the last ``R`` entries are
those of a response of ``R`` tokens. The vocabulary's last token has the right log-prob, but 0 as its id. With
``top_logprobs_num`` each position also has its most probable tokens: as arrays in base64, which take a tenth of the
time of nested lists to read; versions without them return lists. Log-probs are those of temperature 1. SGLang does not
check the ids of an input, and a server ends at one that its model lacks: :meth:`TeacherServers.check_token` asks first.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megarl.base.errors import TeacherError
from megarl.base.formatting import count_noun
from megarl.config.schema.distillation import TeacherServerConfig
from megarl.rollout.interface import EngineLost
from megarl.rollout.sglang.backend import RequestLoop
from megarl.rollout.sglang.http import HttpBackend

_REFUSALS = (400, 401, 403, 404, 413, 422)
"""Statuses that a repetition cannot change."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_TEXTS_PER_REQUEST = 8192
_LARGEST_ID = 2**31 - 1
_AS_ARRAYS = ("return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64")
"""Fields of a request for top tokens in base64; versions without them ignore them."""
_IDS, _VALUES = "input_top_logprobs_idx_flat_b64", "input_top_logprobs_val_flat_b64"
_ROUNDING = 1e-3
"""Above 0 for a log-prob, and above 1 for the sum of probabilities, that rounding explains."""
_Result = TypeVar("_Result")


class TokenRow(NamedTuple):
    """A sequence to grade: token ids of prompt and response."""

    prompt: list[int]
    response: list[int]


class TokenGrades(NamedTuple):
    """Log-probs of a response under the teacher.

    Attributes:
        log_probs: of the response tokens, ``[R]`` float32.
        top_ids: the most probable tokens at each position, ``[R, k]`` int32; ``k`` is 0 if not requested.
        top_log_probs: their log-probs, by descending probability, ``[R, k]`` float32.
    """

    log_probs: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray

    @classmethod
    def of(cls, log_probs: Sequence[float], top: tuple[Any, Any], topk: int) -> TokenGrades:
        """Convert lists or arrays.

        Raises:
            ValueError, TypeError, OverflowError: there are not ``topk`` different tokens at each position, or a number
                is no log-prob.
        """
        ids, values = np.asarray(top[0]), np.asarray(top[1], np.float32)
        if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > _LARGEST_ID):
            raise ValueError(f"top token ids of type {ids.dtype} from {ids.min()} to {ids.max()}")
        ids, values = ids.astype(np.int32).reshape(len(log_probs), topk), values.reshape(len(log_probs), topk)
        if topk and (np.diff(np.sort(ids)) == 0).any():
            raise ValueError("a token is twice among the top tokens of a position")
        grades = cls(np.asarray(log_probs, np.float32), ids, values)
        for numbers in (grades.log_probs, values):
            wrong = numbers[~(np.isfinite(numbers) & (numbers <= _ROUNDING))]
            if wrong.size:
                raise ValueError(f"a log-prob of {wrong[0]}")
        if (np.exp(values.astype(np.float64)).sum(-1) > 1 + _ROUNDING).any():
            raise ValueError("the probabilities of the top tokens add up to more than 1")
        return grades


class TeacherServers:
    """Client of a teacher's servers, which all have one model; ``key`` is the teacher's config key."""

    def __init__(self, key: str, config: TeacherServerConfig) -> None:
        self.key, self.config = key, config
        self.retries = 0
        secret = os.environ.get(config.api_key_env, "") if config.api_key_env else ""
        if config.api_key_env and not secret:
            raise TeacherError(
                f"{key}.api_key_env={config.api_key_env}: the environment variable is not set; it must hold the API "
                "key of the servers",
                code="teacher.api-key-unset",
            )
        self._loop = RequestLoop()
        self._backends = [HttpBackend(url, secret, self._loop) for url in config.urls]
        self._next = itertools.count()

    def grade(self, rows: Sequence[TokenRow], topk: int = 0) -> list[TokenGrades]:
        """Return the log-probs of responses, in order; requests are concurrent, and each has several rows.

        Args:
            rows: sequences; an empty response needs no request.
            topk: most probable tokens to return at each position.

        Raises:
            TeacherError: a row has images; a server refuses a request, fails after all attempts, or returns other
                tokens or numbers that are no log-probs.
        """
        if any(min((*row.prompt, *row.response), default=0) < 0 for row in rows):
            raise TeacherError(f"{self.key}: a teacher behind SGLang grades no rows with images", code="teacher.images")
        size = self.config.rows_per_request
        filled = [row for row in rows if row.response]
        parts = [filled[start : start + size] for start in range(0, len(filled), size)]
        answers = self._run(parts, lambda part: self._grade_part(part, topk))
        grades = iter([grade for answer in answers for grade in answer])
        empty = TokenGrades.of([], ([], []), topk)
        return [next(grades) if row.response else empty for row in rows]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the texts of tokens by a server's tokenizer, if it has one; the model computes nothing."""
        parts = [ids[start : start + _TEXTS_PER_REQUEST] for start in range(0, len(ids), _TEXTS_PER_REQUEST)]

        async def texts(part: Sequence[int]) -> list[str]:
            fields = {"tokens": [[token] for token in part], "skip_special_tokens": False}
            answer = await self._send("/v1/detokenize", fields)
            result = answer.get("text") if isinstance(answer, dict) else None
            if not isinstance(result, list) or len(result) != len(part):
                raise self._malformed(count_noun(len(part), "text"), f"{answer!r:.200}", "/v1/detokenize")
            return result

        return [text for part in self._run(parts, texts) for text in part]

    def check_token(self, token: int) -> None:
        """Check that a server's model has a token, by a request for its log-prob and another one's.

        Raises:
            TeacherError: it has not, or the server does not answer.
        """
        fields = {"input_ids": [[0, 0]], "logprob_start_len": [0], "token_ids_logprob": [[token]]}
        self._run([fields], lambda fields: self._log_probs(fields, 1))

    def check_length(self, tokens: int) -> None:
        """Check that every server takes sequences of this many tokens, as far as it reports its limit.

        Raises:
            TeacherError: a server takes shorter ones only, or does not answer.
        """
        for backend in self._backends:
            info = self._run([backend], lambda backend: backend.server_info())[0]
            limit = info.get("max_req_input_len")
            if isinstance(limit, int) and tokens >= limit:
                raise TeacherError(
                    f"{self.key}.urls: {backend.url} takes fewer than {limit} tokens, and prompt and response have "
                    f"up to {tokens}; start it with a longer --context-length and more memory, or set a shorter "
                    "data.max_response_length",
                    code="teacher.context-length",
                )

    def close(self) -> None:
        """Close connections; the servers keep running."""
        for backend in self._backends:
            self._loop.start(backend.disconnect()).result()

    def _run(self, parts: Sequence[Any], request: Callable[[Any], Awaitable[_Result]]) -> list[_Result]:
        """Run one request per part, at most ``max_concurrent`` at a time; the first error ends all."""

        async def run() -> list[_Result]:
            slots = asyncio.Semaphore(self.config.max_concurrent)

            async def limited(part: Any) -> _Result:
                async with slots:
                    return await request(part)

            tasks = [asyncio.ensure_future(limited(part)) for part in parts]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

        return self._loop.start(run()).result()

    async def _grade_part(self, rows: Sequence[TokenRow], topk: int) -> list[TokenGrades]:
        fields: dict[str, Any] = {
            "input_ids": [row.prompt + row.response for row in rows],
            "logprob_start_len": [len(row.prompt) - 1 for row in rows],
        }
        if topk:
            fields |= {"top_logprobs_num": topk, **dict.fromkeys(_AS_ARRAYS, True)}
        answers = await self._log_probs(fields, len(rows))
        return [self._grades(answer, row, topk) for answer, row in zip(answers, rows, strict=True)]

    def _grades(self, answer: Any, row: TokenRow, topk: int) -> TokenGrades:
        """Read the entries of a response; the tokens must be those that were sent."""
        count = len(row.response)
        try:
            tokens = answer["input_token_logprobs"][-count:]
            log_probs = [log_prob for log_prob, *_ in tokens]
            if any(returned not in (token, 0) for token, (_, returned, *_) in zip(row.response, tokens, strict=True)):
                raise ValueError("log-probs of other tokens")
            return TokenGrades.of(log_probs, _top_tokens(answer, count, topk) if topk else ([], []), topk)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise self._malformed(count_noun(count, "log-prob"), problem, "`input_token_logprobs`") from None

    def _malformed(self, wanted: str, problem: str, form: str) -> TeacherError:
        return TeacherError(
            f"{self.key}.urls={self.config.urls}: a server did not return {wanted}, as asked ({problem}); megarl reads "
            f"{form} as SGLang 0.5 returns it. Check the server, its version and its model",
            code="teacher.malformed-answer",
        )

    async def _log_probs(self, fields: dict[str, Any], count: int) -> list[Any]:
        """Request log-probs; return ``meta_info`` of each of the ``count`` sequences."""
        payload = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, **fields}
        body = await self._send("/generate", payload)
        if isinstance(body, list) and len(body) == count and all(isinstance(part, dict) for part in body):
            return [part.get("meta_info") for part in body]
        raise self._malformed(count_noun(count, "result"), f"{body!r:.200}", "`meta_info`")

    async def _send(self, path: str, fields: dict[str, Any]) -> Any:
        """Send a request, with retries; return the JSON of the answer."""
        reason, wait_s = "", _FIRST_WAIT_S
        for attempt in range(self.config.max_attempts):
            if attempt:
                self.retries += 1
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            backend = self._backends[next(self._next) % len(self._backends)]
            try:
                status, body = await asyncio.wait_for(backend.send("POST", path, fields), self.config.timeout_s)
            except TimeoutError:
                reason = f"{backend.url} did not answer within {self.key}.timeout_s={self.config.timeout_s:g}"
                continue
            except EngineLost as error:
                reason = error.text
                continue
            if status == 200:
                return body
            reason = f"{backend.url}{path} answered with status {status}: {str(body)[:300]}"
            if status in _REFUSALS:
                raise TeacherError(f"{self.key}.urls: {reason}", code="teacher.request-refused")
        raise TeacherError(
            f"{self.key}.urls: {reason}; gave up after {count_noun(self.config.max_attempts, 'attempt')}. Start the "
            "server, then start or resume the run",
            code="teacher.unavailable",
        )


def _top_tokens(answer: Mapping[str, Any], count: int, topk: int) -> tuple[Any, Any]:
    """Read the ids and log-probs of the most probable tokens at the last ``count`` positions: arrays or lists.

    Raises:
        ValueError, TypeError, KeyError, IndexError: the arrays are damaged, or in another form.
    """
    if _VALUES not in answer:
        best = answer["input_top_logprobs"][-count:]
        return [[entry[1] for entry in row] for row in best], [[entry[0] for entry in row] for row in best]
    arrays = []
    for name, dtype in ((_IDS, "int32"), (_VALUES, "float32")):
        if answer.get(f"{name}_dtype") != dtype:
            raise ValueError(f"{name} is not {dtype}")
        arrays.append(np.frombuffer(base64.b64decode(answer[name]), dtype).reshape(-1, topk)[-count:])
    return arrays[0], arrays[1]
