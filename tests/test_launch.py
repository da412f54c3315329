"""fairseq_rope/launch.py: results, failures and errors of processes. tests/serving/test_corpus.py kills them."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from fairseq_rope.launch import outcomes
from tests.commands import ENVIRONMENT, LIMIT, ROOT

KILLED = "__import__('os').kill(__import__('os').getpid(), 9)"


def test_each_task_has_its_result_or_the_reason_of_its_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    tasks = ["1 + 1", KILLED, "[0] * 10**15", "__import__('os').environ['CUDA_VISIBLE_DEVICES']"]
    before = dict(os.environ)
    ended = {outcome.task: outcome for outcome in outcomes(tasks, eval, 2, str(tmp_path))}
    assert os.environ == before
    assert [ended[task].result for task in tasks] == [2, None, None, "3,5"]
    assert ended[tasks[0]].failure == ended[tasks[3]].failure == ""
    assert ended[KILLED].failure.startswith("its process ended without a result (log: ")
    assert ended[tasks[2]].failure.startswith("MemoryError (log: ")
    logs = [outcome.failure.partition("(log: ")[2].rstrip(")") for outcome in ended.values() if outcome.failure]
    assert sorted(map(str, tmp_path.rglob("*.*"))) == sorted(logs), "the logs of failures are the only files"


def test_an_error_of_a_file_ends_the_other_processes(tmp_path):
    tasks = ["__import__('time').sleep(100)", "open('/none')"]
    with (
        pytest.raises(FileNotFoundError, match="'/none'"),
        contextlib.closing(outcomes(tasks, eval, 2, str(tmp_path))) as ended,
    ):
        list(ended)


def test_a_process_ends_after_the_one_that_started_it_was_killed(tmp_path):
    code = (
        "import sys\n"
        "from fairseq_rope.launch import outcomes\n"
        "task = f\"[open({sys.argv[1]!r}, 'w').write(str(__import__('os').getpid())), __import__('time').sleep(99)]\"\n"
        "list(outcomes([task], eval, 1, sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "pid"), str(tmp_path / "jobs")]
    launcher = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT)
    limit = time.monotonic() + LIMIT / 5
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < limit and launcher.poll() is None
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)  # it is there
    launcher.kill()
    launcher.wait(LIMIT)
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < limit:
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the process has not ended")
