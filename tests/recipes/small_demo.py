"""Helpers that run the demo's recipe on a few pairs of its corpus, with a model that trains in seconds."""

import atexit
import contextlib
import functools
import gzip
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.pipeline import __main__ as pipeline
from recipes.pipeline import check_flags
from recipes.pipeline.__main__ import build_parser
from recipes.pipeline.arguments import describe_experiment
from recipes.run import shell
from recipes.run.command_line import parse
from tests import forked_programs
from tests.commands import ROOT

# With another precision, processes that tests start would depend on the machine.
SMALL = ["vocab_size=250", "width=32", "ffn_width=32", "max_epochs=5", "average_checkpoints=5", "precision=fp32"]
# Models that have hardly trained write to the limit, which takes time.
SHORT_OUTPUTS = ["max_len_b=10", "fairseq_generate_flags=--max-len-a=0"]
# /proc/cpuinfo of a CPU that computes bf16 in hardware, and of one that does not.
AVX512_BF16 = "model name\t: A CPU\nflags\t\t: fpu sse2 avx2 avx512f avx512_bf16 gfni\n"
AVX2 = "model name\t: A CPU\nflags\t\t: fpu sse2 avx2\n"


@functools.cache
def small_corpus(train=200, heldout=12):
    """A folder with the first pairs of the demo's corpus: *train* to train, *heldout* each to validate and to test."""
    folder = Path(tempfile.mkdtemp(prefix="small_demo"))
    atexit.register(shutil.rmtree, folder)
    for name, pairs in (("train", train), ("valid", heldout), ("test", heldout)):
        for lang in ("en", "de"):
            file = f"{name}.{lang}.gz"
            whole = gzip.decompress((ROOT / "recipes" / "demo" / "corpus" / file).read_bytes())
            few = b"".join(whole.splitlines(keepends=True)[:pairs])
            (folder / file).write_bytes(gzip.compress(few, mtime=0))
    return folder


def describe(recipe, *flags):
    """The experiment that *flags* of *recipe* describe."""
    parser = build_parser()
    args, train_flags = parse(parser, [recipe, *map(str, flags)])
    return describe_experiment(parser, args, args.arch, args.seed, train_flags)


def run_here(words, stop_before=None, main=pipeline.main, cores=(0,)):
    """Run a recipe, its text tools and the export in this process. Returns its output. (test_pipeline.py runs run.sh.)

    Ctrl-C interrupts the tool with the number *stop_before*. *main* can be that of a comparison. The process may use
    *cores*.
    """
    run_logged = shell.run_logged
    tools = count(1)

    def in_this_process(stage, command, on_line, *more):
        tool = re.fullmatch(r"python -m (recipes\.text\.\w+|fairseq_rope(?= export)) (.*)", command)
        if tool is None:
            return run_logged(stage, command, on_line, *more)
        if next(tools) == stop_before:
            raise KeyboardInterrupt
        with contextlib.redirect_stdout(io.StringIO()) as output:
            import_module(tool[1].replace("fairseq_rope", "fairseq_rope.__main__")).main(shlex.split(tool[2]))
        for line in output.getvalue().splitlines():
            on_line(line)

    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "run_logged", in_this_process)
        patch.setattr(shell, "PROGRAMS", forked_programs.folder())
        patch.setattr(os, "sched_getaffinity", lambda process: {*cores}, raising=False)
        patch.chdir(ROOT)  # where the commands run
        patch.setattr(pipeline, "check_flags", lambda *_, **__: None)
        main(words)
    return printed.getvalue()


def setting_flags(*settings):
    """The --set flags for *settings*, each KEY=VALUE."""
    return [word for setting in settings for word in ("--set", setting)]


def label(recipe, settings):
    """The suffix of the model's folder with these settings."""
    return describe(recipe, *setting_flags(*settings)).label


def usage_error(capsys, function, *words):
    """The only line on stderr of ``function(*words)``, which must exit with status 2."""
    with pytest.raises(SystemExit, match="^2$"):
        function(*words)
    (sentence,) = capsys.readouterr().err.splitlines()
    return sentence


def check_flags_here(monkeypatch):
    """Make check_flags run fairseq's parsers in this process, which is faster than a separate one."""

    def run(words, **_):
        status, folder, argv = 0, Path.cwd(), sys.argv
        os.chdir(ROOT)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                check_flags.parse_commands(words[3], words[4:])
            except SystemExit as stopped:
                status = stopped.code
                if isinstance(status, str):  # as Python does
                    print(status, file=err)
            finally:
                os.chdir(folder)
                sys.argv = argv
        return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())

    monkeypatch.setattr(check_flags, "subprocess", SimpleNamespace(run=run))
