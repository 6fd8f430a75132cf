"""One step's token data through Ray references, as megarl sends it, next to TransferQueue, as verl and NeMo-RL do.

    pip install TransferQueue
    python benchmarks/batch_store.py --samples 1024 4096 --ranks 4

Real processes without a model. A producer has the samples of a rollout. ``collect``: the driver receives them, or
learns their keys. ``log-probs``: each rank reads prompts and responses of its rows and returns a float per token.
``update``: each rank reads eight columns of its rows, in mini-batches that differ from the ranks of the first pass.
Ranks read every value. With Ray references, the driver cuts the batch into chunks and joins the results. With
TransferQueue (its default storage, in actors of its own) the driver sends keys, and the ranks fetch the rows.

CPU seconds are those of the driver, and of all processes together; ``wall`` is the time of the driver. Without the
package only Ray's rows are printed.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import ray
import torch
from data_plane import batch_of, samples_rows
from machine import benchmark_parser, parse_sizes, processor
from torch import Tensor

from megarl.base.formatting import table_lines
from megarl.cluster.fork_server import fork_server
from megarl.cluster.partition import partition_rows
from megarl.cluster.resources import PlacedPool, ResourcePool
from megarl.cluster.session import RaySession
from megarl.cluster.worker_group import WorkerGroup, wait_ready
from megarl.data import DataProto
from megarl.models import ParallelLayout
from megarl.workers.dispatch import Dispatch, WorkerPlace, verb

READ = ("prompts", "responses", "attention_mask")
UPDATED = ("response_mask", "rollout_log_probs", "old_log_probs", "advantages", "ref_log_prob")
UNITS = 2
"""Storage actors of TransferQueue: two per node, as its configuration recommends."""


class NullWorker:
    """A rank that reads its rows and returns log-probs."""

    def __init__(self, place: WorkerPlace) -> None:
        torch.set_num_threads(1)

    @verb(Dispatch.SPLIT, columns=READ)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Return a number per response token."""
        values = batch.packed("responses").float() + batch.packed("prompts").float().mean()
        return batch.token_columns({"old_log_probs": values})

    @verb(Dispatch.SPLIT, columns=(*READ, *UPDATED), mini_batches="rows")
    def update_actor(self, batch: DataProto) -> dict[str, float]:
        """Read all columns."""
        return {"sum": sum(float(batch.packed(name).float().sum()) for name in (*READ[:2], *UPDATED))}


class Producer:
    """Holds the samples of a rollout."""

    def __init__(self, samples: int, longest: int, mean: int) -> None:
        self.rows = samples_rows(samples, longest, mean, 0)

    def batch(self) -> DataProto:
        """Return the samples as one ragged batch."""
        return batch_of(self.rows)

    def connect(self) -> None:
        """Connect to TransferQueue."""
        import transfer_queue as tq

        tq.init()

    def put(self, keys: list[str]) -> None:
        """Put the samples into TransferQueue, with the columns of the update that other processes would add."""
        import transfer_queue as tq

        fields = {name: nested([torch.from_numpy(row) for row in rows]) for name, rows in self.rows.items()}
        for name in ("advantages", "ref_log_prob"):
            fields[name] = fields["rollout_log_probs"]
        tq.kv_batch_put(keys=keys, partition_id="step", fields=fields_of(fields, len(keys)))


class QueueRank:
    """A rank that fetches its rows from TransferQueue."""

    def __init__(self) -> None:
        import transfer_queue as tq

        torch.set_num_threads(1)
        tq.init()
        self.queue = tq

    def ready(self) -> None:
        """Return once the rank is connected."""

    def compute_log_prob(self, keys: list[str]) -> None:
        """Fetch rows, and store a number per response token."""
        rows = self.queue.kv_batch_get(keys=keys, partition_id="step", select_fields=["prompts", "responses"])
        prompts = flat(rows["prompts"]).float().mean()
        parts = [row.float() + prompts for row in rows["responses"].unbind()]
        self.queue.kv_batch_put(
            keys=keys, partition_id="step", fields=fields_of({"old_log_probs": nested(parts)}, len(keys))
        )

    def update_actor(self, keys: list[str]) -> float:
        """Fetch all columns of rows."""
        names = [*READ[:2], *UPDATED]
        rows = self.queue.kv_batch_get(keys=keys, partition_id="step", select_fields=names)
        return sum(float(flat(rows[name]).float().sum()) for name in names)


