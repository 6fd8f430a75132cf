from __future__ import annotations

import threading

import pytest
import torch
from distributed import Place, ProcessPool

from megarl.errors import ConfigError, ResourceError
from megarl.megatron import init_runtime, shutdown_runtime
from megarl.models import ParallelLayout


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="TP2 PP1 DP1 has 2 processes, but 3 were started"):
        init_runtime(ParallelLayout(tp=2), 0, 3, "127.0.0.1", 1)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device='gpu' must be one of auto, cpu, cuda"):
        init_runtime(ParallelLayout(), 0, 1, "127.0.0.1", 1, device="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_cuda_where_there_is_none_is_refused() -> None:
    with pytest.raises(ResourceError, match="no CUDA device"):
        init_runtime(ParallelLayout(), 0, 1, "127.0.0.1", 1, device="cuda")


def describe(place: Place, layouts: list[ParallelLayout]) -> list[tuple[object, ...]]:
    """Joins one layout after the other in the same process."""
    seen = []
    for index, layout in enumerate(layouts):
        runtime = init_runtime(layout, place.rank, place.world_size, "127.0.0.1", place.port + index, device="cpu")
        groups = [runtime.tp_group, runtime.dp_group, runtime.pp_group]
        ranks = [torch.distributed.get_process_group_ranks(group) for group in groups]
        seen.append((tuple(runtime.coordinate), runtime.is_first_stage, runtime.is_last_stage, ranks))
        shutdown_runtime()
    return seen


def test_groups_follow_the_layout_and_a_process_can_join_another(pool: ProcessPool) -> None:
    layouts = [ParallelLayout(tp=2, pp=2), ParallelLayout(pp=2, dp=2)]
    answers = pool.run(describe, 4, layouts)
    assert [answer[0] for answer in answers] == [
        ((0, 0, 0), True, False, [[0, 1], [0], [0, 2]]),
        ((1, 0, 0), True, False, [[0, 1], [1], [1, 3]]),
        ((0, 0, 1), False, True, [[2, 3], [2], [0, 2]]),
        ((1, 0, 1), False, True, [[2, 3], [3], [1, 3]]),
    ]
    assert [answer[1] for answer in answers] == [
        ((0, 0, 0), True, False, [[0], [0, 1], [0, 2]]),
        ((0, 1, 0), True, False, [[1], [0, 1], [1, 3]]),
        ((0, 0, 1), False, True, [[2], [2, 3], [0, 2]]),
        ((0, 1, 1), False, True, [[3], [2, 3], [1, 3]]),
    ]


def join_in_a_thread(place: Place) -> str:
    failures: list[BaseException] = []

    def join() -> None:
        try:
            init_runtime(ParallelLayout(), 0, 1, "127.0.0.1", place.port, device="cpu")
            shutdown_runtime()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    thread.join()
    return repr(failures)


def test_any_thread_may_join(pool: ProcessPool) -> None:
    assert pool.run(join_in_a_thread, 1) == ["[]"]
