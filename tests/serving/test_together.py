"""fairseq_rope/serving/together.py: requests of several threads share calls."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fairseq_rope.serving.together import Together

TIMEOUT = 60  # seconds, so that a mistake ends the test


class Counting:
    """Doubles numbers, and waits in its first call until it may go on."""

    def __init__(self, blocks=True):
        self.calls, self.entered, self.may_end = [], threading.Event(), threading.Event()
        self.blocks = blocks

    def __call__(self, items, **options):
        self.calls.append((sorted(items), options))
        self.entered.set()
        if self.blocks:
            assert self.may_end.wait(TIMEOUT)
        if 13 in items:
            raise ValueError("thirteen")
        return [2 * item for item in items]


def waiting(together, count):
    """Wait until *count* requests wait."""
    for _ in range(TIMEOUT * 1000):
        requests = [future for of_key in [*together._waiting.values()] for _, future in of_key]
        if sum(not future.cancelled() for future in requests) == count:
            return
        threading.Event().wait(0.001)
    raise AssertionError(f"{together._waiting} wait")


def test_what_arrives_during_a_call_shares_the_next_one_with_equal_options():
    run = Counting()
    together = Together(at_once=1)
    with ThreadPoolExecutor(10) as pool:
        first = pool.submit(together, run, 1, beam=4)
        assert run.entered.wait(TIMEOUT)
        later = [pool.submit(together, run, item, beam=4 if item % 2 else 1) for item in range(2, 9)]
        waiting(together, 7)
        run.may_end.set()
        assert [future.result(TIMEOUT) for future in [first, *later]] == [2, *range(4, 17, 2)]
    assert run.calls[0] == ([1], {"beam": 4})
    assert sorted(run.calls[1:], key=str) == [([2, 4, 6, 8], {"beam": 1}), ([3, 5, 7], {"beam": 4})]


def test_a_request_that_is_alone_does_not_wait_and_calls_run_side_by_side():
    run = Counting()
    together = Together(at_once=2)
    with ThreadPoolExecutor(3) as pool:
        futures = []
        for item in (1, 2):
            futures.append(pool.submit(together, run, item))
            while len(run.calls) < item:
                threading.Event().wait(0.001)
        futures.append(pool.submit(together, run, 3))
        waiting(together, 1)
        run.may_end.set()
        assert [future.result(TIMEOUT) for future in futures] == [2, 4, 6]
    assert sorted(items for items, _ in run.calls) == [[1], [2], [3]]
    assert together(run, 5) == 10


def test_only_the_request_that_fails_gets_the_error():
    run = Counting()
    together = Together(at_once=1)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(together, run, 1)
        assert run.entered.wait(TIMEOUT)
        later = [pool.submit(together, run, item) for item in (12, 13, 14)]
        waiting(together, 3)
        run.may_end.set()
        assert first.result(TIMEOUT) == 2
        assert [later[0].result(TIMEOUT), later[2].result(TIMEOUT)] == [24, 28]
        with pytest.raises(ValueError, match="thirteen"):
            later[1].result(TIMEOUT)
    assert together(run, 1) == 2


def in_a_thread(call, *args):
    """Start *call*, and return the list that gets its result."""
    results = []
    # A thread that hangs after a mistake does not keep the process.
    thread = threading.Thread(target=lambda: results.append(call(*args)), daemon=True)
    thread.start()
    return thread, results


def test_ctrl_c_while_waiting_leaves_the_others_their_results():
    """The main thread waits for a call of another thread. Ctrl-C ends its wait, and a later request is computed."""
    run = Counting()
    together = Together(at_once=1)
    first, of_first = in_a_thread(together, run, 1)
    assert run.entered.wait(TIMEOUT)

    def interrupt():
        waiting(together, 1)
        os.kill(os.getpid(), signal.SIGINT)

    in_a_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        together(run, 2)
    later, of_later = in_a_thread(together, run, 3)
    waiting(together, 1)
    run.may_end.set()
    for thread in (first, later):
        thread.join(TIMEOUT)
    assert (of_first, of_later) == ([2], [6])
    assert [items for items, _ in run.calls] == [[1], [3]]


def test_ctrl_c_during_a_call_leaves_the_others_their_results():
    """The main thread and another one wait for the same call."""
    run = Counting()

    def interrupted(items, **options):
        if 2 in items:
            os.kill(os.getpid(), signal.SIGINT)
        return run(items, **options)

    together = Together(at_once=1)
    in_a_thread(together, interrupted, 1)
    assert run.entered.wait(TIMEOUT)
    of_other = []

    def share_the_next_call():
        waiting(together, 1)
        other, results = in_a_thread(together, interrupted, 3)
        waiting(together, 2)
        run.may_end.set()
        other.join(TIMEOUT)
        of_other.extend(results)

    helper, _ = in_a_thread(share_the_next_call)
    with pytest.raises(KeyboardInterrupt):
        together(interrupted, 2)
    helper.join(TIMEOUT)
    assert of_other == [6] and ([2, 3], {}) in run.calls
    assert together(run, 4) == 8


def test_wrong_options_are_an_error_of_their_request_alone():
    run = Counting(blocks=False)
    together = Together(at_once=1)
    with pytest.raises(TypeError, match="unhashable"):
        together(run, 1, beam=[4])
    assert together(run, 2, beam=4) == 4 and run.calls == [([2], {"beam": 4})]


def test_closing_waits_for_all_requests_and_ends_the_threads():
    run = Counting()
    together = Together(at_once=2)
    first, of_first = in_a_thread(together, run, 1)
    assert run.entered.wait(TIMEOUT)
    while not (threads := [*together._threads._threads]):
        threading.Event().wait(0.001)
    closing, of_closing = in_a_thread(together.close)
    assert not of_closing
    run.may_end.set()
    closing.join(TIMEOUT)
    first.join(TIMEOUT)
    assert (of_first, of_closing) == ([2], [None])
    assert not any(thread.is_alive() for thread in threads)


def test_many_threads_get_their_own_results():
    together, run = Together(at_once=2), Counting(blocks=False)
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda item: together(run, item), range(100, 2100))
        assert list(found) == [2 * item for item in range(100, 2100)]
