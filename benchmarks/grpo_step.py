"""One whole GRPO step of megarl beside TRL's ``GRPOTrainer``: same model, prompts, lengths and number of cores.

    python benchmarks/grpo_step.py --peer-python /path/to/trl-venv/bin/python

A step is rollout, reward, group advantages, update and weight sync; there is no reference model. The model is a random
Qwen2 in float32 (hidden size 256, 6 layers, vocabulary 2,048); a step has 64 prompts of 32 tokens with 4 answers each
and is one optimizer step. Lengths are forced by a rule on each side, so both generate the same number of tokens:

- ``equal``: 64 tokens each, the end-of-sequence token never comes early;
- ``log-normal``: median 32, sigma 1, at most 256; each answer ends at its drawn length. With TRL a logits processor in
  its ``generate`` forces the end-of-sequence token there; with megarl the requests have limits of their own.

megarl runs its workers, the classes that a training job runs, as plain objects in two processes of one thread each:
trainer at data parallel 2 and one embedded engine per process, weights by shared memory. The driver's part of a step is
done here. Old log-probs are the engine's own, as TRL takes the update's own; ``--recompute`` adds a row in which the
actor computes them in a pass of its own first, as a training job does.

TRL is no dependency of megarl. It runs in an interpreter of its own, once as one process of two threads and once as two
processes of one thread (``--peer-processes``), and ratios are to the faster. Without ``--peer-python`` only megarl is
measured. To make such an interpreter:

    python -m venv /path/to/trl-venv
    /path/to/trl-venv/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    /path/to/trl-venv/bin/pip install trl accelerate datasets transformers

Contestants take turns, step by step; the table shows medians over the steps after the first. Tokens are response
tokens. "CPU ratio" compares seconds of processor time instead of wall time: what other processes on the machine take
away does not enter, nor does waiting for another process. Two threads of one process do burn processor time while
they wait for each other, so on a busy machine this ratio is fair to TRL in two processes only.
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
from collections.abc import Sequence
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
    PROMPTS,
    ROWS,
    SAMPLES,
    SHAPE,
    VOCAB,
    Mix,
    Taken,
    clock,
    distinct_words,
    prompt_ids,
)
from machine import processor

from megarl.ports import free_port

PEER = Path(__file__).with_name("grpo_trl.py")


def build_model(folder: Path) -> int:
    """Writes the random model with a tokenizer of one word per token; returns the number of parameters."""
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
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    ).save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def environment(threads: int) -> dict[str, str]:
    """For a process of so many threads."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


# ---- megarl


class Processes:
    """Two processes, each with an actor rank and a rollout replica, called as a driver calls them."""

    def __init__(self, folder: Path, mix: Mix, port: int) -> None:
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        self.pipes, self._processes = [], []
        os.environ.update(environment(1))
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, folder, mix, port), daemon=True)
            process.start()
            self.pipes.append(here)
            self._processes.append(process)

    def start(self, role: str, verb: str, arguments: Sequence[tuple[Any, ...]]) -> None:
        """Calls a verb of a role with arguments by rank."""
        for pipe, given in zip(self.pipes, arguments, strict=True):
            pipe.send((role, verb, given))

    def finish(self) -> list[Any]:
        """What the oldest call returned, by rank."""
        results = [pipe.recv() for pipe in self.pipes]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def call(self, role: str, verb: str, *given: Any) -> list[Any]:
        """The same arguments for both ranks."""
        self.start(role, verb, [given] * 2)
        return self.finish()

    def scatter(self, role: str, verb: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Arguments by rank."""
        self.start(role, verb, arguments)
        return self.finish()

    def close(self) -> None:
        """Ends both processes."""
        for process in self._processes:
            process.kill()
            process.join()


def serve(pipe: Any, rank: int, folder: Path, mix: Mix, port: int) -> None:
    """A process: builds its workers, then answers calls."""
    workers = build_workers(rank, folder, mix, port)
    while True:
        try:
            role, verb, given = pipe.recv()
        except EOFError:  # the driver has ended
            return
        try:
            result = time.process_time() if role == "clock" else getattr(workers[role], verb)(*given)
        except Exception as error:
            result = error
        pipe.send(result)


def build_workers(rank: int, folder: Path, mix: Mix, port: int) -> dict[str, Any]:
    """The actor's rank and the rollout replica of one process."""
    from megarl.config import ActorConfig, MegatronConfig, OptimConfig, RolloutConfig
    from megarl.models import ParallelLayout
    from megarl.workers.actor import ActorWorker
    from megarl.workers.place import WorkerPlace
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
    )
    actor = ActorWorker(
        place,
        settings=settings,
        config=ActorConfig(),
        plan=UpdatePlan(ROWS, 1, budget, "token-mean", mix.longest),
        log_prob=LogProbSettings(budget, 1.0),
        reference=None,
    )
    rollout = RolloutSettings(str(folder), "cpu", RolloutConfig(dtype="float32"))
    return {"actor": actor, "rollout": RolloutWorker(place, settings=rollout)}


