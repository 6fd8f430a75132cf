"""``megarl doctor logprobs``: find out why the log-probs of engine and actor differ, from saved rollouts."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.base.commands import exit_code
from megarl.base.errors import DataError, ModelError
from megarl.data.rollout_dump import RolloutDump
from megarl.data.tokenizers import open_tokenizer
from megarl.ops.doctor.logprob_diagnosis import diagnose, render_diagnosis


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 with any verdict, 1 for an error, 2 for wrong arguments, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)

    def diagnose() -> int:
        for path in dump_files(arguments.dumps):
            print(diagnose_dump(path, arguments.model, arguments.rows, arguments.device), end="\n\n")
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


def diagnose_dump(path: Path, model: str, rows: int, device: str) -> str:
    """Compare a dump with transformers and render the report.

    Args:
        model: Hugging Face folder of the weights at the beginning of the step.
        rows: maximum number of rows to analyse.

    Raises:
        DataError, ModelError: the dump or the model cannot be read, or they do not match.
    """
    whole = RolloutDump.load(path)
    columns = [field.name for field in dataclasses.fields(whole) if field.name != "metadata"]
    dump = dataclasses.replace(whole, **{name: getattr(whole, name)[:rows] for name in columns})
    engine, actor = (_generated(dump, name) for name in ("rollout_log_probs", "old_log_probs"))
    if len(engine) == 0:
        raise DataError(f"{path} has no generated token", code="doctor.no-generated-token")
    temperature = dump.metadata.temperature
    rounded = ReferenceModel(model, torch.bfloat16, device).log_probs(dump, [temperature])[0]
    exact = ReferenceModel(model, torch.float32, device)
    in_bfloat16 = (dump.metadata.engine_dtype == "bfloat16", dump.metadata.actor_dtype == "bfloat16")
    diagnosis = diagnose(
        engine, actor, temperature, lambda temperatures: exact.log_probs(dump, temperatures), rounded, in_bfloat16
    )
    return render_diagnosis(str(path), dump, diagnosis, retokenized(dump, model))


class ReferenceModel:
    """Plain transformers model of a Hugging Face folder; computes one row at a time.

    Raises:
        ModelError: the folder's model cannot be loaded.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM

        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # a malformed file raises any error there
            raise ModelError(
                f"cannot load a language model from {folder}: {error}", code="doctor.model-not-loaded"
            ) from error
        self.model = model.to(device).eval()
        self.folder, self.device = folder, device

    @torch.no_grad()
    def log_probs(self, dump: RolloutDump, temperatures: Sequence[float]) -> np.ndarray:
        """Compute log-probs of the generated tokens at several temperatures, ``[temperatures, tokens]``.

        Raises:
            ModelError: a token of the dump is outside the vocabulary.
        """
        parts = [self._row(dump, row, temperatures) for row in range(len(dump))]
        return np.concatenate(parts, axis=1)

    def _row(self, dump: RolloutDump, row: int, temperatures: Sequence[float]) -> np.ndarray:
        ids = torch.from_numpy(np.concatenate([dump.prompts[row], dump.responses[row]]).astype(np.int64))
        vocabulary = self.model.get_input_embeddings().num_embeddings
        if int(ids.max()) >= vocabulary:
            raise ModelError(
                f"row {row} of the dump has token {int(ids.max())}; the vocabulary of {self.folder} has {vocabulary}",
                code="doctor.dump-of-other-model",
            )
        ids = ids.to(self.device)
        logits = self.model(ids[None]).logits[0, len(dump.prompts[row]) - 1 : -1].float()
        generated = torch.from_numpy(dump.generated[row].astype(bool)).to(self.device)
        logits, chosen = logits[generated], ids[len(dump.prompts[row]) :][generated]
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
    """One side's log-probs of the generated tokens of all rows."""
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
    parser.add_argument("--rows", type=int, default=64, help="rows of each dump to analyse")
    parser.add_argument("--device", default="cpu", help="device, such as cuda")
    return parser
