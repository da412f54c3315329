"""Every wait in the tests has a limit. Otherwise, one process that never ends would stop all tests."""

import ast
import signal
import subprocess
import sys

import pytest

from tests.commands import LIMIT, ROOT, default_signals

# The place of the limit among a call's arguments. Each function also takes it as timeout=.
PLACES = {"communicate": 2, "get": 1, "join": 1, "result": 1, "urlopen": 3, "wait": 1}
OF_SUBPROCESS = ("call", "check_call", "check_output", "run")  # only timeout=


def without_limit(source):
    """The calls in *source* that can wait for ever.

    The places are those of processes, threads, events, barriers, futures and queues. ``str.join`` and ``dict.get``
    have one argument or more, so that they are not found.
    """
    calls = []
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        limits = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
        if ast.unparse(call.func.value) != "subprocess":
            if call.func.attr not in PLACES:
                continue
            limits += call.args[PLACES[call.func.attr] - 1 :]
        elif call.func.attr not in OF_SUBPROCESS:
            continue
        if not limits or ast.unparse(limits[0]) == "None":
            calls.append(f"line {call.lineno}: {ast.unparse(call)}")
    return calls


def test_every_wait_in_the_tests_has_a_limit(no_garbage):
    paths = sorted((ROOT / "tests").rglob("*.py"))
    calls = {str(path.relative_to(ROOT)): without_limit(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: lines for path, lines in calls.items() if lines} == {}, "pass LIMIT of tests/commands.py"


@pytest.mark.parametrize(
    "call, limit",
    [
        *(("process.wait({})", "9"), ("thread.join({})", "timeout=9"), ("queue.get({})", "timeout=9")),
        *(("process.communicate('text', {})", "9"), ("start().communicate({})", "timeout=9")),
        *(("future.result({})", "9"), ("urllib.request.urlopen(url, {})", "timeout=9")),
        *(("subprocess.run(words, {})", "timeout=9"), ("subprocess.check_output(words, {})", "timeout=9")),
        ("subprocess.run(words, {}, **kwargs)", "timeout=9"),
    ],
)
def test_a_wait_without_a_limit_is_found(call, limit):
    assert without_limit(call.format(limit)) == []
    assert len(without_limit(call.format("timeout=None"))) == 1
    assert len(without_limit(call.replace(", {}", "").replace("{}", ""))) == 1


def test_functions_that_do_not_wait_are_not_found():
    assert without_limit("' '.join(words); os.path.join(a, b); found.get(1); subprocess.Popen(words); run(1)") == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_the_tests_ignore_ends_a_process_with_default_signals(number):
    code = f"import signal; signal.raise_signal({int(number)})"
    before = signal.signal(number, signal.SIG_IGN)
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, preexec_fn=default_signals, capture_output=True, text=True, timeout=LIMIT)
    finally:
        signal.signal(number, before)
    assert done.returncode == -number, done.stderr