class PipeReplica:
    """A replica of the two processes, as the router sees it."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    async def exchange(self, requests: Sequence[Any], aborted: Sequence[str], slice_s: float) -> list[Any]:
        """New requests in, completions out."""
        self._pipe.send(("rollout", "exchange", (requests, aborted, slice_s)))
        answer = await asyncio.to_thread(self._pipe.recv)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Done:
    """A result that is there already."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self, timeout_s: float | None = None) -> Any:
        """The value."""
        return self.value


class ActorEnd:
    """The actor's side of the weight sync, over the pipes."""

    def __init__(self, processes: Processes) -> None:
        self._call = processes.call

    def make_room(self) -> Done:
        """What may leave the device leaves it."""
        return Done(self._call("actor", "make_room"))

    def open_transfer(self, session: int) -> Done:
        """Gets ready to send."""
        return Done(self._call("actor", "open_transfer", session))

    def export_bucket(self, index: int) -> Done:
        """Shipments by training rank."""
        return Done(self._call("actor", "export_bucket", index))

    def release_bucket(self, index: int) -> None:
        """Frees the shipments."""
        self._call("actor", "release_bucket", index)

    def checksums(self) -> Done:
        """What the actor holds."""
        return Done(self._call("actor", "weight_shares"))

    def close_transfer(self, completed: bool) -> Done:
        """Nothing more is sent."""
        return Done(self._call("actor", "close_transfer", completed))


class EngineEnd:
    """The engines' side, likewise."""

    def __init__(self, processes: Processes) -> None:
        self._call, self._scatter = processes.call, processes.scatter

    def sleep(self, tags: tuple[str, ...]) -> Done:
        """Frees what the tags name."""
        return Done(self._call("rollout", "sleep", tags))

    def wake(self, tags: tuple[str, ...]) -> Done:
        """Makes it usable again."""
        return Done(self._call("rollout", "wake", tags))

    def begin_update(self, version: int) -> Done:
        """Makes the engines stale."""
        return Done(self._call("rollout", "begin_update", version))

    def open_transfer(self, session: int) -> Done:
        """Gets ready to receive."""
        return Done(self._call("rollout", "open_transfer", session))

    def import_bucket(self, index: int, exported: Done) -> Done:
        """Gives each engine what is for it."""
        shares = [(index, [export.get(rank) for export in exported.result()]) for rank in range(2)]
        return Done(self._scatter("rollout", "import_bucket", shares))

    def checksums(self) -> Done:
        """What the engines hold."""
        return Done([share for replica in self._call("rollout", "weight_shares") for share in replica])

    def close_transfer(self, completed: bool) -> Done:
        """Nothing more is received."""
        return Done(self._call("rollout", "close_transfer", completed))

    def end_update(self, version: int) -> Done:
        """Makes the engines serve the new weights."""
        return Done(self._call("rollout", "end_update", version))


