"""Each policy loss as a loop over the tokens of a row, with plain transformers instead of the engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from role_processes import MINI_BATCH_ROWS
from tiny_policies import Row, Token, policy_tokens, rows_of
from torch import Tensor

from megarl.algorithms import token_keys
from megarl.data import DataProto

LOW, HIGH, SEED = 0.2, 0.3, 1
CLIP_SHARE, KL_SHARE, KL_COEF, BOUNDS = 0.3, 0.3, 0.7, (0.05, 3.0)
CAP, M2_THRESHOLD = 2.5, 0.15
DIVERGENCE_BOUNDS = 0.01, 0.02

Case = Callable[[Any, Row], list[Token]]


def loss_tokens(name: str, batch: DataProto) -> Case:
    """Losses of a row's tokens, for ``tiny_policies.train``; mini-batches count the steps."""

    def tokens(model: Any, row: Row) -> list[Token]:
        log_probs, _ = policy_tokens(model, row)
        chosen = choice(name, model, batch, row) if name in ("clip_cov", "kl_cov", "m2po") else set()
        own = [t for t, trained in enumerate(row.mask.tolist()) if trained]
        result: list[Token] = []
        for t in range(len(log_probs)):
            token_means = {"ppo_kl": row.columns["old_log_probs"][t].item() - log_probs[t].item()}
            loss = FORMULAS[name](log_probs, row, own, t, t in chosen, token_means)
            result.append((loss, {"pg_loss": loss}, token_means))
        return result

    return tokens


def choice(name: str, model: Any, batch: DataProto, row: Row) -> set[int]:
    """Positions in a row that a loss selects from its whole mini-batch."""
    rows = rows_of(batch)
    index = next(i for i, other in enumerate(rows) if same(other, row))
    step = index // MINI_BATCH_ROWS
    token_means = []
    for number in range(step * MINI_BATCH_ROWS, (step + 1) * MINI_BATCH_ROWS):
        other = rows[number]
        keys = token_keys([(other.prompt, other.response)], SEED, step).tolist()
        with torch.no_grad():
            new = policy_tokens(model, other)[0].tolist()
        old, advantages = (other.columns[n].tolist() for n in ("old_log_probs", "advantages"))
        for t, trained in enumerate(other.mask.tolist()):
            if trained:
                token_means.append((number, t, keys[t], new[t], math.exp(new[t] - old[t]), advantages[t]))
    mean_new, mean_advantage = (sum(fact[i] for fact in token_means) / len(token_means) for i in (3, 5))
    cov = {fact[:2]: (fact[3] - mean_new) * (fact[5] - mean_advantage) for fact in token_means}
    if name == "m2po":
        rest = [fact for fact in token_means if fact[5] * (fact[4] - 1) > 0]
        rest.sort(key=lambda fact: (math.log(fact[4]) ** 2, fact[2]))
        taken = []
        while rest and sum(math.log(fact[4]) ** 2 for fact in rest) / len(rest) > M2_THRESHOLD:
            taken.append(rest.pop())
    elif name == "kl_cov":
        ranked = sorted(token_means, key=lambda fact: (-cov[fact[:2]], fact[2]))
        taken = ranked[: max(1, int(KL_SHARE * len(token_means)))]
    else:
        free = [f for f in token_means if not ((f[5] > 0 and f[4] > 1 + HIGH) or (f[5] < 0 and f[4] < 1 - LOW))]
        inside = [fact for fact in free if BOUNDS[0] < cov[fact[:2]] < BOUNDS[1]]
        assert inside
        taken = sorted(inside, key=lambda fact: fact[2])[: max(1, int(CLIP_SHARE * len(token_means)))]
    return {t for number, t, *_ in taken if number == index}


def same(one: Row, other: Row) -> bool:
    return all(torch.equal(*pair) for pair in ((one.prompt, other.prompt), (one.response, other.response)))


def clipped(ratio: Tensor, advantage: float, token_means: dict[str, float]) -> Tensor:
    near = min(max(ratio.item(), 1 - LOW), 1 + HIGH)
    outside = advantage * near < advantage * ratio.item()
    token_means["pg_clipfrac"] = float(outside)
    return torch.tensor(-advantage * near) if outside else -advantage * ratio


