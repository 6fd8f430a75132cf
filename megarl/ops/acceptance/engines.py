"""Rollout engines: tokens per second next to transformers, agreement with the trainer, and SGLang's contract tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from xml.etree import ElementTree

import torch

from megarl.megatron import MegatronOptions, OutputOptions, PackedMicroBatch
from megarl.ops.acceptance.bench import Bench, MissingError, checkout, needs_package, within
from megarl.ops.acceptance.models import SHAPES, SingleRankEngine, random_shape
from megarl.ops.acceptance.results import Result, Verdict
from megarl.rollout import Completion, EngineOptions, Request, RolloutEngine, SamplingParams, create_engine

NEAR_TIE = 1e-4  # largest difference of two logits that rounding may reverse
FLOAT32_LIMIT = 1e-4  # largest difference of log-probs between engine and trainer, in nats
CONTRACT_LIMIT_S = 400.0


def run(bench: Bench) -> None:
    """Check the embedded engine, then SGLang."""
    case = _Case(bench)
    bench.check("embedded: greedy answers equal transformers'", case.greedy)
    bench.check("embedded: log-probs equal the trainer's in float32", case.mismatch)
    bench.check("embedded: speed", case.speed)
    bench.check("SGLang: contract tests", partial(_contract, bench, "tests/rollout", "sglang"))


class _Case:
    """Prompts, and a small and a larger random model."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.count, self.prompt, self.response = (8, 8, 16) if bench.is_tiny else (128, 128, 256)

    @cached_property
    def small(self) -> Path:
        return self._folder("tiny", torch.float32)

    @cached_property
    def _larger(self) -> tuple[Path, torch.dtype]:
        dtype = torch.float32 if self.bench.is_tiny else torch.bfloat16
        return self._folder("tiny" if self.bench.is_tiny else "0.5B", dtype), dtype

    @cached_property
    def prompts(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        vocabulary = SHAPES["tiny"]["vocab_size"]
        drawn: list[list[int]] = torch.randint(0, vocabulary, (self.count, self.prompt), generator=generator).tolist()
        return drawn

    def greedy(self) -> Result:
        """Compare greedy answers in float32, token by token; a different token must be a near tie."""
        model = self._transformers(self.small, torch.float32)
        ids = torch.tensor(self.prompts, device=self.bench.device)
        theirs = _generate(model, ids, self.response, do_sample=False)[:, self.prompt :].tolist()
        ours = [c.token_ids for c in self._generated(self._engine(self.small, "float32"), temperature=0.0)]
        different = [row for row in zip(self.prompts, ours, theirs, strict=True) if row[1] != row[2]]
        gaps = [first_gap(model, *row) for row in different]
        outcome = Verdict.OK if all(gap <= NEAR_TIE for gap in gaps) else Verdict.FAIL
        note = f"logits at the first different token differ by up to {max(gaps):.2g}" if gaps else ""
        equal = self.count - len(different)
        return Result("", outcome, equal, f"of {self.count} answers", "equal, or a near tie", note)

    def mismatch(self) -> Result:
        """Compare the log-probs of sampled tokens with those of Megatron's engine on the same weights."""
        completions = self._generated(self._engine(self.small, "float32"), temperature=1.0)
        rows = [
            (torch.tensor(prompt), torch.tensor(completion.token_ids))
            for prompt, completion in zip(self.prompts, completions, strict=True)
        ]
        with SingleRankEngine(self.small, MegatronOptions(), self.bench.device) as trainer:
            outputs = trainer.forward([PackedMicroBatch.from_rows(rows)], OutputOptions())
            assert outputs is not None
            theirs = outputs[0].log_probs.cpu()
        ours = torch.tensor([value for completion in completions for value in completion.log_probs])
        return within(float((ours - theirs).abs().max()), FLOAT32_LIMIT, "nats")

    def speed(self) -> Result:
        """Compare tokens per second with transformers' ``generate`` in one static batch, which gives no log-probs."""
        folder, dtype = self._larger
        engine = self._engine(folder, str(dtype).removeprefix("torch."))
        ours = self.bench.seconds(lambda: self._generated(engine, temperature=1.0), repeats=2)
        engine.shutdown()
        model = self._transformers(folder, dtype)
        ids = torch.tensor(self.prompts, device=self.bench.device)
        theirs = self.bench.seconds(lambda: _generate(model, ids, self.response, do_sample=True), repeats=2)
        tokens = self.count * self.response
        note = f"{tokens / ours:,.0f} tokens/s, transformers {tokens / theirs:,.0f}"
        return self.bench.speed(theirs / ours, 1.0, "x", note)

    def _generated(self, engine: RolloutEngine, temperature: float) -> Sequence[Completion]:
        params = SamplingParams(self.response, temperature=temperature, ignore_eos=True)
        requests = [Request(str(n), prompt, params, n) for n, prompt in enumerate(self.prompts)]
        return engine.generate(requests)

    def _engine(self, folder: Path, dtype: str) -> RolloutEngine:
        length = self.prompt + self.response
        options = EngineOptions(dtype, self.bench.device.type, max_num_seqs=self.count, max_model_len=length)
        engine = create_engine("embedded", str(folder), options)
        engine.load_hf(str(folder))
        return engine

    def _transformers(self, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
        import transformers

        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False
        )
        return model.eval().to(self.bench.device)

    def _folder(self, shape: str, dtype: torch.dtype) -> Path:
        folder = self.bench.scratch / f"{shape}_{str(dtype).removeprefix('torch.')}"
        if not (folder / "config.json").is_file():
            random_shape(shape, folder, dtype)
        return folder


@torch.inference_mode()
def first_gap(model: torch.nn.Module, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """Return by how much the logit of their token exceeds ours where two greedy answers first differ."""
    at = next(number for number, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
    ids = torch.tensor([prompt + ours[:at]], device=next(model.parameters()).device)
    logits = model(ids).logits[0, -1].float()
    return float(logits[theirs[at]] - logits[ours[at]])


@torch.inference_mode()
def _generate(model: torch.nn.Module, ids: torch.Tensor, tokens: int, do_sample: bool) -> torch.Tensor:
    generated: torch.Tensor = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=do_sample,
        top_k=0 if do_sample else None,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    return generated


def _contract(bench: Bench, tests: str, marker: str) -> Result:
    """Run SGLang's tests of the checkout in a process of their own."""
    needs_package("sglang")
    needs_package("pytest")
    report = bench.scratch / "sglang.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, f"--junitxml={report}", tests]
    try:
        subprocess.run(command, cwd=checkout(), stdout=2, timeout=CONTRACT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return Result("", Verdict.FAIL, note=f"not finished after {CONTRACT_LIMIT_S:.0f} s")
    if not report.is_file():
        raise MissingError("pytest wrote no report; see the log")
    suite = ElementTree.parse(report).getroot().find("testsuite")  # noqa: S314 - written by pytest
    assert suite is not None
    total, bad = int(suite.get("tests", 0)), int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    failed = [case.get("name", "") for case in suite.iter("testcase") if len(case) and case[0].tag != "skipped"]
    outcome = Verdict.OK if total and not bad else Verdict.FAIL
    return Result("", outcome, total - bad, f"of {total} tests", "all", ", ".join(failed[:3]))
