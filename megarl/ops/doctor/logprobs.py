"""``megarl doctor logprobs``: find out why the log-probs of engine and actor differ, from saved rollouts.

Each side is compared with plain transformers on the weights that both should have had. The first cause that fits
explains a difference: another temperature; other weights, if the difference is larger than rounding; another dtype, if
the side is configured for bfloat16 or its differences correlate with bfloat16's errors; else the kernels.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.base.commands import exit_code
from megarl.base.errors import DataError, ModelError
from megarl.base.formatting import count_noun
from megarl.data.rollout_dump import RolloutDump
from megarl.data.tokenizers import open_tokenizer
from megarl.ops.doctor.dump_images import DumpImages

AGREES = 1e-4  # mean absolute difference of log-probs, in nats, below which two float32 computations agree
EXPLAINED = 0.3  # a temperature explains a difference if at most this share of it remains
CORRELATED, SIGNIFICANT = 0.25, 3.0
"""Differences are bfloat16's errors above this correlation, if it is that many standard deviations above chance."""
ROUNDING = 4.0  # a difference above this multiple of bfloat16's is not rounding
SAME_TEMPERATURE = 0.02  # relative difference below which two temperatures are equal

_ROWS = {
    "difference": "in float32",
    "rounded": "in bfloat16",
    "correlation": "correlation with bfloat16's errors",
    "remaining": "in float32, at the best temperature",
    "temperature": "best temperature",
}
"""Rows of the report: fields of a side, with their labels."""
_IMAGES_FROM = "--run FOLDER of a run whose data files have the images"
LogProbsAt = Callable[[Sequence[float]], np.ndarray]  # maps temperatures to log-probs `[temperatures, tokens]`


class Cause(Enum):
    """Cause of a difference to transformers."""

    NONE = "none"
    TEMPERATURE = "temperature"
    DTYPE = "dtype"
    WEIGHTS = "weights"
    KERNELS = "kernels"