def nested(rows: list[Tensor]) -> Tensor:
    """Build a ragged tensor, TransferQueue's form of rows with different lengths."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def flat(rows: Tensor) -> Tensor:
    """Return the values of all rows."""
    return torch.cat(list(rows.unbind()))


def fields_of(columns: dict[str, Tensor], rows: int) -> Any:
    """Build TransferQueue's argument."""
    from tensordict import TensorDict

    return TensorDict(columns, batch_size=rows)


class Stopwatch:
    """Measures stages: wall seconds, CPU seconds of the driver and of all processes."""

    def __init__(self, label: str) -> None:
        self.label, self.rows = label, list[list[str]]()

    def measure(self, stage: str, work: Callable[[], Any]) -> Any:
        """Run a stage and note its row."""
        before = time.perf_counter(), time.process_time(), cpu_of_all()
        result = work()
        seconds = time.perf_counter() - before[0], time.process_time() - before[1], cpu_of_all() - before[2]
        self.rows.append([self.label, stage, *(f"{value:.2f}" for value in seconds)])
        return result


def cpu_of_all() -> float:
    """CPU seconds of this process and its children, Ray's processes among them."""
    driver, total = psutil.Process(), 0.0
    for process in [driver, *driver.children(recursive=True)]:
        try:
            total += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


def with_ray(pool: PlacedPool, producer: Any, ranks: int) -> list[list[str]]:
    """Measure megarl's way."""
    group = WorkerGroup("null", NullWorker, {}, ParallelLayout(dp=ranks), pool)
    wait_ready([group])
    watch = Stopwatch("Ray references (megarl)")
    batch: DataProto = watch.measure("collect", lambda: ray.get(producer.batch.remote()))
    batch = watch.measure("log-probs", lambda: batch.union(group.compute_log_prob(batch)))
    batch = batch.with_packed({name: batch.packed("rollout_log_probs") for name in ("advantages", "ref_log_prob")})
    batch.meta_info["rows"] = len(batch) // 4
    watch.measure("update", lambda: group.update_actor(batch))
    group.shutdown()
    return watch.rows


def with_queue(producer: Any, batch: DataProto, ranks: int) -> list[list[str]]:
    """Measure TransferQueue with the rows of megarl's plans."""
    import transfer_queue as tq
    from omegaconf import OmegaConf

    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": UNITS}}}))
    workers = [ray.remote(QueueRank).options(num_cpus=0).remote() for _ in range(ranks)]
    ray.get([producer.connect.remote(), *(worker.ready.remote() for worker in workers)])
    keys = [str(row) for row in range(len(batch))]
    plans = partition_rows(batch, ranks).rows, partition_rows(batch, ranks, len(batch) // 4, equal=True).rows

    def call(name: str, plan: list[list[int]]) -> None:
        ray.get([
            getattr(worker, name).remote([keys[row] for row in rows])
            for worker, rows in zip(workers, plan, strict=True)
        ])  # fmt: skip

    watch = Stopwatch("TransferQueue")
    watch.measure("collect", lambda: ray.get(producer.put.remote(keys)))
    watch.measure("log-probs", lambda: call("compute_log_prob", plans[0]))
    watch.measure("update", lambda: call("update_actor", plans[1]))
    for worker in workers:
        ray.kill(worker)
    tq.close()
    return watch.rows


def main() -> None:
    """Print the table."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[1024])
    parser.add_argument("--longest", type=int, default=15360, help="longest response in tokens")
    parser.add_argument("--mean", type=int, default=2048, help="mean response in tokens")
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks")
    args = parse_sizes(parser, samples=[8], longest=32, mean=16, ranks=1)

    has_queue = importlib.util.find_spec("transfer_queue") is not None
    rows = []
    with fork_server(), RaySession(num_cpus=args.ranks + UNITS + 2) as session:
        pool = session.place([ResourcePool("ranks", "cpu", [args.ranks])])["ranks"]
        for samples in args.samples:
            producer = ray.remote(Producer).options(num_cpus=0).remote(samples, args.longest, args.mean)
            batch: DataProto = ray.get(producer.batch.remote())
            tokens = sum(int(batch.packed(name).numel()) for name in READ[:2])
            of_both = with_ray(pool, producer, args.ranks)
            if has_queue:
                of_both += with_queue(producer, batch, args.ranks)
            rows += [[f"{samples:,}, {tokens / 1e6:.1f} M", *row] for row in of_both]
            ray.kill(producer)
    print(f"{processor()}, {args.ranks} ranks" + ("" if has_queue else "; TransferQueue is not installed"))
    header = ["samples, tokens", "store", "stage", "wall s", "driver CPU s", "all CPU s"]
    print("\n".join(table_lines([header, *rows])))


if __name__ == "__main__":
    main()
