"""Whether fairseq knows the architectures and all flags of a recipe, asked before its first stage."""

import subprocess
import sys
from collections.abc import Sequence

from recipes.pipeline import fairseq_train, stage09_translate
from recipes.pipeline.experiment import ROOT, Experiment, StageError

PASSED = "all flags are known"
_PARSE = f"""
import difflib, shlex, sys
from fairseq import models, options
for arch, train, generate in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    print(arch, flush=True)
    sys.argv = shlex.split(train)  # where fairseq looks for --user-dir
    parser = options.get_training_parser()
    if arch not in models.ARCH_MODEL_REGISTRY:
        near = difflib.get_close_matches(arch, models.ARCH_MODEL_REGISTRY, n=1, cutoff=0)
        sys.exit(f"fairseq has no such architecture; the nearest is {{near[0]}}")
    options.parse_args_and_arch(parser)
    sys.argv = shlex.split(generate)
    options.parse_args_and_arch(options.get_generation_parser())
print({PASSED!r})
"""


def check_flags(experiments: Sequence[Experiment], flag: str = "--arch") -> None:
    """Raise a StageError unless fairseq, in a process of its own, knows the architectures and all flags."""
    words = [sys.executable, "-c", _PARSE]
    for experiment in experiments:
        generate = stage09_translate.command(experiment, experiment.data_bin, "test")
        devices = fairseq_train.devices_and_precision(experiment)
        words += [experiment.arch, fairseq_train.command(experiment, *devices), generate]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    printed = done.stdout.splitlines()
    if done.returncode or printed[-1:] != [PASSED]:
        known = {experiment.arch for experiment in experiments}
        arch = next((line for line in reversed(printed) if line in known), experiments[0].arch)
        said = [line for line in done.stderr.splitlines() if line.strip()] if done.returncode else []
        why = said[-1].strip() if said else f"fairseq ended with status {done.returncode} before it had read all flags"
        raise StageError(f"{flag} {arch}: {why}")
