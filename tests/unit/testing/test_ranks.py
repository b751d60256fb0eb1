"""The public pool of ranks, on real processes."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from torchinstruments.testing.ranks import RankFailure, RankPool, run_ranks


def _sum_of_ranks(offset: int = 0) -> tuple[int, float, int]:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return os.getpid(), value.item(), torch.get_num_threads()


def _environment(name: str) -> str:
    return os.environ[name]


def _fail_on(rank: int, *, waiting: bool = False) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    if waiting:
        dist.barrier()
    return "fine"


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _return_what_cannot_be_pickled() -> object:
    return (number for number in range(3))


@pytest.fixture(scope="module")
def pool():
    """Two ranks."""
    with RankPool(2, environ={"EXTRA": "yes"}) as one:
        yield one


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_every_rank_runs_the_function_in_one_group_and_the_results_come_by_rank(pool):
    """With arguments, on one thread, in two processes that stay the same."""
    first, second = pool.run(_sum_of_ranks, 10), pool.run(_sum_of_ranks, offset=0)
    assert [value for _, value, _ in first] == [21.0, 21.0]
    assert [value for _, value, _ in second] == [1.0, 1.0]
    assert [threads for *_, threads in first] == [1, 1]
    assert [pid for pid, *_ in first] == [pid for pid, *_ in second] == list(pool.pids)


def test_ranks_have_a_launchers_variables_and_the_callers(pool):
    """So that a program that reads them runs unchanged."""
    assert pool.run(_environment, "RANK") == ["0", "1"]
    assert pool.run(_environment, "LOCAL_RANK") == ["0", "1"]
    assert pool.run(_environment, "WORLD_SIZE") == ["2", "2"]
    assert pool.run(_environment, "EXTRA") == ["yes", "yes"]


def test_an_exception_comes_back_with_a_traceback_a_rank_and_the_pool_goes_on(pool):
    """The other rank had no trouble, so nothing is started anew."""
    pids = [pid for pid, *_ in pool.run(_sum_of_ranks)]
    with pytest.raises(RankFailure) as caught:
        pool.run(_fail_on, 1)
    assert list(caught.value.tracebacks) == [1]
    assert "ValueError: no luck on 1" in caught.value.tracebacks[1]
    assert "_fail_on" in str(caught.value)
    assert [pid for pid, *_ in pool.run(_sum_of_ranks)] == pids


def test_a_rank_that_hangs_in_a_collective_that_another_one_left_is_ended(pool):
    """And the next function finds new ranks."""
    pids = [pid for pid, *_ in pool.run(_sum_of_ranks)]
    with pytest.raises(RankFailure) as caught:
        pool.run(_fail_on, 0, waiting=True)
    assert "no luck on 0" in caught.value.tracebacks[0]
    assert all(_is_gone(pid) for pid in pids)
    assert [value for _, value, _ in pool.run(_sum_of_ranks)] == [1.0, 1.0]


def test_a_rank_that_dies_is_named_with_its_exit_code(pool):
    """Nobody else can tell of it."""
    with pytest.raises(RankFailure) as caught:
        pool.run(_die_on, 1)
    assert caught.value.tracebacks == {1: "the process died with exit code -9"}


def test_a_rank_that_does_not_answer_in_time_is_ended(pool):
    """The time is the caller's."""
    pool.run(_sum_of_ranks)
    pids = pool.pids
    with pytest.raises(RankFailure) as caught:
        pool.run(_sleep_on, 1, timeout_s=0.5)
    assert list(caught.value.tracebacks) == [1]
    assert all(_is_gone(pid) for pid in pids)


def test_a_result_that_cannot_be_sent_is_a_failure_that_says_so(pool):
    """It must not end the rank."""
    with pytest.raises(RankFailure, match="pickle"):
        pool.run(_return_what_cannot_be_pickled)
    assert len(pool.run(_sum_of_ranks)) == 2


def test_a_function_that_has_no_module_is_refused_in_one_sentence(pool):
    """Ranks find it by name."""
    with pytest.raises(ValueError, match="at the top of a module"):
        pool.run(lambda: None)


def test_run_ranks_starts_a_world_and_ends_it():
    """One call for one function."""
    results = run_ranks(_sum_of_ranks, 1, 5)
    assert [value for _, value, _ in results] == [5.0]
    assert all(_is_gone(pid) for pid, *_ in results)


def test_a_world_without_ranks_is_refused():
    """Its smallest size is one."""
    with pytest.raises(ValueError, match="world_size=0"):
        RankPool(0)
