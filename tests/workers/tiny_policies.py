"""A small policy and critic, a batch of responses, and the results of plain transformers and loops over tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.data import DataProto

VOCAB, EOS, PAD = 101, 7, 0  # a prime: no tensor-parallel size divides it
TEMPERATURE = 0.7
PROMPT_WIDTH, RESPONSE_WIDTH = 7, 8
ROW_LENGTHS = [(3, 5), (7, 2), (4, 4), (1, 8), (4, 4), (2, 6), (4, 4), (3, 1)]  # prompts of one length are the same
UNTRAINED_ROW = 2  # its whole response is masked, as where a reward failed

LR, WARMUP, CLIP_GRAD, EPS, WEIGHT_DECAY = 1e-2, 3, 0.5, 1e-3, 0.1


def save_model(path: Path, family: str = "qwen2", *, critic: bool = False, **changes: Any) -> Any:
    """Save a model with large random weights, so that errors show, and return it."""
    import transformers

    name = "".join(word.capitalize() for word in family.split("_"))
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        **({"num_labels": 1} if critic else {}),
        **changes,
    }
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}For{'SequenceClassification' if critic else 'CausalLM'}")(config).float()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name or "bias" in name:
                param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(path)
    return model.eval()


def load_model(path: Path, *, critic: bool = False) -> Any:
    import transformers

    cls = transformers.AutoModelForSequenceClassification if critic else transformers.AutoModelForCausalLM
    return cls.from_pretrained(path, dtype=torch.float32).eval()


class Models(NamedTuple):
    """Model folders, the saved models (read-only), and a training batch."""

    policy_path: Path
    critic_path: Path
    policy: Any
    critic: Any
    batch: DataProto


class Row(NamedTuple):
    """A row without padding; the last fields are over its response tokens."""

    prompt: Tensor
    response: Tensor
    mask: Tensor
    columns: dict[str, Tensor]


def rows_of(batch: DataProto) -> list[Row]:
    tensors = batch.tensors
    width = tensors["prompts"].shape[1]
    rows = []
    for index, real in enumerate(tensors["attention_mask"].bool()):
        size = int(real[width:].sum())
        columns = {
            name: tensor[index, :size]
            for name, tensor in tensors.items()
            if name not in ("prompts", "responses", "attention_mask", "prompt_digests")
        }
        prompt, response = tensors["prompts"][index][real[:width]], tensors["responses"][index, :size]
        rows.append(Row(prompt, response, columns.pop("response_mask", torch.ones(size)), columns))
    return rows


def answers(seed: int = 0) -> DataProto:
    """Rows of random tokens in padded rectangles, with a mask that has holes."""
    generator = torch.Generator().manual_seed(seed)
    count = len(ROW_LENGTHS)
    prompts = torch.full((count, PROMPT_WIDTH), PAD)
    responses = torch.full((count, RESPONSE_WIDTH), PAD)
    attention = torch.zeros(count, PROMPT_WIDTH + RESPONSE_WIDTH, dtype=torch.int64)
    mask = torch.zeros(count, RESPONSE_WIDTH, dtype=torch.int64)
    drawn: dict[int, Tensor] = {}
    for row, (prompt, response) in enumerate(ROW_LENGTHS):
        tokens = torch.randint(1, VOCAB, (prompt,), generator=generator)
        prompts[row, PROMPT_WIDTH - prompt :] = drawn.setdefault(prompt, tokens)
        responses[row, :response] = torch.randint(1, VOCAB, (response,), generator=generator)
        attention[row, PROMPT_WIDTH - prompt : PROMPT_WIDTH + response] = 1
        mask[row, :response] = int(row != UNTRAINED_ROW)
    mask[0, 1] = mask[3, 4] = 0  # tokens of a tool, say
    return DataProto.from_dict(
        {"prompts": prompts, "responses": responses, "attention_mask": attention, "response_mask": mask}
    )


def training_batch(policy: Any, critic: Any, seed: int = 0) -> DataProto:
    """Responses with the columns of an update, far enough from the models' outputs to trigger every clip.

    The columns of a model that is None are zero except for noise.
    """
    batch = answers(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        zeros = [torch.zeros(len(row.response)) for row in rows_of(batch)]
        log_probs = rectangle([policy_tokens(policy, row)[0] for row in rows_of(batch)] if policy else zeros)
        values = rectangle([value_tokens(critic, row) for row in rows_of(batch)] if critic else zeros)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(log_probs.shape, generator=generator)

    columns = {
        "old_log_probs": log_probs + noise(0.8),
        "ref_log_prob": log_probs + noise(0.5),
        "advantages": noise(1.0) + 0.3,
        "values": values + noise(0.5),
        "returns": values + noise(1.0),
    }
    real = batch.tensors["attention_mask"][:, PROMPT_WIDTH:]
    return batch.with_columns({name: column * real for name, column in columns.items()}, {})


def rectangle(rows: list[Tensor]) -> Tensor:
    result = torch.zeros(len(rows), RESPONSE_WIDTH)
    for row, values in zip(result, rows, strict=True):
        row[: len(values)] = values
    return result


def policy_tokens(model: Any, row: Row, temperature: float = TEMPERATURE) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a row's response tokens, differentiable."""
    logits = model(torch.cat([row.prompt, row.response])[None]).logits[0] / temperature
    log_probs = logits[len(row.prompt) - 1 : -1].log_softmax(-1)
    return log_probs.gather(1, row.response[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def value_tokens(model: Any, row: Row) -> Tensor:
    """Values of the states before a row's response tokens, differentiable."""
    hidden = model.model(torch.cat([row.prompt, row.response])[None]).last_hidden_state[0]
    return model.score(hidden)[len(row.prompt) - 1 : -1, 0]


# ---- losses written token by token: what is minimised, metrics aggregated like it, and metrics that are means


Token = tuple[Tensor, dict[str, Tensor], dict[str, float]]


def actor_tokens(model: Any, row: Row) -> list[Token]:
    """Clip range 0.8 to 1.3, dual clip at 1.5, entropy bonus 0.01, KL loss k3 times 0.2; optional weights."""
    log_probs, entropies = policy_tokens(model, row)
    tokens: list[Token] = []
    for index, (log_prob, entropy) in enumerate(zip(log_probs, entropies, strict=True)):
        old, ref, advantage = (row.columns[n][index].item() for n in ("old_log_probs", "ref_log_prob", "advantages"))
        ratio = (log_prob - old).exp()
        near = min(max(ratio.item(), 0.8), 1.3)
        loss = -advantage * ratio
        clipped = -advantage * near > -advantage * ratio.item()
        if clipped:
            loss = torch.tensor(-advantage * near)
        dual = advantage < 0 and ratio.item() > 1.5
        if dual:
            loss = torch.tensor(-advantage * 1.5)
        if "rollout_is_weights" in row.columns:
            loss = loss * row.columns["rollout_is_weights"][index].item()
        kl = (ref - log_prob).exp() - (ref - log_prob) - 1
        token_means = {"ppo_kl": old - log_prob.item(), "pg_clipfrac": float(clipped), "pg_clipfrac_lower": float(dual)}
        tokens.append((loss - 0.01 * entropy + 0.2 * kl, {"pg_loss": loss, "kl_loss": kl}, token_means))
    return tokens


def critic_tokens(model: Any, row: Row) -> list[Token]:
    """Values clipped to 0.4 around the old ones; loss coefficient 0.7."""
    tokens: list[Token] = []
    for index, value in enumerate(value_tokens(model, row)):
        old, target = row.columns["values"][index].item(), row.columns["returns"][index].item()
        near = value.clamp(old - 0.4, old + 0.4)
        plain, clipped = (value - target) ** 2, (near - target) ** 2
        loss = 0.5 * (clipped if clipped.item() > plain.item() else plain)
        token_means = {"vf_clipfrac": float(clipped.item() > plain.item()), "vpred_mean": value.item()}
        tokens.append((0.7 * loss, {"vf_loss": loss}, token_means))
    return tokens


def sft_tokens(model: Any, row: Row) -> list[Token]:
    """A row is accurate if greedy decoding gives every trained token."""
    logits = model(torch.cat([row.prompt, row.response])[None]).logits[0, len(row.prompt) - 1 : -1]
    log_probs, greedy = logits.log_softmax(-1), logits.argmax(-1)
    return [
        (-log_probs[index, token], {}, {"accuracy": float(token == greedy[index])})
        for index, token in enumerate(row.response)
    ]


def aggregate(per_row: list[list[Any]], mode: str, horizon: int) -> Any:
    """Aggregate one number per trained token, by the definition of each mode."""
    per_row = [numbers for numbers in per_row if numbers]
    if mode == "all-of-row":
        return sum(map(min, per_row)) / len(per_row)
    if mode == "token-mean":
        return sum(number for numbers in per_row for number in numbers) / sum(map(len, per_row))
    if mode == "token-sum":
        return sum(number for numbers in per_row for number in numbers)
    divisor = {
        "seq-mean-token-sum": lambda n: 1,
        "seq-mean-token-mean": len,
        "seq-mean-token-sum-norm": lambda n: horizon,
    }
    return sum(sum(numbers) / divisor[mode](numbers) for numbers in per_row) / len(per_row)


class Trained(NamedTuple):
    metrics: dict[str, float]
    weights: dict[str, Tensor]
    grads: list[dict[str, Tensor]]  # of each step, before clipping


def adam_of(model: Any) -> torch.optim.AdamW:
    """Torch's AdamW with weight decay for matrices only."""
    groups = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]]
    decays = (WEIGHT_DECAY, 0.0)
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)], eps=EPS
    )


