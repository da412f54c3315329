"""Check that fairseq knows the architectures and all flags of a recipe, and can build its models, before stage 1.

    python -m recipes.pipeline.check_flags QUANTIZATION SYSTEM TRAIN GENERATE [SYSTEM TRAIN GENERATE …]

parses these commands with fairseq's parsers, and builds each model, also with the ``--model-overrides`` of GENERATE.
If QUANTIZATION is not empty, CTranslate2 must support the models with weights of this type. It runs in a separate
process, because fairseq's parsers exit at an error.
"""

import argparse
import difflib
import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from recipes.pipeline import fairseq_train, stage09_translate
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.start import SIDES, SIZES
from recipes.run import shell
from recipes.run.run import ROOT, StageError

PARSED, BUILT, PASSED = "the flags are known", "the model can be built", "the models can be built"
WARNING = "warning: "


def check_flags(
    experiments: Sequence[Experiment],
    flag: str = "--arch",
    devices: tuple[int, str] | None = None,
    quantization: str = "",
) -> None:
    """Raise a StageError unless fairseq, in a separate process, knows the flags and can build the models.

    Args:
        experiments: the trainings
        flag: the flag that names the systems, for messages
        devices: the number of GPUs and the precision, if another machine trains
        quantization: the type of the exported weights; "" if the models are not exported
    """
    words = [f"{shell.PROGRAMS}/python", "-m", "recipes.pipeline.check_flags", quantization]
    for experiment in experiments:
        generate = stage09_translate.command(experiment, experiment.data_bin, "test")
        devices_here = devices or fairseq_train.devices_and_precision(experiment)
        words += [experiment.system, fairseq_train.command(experiment, *devices_here), generate]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    printed = [line for line in done.stdout.splitlines() if not line.startswith(WARNING)]
    for line in dict.fromkeys(done.stdout.splitlines()):
        if line.startswith(WARNING):
            print(f"recipes: {line}", file=sys.stderr)
    if done.returncode or printed[-1:] != [PASSED]:
        known = {experiment.system for experiment in experiments}
        system = next((line for line in reversed(printed) if line in known), experiments[0].system)
        lines = done.stderr.strip().splitlines() if done.returncode else []
        errors = [line for line in lines if not re.fullmatch(r"see \S+ --help", line)]
        ended = f"fairseq ended with status {done.returncode} before it had read all flags"
        why = errors[-1].strip() if errors else ended
        if PARSED in printed[-1:]:
            failing = experiments[printed.count(PARSED) - 1]
            sizes = ", ".join(f"{name}={getattr(failing.settings, name)}" for name in SIZES)
            why += f" (settings: {sizes})"
        raise StageError(f"{flag} {system}: {why}")


def parse_commands(quantization: str, words: Sequence[str]) -> None:
    """Print each system in *words*, then parse its commands and build its model. fairseq's parser exits at an error."""
    from fairseq import models, options

    from fairseq_rope.serving.ctranslate2_support import unsupported
    from fairseq_rope.serving.export import overrides_of

    for system, train, generate in zip(words[::3], words[1::3], words[2::3], strict=True):
        print(system, flush=True)
        sys.argv = shlex.split(train)  # fairseq reads --user-dir from here
        arch = sys.argv[sys.argv.index("--arch") + 1]
        user_dir = sys.argv[sys.argv.index("--user-dir") + 1]
        if user_dir == "fairseq_rope":  # fairseq does not import it again, since recipes have
            import fairseq_rope.plugin  # noqa: F401
        parser = options.get_training_parser()
        if "fairseq_rope.plugin" not in sys.modules:
            sys.exit(f"{user_dir}/__init__.py must import fairseq_rope.plugin, which registers the models")
        if arch not in models.ARCH_MODEL_REGISTRY:
            near = difflib.get_close_matches(arch, models.ARCH_MODEL_REGISTRY, n=1, cutoff=0)
            sys.exit(f"fairseq has no such architecture; the nearest is {near[0]}")
        try:
            args = options.parse_args_and_arch(parser)
            replaced = _replaced_sizes(arch, args)
            if replaced:
                print(f"{WARNING}--arch {arch}: the settings replace its own {replaced}", flush=True)
            sys.argv = shlex.split(generate)
            search = options.parse_args_and_arch(options.get_generation_parser())
            print(PARSED, flush=True)
            model = _build(args)
            print(BUILT, flush=True)
            if given := overrides_of(search):
                flag = f"--model-overrides {search.model_overrides}: "
                model = _build(argparse.Namespace(**{**vars(args), **given}), flag)
        except (AssertionError, ValueError) as error:
            sys.exit(" ".join(str(error).split()))
        what = unsupported(model, quantization) if quantization and model is not None else None
        if what is not None:
            sys.exit(f"stage 11 cannot export this model: {what}, which CTranslate2 does not support")
    print(PASSED)


def _replaced_sizes(arch: str, args: argparse.Namespace) -> str:
    """The sizes of the architecture *arch* that are not transformer-base's, and that *args* replace; "" without any."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    own, base = argparse.Namespace(), argparse.Namespace()
    ARCH_CONFIG_REGISTRY[arch](own)
    ARCH_CONFIG_REGISTRY["transformer"](base)
    options = [f"{side}_{option}" for side in SIDES for option in SIZES.values()] + ["dropout"]
    replaced = [
        f"{option}={getattr(own, option)} by {getattr(args, option)}"
        for option in options
        if getattr(own, option, None) not in (None, getattr(base, option), getattr(args, option))
    ]
    return ", ".join(replaced)


def _build(args: argparse.Namespace, flag: str = "") -> Any:
    """Build the model without memory for its weights. Its own checks raise a ValueError, whose text follows *flag*.

    Returns None if the model cannot be built so.
    """
    import torch
    from fairseq import models

    words = _dictionary()
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    try:
        with torch.device("meta"):
            return models.ARCH_MODEL_REGISTRY[args.arch].build_model(args, task)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"{flag}{error}") from error
    except Exception:  # the model needs the values of its weights, or more of the task; stage 7 has both
        return None


@functools.cache
def _dictionary() -> Any:
    from fairseq.data import Dictionary

    words = Dictionary()
    for number in range(2**16):  # more than a cutoff of an adaptive softmax
        words.add_symbol(str(number))
    return words


if __name__ == "__main__":
    parse_commands(sys.argv[1], sys.argv[2:])