class Megarl:
    """The driver of the two processes."""

    def __init__(self, folder: Path, mix: Mix, recompute: bool) -> None:
        from transformers import PreTrainedTokenizerFast

        from megarl.models import ParallelLayout, WeightMap, read_model_config
        from megarl.rewards import RewardManager, in_driver
        from megarl.sharding import RolloutLayout, Routes, ShardingManager, build_plan, replica_parts

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
        given = [(parts, routes, None, "float32") for parts in replica_parts(plan)]
        self.processes.scatter("rollout", "connect_sync", given)
        self.sync = ShardingManager(plan, ActorEnd(self.processes), EngineEnd(self.processes))
        self.sync.sync_weights()
        self.rewards = RewardManager(in_driver(score), PreTrainedTokenizerFast.from_pretrained(folder))

    def step(self, number: int) -> Taken:
        """One step."""
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
        """Ends the processes."""
        self.processes.close()

    def _cpu(self) -> float:
        return sum(self.processes.call("clock", "")) + time.process_time()

    def _generate(self, number: int) -> Any:
        from megarl.rollout.agents.batch import trajectories_to_batch
        from megarl.rollout.agents.loop import Trajectory

        prompts, lengths = prompt_ids(number), self.mix.lengths(number)
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
        """Each answer ends at its drawn length, which the router, as in a training job, does not know."""
        from megarl.rollout import SamplingParams
        from megarl.rollout.router import Router

        replicas = [PipeReplica(pipe) for pipe in self.processes.pipes]
        async with Router(replicas, ROWS // 2 + 16, 600.0) as router:
            asked = [
                router.generate(
                    prompts[row // SAMPLES],
                    SamplingParams(length, ignore_eos=True),
                    seed=number * ROWS + row,
                    key=str(row // SAMPLES),
                    expected_tokens=self.mix.longest,
                )
                for row, length in enumerate(lengths)
            ]
            return await asyncio.gather(*asked)

    def _advantages(self, batch: Any) -> Any:
        from megarl.algorithms import ADVANTAGES, AdvantageInputs

        groups = [f"{row // SAMPLES}" for row in range(ROWS)]
        facts = {"uid": groups, "data_source": ["words"] * ROWS, "reward_model": [{"ground_truth": ""}] * ROWS}
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
        from megarl.cluster.split import collect, plan_rows, split

        if not self.recompute:
            return batch.with_columns({"old_log_probs": batch.tensors["rollout_log_probs"]}, {})
        plan = plan_rows(batch, 2)
        parts = self.processes.scatter("actor", "compute_log_prob", [(part,) for part in split(batch, plan)])
        return batch.union(collect(parts, plan))

    def _update(self, batch: Any) -> None:
        from megarl.cluster.split import plan_rows, split

        chunks = split(batch, plan_rows(batch, 2, ROWS), ROWS)
        metrics = self.processes.scatter("actor", "update_actor", [(chunk,) for chunk in chunks])[0]
        assert not metrics["actor/skipped_steps"] and math.isfinite(metrics["actor/grad_norm"])


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The reward with the arguments that megarl gives."""
    return distinct_words(solution_str)


# ---- TRL, in its own interpreter (grpo_trl.py)


class Peer:
    """TRL in its own interpreter, which takes a step for each line it reads and answers with a line of numbers."""

    def __init__(self, args: argparse.Namespace, folder: Path, mix: Mix, processes: int) -> None:
        call = [str(PEER), str(folder), "--lengths", mix.name, "--steps", str(args.steps),
                "--batch-size", str(args.peer_batch_size // processes)]  # fmt: skip
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
        """One step."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return Taken(**self._read())

    def close(self) -> None:
        """Ends the interpreter."""
        self._process.terminate()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        raise SystemExit("the peer's process ended; its error is above")


# ---- the report


def compare(mix: Mix, folder: Path, args: argparse.Namespace) -> None:
    """Measures one mix and prints its table."""
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
    """Tokens per second, each the median over steps with so many tokens."""
    columns = zip(*taken, strict=True)
    return Taken(*(statistics.median(n / s for n, s in zip(tokens, column, strict=True)) for column in columns))


def report(mix: Mix, taken: dict[str, list[Taken]], versions: Sequence[str]) -> None:
    """The table: medians of tokens per second, each step with its own number of tokens."""
    steps = len(next(iter(taken.values())))
    tokens = [sum(mix.lengths(number)) for number in range(1, steps + 1)]
    rates = {name: median_rates(tokens, seconds) for name, seconds in taken.items()}
    print(f"\n{mix.name}: {ROWS} answers of {min(mix.lengths(1))} to {max(mix.lengths(1))} tokens, "
          f"{statistics.mean(tokens):,.0f} tokens a step; medians of {steps} steps")  # fmt: skip
    if versions:
        print(f"TRL's interpreter: {versions[0]}")
    else:
        print("without TRL: --peer-python names an interpreter that has it")
    print(f"{'tokens/s':<36}{'generated':>10}{'updated':>9}{'end to end':>12}{'ratio':>7}{'CPU ratio':>11}")
    peers = [rate for name, rate in rates.items() if name.startswith("TRL")]
    best = max(peers, key=lambda rate: rate.step) if peers else None
    for name, rate in rates.items():
        ratios = "" if best is None else f"{rate.step / best.step:>7.2f}{rate.cpu / best.cpu:>11.2f}"
        print(f"{name:<36}{rate.generate:>10,.0f}{rate.update:>9,.0f}{rate.step:>12,.0f}{ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter that has TRL")
    parser.add_argument("--peer-processes", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--peer-batch-size", type=int, default=64, help="rows of TRL's micro-batch, over its processes")
    parser.add_argument("--lengths", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--recompute", action="store_true", help="add megarl with a pass for old log-probs")
    parser.add_argument("--steps", type=int, default=6, help="the first is not counted")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        parameters = build_model(Path(name))
        versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "transformers", "megatron-core"))
        print(f"{processor()}, two cores each; {versions}")
        print(f"Qwen2, {parameters / 1e6:.1f} M parameters, float32; {PROMPTS} prompts x {SAMPLES} answers", flush=True)
        for mix in args.lengths:
            compare(MIXES[mix], Path(name), args)


if __name__ == "__main__":
    main()
