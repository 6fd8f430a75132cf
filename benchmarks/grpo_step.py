"""One GRPO step of megarl against TRL's ``GRPOTrainer``: same model, prompts, lengths and number of cores.

    python benchmarks/grpo_step.py --peer-python /path/to/trl-venv/bin/python

A step is rollout, reward, group advantages, update and weight sync, without a reference model. The model is a random
Qwen2 in float32 (hidden size 256, 6 layers, vocabulary 2,048). A step has 64 prompts of 32 tokens with 4 samples each
and one optimizer step. Lengths are forced on each side, so both generate the same number of tokens:

- ``equal``: 64 tokens each; the end-of-sequence token never comes early;
- ``log-normal``: median 32, sigma 1, at most 256; each response ends at its drawn length. In TRL, a logits processor in
  ``generate`` forces the end-of-sequence token; in megarl, each request has a token limit.

megarl runs the worker classes of a training job as plain objects in two processes of one thread each: the actor at data
parallel 2 and one embedded engine per process, with weights through shared memory. This process runs the driver's part
of a step. Old log-probs come from the engine, as TRL takes them from the update. ``--recompute`` adds a row in which
the actor first computes them in a separate pass, as in a training job.

TRL is no dependency of megarl. It runs in a separate interpreter, once as one process of two threads and once as two
processes of one thread (``--peer-processes``); ratios compare with the faster one. Without ``--peer-python`` only
megarl is measured. To create such an interpreter:

    python -m venv /path/to/trl-venv
    /path/to/trl-venv/bin/pip install torch==2.13.0
    /path/to/trl-venv/bin/pip install trl accelerate datasets transformers

Both sides run in turn, step by step; the table shows medians over the steps after the first. Tokens are response
tokens. "CPU ratio" compares processor time instead of wall time. Neither other processes on the machine nor waiting for
another process affect it. But two threads of one process use processor time while they wait for each other, so on a
busy machine this ratio is fair only to TRL in two processes.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import itertools
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from grpo_workload import (
    EOS,
    FIRST_WORD,
    LEARNING_RATE,
    MARK,
    MIXES,
    PAD,
    SAMPLES,
    SHAPE,
    VOCAB,
    Mix,
    Taken,
    clock,
    mix_of,
    prompt_ids,
    score,
)
from machine import benchmark_parser, parse_sizes, processor

from megarl.base.ports import free_port

PEER = Path(__file__).with_name("grpo_trl.py")


def build_model(folder: Path) -> int:
    """Write the random model with a tokenizer of one word per token; return the number of parameters."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE))
    model.save_pretrained(folder)
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(FIRST_WORD, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a process with a number of threads."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


# ---- megarl


class Processes:
    """Two processes, each with an actor rank and a rollout replica, called as by a driver."""

    def __init__(self, folder: Path, mix: Mix, port: int) -> None:
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        self.pipes, self._processes = [], []
        os.environ.update(environment(1))
        for rank in range(2):
            parent_pipe, child_pipe = context.Pipe()
            process = context.Process(target=serve, args=(child_pipe, rank, folder, mix, port), daemon=True)
            process.start()
            self.pipes.append(parent_pipe)
            self._processes.append(process)

    def start(self, role: str, verb: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Call a verb of a role with arguments by rank."""
        for pipe, given in zip(self.pipes, arguments, strict=True):
            pipe.send((role, verb, given))

    def finish(self) -> list[Any]:
        """Return the results of the oldest call, by rank."""
        results = [pipe.recv() for pipe in self.pipes]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def call(self, role: str, verb: str, *given: Any) -> list[Any]:
        """Call a verb with the same arguments on both ranks."""
        self.start(role, verb, [given] * 2)
        return self.finish()

    def scatter(self, role: str, verb: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a verb with arguments by rank."""
        self.start(role, verb, arguments)
        return self.finish()

    def close(self) -> None:
        """End both processes."""
        for process in self._processes:
            process.kill()
            process.join()


def serve(pipe: Any, rank: int, folder: Path, mix: Mix, port: int) -> None:
    """Build the workers of a process and answer calls."""
    workers = build_workers(rank, folder, mix, port)
    while True:
        try:
            role, verb, arguments = pipe.recv()
        except EOFError:  # the driver ended
            return
        try:
            result = time.process_time() if role == "clock" else getattr(workers[role], verb)(*arguments)
        except Exception as error:
            result = error
        pipe.send(result)


def build_workers(rank: int, folder: Path, mix: Mix, port: int) -> dict[str, Any]:
    """Build the actor rank and the rollout replica of one process."""
    from megarl.config import ActorConfig, MegatronConfig, OptimConfig, RolloutConfig
    from megarl.models import ParallelLayout
    from megarl.workers.actor import ActorWorker
    from megarl.workers.dispatch import WorkerPlace
    from megarl.workers.rollout import RolloutWorker
    from megarl.workers.settings import (
        LogProbSettings,
        MicroBatchBudget,
        RoleSettings,
        RolloutSettings,
        UpdatePlan,
    )

    place, layout = WorkerPlace(rank, 2, "127.0.0.1", port), ParallelLayout(dp=2)
    budget = MicroBatchBudget(max_tokens=2048, share_prompts=True)
    settings = RoleSettings(
        model_path=str(folder),
        layout=layout,
        megatron=MegatronConfig(data_parallel_size=2, dtype="float32"),
        optim=OptimConfig(lr=LEARNING_RATE),
        total_updates=1000,
        device="cpu",
        seed=1,
        nccl_timeout=600,
    )
    actor = ActorWorker(
        place,
        settings=settings,
        config=ActorConfig(),
        plan=UpdatePlan(mix.rows, 1, budget, "token-mean", mix.longest),
        log_prob=LogProbSettings(budget, 1.0),
        reference=None,
    )
    rollout = RolloutSettings(str(folder), "cpu", RolloutConfig(dtype="float32"))
    return {"actor": actor, "rollout": RolloutWorker(place, settings=rollout)}


class PipeReplica:
    """A replica of the two processes, as the router uses it."""

    def __init__(self, pipe: Any) -> None:
        self._pipe, self._free = pipe, asyncio.Lock()

    async def accept(self, client: str, requests: Sequence[Any], aborted: Sequence[str]) -> None:
        """Submit new requests."""
        await self._call("accept", client, requests, aborted)

    async def completions(self, client: str, wait_s: float) -> list[Any]:
        """Return completions."""
        return await self._call("completions", client, wait_s)

    async def _call(self, verb: str, *args: Any) -> Any:
        async with self._free:  # the process runs one call at a time
            self._pipe.send(("rollout", verb, args))
            answer = await asyncio.to_thread(self._pipe.recv)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Done:
    """A finished result."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the value."""
        return self.value


class SyncGroup:
    """One role of both processes, as the sharding manager calls a worker group."""

    ranks = (0, 1)

    def __init__(self, processes: Processes, role: str) -> None:
        self._processes, self._role = processes, role

    def submit_on(self, ranks: Sequence[int], verb: str, *args: Any, after_failure: bool = False) -> Done:
        """Run a verb on both processes."""
        assert tuple(ranks) == self.ranks
        return Done(self._processes.call(self._role, verb, *args))

    def submit_scatter(self, verb: str, receivers: Mapping[int, Sequence[int]], width: int, *args: Any) -> Done:
        """Run a verb that returns messages by destination."""
        return self.submit_on(self.ranks, verb, *args)

    def submit_gather(self, verb: str, exported: Done, index: int, **places: Any) -> Done:
        """Pass each engine its messages."""
        shares = [(index, [export[rank] for export in exported.result() if rank in export]) for rank in self.ranks]
        return Done(self._processes.scatter(self._role, verb, shares))


class Megarl:
    """The driver of the two processes."""

    def __init__(self, folder: Path, mix: Mix, recompute: bool) -> None:
        from transformers import PreTrainedTokenizerFast

        from megarl.cluster.sharding_manager import ShardingManager
        from megarl.models import ParallelLayout, WeightMap, read_model_config
        from megarl.rewards import RewardManager, in_driver
        from megarl.sharding.placement import RolloutLayout, Routes
        from megarl.sharding.plan import build_plan, replica_plans

        self.mix, self.recompute = mix, recompute
        self.processes = Processes(folder, mix, free_port())
        plan = build_plan(
            WeightMap(read_model_config(folder)), ParallelLayout(dp=2), RolloutLayout(replicas=2), 2**28, 4
        )
        for role in ("actor", "rollout"):
            self.processes.call(role, "init_model")
        engines = itertools.chain(*self.processes.call("rollout", "sync_places"))
        routes = Routes(self.processes.call("actor", "sync_place"), tuple(engines))
        self.processes.call("actor", "connect_sync", plan, routes, None, "float32")
        arguments = [(parts, routes, None, "float32") for parts in replica_plans(plan)]
        self.processes.scatter("rollout", "connect_sync", arguments)
        self.sync = ShardingManager(plan, SyncGroup(self.processes, "actor"), SyncGroup(self.processes, "rollout"))
        self.sync.sync_weights()
        self.rewards = RewardManager(
            in_driver(score), PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
        )

    def step(self, number: int) -> Taken:
        """Run one step."""
        seconds: dict[str, float] = defaultdict(float)
        cpu = self._cpu()
        with clock(seconds, "step"):
            with clock(seconds, "generate"):
                batch = self._generate(number)
            batch = self._advantages(batch)
            with clock(seconds, "update"):
                batch = self._old_log_probs(batch)
                self._update(batch)
            self.sync.sync_weights()
        return Taken(seconds["generate"], seconds["update"], seconds["step"], self._cpu() - cpu)

    def close(self) -> None:
        """End the processes."""
        self.processes.close()

    def _cpu(self) -> float:
        return sum(self.processes.call("clock", "")) + time.process_time()

    def _generate(self, number: int) -> Any:
        from megarl.agents.trajectories import trajectories_to_batch
        from megarl.agents.types import Trajectory

        prompts, lengths = prompt_ids(number, self.mix.prompts), self.mix.lengths(number)
        completions = asyncio.run(self._answers(number, prompts, lengths))
        assert [len(c.token_ids) for c in completions] == lengths
        return trajectories_to_batch(
            [
                Trajectory(prompts[row // SAMPLES], c.token_ids, [1] * len(c.token_ids), c.log_probs, "length", 2)
                for row, c in enumerate(completions)
            ],
            PAD,
        )

    async def _answers(self, number: int, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Any]:
        """Generate responses of drawn lengths, which the router does not know, as in a training job."""
        from megarl.rollout import SamplingParams
        from megarl.rollout.router import Router

        replicas = [PipeReplica(pipe) for pipe in self.processes.pipes]
        async with Router(dict(enumerate(replicas)), self.mix.rows // 2 + 16, 600.0) as router:
            requests = [
                router.generate(
                    prompts[row // SAMPLES],
                    SamplingParams(length, ignore_eos=True),
                    seed=number * self.mix.rows + row,
                    key=str(row // SAMPLES),
                )
                for row, length in enumerate(lengths)
            ]
            return await asyncio.gather(*requests)

    def _advantages(self, batch: Any) -> Any:
        from megarl.algorithms import ADVANTAGES, AdvantageInputs

        rows = self.mix.rows
        groups = [f"{row // SAMPLES}" for row in range(rows)]
        facts = {"uid": groups, "data_source": ["words"] * rows, "reward_model": [{"ground_truth": ""}] * rows}
        scored = self.rewards.score(batch.with_columns({}, facts)).batch
        advantages, _ = ADVANTAGES["grpo"](
            AdvantageInputs(
                token_level_rewards=scored.tensors["token_level_scores"],
                response_mask=scored.tensors["response_mask"],
                values=None,
                group_ids=scored.non_tensor_batch["uid"],
                gamma=1.0,
                lam=1.0,
                norm_by_std=True,
            )
        )
        return scored.with_columns({"advantages": advantages}, {})

    def _old_log_probs(self, batch: Any) -> Any:
        from megarl.cluster.partition import partition_rows

        if not self.recompute:
            return batch.with_columns({"old_log_probs": batch.tensors["rollout_log_probs"]}, {})
        partition = partition_rows(batch, 2)
        parts = self.processes.scatter("actor", "compute_log_prob", [(part,) for part in partition.split(batch)])
        return batch.union(partition.collect(parts))

    def _update(self, batch: Any) -> None:
        from megarl.cluster.partition import partition_rows

        chunks = partition_rows(batch, 2, self.mix.rows).split(batch)
        metrics = self.processes.scatter("actor", "update_actor", [(chunk,) for chunk in chunks])[0]
        assert not metrics["actor/skipped_steps"] and math.isfinite(metrics["actor/grad_norm"])


# ---- TRL, in a separate interpreter (grpo_trl.py)


class Peer:
    """TRL in a separate interpreter: runs a step per input line and answers with a line of numbers."""

    def __init__(self, args: argparse.Namespace, folder: Path, mix: Mix, processes: int) -> None:
        batch_size = min(args.peer_batch_size, mix.rows) // processes
        call = [str(PEER), str(folder), "--lengths", mix.name, "--steps", str(args.steps),
                "--batch-size", str(batch_size), *["--tiny"] * args.tiny]  # fmt: skip
        if processes > 1:
            call = [
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={processes}",
                f"--master-port={free_port()}",
                *call,
            ]
        self._process = subprocess.Popen(
            [args.peer_python, *call],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(2 // processes),
            cwd=folder,
            text=True,
        )
        self.versions: str = self._read()["versions"]

    def step(self, number: int) -> Taken:
        """Run one step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return Taken(**self._read())

    def close(self) -> None:
        """End the interpreter."""
        self._process.terminate()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        raise SystemExit("the peer's process ended; its error is above")


# ---- report


def compare(mix: Mix, folder: Path, args: argparse.Namespace) -> None:
    """Measure one mix and print its table."""
    with ExitStack() as stack:
        contestants: dict[str, Megarl | Peer] = {"megarl": Megarl(folder, mix, False)}
        if args.recompute:
            contestants["megarl, old log-probs recomputed"] = Megarl(folder, mix, True)
        for processes in args.peer_processes if args.peer_python else []:
            name = f"TRL, {processes} process{'es' if processes > 1 else ''}"
            contestants[name] = Peer(args, folder, mix, processes)
        for contestant in contestants.values():
            stack.callback(contestant.close)
        taken: dict[str, list[Taken]] = {name: [] for name in contestants}
        for number in range(args.steps):
            for name, contestant in contestants.items():
                taken[name].append(contestant.step(number))
        versions = [c.versions for c in contestants.values() if isinstance(c, Peer)]
    report(mix, {name: steps[1:] for name, steps in taken.items()}, versions)


def median_rates(tokens: Sequence[int], taken: Sequence[Taken]) -> Taken:
    """Return tokens per second, each as the median over steps."""
    columns = zip(*taken, strict=True)
    return Taken(*(statistics.median(n / s for n, s in zip(tokens, column, strict=True)) for column in columns))


def report(mix: Mix, taken: dict[str, list[Taken]], versions: Sequence[str]) -> None:
    """Print the table: medians of tokens per second."""
    steps = len(next(iter(taken.values())))
    tokens = [sum(mix.lengths(number)) for number in range(1, steps + 1)]
    rates = {name: median_rates(tokens, seconds) for name, seconds in taken.items()}
    print(f"\n{mix.name}: {mix.rows} answers of {min(mix.lengths(1))} to {max(mix.lengths(1))} tokens, "
          f"{statistics.mean(tokens):,.0f} tokens a step; medians of {steps} steps")  # fmt: skip
    if versions:
        print(f"TRL's interpreter: {versions[0]}")
    else:
        print("without TRL: pass an interpreter with TRL by --peer-python")
    print(f"{'tokens/s':<36}{'generated':>10}{'updated':>9}{'end to end':>12}{'ratio':>7}{'CPU ratio':>11}")
    peers = [rate for name, rate in rates.items() if name.startswith("TRL")]
    best = max(peers, key=lambda rate: rate.step) if peers else None
    for name, rate in rates.items():
        ratios = "" if best is None else f"{rate.step / best.step:>7.2f}{rate.cpu / best.cpu:>11.2f}"
        print(f"{name:<36}{rate.generate:>10,.0f}{rate.update:>9,.0f}{rate.step:>12,.0f}{ratios}", flush=True)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--peer-python", help="interpreter with TRL")
    parser.add_argument("--peer-processes", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--peer-batch-size", type=int, default=64, help="rows of TRL's micro-batch, over its processes")
    parser.add_argument("--lengths", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--recompute", action="store_true", help="add megarl with a pass for old log-probs")
    parser.add_argument("--steps", type=int, default=6, help="number of steps; the first does not count")
    args = parse_sizes(parser, steps=2, lengths=["log-normal"])
    with tempfile.TemporaryDirectory() as name:
        parameters = build_model(Path(name))
        versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "transformers", "megatron-core"))
        print(f"{processor()}, two cores each; {versions}")
        print(f"Qwen2, {parameters / 1e6:.1f} M parameters, float32", flush=True)
        for mix in args.lengths:
            compare(mix_of(mix, args.tiny), Path(name), args)


if __name__ == "__main__":
    main()
