from megarl.rollout.embedded.generation import PromptGroup, RequestQueue, shared_prefix_length, within_budget


def queue_of(*prompts):
    queue = RequestQueue()
    queue.add((prompt, number) for number, prompt in enumerate(prompts))
    return queue


def test_requests_are_grouped_by_prompt_in_order_of_arrival():
    queue = queue_of([1, 2], [3], [1, 2], (3,))
    queue.add([([4], 4), ([1, 2], 5)])
    assert len(queue) == 6
    assert queue.take(99, may_split=False) == [
        PromptGroup((1, 2), [0, 2, 5]),
        PromptGroup((3,), [1, 3]),
        PromptGroup((4,), [4]),
    ]
    assert not queue


def test_a_group_waits_until_it_fits_or_may_be_split():
    queue = queue_of(*[[1]] * 3, *[[2]] * 3)
    assert queue.take(4, may_split=False) == [PromptGroup((1,), [0, 1, 2])]
    assert queue.take(2, may_split=False) == []
    assert queue.take(2, may_split=True) == [PromptGroup((2,), [3, 4])]
    assert queue.take(2, may_split=False) == [PromptGroup((2,), [5])]
    assert not queue
    assert queue.take(2, may_split=True) == []


def test_requests_can_be_removed():
    queue = queue_of([1], [2], [1], [3])
    assert queue.remove(lambda number: number in (0, 1)) == [0, 1]
    assert queue.take(9, may_split=False) == [PromptGroup((1,), [2]), PromptGroup((3,), [3])]


def test_shared_prefix():
    start = tuple(range(40))
    assert shared_prefix_length([(*start, 1), (*start, 2, 3), (*start, 2)]) == 40
    # One token stays behind the prefix even where a prompt is a prefix of the others.
    assert shared_prefix_length([start, (*start, 2, 3), (*start, 2)]) == 39
    # Saving 40 tokens once does not pay for a forward pass of its own.
    assert shared_prefix_length([(*start, 1), (*start, 2)]) == 0
    assert shared_prefix_length([(1, *start), (2, *start), (2, 3, *start)]) == 0
    assert shared_prefix_length([start]) == 0
    assert shared_prefix_length([]) == 0


def test_prompt_token_budget():
    groups = [PromptGroup((0,) * length, [i]) for i, length in enumerate([5, 3, 9, 2, 2])]
    sizes = [[len(g.prompt) for g in run] for run in within_budget(groups, 1, 6)]
    assert sizes == [[5, 3], [9], [2, 2]]
    assert list(within_budget([], 0, 6)) == []
