"""Stage 7: train (fairseq-train). An interrupted training goes on from its last checkpoint."""

import json
import math
import re
import sys
from pathlib import Path

from tqdm import tqdm

from recipes.pipeline import stage06_binarise
from recipes.pipeline.experiment import Experiment, StageError, write_whole
from recipes.pipeline.machine import describe

NUMBER = 7
TITLE = "train"
PER_MODEL = True
LEARNT_FROM = (
    "layers",
    "width",
    "ffn_width",
    "heads",
    "dropout",
    "adam_betas",
    "adam_eps",
    "warmup_init_lr",
    "label_smoothing",
    "learning_rate",
    "warmup_updates",
    "tokens_per_update",
    "fairseq_train_flags",
)
# What can change between two runs of one training, which then goes on.
NOT_LEARNT_FROM = (
    "tokens_per_device",
    "precision",
    "max_epochs",
    "max_updates",
    "save_every_updates",
    "average_checkpoints",
)
SETTINGS = (*LEARNT_FROM, *NOT_LEARNT_FROM)


def inputs(x: Experiment) -> list[Path]:
    return stage06_binarise.outputs(x)


def outputs(x: Experiment) -> list[Path]:
    return [x.model / "checkpoints" / "checkpoint_last.pt", *(path for _, path in to_average(x))]


def to_average(x: Experiment) -> list[tuple[int, Path]]:
    """The newest checkpoints, which stage 8 averages, in their order: epoch or update, and file."""
    pattern = r"checkpoint_\d+_(\d+)\.pt" if x.settings["save_every_updates"] else r"checkpoint(\d+)\.pt"
    numbered = []
    for path in (x.model / "checkpoints").glob("checkpoint*.pt"):
        match = re.fullmatch(pattern, path.name)
        if match:
            numbered.append((int(match.group(1)), path))
    return sorted(numbered)[-x.settings["average_checkpoints"] :]


def check_checkpoints(x: Experiment) -> None:
    """Refuse to end with others to average than the last ones, one for each epoch or interval.

    Raises:
        StageError: one is missing; removed by hand, or trained with another save_every_updates; or the last
            is beyond the limit, of a training that was longer
    """
    found, s = [number for number, _ in to_average(x)], x.settings
    limit = "max_updates" if s["save_every_updates"] else "max_epochs"
    if s[limit] and found and found[-1] > s[limit]:
        raise StageError(
            f"stage {NUMBER} ({TITLE}): {x.model / 'checkpoints'} is of a training of {found[-1]} "
            f"{limit[4:]} already, beyond {limit}={s[limit]}: set {limit}={found[-1]}, or remove that folder "
            "to train anew"
        )
    every = s["save_every_updates"] or 1
    wanted = [found[-1] - every * n for n in reversed(range(s["average_checkpoints"]))] if found else []
    if found != wanted or not found:
        raise StageError(
            f"stage {NUMBER} ({TITLE}): {x.model / 'checkpoints'} has {found or 'none'} of the "
            f"{'updates' if s['save_every_updates'] else 'epochs'} to average, and not the last "
            f"{s['average_checkpoints']}, one every {every}: train longer, or remove that folder to train "
            "anew"
        )


def batches(tokens_per_update: int, tokens_per_device: int, devices: int) -> tuple[int, int]:
    """--max-tokens and --update-freq for updates of about *tokens_per_update* on so many *devices*.

    Each device takes ``--max-tokens`` tokens a batch, at most *tokens_per_device*, and ``--update-freq``
    batches make an update. fairseq counts the tokens of the longer side, with padding.
    """
    frequency = math.ceil(tokens_per_update / (tokens_per_device * devices))
    return tokens_per_update // (devices * frequency), frequency


def devices_and_precision(x: Experiment) -> tuple[int, str]:
    """How many GPUs train (0: the CPU), and in which precision.

    Raises:
        StageError: more GPUs were asked for than there are, or a precision that they do not have
    """
    import torch

    there = torch.cuda.device_count()
    gpus = there if x.gpus is None else x.gpus
    if gpus > there and not x.dry_run:
        raise StageError(f"--gpus {gpus}: this machine has {there}")
    asked = x.settings["precision"]
    if gpus == 0:
        if asked in ("fp16", "bf16"):
            raise StageError(f"--set precision={asked}: fairseq trains in 16 bits on GPUs only")
        return 0, "fp32"
    generation = torch.cuda.get_device_capability() if there else (8, 0)
    best = "bf16" if generation >= (8, 0) else "fp16" if generation >= (7, 0) else "fp32"
    if asked == "bf16" and best != "bf16":
        raise StageError(f"--set precision=bf16: this GPU has none, {best} is the best for it")
    return gpus, best if asked == "auto" else asked


