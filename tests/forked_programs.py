"""Programs that start without importing torch and fairseq: a server has imported both, and forks for each command.

Importing them takes more than a second, and a test of a recipe runs dozens of commands. :func:`folder` returns a folder
of programs for the front of PATH. Each program connects to the server, hands over its words, variables, folder and open
files, and waits for the process that the server forks. What that process does after its imports is the same: it loads
the plugin from --user-dir, reads its words and runs the program's main function. Its memory is not counted as that of
the caller's children.

tests/recipes/test_wmt14.py and tests/test_end_to_end.py run the real programs.
"""

import array
import atexit
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

FAIRSEQ = "preprocess train hydra-train generate interactive validate eval-lm".split()
PROGRAMS = ("python", *(f"fairseq-{name}" for name in FAIRSEQ))
IMPORTED = ("fairseq.trainer", "fairseq.tasks.translation", "sacremoses", "tests.quick_hydra")
# The program's first line has -I and -S, so that it starts in milliseconds. Another "python" than one of a module is
# the real one.
CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
program = os.path.basename(sys.argv[0])
if program == "python" and sys.argv[1:2] != ["-m"]:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([program, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request)
    server.recv(4)  # the process id
    status = int.from_bytes(server.recv(4), "big", signed=True)
if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def folder(gpus: int = 0) -> str:
    """The folder of the programs, for a machine with simulated GPUs (tests/simulated_gpu) or without.

    The server starts with the first call, and ends with this process.
    """
    from tests.commands import ENVIRONMENT, ROOT
    from tests.commands_on_gpus import environment

    programs = tempfile.mkdtemp(prefix="forked")
    address = f"{programs}/socket"
    variables = environment(gpus) if gpus else ENVIRONMENT
    path = os.pathsep.join([str(ROOT), variables["PYTHONPATH"]])
    command = [sys.executable, "-m", "tests.forked_programs", address]
    server = subprocess.Popen(
        command, cwd=ROOT, env={**variables, "PYTHONPATH": path, "PYTHONUTF8": "1"}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert server.stdout.readline() == "ready\n"

    def end():
        server.stdin.close()  # the server reads its end
        server.wait(timeout=10)
        shutil.rmtree(programs)

    atexit.register(end)
    for name in PROGRAMS:
        program = Path(programs, name)
        program.write_text(CLIENT.format(python=sys.executable, address=address))
        program.chmod(0o755)
    return programs


class Started:
    """A program that writes its output to *log*, in a process that can be killed with its number *pid*."""

    def __init__(self, words: list[str], log: Path):
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(f"{folder()}/socket")
        request = json.dumps([str(words[0]), [*map(str, words[1:])], os.getcwd(), dict(os.environ)]).encode()
        with open(log, "w") as file, open(os.devnull) as nothing:
            files = [nothing.fileno(), file.fileno(), file.fileno()]
            socket.send_fds(self.connection, [len(request).to_bytes(8, "big")], files)
        self.connection.sendall(request)
        self.pid = int.from_bytes(self.connection.recv(4), "big")

    def wait(self, timeout: float) -> int:
        """The status of the process at its end, minus the signal if one has ended it."""
        with self.connection:
            self.connection.settimeout(timeout)
            return int.from_bytes(self.connection.recv(4), "big", signed=True)


def serve(address: str) -> None:
    """Fork for each connection, until the end of standard input."""
    for name in IMPORTED:
        importlib.import_module(name)
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_generation_parser(), ["data"]))
    gc.freeze()
    processes = set()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
            connection, _ = server.accept()
            process = os.fork()
            if process == 0:
                server.close()
                answer(connection)
            connection.close()
            processes.add(process)
            processes = {number for number in processes if os.waitpid(number, os.WNOHANG)[0] == 0}
    for process in processes:
        os.waitpid(process, 0)


def answer(connection: socket.socket) -> None:
    """Run the program that the client requests in a new process, and send its status."""
    header, files, *_ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        program, words, cwd, variables = json.loads(stream.read(int.from_bytes(header, "big")))
    process = os.fork()
    if process == 0:
        connection.close()
        run(program, words, cwd, variables, files)
    connection.sendall(process.to_bytes(4, "big"))
    for file in (*files, 0, 1, 2):
        os.close(file)

    def end_with_the_client() -> None:
        if not connection.recv(1):
            os.kill(process, signal.SIGTERM)

    threading.Thread(target=end_with_the_client, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    connection.sendall(status.to_bytes(4, "big", signed=True))
    os._exit(0)


def run(program: str, words: list[str], cwd: str, variables: dict[str, str], files: array.array) -> None:
    """Run the main function of *program*, and end the process as Python does."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    random.seed()
    importlib.import_module("numpy").random.seed()
    status = 1
    try:
        if program == "python":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program, *words]
            importlib.import_module("fairseq_cli." + program.removeprefix("fairseq-").replace("-", "_")).cli_main()
        status = 0
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # the plugin has its own
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1])