def clipped_step(model: Any, adam: torch.optim.AdamW, step: int) -> tuple[float, float]:
    """Clip the gradient and make a step with the warm-up's learning rate; the norm before clipping, and the rate."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD).item()
    lr = LR * min(1.0, (step + 1) / WARMUP)
    for group in adam.param_groups:
        group["lr"] = lr
    adam.step()
    return norm, lr


def train(
    model: Any, batch: DataProto, tokens: Callable[[Any, Row], list[Token]], mode: str, mini_batch_rows: int
) -> Trained:
    """Optimizer steps over consecutive mini-batches with torch's AdamW; metrics are means over the steps."""
    adam = adam_of(model)
    rows = rows_of(batch)
    starts = range(0, len(rows), mini_batch_rows)
    totals: dict[str, float] = defaultdict(float)
    grads = []
    for step, start in enumerate(starts):
        of_rows = [
            [token for token, trained in zip(tokens(model, row), row.mask.tolist(), strict=True) if trained]
            for row in rows[start : start + mini_batch_rows]
        ]
        loss = aggregate([[token[0] for token in row] for row in of_rows], mode, RESPONSE_WIDTH)
        adam.zero_grad()
        loss.backward()
        totals["loss"] += loss.item()
        first = next(row for row in of_rows if row)[0]
        for name in first[1]:
            totals[name] += aggregate([[t[1][name].item() for t in row] for row in of_rows], mode, RESPONSE_WIDTH)
        for name in first[2]:
            how = "all-of-row" if name == "accuracy" else "token-mean"
            totals[name] += aggregate([[t[2][name] for t in row] for row in of_rows], how, 0)
        grads.append({name: param.grad.clone() for name, param in model.named_parameters()})
        norm, lr = clipped_step(model, adam, step)
        totals["grad_norm"] += norm
        totals["lr"] += lr
    assert all(math.isfinite(total) for total in totals.values())
    return Trained(
        {name: total / len(starts) for name, total in totals.items()},
        {name: param.detach().clone() for name, param in model.named_parameters()},
        grads,
    )
