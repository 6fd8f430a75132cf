"""A diagnosis as a table and a verdict in words."""

from __future__ import annotations

from megarl.data.rollout_dump import RolloutDump
from megarl.doctor.diagnosis import AGREES, Cause, Diagnosis, Finding


def verdict(found: Diagnosis, temperature: float) -> str:
    """Where the difference comes from, in a line or two.

    Args:
        found: the diagnosis.
        temperature: of the run.
    """
    engine, actor = found.engine, found.actor
    if engine.cause is Cause.WEIGHTS and actor.cause is Cause.WEIGHTS:
        return (
            "weights: neither side computed with this folder's weights (ask again with the folder of the weights that "
            "the step began with)"
        )
    if found.between <= AGREES:
        return "none: engine and actor agree"
    if engine.cause is Cause.DTYPE and actor.cause is Cause.DTYPE:
        return "kernels: both sides compute in bfloat16, and each rounds in its own way"
    causes = [
        _cause("the engine", engine, found, temperature),
        _cause("the actor", actor, found, temperature),
    ]
    told = [cause for cause in causes if cause]
    return "; ".join(told) or "none: both sides agree with transformers"


def _cause(name: str, side: Finding, found: Diagnosis, temperature: float) -> str:
    if side.cause is Cause.TEMPERATURE:
        return f"temperature: {name}'s log-probs are those at {side.temperature:.3g}, the run's is {temperature:g}"
    if side.cause is Cause.DTYPE:
        return (
            f"dtype: {name} computes in bfloat16 (the difference is {side.difference / max(found.rounding, 1e-12):.2g} "
            "times what that makes)"
        )
    if side.cause is Cause.WEIGHTS:
        return (
            f"weights: {name} computed with other weights than this folder's (the difference is "
            f"{side.difference / max(found.rounding, 1e-12):.0f} times what bfloat16 makes)"
        )
    if side.cause is Cause.KERNELS:
        return (
            f"kernels: {name} has the right weights and temperature and rounds otherwise, "
            f"{side.difference / max(found.rounding, 1e-12):.2g} times what bfloat16 makes"
        )
    return ""


def render(name: str, dump: RolloutDump, found: Diagnosis, retokenized: int | None) -> str:
    """The whole report of a dump as plain text.

    Args:
        name: of the dump.
        dump: what was looked at.
        found: its diagnosis.
        retokenized: rows whose text has other ids when it is encoded again; None = there was no tokenizer.
    """
    facts = dump.facts
    versions = ", ".join(map(str, sorted(set(dump.weight_versions.tolist()))))
    lines = [
        f"{name}: step {facts.step}, {len(dump)} rows, {found.tokens} generated tokens, temperature "
        f"{facts.temperature:g}, weight version {versions}",
        f"engine {facts.engine} in {facts.engine_dtype}, actor in {facts.actor_dtype}",
        "",
        f"{'mean |difference| of log-probs to transformers':<48}{'engine':>12}{'actor':>12}",
        _row("  in float32", found.engine.difference, found.actor.difference),
        _row("  in bfloat16", found.engine.rounded, found.actor.rounded),
        _row("  correlation with bfloat16's errors", found.engine.alike, found.actor.alike),
        _row("  in float32, at the temperature that fits best", found.engine.remaining, found.actor.remaining),
        _row("  that temperature", found.engine.temperature, found.actor.temperature),
        "",
        f"engine less actor: mean |difference| {found.between:.3g}, largest {found.largest:.3g}, mean (KL) "
        f"{found.signed:+.3g}, k3 {found.k3:.3g}",
        f"float32 and bfloat16 differ by {found.rounding:.3g}",
        _tokens(len(dump), retokenized),
        f"verdict: {verdict(found, facts.temperature)}",
    ]
    return "\n".join(lines)


def _row(label: str, engine: float, actor: float) -> str:
    return f"{label:<48}{engine:>12.3g}{actor:>12.3g}"


def _tokens(rows: int, retokenized: int | None) -> str:
    if retokenized is None:
        return "tokenization: not looked at, the folder has no tokenizer"
    if not retokenized:
        return "tokenization: every answer's text encodes to the ids that were sampled"
    return (
        f"tokenization: the text of {retokenized} of {rows} answers encodes to other ids than were sampled; whatever "
        "goes through text (an HTTP client, a chat template) would compute other log-probs"
    )
