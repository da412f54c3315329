"""fairseq_rope/launch.py: results, failures and errors of processes. tests/serving/test_corpus.py kills them."""

import contextlib
import os

import pytest

from fairseq_rope.launch import outcomes

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