def gspo(log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]) -> Tensor:
    old, advantage = row.columns["old_log_probs"], row.columns["advantages"][t].item()
    mean = sum((log_probs[k] - old[k]).item() for k in own) / max(len(own), 1)
    return clipped((log_probs[t] - log_probs[t].item() + mean).exp(), advantage, token_means)


def gmpo(log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]) -> Tensor:
    old, advantages = row.columns["old_log_probs"], row.columns["advantages"].tolist()
    total = torch.zeros(())
    for k in own:
        ratio = log_probs[k] - old[k]
        bound = HIGH if advantages[k] > 0 else -LOW
        counts = ratio.item() <= bound if advantages[k] > 0 else ratio.item() >= bound
        total = total + (ratio if counts else bound)
    ratio = (log_probs[t] - old[t]).item()
    token_means["pg_clipfrac"] = float(advantages[t] > 0 and not -LOW <= ratio <= HIGH)
    token_means["pg_clipfrac_lower"] = float(advantages[t] < 0 and not -LOW <= ratio <= HIGH)
    return -sum(advantages[k] for k in own) / max(len(own), 1) * (total / max(len(own), 1)).exp()


def cispo(log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]) -> Tensor:
    ratio = math.exp(log_probs[t].item() - row.columns["old_log_probs"][t].item())
    weight = min(max(ratio, 1 - LOW), 1 + HIGH)
    token_means["pg_clipfrac"] = float(weight != ratio)
    return -weight * row.columns["advantages"][t].item() * log_probs[t]


def reinforce(
    log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]
) -> Tensor:
    return -row.columns["advantages"][t].item() * log_probs[t]


def sapo(log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]) -> Tensor:
    advantage = row.columns["advantages"][t].item()
    tau = 1.0 if advantage > 0 else 1.05
    ratio = (log_probs[t] - row.columns["old_log_probs"][t].item()).exp()
    return -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())


def clip_cov(
    log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]
) -> Tensor:
    ratio = (log_probs[t] - row.columns["old_log_probs"][t].item()).exp()
    loss = clipped(ratio, row.columns["advantages"][t].item(), token_means)
    token_means["pg_clipfrac"] = float(chosen)
    return torch.zeros(()) if chosen else loss


def kl_cov(log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]) -> Tensor:
    log_ratio = log_probs[t] - row.columns["old_log_probs"][t].item()
    token_means["kl_cov_frac"] = float(chosen)
    loss = -row.columns["advantages"][t].item() * log_ratio.exp()
    return loss + KL_COEF * log_ratio.abs() if chosen else loss


def dppo(kind: str) -> Callable[..., Tensor]:
    def loss(
        log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]
    ) -> Tensor:
        old, advantage = math.exp(row.columns["old_log_probs"][t].item()), row.columns["advantages"][t].item()
        new = math.exp(log_probs[t].item())
        distance = abs(new - old)
        if kind == "kl":
            distance = old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))
        low, high = DIVERGENCE_BOUNDS
        outside = new > old and distance > high if advantage > 0 else new < old and distance > low
        token_means["pg_clipfrac"] = float(outside)
        token_means["pg_clipfrac_lower"] = float(not outside and new / old > CAP)
        return torch.zeros(()) if outside else -advantage * min(new / old, CAP) * log_probs[t]

    return loss


def topr(log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]) -> Tensor:
    old, advantage = row.columns["old_log_probs"], row.columns["advantages"][t].item()
    whole = math.exp(sum((log_probs[k] - old[k]).item() for k in own))
    token_means["pg_clipfrac"] = float(advantage < 0 and whole > 1)
    return -advantage * (min(whole, 1.0) if advantage < 0 else 1.0) * log_probs[t]


def m2po(log_probs: Tensor, row: Row, own: list[int], t: int, chosen: bool, token_means: dict[str, float]) -> Tensor:
    token_means["pg_clipfrac"] = float(chosen)
    ratio = (log_probs[t] - row.columns["old_log_probs"][t].item()).exp()
    return torch.zeros(()) if chosen else -row.columns["advantages"][t].item() * ratio


FORMULAS = {
    "gspo": gspo,
    "geo_mean": gmpo,
    "cispo": cispo,
    "reinforce": reinforce,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo("tv"),
    "dppo_kl": dppo("kl"),
    "topr": topr,
    "m2po": m2po,
}
