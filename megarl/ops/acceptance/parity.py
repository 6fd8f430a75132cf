"""Parity with transformers on one device: log-probs, gradients and an optimizer step of every family.

The reference is transformers' float32 model on the same device. In float32 the limit is absolute. In bfloat16 the limit
is the error of transformers' bfloat16 model against the same reference, times a factor; models with experts are
compared by their median error.
"""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.megatron import (
    MegatronEngine,
    MegatronOptions,
    OptimizerOptions,
    OutputOptions,
    PackedMicroBatch,
    PolicyOutputs,
)
from megarl.models import ParallelLayout, WeightMap
from megarl.ops.acceptance.bench import Bench, within
from megarl.ops.acceptance.models import FAMILIES, VOCABULARY, SingleRankEngine, checkpoint_tensors, random_family
from megarl.ops.acceptance.results import Result, Verdict

FLOAT32_LIMIT = 5e-5  # largest difference of log-probs in nats, and of gradients relative to the largest gradient
BFLOAT16_FACTOR = 2.0  # our bfloat16 error over that of transformers; both round at other places
PACKED_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""Largest difference in nats between a row in a packed micro-batch and alone."""
LR, ADAM_EPS = 1e-2, 1e-3


class Row(NamedTuple):
    """Token ids, and the weights of the response tokens in the loss."""

    prompt: Tensor
    response: Tensor
    weights: Tensor


class Outputs(NamedTuple):
    """Log-probs of all response tokens, and gradients or weights by checkpoint name."""

    log_probs: Tensor
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def run(bench: Bench) -> None:
    """Check every family in float32 and bfloat16, then packing and shared prompts."""
    cases = {family: _Case(family, bench) for family in FAMILIES}
    for family, case in cases.items():
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{family} {str(dtype).removeprefix('torch.')}"
            for quantity in ("log-probs", "gradients", "optimizer step"):
                bench.check(f"{name} {quantity}", partial(case.compare, quantity, dtype))
            if family in ("llama", "qwen3_moe", "gpt_oss", "deepseek_v3"):
                bench.check(f"{name} packed rows", partial(case.packed, dtype))
                bench.check(f"{name} shared prompts", partial(case.shared, dtype))
    for dtype in (torch.float32, torch.bfloat16):
        bench.check(f"kernels in {str(dtype).removeprefix('torch.')}", partial(cases["llama"].kernels, dtype))


class _Case:
    """One family: the reference and its outputs, computed at the first use."""

    def __init__(self, family: str, bench: Bench) -> None:
        self.family, self.bench = family, bench
        self._ours: dict[torch.dtype, Outputs] = {}

    @cached_property
    def folder(self) -> Path:
        return self.bench.scratch / self.family

    @cached_property
    def model(self) -> Any:
        return random_family(self.family, self.folder, self.bench.device)

    @cached_property
    def rows(self) -> list[Row]:
        lengths = (
            [(3, 5), (7, 2), (4, 4), (1, 9)] if self.bench.is_tiny else [(200, 500), (7, 900), (64, 64), (1, 1500)]
        )
        generator = torch.Generator().manual_seed(0)
        draw = partial(torch.randint, 0, VOCABULARY, generator=generator)
        return [Row(draw((p,)), draw((r,)), torch.randn(r, generator=generator) / 40) for p, r in lengths]

    @cached_property
    def reference(self) -> Outputs:
        return _of_transformers(self.model, self.rows, self.bench.device)

    @cached_property
    def rounded(self) -> Outputs:
        """Outputs of transformers' bfloat16 model."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.bfloat16, trust_remote_code=False)
        return _of_transformers(model.eval().to(self.bench.device), self.rows, self.bench.device)

    def compare(self, quantity: str, dtype: torch.dtype) -> Result:
        error = partial(_difference, quantity, self.reference, typical=self._reroutes(dtype))
        if dtype not in self._ours:
            self._ours[dtype] = self._of_megarl(dtype)
        ours = error(self._ours[dtype])
        if dtype is torch.float32:
            return within(ours, FLOAT32_LIMIT)
        theirs = error(self.rounded)
        return within(ours / max(theirs, 1e-9), BFLOAT16_FACTOR, "x", f"error {ours:.2g}, transformers {theirs:.2g}")

    def packed(self, dtype: torch.dtype) -> Result:
        """Compare rows of one packed micro-batch with each row alone."""
        with self._engine(dtype) as engine:
            packed = _log_probs(engine, [_pack(self.rows)])
            alone = _log_probs(engine, [_pack([row]) for row in self.rows])
            return self._near(packed, alone, dtype)

    def shared(self, dtype: torch.dtype) -> Result:
        """Compare prompts that are stored once with repeated prompts."""
        rows = [row._replace(prompt=self.rows[0].prompt) for row in self.rows]
        with self._engine(dtype) as engine:
            if not engine.can_share_prompts:
                return Result("", Verdict.INFO, note=f"not available with {engine.describe()}")
            plain, shared = (_log_probs(engine, [_pack(rows, share_prompts=share)]) for share in (False, True))
            return self._near(plain, shared, dtype)

    def kernels(self, dtype: torch.dtype) -> Result:
        with self._engine(dtype) as engine:
            return Result("", Verdict.INFO, note=engine.describe())

    def _near(self, ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> Result:
        return within(_error(ours, theirs, typical=self._reroutes(dtype)), PACKED_LIMIT[dtype], "nats")

    def _reroutes(self, dtype: torch.dtype) -> bool:
        """Whether rounding sends a few tokens to other experts: their large errors say nothing about the kernels."""
        return dtype is torch.bfloat16 and any("experts" in field for field in FAMILIES[self.family])

    def _engine(self, dtype: torch.dtype) -> SingleRankEngine:
        assert self.model is not None  # writes the folder
        optimizer = OptimizerOptions(lr=LR, eps=ADAM_EPS, clip_grad=1.0, use_distributed_optimizer=False)
        return SingleRankEngine(self.folder, MegatronOptions(dtype=dtype, optimizer=optimizer), self.bench.device)

    def _of_megarl(self, dtype: torch.dtype) -> Outputs:
        with self._engine(dtype) as engine:
            micro_batch = _pack(self.rows)
            log_probs = _log_probs(engine, [micro_batch])
            engine.forward_backward([micro_batch], _loss, OutputOptions(with_entropy=True))
            params: dict[str, Any] = {n: p for n, p in engine.weights.parameters().items() if p.requires_grad}
            grads = _whole(engine, {name: p.main_grad.clone() for name, p in params.items()})
            engine.optimizer_step()
            return Outputs(log_probs, grads, _whole(engine, engine.weights.to_host()))


def _pack(rows: list[Row], *, share_prompts: bool = False) -> PackedMicroBatch:
    columns = {"weights": torch.cat([row.weights for row in rows])}
    return PackedMicroBatch.from_rows([(r.prompt, r.response) for r in rows], columns, share_prompts=share_prompts)


def _loss(outputs: PolicyOutputs, micro_batch: PackedMicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
    assert outputs.entropy is not None
    weights = micro_batch.columns["weights"]
    loss = -(outputs.log_probs * weights).sum() - 0.3 * (outputs.entropy * weights).sum()
    return loss, {"loss": loss}


def _log_probs(engine: MegatronEngine, micro_batches: list[PackedMicroBatch]) -> Tensor:
    outputs = engine.forward(micro_batches, OutputOptions(with_entropy=True))
    assert outputs is not None
    return torch.cat([output.log_probs.float().cpu() for output in outputs])


def _of_transformers(model: Any, rows: list[Row], device: torch.device) -> Outputs:
    """Compute the same loss with transformers, row by row, and one step of torch's AdamW on float32 weights."""
    model.zero_grad()
    chosen = []
    for row in rows:
        logits = model(torch.cat([row.prompt, row.response])[None].to(device)).logits[0, len(row.prompt) - 1 : -1]
        log_probs = logits.float().log_softmax(-1)
        picked = log_probs.gather(1, row.response[:, None].to(device))[:, 0]
        weights = row.weights.to(device)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        (-(picked * weights).sum() - 0.3 * (entropy * weights).sum()).backward()
        chosen.append(picked.detach().float().cpu())
    named = dict(model.named_parameters())
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.detach() for n, p in named.items()}
    grads = {name: grad.float().cpu() for name, grad in grads.items()}
    masters = {name: param.detach().float().cpu().requires_grad_() for name, param in named.items()}
    for name, master in masters.items():
        master.grad = grads[name].clone()
    torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
    is_decayed = {name: p.dim() > 1 and not name.endswith("bias") for name, p in masters.items()}
    decayed = [p for name, p in masters.items() if is_decayed[name]]
    others = [p for name, p in masters.items() if not is_decayed[name]]
    decay = OptimizerOptions().weight_decay
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=LR, eps=ADAM_EPS, betas=OptimizerOptions().betas).step()
    stepped = {name: master.detach().to(named[name].dtype).float() for name, master in masters.items()}
    return Outputs(torch.cat(chosen), _split_experts(grads), _split_experts(stepped))


