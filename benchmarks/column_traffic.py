"""A GRPO step's verbs without a model, and a count of the token columns that its hosts read from each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from data_plane import PROMPT, AnsweringWorker, batch_of, samples_rows

from megarl.cluster.partition import Partition, partition_rows
from megarl.cluster.stored_chunks import encoded
from megarl.config.schema.algorithm import AlgorithmConfig
from megarl.data import DataProto, stratified_minibatch_order, token_counts
from megarl.data.columns import column_widths
from megarl.data.ragged import Chunk, ChunkReference, RemoteValues
from megarl.data.remote_columns import RowFunction, RowMap, attach_chunks, separate, write_values
from megarl.trainer.phases.advantage_phase import AdvantagePhase
from megarl.trainer.records.step_metrics import batch_metrics
from megarl.workers.dispatch import UPDATE_ROWS, WorkerPlace, read_marks

PASSES = ("compute_log_prob", "compute_ref_log_prob")
MINI_BATCHES = 4


class RandomAnswers(AnsweringWorker):
    """Answers the verbs of a step without a model, with values that do not repeat, as a model's."""

    def _answer(self, batch: DataProto, name: str, value: float) -> DataProto:
        names = (name, "entropys") if name == "old_log_probs" else (name,)
        return batch.token_columns({name: torch.rand(len(batch.packed("responses"))) for name in names})


MARKS = read_marks(RandomAnswers)


def drawn_batch(samples: int, longest: int, mean: int, aligned: bool, seed: int = 0) -> DataProto:
    """Draw the scored samples of a step, in the order of its mini-batches."""
    batch = batch_of(samples_rows(samples, longest, mean, seed))
    batch = batch.with_packed({"token_level_scores": torch.zeros(len(batch.packed("responses")))})
    batch = batch.reorder(stratified_minibatch_order(token_counts(batch), MINI_BATCHES, 8))
    batch.meta_info["actor_mini_batch_rows"] = samples // MINI_BATCHES
    if not aligned:
        del batch.meta_info[UPDATE_ROWS]
    return batch


def run_step(group: Any, batch: DataProto, measure: Callable[[str, Callable[[], Any]], Any]) -> None:
    """Run the verbs of a GRPO step with a KL loss."""
    phase = AdvantagePhase(AlgorithmConfig(adv_estimator="grpo"))
    phase.rows = group.row_map(PASSES[0])
    batch = measure("store", lambda: group.store(PASSES[0], batch))
    for name in PASSES:
        batch = batch.union(measure(name, lambda name=name, batch=batch: group.call(name, batch)))
    batch = measure("advantages", lambda: phase.compute(batch, {}))
    measure("update_actor", lambda: group.call("update_actor", batch))
    longest = column_widths(batch.tensors.shapes)[1] or 0
    measure("metrics", lambda: batch_metrics(batch, PROMPT, longest, phase.rows, compare_log_probs=True))


class CountedChunk(ChunkReference):
    """A chunk in this process that a host has written.

    Attributes:
        sizes: bytes per value of each column, as stored.
    """

    def __init__(self, chunk: Chunk, host: int) -> None:
        self.chunk, self.host = chunk, host
        stored = encoded(chunk)
        self.sizes = {name: values.nbytes / max(1, len(chunk[name])) for name, values in stored.items()}
        self.nbytes = sum(values.nbytes for values in stored.values())

    @classmethod
    def fetch(cls, references: Sequence[CountedChunk]) -> list[Chunk]:
        """Return the values."""
        return [reference.chunk for reference in references]


class CountedGroup:
    """Data-parallel ranks in this process that count what their hosts would read from each other; a worker group.

    Attributes:
        moved: bytes of the chunks that each host has read from others, each once, by stage.
        needed: bytes of the values of its rows among them.
    """

    def __init__(self, hosts: int, ranks: int) -> None:
        self.dp, self.ranks, self.stage = hosts * ranks, ranks, ""
        self.moved: dict[str, list[float]] = defaultdict(lambda: [0.0] * hosts)
        self.needed: dict[str, list[float]] = defaultdict(lambda: [0.0] * hosts)
        self._has: set[Any] = set()
        self._worker = RandomAnswers(WorkerPlace(0, 1, "", 0))

    def partition(self, verb: str, batch: DataProto) -> Partition:
        """See the worker group."""
        mark = MARKS[verb]
        rows = batch.meta_info[mark.mini_batches] if mark.mini_batches else None
        return partition_rows(batch, self.dp, rows, equal=mark.equal_rows)

    def store(self, verb: str, batch: DataProto) -> DataProto:
        """Write the values on the driver's host, the first."""
        return write_values(batch, self.partition(verb, batch).rows, lambda chunk: CountedChunk(chunk, 0))

    def call(self, verb: str, batch: DataProto) -> Any:
        """Run a verb of each rank."""
        partition = self.partition(verb, batch)
        parts = partition.split(MARKS[verb].read(batch))
        return partition.collect(
            [self._run(rank, part, getattr(self._worker, verb)) for rank, part in enumerate(parts)]
        )

    def row_map(self, verb: str) -> RowMap:
        """Return a map over the verb's ranks."""

        def map_rows(
            function: RowFunction, columns: Sequence[str], batch: DataProto, *args: Any, group_by: str | None = None
        ) -> tuple[DataProto, list[Any]]:
            assert group_by is None
            partition, facts = Partition(self.partition(verb, batch).rows[: len(batch)]), list[Any]()

            def answer(part: DataProto) -> DataProto:
                result, fact = function(part, *args)
                facts.append(fact)
                return result

            parts = partition.split(batch.present(columns), write=lambda chunk: CountedChunk(chunk, 0))
            return partition.collect([self._run(rank, part, answer) for rank, part in enumerate(parts)]), facts

        return map_rows

    def _run(self, rank: int, part: DataProto, answer: Callable[[DataProto], Any]) -> Any:
        host = rank // self.ranks
        self._count(host, part)
        result = answer(part)
        if not isinstance(result, DataProto):
            return result
        separated, chunk = separate(result)
        return attach_chunks(separated, [(CountedChunk(chunk, host),)])

    def _count(self, host: int, part: DataProto) -> None:
        for name, column in part.tensors.ragged.items():
            if not isinstance(column.values, RemoteValues):
                continue
            places = column.values.places.compact()
            for chunk in places.references:
                if chunk.host != host and (host, chunk) not in self._has:
                    self._has.add((host, chunk))
                    self.moved[self.stage][host] += chunk.nbytes
            rows = zip(places.numbers.tolist(), places.begins.tolist(), column.lengths.tolist(), strict=True)
            for number, begin, length in rows:
                chunk = places.references[number]
                if chunk.host != host and (key := (host, chunk, name, begin)) not in self._has:
                    self._has.add(key)
                    self.needed[self.stage][host] += length * chunk.sizes[name]

    def measure(self, stage: str, work: Callable[[], Any]) -> Any:
        """Count a stage."""
        self.stage = stage
        return work()