@dataclass(frozen=True)
class SideDiagnosis:
    """Diagnosis of one side, engine or actor."""

    cause: Cause
    difference: float  # mean absolute difference to float32 at the run's temperature, in nats
    rounded: float  # mean absolute difference to bfloat16
    correlation: float  # correlation of the side's errors with bfloat16's errors, -1 to 1
    temperature: float  # temperature of the nearest float32 log-probs
    remaining: float  # mean absolute difference at that temperature


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of a rollout dump."""

    engine: SideDiagnosis
    actor: SideDiagnosis
    between: float  # mean absolute difference of the two sides, in nats
    largest: float  # largest absolute difference
    signed: float  # mean of engine minus actor: the k1 estimate of the KL
    k3: float  # the k3 estimate of the KL, never negative
    rounding: float  # mean absolute difference of transformers in float32 and bfloat16
    tokens: int  # number of compared tokens


def diagnose(
    engine: np.ndarray,
    actor: np.ndarray,
    temperature: float,
    exact: LogProbsAt,
    rounded: np.ndarray,
    in_bfloat16: tuple[bool, bool] = (False, False),
) -> Diagnosis:
    """Compare both sides with a third computation of the same tokens.

    Args:
        engine: the engine's log-probs, ``[tokens]``.
        actor: the actor's log-probs, ``[tokens]``.
        temperature: sampling temperature of the run.
        exact: transformers in float32, at any temperature.
        rounded: transformers in bfloat16 at the run's temperature, ``[tokens]``.
        in_bfloat16: whether engine and actor are configured for bfloat16.
    """
    reference = exact([temperature])[0]
    log_ratio = actor - engine
    return Diagnosis(
        engine=_diagnose_side(engine, temperature, reference, exact, rounded, in_bfloat16[0]),
        actor=_diagnose_side(actor, temperature, reference, exact, rounded, in_bfloat16[1]),
        between=_distance(engine, actor),
        largest=float(np.abs(log_ratio).max()),
        signed=float(-log_ratio.mean()),
        k3=float((np.exp(np.clip(log_ratio, -20, 20)) - 1 - log_ratio).mean()),
        rounding=_distance(rounded, reference),
        tokens=len(engine),
    )


def _distance(left: np.ndarray, right: np.ndarray) -> float:
    return float(np.abs(left - right).mean())


def _diagnose_side(
    side: np.ndarray,
    temperature: float,
    reference: np.ndarray,
    exact: LogProbsAt,
    rounded: np.ndarray,
    in_bfloat16: bool,
) -> SideDiagnosis:
    difference, to_rounded = _distance(side, reference), _distance(side, rounded)
    correlation = _correlation(side - reference, rounded - reference)
    if difference <= AGREES:
        return SideDiagnosis(Cause.NONE, difference, to_rounded, correlation, temperature, difference)
    best, remaining = _nearest_temperature(side, temperature, exact)
    if abs(best / temperature - 1) > SAME_TEMPERATURE and remaining <= EXPLAINED * difference:
        cause = Cause.TEMPERATURE
    elif difference > ROUNDING * _distance(rounded, reference):
        cause = Cause.WEIGHTS
    else:
        pattern = correlation >= max(CORRELATED, SIGNIFICANT / len(side) ** 0.5)
        cause = Cause.DTYPE if in_bfloat16 or pattern else Cause.KERNELS
    return SideDiagnosis(cause, difference, to_rounded, correlation, best, remaining)


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    left, right = left - left.mean(), right - right.mean()
    scale = float(np.sqrt((left**2).sum() * (right**2).sum()))
    return float((left * right).sum()) / scale if scale > 0 else 0.0


def _nearest_temperature(side: np.ndarray, temperature: float, exact: LogProbsAt) -> tuple[float, float]:
    """Temperature of the nearest float32 log-probs, by two grid scans, and the remaining difference."""
    grid = np.geomspace(temperature / 5, temperature * 5, 49)
    for _ in range(2):
        distances = np.abs(exact(grid.tolist()) - side).mean(axis=1)
        at = int(distances.argmin())
        best, remaining = float(grid[at]), float(distances[at])
        grid = np.geomspace(grid[max(at - 1, 0)], grid[min(at + 1, len(grid) - 1)], 17)
    return best, remaining


def logprob_verdict(diagnosis: Diagnosis, temperature: float) -> str:
    """State the cause of the difference in a line or two."""
    engine, actor = diagnosis.engine, diagnosis.actor
    if engine.cause is Cause.WEIGHTS and actor.cause is Cause.WEIGHTS:
        return (
            "weights: neither side computed with this folder's weights (repeat with the folder of the weights at the "
            "beginning of the step)"
        )
    if diagnosis.between <= AGREES:
        return "none: engine and actor agree"
    if engine.cause is Cause.DTYPE and actor.cause is Cause.DTYPE:
        return "kernels: both sides compute in bfloat16 and round differently"
    sides = (("the engine", engine), ("the actor", actor))
    causes = [_cause(name, side, diagnosis, temperature) for name, side in sides]
    return "; ".join(filter(None, causes)) or "none: both sides agree with transformers"


def _cause(name: str, side: SideDiagnosis, diagnosis: Diagnosis, temperature: float) -> str:
    ratio = side.difference / max(diagnosis.rounding, 1e-12)
    texts = {
        Cause.NONE: "",
        Cause.TEMPERATURE: f"{name}'s log-probs are at temperature {side.temperature:.3g}, the run's is "
        f"{temperature:g}",
        Cause.DTYPE: f"{name} computes in bfloat16 (the difference is {ratio:.2g} times bfloat16's)",
        Cause.WEIGHTS: f"{name} computed with other weights than this folder's (the difference is {ratio:.0f} times "
        "bfloat16's)",
        Cause.KERNELS: f"{name} has the right weights and temperature and rounds differently, {ratio:.2g} times "
        "bfloat16's difference",
    }
    text = texts[side.cause]
    return text and f"{side.cause.value}: {text}"


def render_diagnosis(
    name: str, dump: RolloutDump, diagnosis: Diagnosis, retokenized: int | None, left_out: int = 0
) -> str:
    """Render the report of a dump.

    Args:
        retokenized: number of rows that encode to other ids; None without a tokenizer.
        left_out: number of rows with images that were not compared.
    """
    metadata = dump.metadata
    versions = ", ".join(map(str, sorted(set(dump.weight_versions.tolist()))))
    lines = [
        f"{name}: step {metadata.step}, {len(dump)} rows, {diagnosis.tokens} generated tokens, temperature "
        f"{metadata.temperature:g}, weight version {versions}",
        f"engine {metadata.engine} in {metadata.engine_dtype}, actor in {metadata.actor_dtype}",
        *([f"{count_noun(left_out, 'row')} with images left out; needed: {_IMAGES_FROM}"] if left_out else []),
        "",
        f"{'mean |difference| of log-probs to transformers':<48}{'engine':>12}{'actor':>12}",
        *(
            f"  {label:<46}{getattr(diagnosis.engine, name):>12.3g}{getattr(diagnosis.actor, name):>12.3g}"
            for name, label in _ROWS.items()
        ),
        "",
        f"engine minus actor: mean |difference| {diagnosis.between:.3g}, largest {diagnosis.largest:.3g}, mean (KL) "
        f"{diagnosis.signed:+.3g}, k3 {diagnosis.k3:.3g}",
        f"float32 and bfloat16 differ by {diagnosis.rounding:.3g}",
        _tokens(len(dump), retokenized),
        f"verdict: {logprob_verdict(diagnosis, metadata.temperature)}",
    ]
    return "\n".join(lines)


def _tokens(rows: int, retokenized: int | None) -> str:
    if retokenized is None:
        return "tokenization: not checked, the folder has no tokenizer"
    if not retokenized:
        return "tokenization: the text of every response encodes to the sampled ids"
    return (
        f"tokenization: the text of {retokenized} of {rows} responses encodes to different ids than sampled; a path "
        "through text (an HTTP client, a chat template) would compute different log-probs"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 with any verdict, 1 for an error, 2 for wrong arguments, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)

    def diagnose() -> int:
        for path in dump_files(arguments.dumps):
            report = diagnose_dump(path, arguments.model, arguments.rows, arguments.device, arguments.run)
            print(report, end="\n\n")
        return 0

    return exit_code(diagnose, bad_input=())


def dump_files(arguments: Sequence[str]) -> Iterator[Path]:
    """Find the dumps: files, the ``.npz`` next to a ``.jsonl``, or a folder's files by step.

    Raises:
        DataError: a dump does not exist.
    """
    for name in arguments:
        path = Path(name)
        if path.is_dir():
            files = sorted(path.glob("*.npz"), key=lambda file: (len(file.stem), file.stem))
        else:
            files = [path.with_suffix(".npz") if path.suffix == ".jsonl" else path]
        if not files or not files[0].is_file():
            raise DataError(
                f"{files[0] if files else path / '*.npz'}: no such file; trainer.rollout_data_dir has one per step "
                "with actor_rollout_ref.rollout.calculate_log_probs=true",
                code="doctor.no-rollout-dump",
            )
        yield from files


def diagnose_dump(path: Path, model: str, rows: int, device: str, run: str | None = None) -> str:
    """Compare a dump with transformers and render the report.

    Args:
        model: Hugging Face folder of the weights at the beginning of the step.
        rows: maximum number of rows to analyse.
        run: folder of the run, whose data files have the images; None = rows with images are left out.

    Raises:
        ConfigError, DataError, ModelError: the dump, the model or the run cannot be read, or they do not match.
    """
    whole = RolloutDump.load(path)
    images = DumpImages.of(whole, model, run)
    readable = [row for row in range(len(whole)) if images.can_read(whole, row)]
    chosen, left_out = readable[:rows], len(whole) - len(readable)
    if len(whole) and not chosen:
        text = f"{path}: every row has images, which a dump does not contain; expected {_IMAGES_FROM}, or rows of text"
        raise DataError(text, code="doctor.rows-with-images")
    columns = [field.name for field in dataclasses.fields(whole) if isinstance(getattr(whole, field.name), list)]
    values: dict[str, Any] = {name: [getattr(whole, name)[row] for row in chosen] for name in columns}
    dump = dataclasses.replace(whole, **values, weight_versions=whole.weight_versions[chosen])
    engine, actor = (_generated(dump, name) for name in ("rollout_log_probs", "old_log_probs"))
    if len(engine) == 0:
        raise DataError(f"{path} has no generated token", code="doctor.no-generated-token")
    temperature = dump.metadata.temperature
    rounded = ReferenceModel(model, torch.bfloat16, device, images).log_probs(dump, [temperature])[0]
    exact = ReferenceModel(model, torch.float32, device, images)
    in_bfloat16 = (dump.metadata.engine_dtype == "bfloat16", dump.metadata.actor_dtype == "bfloat16")
    diagnosis = diagnose(
        engine, actor, temperature, lambda temperatures: exact.log_probs(dump, temperatures), rounded, in_bfloat16
    )
    return render_diagnosis(str(path), dump, diagnosis, retokenized(dump, model), left_out)


class ReferenceModel:
    """Plain transformers model of a Hugging Face folder; computes one row at a time.

    Args:
        images: images of the rows; None = they have none.

    Raises:
        ModelError: the folder's model cannot be loaded.
    """

    def __init__(
        self, folder: str | Path, dtype: torch.dtype, device: str = "cpu", images: DumpImages | None = None
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        try:
            config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
            model = kind.from_pretrained(str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a malformed file raises any error there
            raise ModelError(
                f"cannot load a language model from {folder}: {error}", code="doctor.model-not-loaded"
            ) from error
        self.model = model.to(device).eval()
        self.folder, self.device, self.images = folder, device, images or DumpImages()

    @torch.no_grad()
    def log_probs(self, dump: RolloutDump, temperatures: Sequence[float]) -> np.ndarray:
        """Compute log-probs of the generated tokens at several temperatures, ``[temperatures, tokens]``.

        Raises:
            ModelError: a token of the dump is outside the vocabulary.
        """
        parts = [self._row(dump, row, temperatures) for row in range(len(dump))]
        return np.concatenate(parts, axis=1)

    def _row(self, dump: RolloutDump, row: int, temperatures: Sequence[float]) -> np.ndarray:
        ids = np.concatenate([dump.prompts[row], dump.responses[row]]).astype(np.int64)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if int(ids.max()) >= vocabulary:
            raise ModelError(
                f"row {row} of the dump has token {int(ids.max())}; the vocabulary of {self.folder} has {vocabulary}",
                code="doctor.dump-of-other-model",
            )
        inputs = {name: values.to(self.device) for name, values in self.images.inputs(ids).items()}
        logits = self.model(**inputs).logits[0, len(dump.prompts[row]) - 1 : -1].float()
        generated = torch.from_numpy(dump.generated[row].astype(bool)).to(self.device)
        logits, chosen = logits[generated], inputs["input_ids"][0, len(dump.prompts[row]) :][generated]
        if dump.support is not None:
            ids_inside = torch.from_numpy(dump.support[row].astype(np.int64)).to(self.device)[generated]
            outside = torch.ones(len(logits), logits.shape[1] + 1, dtype=torch.bool, device=self.device)
            outside.scatter_(1, ids_inside.where(ids_inside >= 0, logits.shape[1]), False)
            logits = logits.masked_fill(outside[:, :-1], -torch.inf)
        each = [(logits / t).log_softmax(-1).gather(1, chosen[:, None])[:, 0] for t in temperatures]
        return torch.stack(each).double().cpu().numpy()


def retokenized(dump: RolloutDump, folder: str | Path) -> int | None:
    """Count rows whose text encodes to different ids; None if the folder has no tokenizer."""
    try:
        tokenizer: Any = open_tokenizer(folder)
    except ModelError:
        return None
    rows: int = sum(
        tokenizer.encode(tokenizer.decode(ids.tolist()), add_special_tokens=False) != ids.tolist()
        for ids in dump.responses
    )
    return rows


def _generated(dump: RolloutDump, name: str) -> np.ndarray:
    rows: list[np.ndarray] = getattr(dump, name)
    kept = [values[mask.astype(bool)] for values, mask in zip(rows, dump.generated, strict=True)]
    return np.concatenate(kept).astype(np.float64) if kept else np.zeros(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megarl doctor logprobs",
        description="Recomputes the log-probs of saved rollouts and reports why engine and actor differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="<step>.npz or folder of trainer.rollout_data_dir")
    parser.add_argument(
        "--model", required=True, help="Hugging Face folder of the weights at the beginning of the step"
    )
    parser.add_argument("--run", metavar="FOLDER", help="folder of the run, to read the images of its prompts")
    parser.add_argument("--rows", type=int, default=64, help="rows of each dump to analyse")
    parser.add_argument("--device", default="cpu", help="device, such as cuda")
    return parser