def check_devices(x: Experiment) -> None:
    """Ask for GPUs, or a precision of theirs, that are not there: said before the other stages run.

    Raises:
        StageError: see :func:`devices_and_precision`
    """
    if x.gpus or x.settings["precision"] in ("fp16", "bf16"):
        devices_and_precision(x)


def command(x: Experiment, gpus: int, precision: str) -> str:
    """The fairseq-train command of *x*."""
    s = x.settings
    sizes = " ".join(
        f"--{side}-layers {s['layers']} --{side}-embed-dim {s['width']} "
        f"--{side}-ffn-embed-dim {s['ffn_width']} --{side}-attention-heads {s['heads']}"
        for side in ("encoder", "decoder")
    )
    max_tokens, update_freq = batches(s["tokens_per_update"], s["tokens_per_device"], max(1, gpus))
    device = f"--distributed-world-size {gpus}" if gpus else "--cpu"
    limits = "".join(
        f"--{flag} {s[name]} "
        for flag, name in (("max-epoch", "max_epochs"), ("max-update", "max_updates"))
        if s[name]
    )
    kept = s["average_checkpoints"]
    if s["save_every_updates"]:
        saved = (
            f"--save-interval-updates {s['save_every_updates']} --keep-interval-updates {kept} "
            "--no-epoch-checkpoints"
        )
    else:
        saved = f"--keep-last-epochs {kept}"
    return (
        f"fairseq-train {x.shell(x.work / 'data-bin')} --source-lang {x.source} --target-lang {x.target} "
        f"--user-dir fairseq_rope --arch {x.arch} {sizes} --share-all-embeddings --dropout {s['dropout']} "
        f"--optimizer adam --adam-betas '{s['adam_betas']}' --adam-eps {s['adam_eps']} "
        f"--lr {s['learning_rate']} --lr-scheduler inverse_sqrt --warmup-init-lr {s['warmup_init_lr']} "
        f"--warmup-updates {s['warmup_updates']} "
        f"--criterion fused_label_smoothed_cross_entropy --label-smoothing {s['label_smoothing']} "
        f"--max-tokens {max_tokens} --update-freq {update_freq} {limits}"
        f"{saved} --save-dir {x.shell(x.model / 'checkpoints')} "
        f"{device} {'' if precision == 'fp32' else f'--{precision} '}"
        f"--seed {x.seed} --log-format json --log-interval 20 {s['fairseq_train_flags']}"
    )


LONGEST = 1024  # tokens, with the end of the sentence, that fairseq takes unless told


def has_room(x: Experiment) -> bool:
    """Whether more than LONGEST tokens can be translated: model and search both have to be told so."""
    return all("-positions" in x.settings[f"fairseq_{program}_flags"] for program in ("train", "generate"))


def check_lengths(x: Experiment, max_tokens: int) -> None:
    """Refuse a sentence too long for a batch, or to validate or translate, before anything is trained.

    In the training set, fairseq leaves sentences over LONGEST out and says so.

    Args:
        max_tokens: what a batch holds in training and validation

    Raises:
        StageError: there is one, and no flag makes room for it
    """
    for path in x.texts("bpe"):
        if not path.exists():  # removed for its room, once there was binary data
            continue
        roomy = has_room(x) if path.stem == "test" else "-positions" in x.settings["fairseq_train_flags"]
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                tokens = len(line.split()) + 1
                if tokens > LONGEST and not roomy:
                    if path.stem == "train":
                        continue
                    allowed = (
                        f"the {LONGEST} that fairseq takes: divide it, or set --max-source-positions and "
                    )
                    allowed += "--max-target-positions in fairseq_train_flags and fairseq_generate_flags"
                elif tokens > max_tokens and path.stem != "test":
                    allowed = f"the {max_tokens} of a batch: divide it, or set a larger tokens_per_update"
                else:
                    continue
                where = f"stage {NUMBER} ({TITLE}): {path}, line {number}"
                raise StageError(f"{where}, has {tokens} tokens, more than {allowed}")


