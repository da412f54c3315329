"""Run fairseq's commands, as programs and in this process."""

import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from unittest import mock

from fairseq import checkpoint_utils

import tests.quick_hydra  # noqa: F401  hydra remembers what it composes

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "fairseq_rope"
BIN = Path(sys.executable).parent

# How long a test waits for a process or a thread, in seconds
LIMIT = 300

QUICK_START = str(ROOT / "tests" / "quick_start")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [QUICK_START, os.environ.get("PYTHONPATH")]))}
# A shell's background jobs ignore Ctrl-C. The processes that tests start and interrupt would inherit that.
# SIGHUP stays ignored here, so that nohup keeps the tests running; default_signals restores it in new processes.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(_number, _handler)

TINY = (
    "--arch transformer_rope_tiny --share-all-embeddings --optimizer adam --lr 0.01 --lr-scheduler inverse_sqrt "
    "--warmup-updates 20 --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 500 "
    "--dropout 0.1 --cpu --seed 3 --num-workers 0 --log-format json"
)
LOADS_DATA = [f"fairseq-{name}" for name in ("train", "generate", "interactive", "validate", "eval-lm")]


def default_signals():
    """Restore the default action of the signals that tests send. Popen's ``preexec_fn`` runs this in the new process.

    Otherwise, the process would inherit that SIGHUP is ignored (after nohup) or SIGINT (in a shell's background).
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def run_program(*words, check=True, timeout=LIMIT, **kwargs):
    """Run a program of this environment as a user does. Returns the finished process."""
    command = [f"{BIN}/{words[0]}", *(str(word) for word in words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=timeout, **kwargs)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done


def training(data, save_dir, *more, without=()):
    """The words of a fairseq-train command: TINY *without* some parts. Flags in *more* override those of TINY."""
    flags = TINY
    for part in without:
        assert part in flags
        flags = flags.replace(part, "")
    return ["fairseq-train", data, "--user-dir", PLUGIN, *flags.split(), "--save-dir", save_dir, *more]


def call(program, *words, stdin=""):
    """Run *program* ("fairseq-train", …) in this process. Returns its output and its log.

    By default, this process loads the data: a second one, which torch would start, can take 5 seconds to end.
    """
    if program in LOADS_DATA and "--num-workers" not in words:
        words = (*words, "--num-workers", 0)
    main = import_module("fairseq_cli." + program.split("-", 1)[1].replace("-", "_")).cli_main
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", [program, *(str(word) for word in words)]))
        stack.enter_context(mock.patch.object(sys, "stdin", io.StringIO(stdin)))
        stack.enter_context(contextlib.redirect_stdout(printed))
        # fairseq-validate removes every second handler of the log and adds one; afterwards, all are as before.
        root = logging.getLogger()
        stack.enter_context(mock.patch.object(root, "handlers", [logging.StreamHandler(printed)]))
        stack.callback(root.setLevel, root.level)
        root.setLevel(logging.INFO)
        # A new process would not have the best score of an earlier training.
        vars(checkpoint_utils.save_checkpoint).pop("best", None)
        main()
    return printed.getvalue()


def train(data, save_dir, *more):
    """Train a tiny model, for one epoch by default. Returns the log."""
    return call(*training(data, save_dir, "--max-epoch", 1, *more))


def valid_losses(log):
    """The validation loss of each epoch in fairseq's JSON log."""
    logged = [json.loads(line) for line in re.findall(r"\{.*\"valid_loss\".*\}", log)]
    return {entry["epoch"]: entry["valid_loss"] for entry in logged}


def outputs(printed, letter="H"):
    """The texts of the lines ``LETTER-number`` by sentence number, in order and without the score."""
    texts = {}
    for number, fields in re.findall(rf"^{letter}-(\d+)\t(.*)$", printed, re.MULTILINE):
        texts.setdefault(int(number), []).append(fields.split("\t")[-1])
    return texts


def scores(printed):
    """The printed scores (log base 2) of the hypotheses by sentence number."""
    by_sentence = {}
    for number, score in re.findall(r"^H-(\d+)\t(\S+)\t", printed, re.MULTILINE):
        by_sentence.setdefault(int(number), []).append(float(score))
    return by_sentence