def _split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split transformers' stacked expert tensors into one per expert; names end as in a checkpoint."""
    result = {}
    for name, tensor in tensors.items():
        base, _, last = name.rpartition(".")
        if not base.endswith(".experts"):
            result[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            if f"{base}.gate_up_proj_bias" in tensors:  # rows of gate and up alternate, and matrices are transposed
                result[f"{base}.{number}.{last.replace('_proj', '')}"] = expert.t()
                continue
            parts = zip(("gate", "up"), expert.chunk(2), strict=True) if last == "gate_up_proj" else [("down", expert)]
            result |= {f"{base}.{number}.{part}": values for part, values in parts}
    return result


def _whole(engine: MegatronEngine, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Assemble checkpoint tensors in host memory from the parameters of one rank."""
    params = WeightMap(engine.model).megatron_params(ParallelLayout(), 0)
    whole = checkpoint_tensors(engine.model, params, {name: t.float().cpu() for name, t in tensors.items()})
    names = {"gate_proj.weight": "gate", "up_proj.weight": "up", "down_proj.weight": "down",
             "w1.weight": "gate", "w3.weight": "up", "w2.weight": "down", "gate_up_proj.weight": "gate_up",
             "gate_up_proj.bias": "gate_up_bias", "down_proj.bias": "down_bias"}  # fmt: skip
    renamed = {}
    for name, tensor in whole.items():
        base, _, rest = name.partition(".experts.")
        number, _, last = rest.partition(".")
        name = f"{base}.experts.{number}.{names[last]}" if rest else name
        renamed[name.replace(".block_sparse_moe.", ".mlp.")] = tensor
    return renamed


def _error(ours: Tensor, theirs: Tensor, *, typical: bool) -> float:
    """Largest difference, or the median (``typical``), which a few tokens do not decide."""
    difference = (ours - theirs).abs()
    return float(difference.median() if typical else difference.max())


def _difference(quantity: str, reference: Outputs, ours: Outputs, *, typical: bool) -> float:
    """Difference of log-probs; for gradients and weights, norm of the difference over the reference's norm."""
    if quantity == "log-probs":
        return _error(ours.log_probs, reference.log_probs, typical=typical)
    mine, theirs = (ours.grads, reference.grads) if quantity == "gradients" else (ours.weights, reference.weights)
    if missing := theirs.keys() - mine.keys():
        raise AssertionError(f"no {quantity} of {sorted(missing)[:3]}")
    squares = sum(float((mine[name] - theirs[name]).double().square().sum()) for name in theirs)
    return float((squares / sum(float(t.double().square().sum()) for t in theirs.values())) ** 0.5)
