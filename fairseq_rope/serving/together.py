"""Share one call of a function between calls that arrive together, from several threads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

Run = Callable[..., Sequence[Any]]
Requests = list[tuple[Any, "Future[Any]"]]  # items, and what gets their results


class Together:
    """Collects the requests that arrive while its *at_once* threads are busy, and computes them with one call."""

    def __init__(self, at_once: int) -> None:
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="together")
        self._waiting: dict[tuple[Any, ...], Requests] = {}  # by function and options
        self._lock = threading.Lock()

    def __call__(self, run: Run, item: Any, **options: Any) -> Any:
        """Return the result for *item*, or raise the error of *run* for it.

        *run* is called with the items of requests with equal options, which must be hashable, and returns a result for
        each item.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._waiting.setdefault((run, *sorted(options.items())), []).append((item, future))
        # A task for each request. The first one takes all requests with the same options, so later ones may find none.
        self._threads.submit(_compute, self._waiting, self._lock)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C, if it has not begun

    def close(self) -> None:
        """End the threads when they have computed all requests."""
        self._threads.shutdown()


def _compute(waiting: dict[tuple[Any, ...], Requests], lock: threading.Lock) -> None:
    with lock:
        if not waiting:
            return
        key = next(iter(waiting))
        requests = waiting.pop(key)
    run, *options = key
    _fill(run, dict(options), [request for request in requests if request[1].set_running_or_notify_cancel()])


def _fill(run: Run, options: dict[str, Any], requests: Requests) -> None:
    """Compute the results of *requests*. If the call fails, each request has its own, and only some may fail."""
    if not requests:
        return
    try:
        results = run([item for item, _ in requests], **options)
    except Exception as error:
        if len(requests) > 1:
            for request in requests:
                _fill(run, options, [request])
        else:
            requests[0][1].set_exception(error)
        return
    for (_, future), result in zip(requests, results):
        future.set_result(result)
