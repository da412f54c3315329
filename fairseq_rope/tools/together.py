"""Share one call of a function between calls that arrive together, from several threads."""

import threading
from typing import Any, Callable, Dict, List, Sequence

Run = Callable[..., Sequence[Any]]


class _Request:
    def __init__(self, item: Any, options: Dict[str, Any]) -> None:
        self.item, self.options = item, options
        self.batch: List[_Request] = []  # of a request whose thread makes the next call
        self.result: Any = None
        self.error: Any = RuntimeError("Ctrl-C ended the thread that computed it")  # until there is a result
        self.woken = threading.Event()


class Together:
    """Collects the requests that arrive while the function runs, and gives them to its next call.

    There is no further thread: a thread whose request can run at once makes the call, also for the requests that wait
    with the same options. When it returns, a thread that waits makes the next call. So a request that is alone
    does not wait.

    Args:
        run: called with a list of items and with options, returns a result for each item
        at_once: how many calls of *run* there can be at a time
    """

    def __init__(self, run: Run, at_once: int) -> None:
        self._run, self._at_once = run, at_once
        self._waiting: List[_Request] = []
        self._calls = 0
        self._lock = threading.Lock()

    def __call__(self, item: Any, **options: Any) -> Any:
        """Return the result for *item*, or raise the error of *run* for it."""
        request = _Request(item, options)
        with self._lock:
            self._waiting.append(request)
            if self._calls < self._at_once:
                self._calls += 1
                self._take().woken.set()
        try:
            request.woken.wait()
        except BaseException:  # Ctrl-C: the others must not wait for this thread
            with self._lock:
                if request in self._waiting:
                    self._waiting.remove(request)
            if request.batch:
                self._call(request.batch)
            raise
        if request.batch:
            self._call(request.batch)
        if request.error is not None:
            raise request.error
        return request.result

    def _take(self) -> _Request:
        """Return the first request that waits, with those of the same options as its batch."""
        first = self._waiting[0]
        first.batch = [request for request in self._waiting if request.options == first.options]
        self._waiting = [request for request in self._waiting if request.options != first.options]
        return first

    def _call(self, batch: List[_Request]) -> None:
        try:
            self._fill(batch)
        finally:
            with self._lock:
                if self._waiting:
                    self._take().woken.set()
                else:
                    self._calls -= 1
            for request in batch:
                request.woken.set()

    def _fill(self, batch: List[_Request]) -> None:
        """Compute the results of *batch*. If the call fails, each request has its own, and only some may fail."""
        try:
            results = self._run([request.item for request in batch], **batch[0].options)
            for request, result in zip(batch, results):
                request.result, request.error = result, None
        except Exception as error:
            if len(batch) > 1:
                for request in batch:
                    self._fill([request])
            else:
                batch[0].error = error