def run(x: Experiment) -> None:
    gpus, precision = devices_and_precision(x)
    s = x.settings
    max_tokens, update_freq = batches(s["tokens_per_update"], s["tokens_per_device"], max(1, gpus))
    where = f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "the CPU"
    x.say(
        f"on {where} in {precision}: {max(1, gpus)} × {update_freq} batches of {max_tokens} tokens an update "
        f"({s['tokens_per_update']} were asked for)"
    )
    checkpoints = x.model / "checkpoints"
    train = command(x, gpus, precision)
    if not x.dry_run:
        check_lengths(x, max_tokens)
        of = x.fingerprint(sys.modules[__name__])
        learnt_from = {name: value for name, value in of.items() if name not in NOT_LEARNT_FROM}
        wanted = json.dumps(learnt_from, indent=1)
        _go_on_or_begin(x, checkpoints, wanted)
        write_whole(checkpoints / "begun.json", wanted)
        process = {
            **describe(),
            "batches": {
                "device": where,
                "precision": precision,
                "max_tokens": max_tokens,
                "update_freq": update_freq,
            },
            "command": train,
        }
        with history(x).open("a") as file:  # a crash may have left half a line
            file.write("\n" + json.dumps({"process": process}) + "\n")
    total = s["max_updates"] or s["max_epochs"]
    unit = "update" if s["max_updates"] else "epoch"
    # Not drawn before the command is printed; in a log file, a line every half minute.
    every = 1 if sys.stderr.isatty() else 30
    with tqdm(
        total=total, bar_format=_BAR, unit=unit, mininterval=every, delay=0.1, disable=x.dry_run
    ) as bar:
        x.command(train, on_line=lambda line: _follow(bar, history(x), line))
    if not x.dry_run:
        check_checkpoints(x)


def _go_on_or_begin(x: Experiment, checkpoints: Path, wanted: str) -> None:
    """See that *checkpoints*, if it is there, is of a training that *wanted* describes.

    One of another is moved to ``checkpoints.old``, and back when it is the one that is wanted.
    """

    def is_wanted(folder: Path) -> bool:
        begun = folder / "begun.json"
        return begun.exists() and begun.read_text() == wanted

    if not checkpoints.exists() or is_wanted(checkpoints):
        return
    old = checkpoints.with_name("checkpoints.old")
    new, aside = x.shell(checkpoints), x.shell(old)
    if is_wanted(old):
        x.say(f"{old.name} is of these data and settings: put back")
        x.command(f"mv {new} {new}.tmp && mv {aside} {new} && mv {new}.tmp {aside}")
    elif list(checkpoints.glob("*.pt")):
        x.say(f"{checkpoints} is of other data or settings: moved to {old.name}, started anew")
        x.command(f"rm -rf {aside} && mv {new} {aside}")
    else:  # it ended before its first checkpoint
        x.command(f"rm -rf {new}")


_BAR = "  {l_bar}{bar}| {unit} {n:.1f}/{total} [{elapsed}<{remaining}{postfix}]"


def history(x: Experiment) -> Path:
    """Where fairseq's lines of JSON about whole epochs are kept, beside the checkpoints that they tell of.

    Before those of every process that trained stands one about it: commit, versions, hardware, batches,
    command.
    """
    return x.model / "checkpoints" / "history.jsonl"


def _follow(bar: tqdm, kept: Path, line: str) -> None:
    """Move *bar* to the epoch or update that *line* of fairseq's log tells of; if it sums one up, keep it."""
    start = line.find("{")
    if start < 0 or not line.rstrip().endswith("}"):
        return
    try:
        told = json.loads(line[start:])
    except ValueError:
        return  # the configuration, printed once, is no JSON
    if "valid_loss" in told or "train_loss" in told:
        with kept.open("a") as file:
            file.write(json.dumps(told) + "\n")
    if "valid_loss" in told:
        bar.set_postfix(valid_loss=told["valid_loss"], refresh=False)
    elif bar.unit == "update":
        updates = told.get("num_updates", told.get("train_num_updates"))
        if updates is not None:
            bar.update(int(updates) - bar.n)
    elif "update" in told:  # in epochs, with a fraction
        bar.update(float(told["update"]) - bar.n)
    elif "train_loss" in told:
        bar.update(float(told["epoch"]) - bar.n)
