"""The fairseq-train command of an experiment: devices, precision, batches and flags."""

import argparse
import math
import shlex

from recipes.pipeline.experiment import Experiment
from recipes.run import precision
from recipes.run.run import StageError
from recipes.run.shell import quoted


def batches(tokens_per_update: int, tokens_per_device: int, devices: int) -> tuple[int, int]:
    """The values of --max-tokens (size of a device's batch) and --update-freq (number of batches in an update).

    An update has about *tokens_per_update*. fairseq counts the tokens of the longer side, including padding.
    """
    frequency = math.ceil(tokens_per_update / (tokens_per_device * devices))
    return tokens_per_update // (devices * frequency), frequency


def batches_of(command: str) -> dict[str, int | str]:
    """What *command* says of its batches: "max_tokens", "update_freq" and "batch_size", if it has them.

    The last flag counts, as for fairseq. Flags that the user gives come after those of the recipe.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for names in (("--max-tokens",), ("--update-freq",), ("--batch-size", "--max-sentences")):
        parser.add_argument(*names)
    given = vars(parser.parse_known_args(shlex.split(command))[0])
    return {name: int(value) if value.isdigit() else value for name, value in given.items() if value is not None}


def patience(experiment: Experiment) -> int:
    """The number of validations without a lower loss after which the training ends; 0: it does not end early."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--patience", type=int, default=0)
    return max(0, parser.parse_known_args(shlex.split(experiment.settings.fairseq_train_flags))[0].patience)


def asked(experiment: Experiment) -> tuple[str, str]:
    """The precision that the user asks for, which can be "auto", and the words that ask for it.

    A flag for fairseq-train comes before the setting.
    """
    flag = precision.flag_in(experiment.settings.fairseq_train_flags)
    if flag:
        return precision.FLAGS[flag], f"{flag} among the flags for fairseq-train"
    return experiment.settings.precision, f"--set precision={experiment.settings.precision}"


def refuse_another(experiment: Experiment, resumed: str) -> None:
    """Raise a StageError if the user asks for another precision than the training *resumed* in the model's folder."""
    wanted, words = asked(experiment)
    if resumed and wanted not in ("auto", resumed):
        has = f"the training in {experiment.checkpoints} has the precision {resumed}, and cannot resume in {wanted}"
        instead = f"set precision={resumed}, or train another model with --name NAME or another --work-dir"
        raise StageError(f"stage 7 (train): {words}: {has}: {instead}")


def devices_and_precision(experiment: Experiment, resumed: str = "") -> tuple[int, str]:
    """The number of GPUs (0: the CPU) and the precision. Raises a StageError if the machine lacks them.

    *resumed* is the precision of the training that resumes. ``auto`` keeps it. For a new training, ``auto`` takes the
    precision of the earlier runs of a comparison, or the best that the device computes in hardware.
    """
    available = 0 if experiment.gpus == 0 else _gpus_here()
    gpus = available if experiment.gpus is None else experiment.gpus
    if gpus > available and not experiment.dry_run:
        raise StageError(f"--gpus {gpus}: this machine has {available}")
    refuse_another(experiment, resumed)
    wanted, words = asked(experiment)
    best = _best_of_gpus(available) if gpus else precision.on_cpu()
    if wanted == "auto" and resumed:
        wanted = resumed
        words = f"stage 7 (train): the training in {experiment.checkpoints} has the precision {resumed}"
    elif wanted == "auto":
        others = experiment.precision_of_others
        usual = others in ("fp32", best) or gpus and others == "fp16"
        return gpus, others if usual else best
    if gpus == 0 and wanted == "fp16" and not words.startswith("--memory-efficient"):
        raise StageError(f"{words}: fairseq trains in fp16 on GPUs only")
    if gpus and wanted == "bf16" and best != "bf16":
        raise StageError(f"{words}: this GPU does not support it; the best is {best}")
    return gpus, wanted


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def _best_of_gpus(available: int) -> str:
    """The best precision of the first GPU; without GPUs, in a dry run, that of new ones."""
    import torch

    generation = torch.cuda.get_device_capability() if available else (8, 0)
    return "bf16" if generation >= (8, 0) else "fp16" if generation >= (7, 0) else "fp32"


def check_devices(experiment: Experiment, resumed: str = "") -> None:
    """Call :func:`devices_and_precision`, unless the CPU in fp32 suffices: that loads no torch."""
    refuse_another(experiment, resumed)
    if experiment.gpus or asked(experiment)[0] not in ("auto", "fp32") or resumed not in ("", "fp32"):
        devices_and_precision(experiment, resumed)


def warning(experiment: Experiment, resumed: str = "") -> str:
    """A sentence if *experiment* trains in bf16 on a CPU that has no instructions for it; else ""."""
    wanted, words = asked(experiment)
    if "bf16" not in (wanted, wanted == "auto" and resumed) or precision.on_cpu() == "bf16":
        return ""
    gpus, _ = devices_and_precision(experiment, resumed)
    why = words if wanted == "bf16" else f"the training in {experiment.checkpoints} has the precision bf16"
    return "" if gpus else f"{why}: {precision.EMULATED}"


def command(experiment: Experiment, gpus: int, number_format: str) -> str:
    """The command that trains *experiment* on *gpus* GPUs (0: on the CPU) in the precision *number_format*."""
    s = experiment.settings
    sizes = " ".join(
        f"--{side}-layers {s.layers} --{side}-embed-dim {s.width} "
        f"--{side}-ffn-embed-dim {s.ffn_width} --{side}-attention-heads {s.heads}"
        for side in ("encoder", "decoder")
    )
    max_tokens, update_freq = batches(s.tokens_per_update, s.tokens_per_device, max(1, gpus))
    limits = f"--max-epoch {s.max_epochs} " if s.max_epochs else ""
    limits += f"--max-update {s.max_updates} " if s.max_updates else ""
    saved = f"--keep-last-epochs {s.average_checkpoints}"
    if s.save_every_updates:
        saved = f"--save-interval-updates {s.save_every_updates} --keep-interval-updates {s.average_checkpoints}"
        saved += " --no-epoch-checkpoints"
    start = f"--finetune-from-model {quoted(experiment.start_copy)} " if experiment.start_checkpoint else ""
    # Without a number of processes, fairseq starts one for each GPU, also with --cpu.
    device = f"--distributed-world-size {gpus}" if gpus else "--cpu --distributed-world-size 1"
    needs_no_flag = number_format == "fp32" or precision.flag_in(s.fairseq_train_flags)
    flag = "" if needs_no_flag else f"{quoted(f'--{number_format}')} "
    return (
        f"fairseq-train {quoted(experiment.data_bin)} {experiment.languages} "
        f"{experiment.user_dir} --arch {experiment.arch} {sizes} {experiment.sharing}{start}"
        f"--dropout {s.dropout} --optimizer adam --adam-betas {quoted(s.adam_betas)} --adam-eps {s.adam_eps} "
        f"--lr {s.learning_rate} --lr-scheduler inverse_sqrt --warmup-init-lr {s.warmup_init_lr} "
        f"--warmup-updates {s.warmup_updates} "
        f"--criterion fused_label_smoothed_cross_entropy --label-smoothing {s.label_smoothing} "
        f"--max-tokens {max_tokens} --update-freq {update_freq} {limits}"
        f"{saved} --save-dir {quoted(experiment.checkpoints)} {device} "
        f"{flag}--seed {experiment.seed} --log-format json --log-interval 20 "
        f"{quoted(*shlex.split(s.fairseq_train_flags))}"
    )
