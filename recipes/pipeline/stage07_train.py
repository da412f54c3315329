"""Stage 7: train (fairseq-train). An interrupted training goes on from its last checkpoint.

    fairseq-train … --log-format json 2>&1 | python -m recipes.pipeline.stage07_train HISTORY

also adds the lines that sum up an epoch to the file HISTORY.
"""

import hashlib
import itertools
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
# What makes another model of the same texts, whose folder has another name than that of the recipe's own.
NAMED_BY = ("normalise_punctuation", "max_words", "max_length_ratio", "vocab_size", *LEARNT_FROM)


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
        StageError: one is missing; removed by hand, or trained with another save_every_updates
    """
    found, s = [number for number, _ in to_average(x)], x.settings
    every = s["save_every_updates"] or 1
    wanted = [found[-1] - every * n for n in reversed(range(s["average_checkpoints"]))] if found else []
    if found != wanted or not found:
        raise StageError(
            f"stage {NUMBER} ({TITLE}): {x.model / 'checkpoints'} has {found or 'none'} of the "
            f"{'updates' if s['save_every_updates'] else 'epochs'} to average, and not the last "
            f"{s['average_checkpoints']}, one every {every}: train longer, or anew with --name NAME"
        )


def check_limit(x: Experiment) -> None:
    """Raise a StageError if there is a checkpoint of a longer training than the settings allow."""
    found, s = [number for number, _ in to_average(x)], x.settings
    limit = "max_updates" if s["save_every_updates"] else "max_epochs"
    if s[limit] and found and found[-1] > s[limit]:
        raise StageError(
            f"stage {NUMBER} ({TITLE}): {x.model / 'checkpoints'} is of a training of {found[-1]} "
            f"{limit[4:]} already, beyond {limit}={s[limit]}: set {limit}={found[-1]}, or train another "
            "model with --name NAME"
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
    s, q = x.settings, x.quoted
    sizes = " ".join(
        f"--{side}-layers {q('layers')} --{side}-embed-dim {q('width')} "
        f"--{side}-ffn-embed-dim {q('ffn_width')} --{side}-attention-heads {q('heads')}"
        for side in ("encoder", "decoder")
    )
    max_tokens, update_freq = batches(s["tokens_per_update"], s["tokens_per_device"], max(1, gpus))
    device = f"--distributed-world-size {gpus}" if gpus else "--cpu"
    limits = "".join(
        f"--{flag} {q(name)} "
        for flag, name in (("max-epoch", "max_epochs"), ("max-update", "max_updates"))
        if s[name]
    )
    if s["save_every_updates"]:
        saved = (
            f"--save-interval-updates {q('save_every_updates')} "
            f"--keep-interval-updates {q('average_checkpoints')} --no-epoch-checkpoints"
        )
    else:
        saved = f"--keep-last-epochs {q('average_checkpoints')}"
    return (
        f"fairseq-train {x.shell(x.work / 'data-bin')} --source-lang {x.source} --target-lang {x.target} "
        f"--user-dir fairseq_rope --arch {x.arch} {sizes} --share-all-embeddings --dropout {q('dropout')} "
        f"--optimizer adam --adam-betas {q('adam_betas')} --adam-eps {q('adam_eps')} "
        f"--lr {q('learning_rate')} --lr-scheduler inverse_sqrt --warmup-init-lr {q('warmup_init_lr')} "
        f"--warmup-updates {q('warmup_updates')} "
        f"--criterion fused_label_smoothed_cross_entropy --label-smoothing {q('label_smoothing')} "
        f"--max-tokens {max_tokens} --update-freq {update_freq} {limits}"
        f"{saved} --save-dir {x.shell(x.model / 'checkpoints')} "
        f"{device} {'' if precision == 'fp32' else f'--{precision} '}"
        f"--seed {x.seed} --log-format json --log-interval 20 {x.flags('fairseq_train_flags')}"
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
        learnt_from = _learnt_from(x)
        if _begun(checkpoints) != learnt_from:  # a training that ended before its first checkpoint
            history(x).unlink(missing_ok=True)
            write_whole(checkpoints / "begun.json", json.dumps(learnt_from, indent=1))
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
        x.command(
            f"{train} 2>&1 | python -m recipes.pipeline.stage07_train {x.shell(history(x))}",
            on_line=lambda line: _follow(bar, line),
        )
    if not x.dry_run:
        check_checkpoints(x)


def prepare(x: Experiment) -> None:
    """Let the model's folder be that of the training which the settings and data describe, or of none.

    One that holds checkpoints of another training is moved to a name of its own, and the wanted one back to
    its place.

    Raises:
        StageError: see :func:`check_limit`
    """
    if not all(path.exists() for path in inputs(x)):  # in a dry run
        return
    wanted = _learnt_from(x)
    names = [x.model.name]
    if not x.name and {*x.differs} & {*LEARNT_FROM}:
        names.append(x.unlabelled)  # where earlier versions trained with any settings
    begun = {
        folder: _begun(folder / "checkpoints")
        for folder in sorted(x.work.glob(f"{x.unlabelled}*"))
        if folder.name.partition(".old-")[0] in names
    }
    for folder in list(begun):
        old = folder / "checkpoints.old"  # where earlier versions kept the training before the last one
        if old.exists():
            aside = _aside(folder, _begun(old))
            begun[aside] = _begun(old)
            x.move(old, aside / "checkpoints", "is of other settings or data")
    here = begun.pop(x.model, None)
    if here == wanted:
        check_limit(x)
        return
    found = next((folder for folder, of in begun.items() if of == wanted), None)
    trained = any((x.model / "checkpoints").glob("*.pt"))
    if trained or found is not None and x.model.exists():
        x.move(x.model, _aside(x.model, here), "is of other settings or data")
    if found is not None:
        x.move(found, x.model, "is of these settings and data")
        check_limit(x)


def _learnt_from(x: Experiment) -> dict[str, Any]:
    """What a training is identified by: settings, and what stands for the contents of the data."""
    of = x.fingerprint(sys.modules[__name__])
    return {name: value for name, value in of.items() if name not in NOT_LEARNT_FROM}


def _begun(checkpoints: Path) -> dict[str, Any] | None:
    """:func:`_learnt_from` of the training in the folder *checkpoints*; None if nothing says it."""
    try:
        return json.loads((checkpoints / "begun.json").read_text())
    except (OSError, ValueError):
        return None


def _aside(folder: Path, begun: dict[str, Any] | None) -> Path:
    """A name that is not taken, for *folder* while another training takes its place."""
    digest = hashlib.sha256(json.dumps(begun, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{folder.name.partition('.old-')[0]}.old-{digest}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(path for path in map(folder.with_name, names) if not path.exists())


_BAR = "  {l_bar}{bar}| {unit} {n:.1f}/{total} [{elapsed}<{remaining}{postfix}]"


def history(x: Experiment) -> Path:
    """Where fairseq's lines of JSON about whole epochs are kept, beside the checkpoints that they tell of.

    Before those of every process that trained stands one about it: commit, versions, hardware, batches,
    command.
    """
    return x.model / "checkpoints" / "history.jsonl"


def _json(line: str) -> dict[str, Any]:
    """What *line* of fairseq's log says as JSON; {} if it is another line."""
    start = line.find("{")
    try:  # the configuration, printed once, is no JSON
        return json.loads(line[start:]) if start >= 0 and line.rstrip().endswith("}") else {}
    except ValueError:
        return {}


def _follow(bar: tqdm, line: str) -> None:
    """Move *bar* to the epoch or update that *line* of fairseq's log names."""
    told = _json(line)
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


# -- the tool --------------------------------------------------------------------------------------


def keep_history(lines: Iterable[bytes], path: Path) -> None:
    """Copy *lines* to standard output, and what they say of whole epochs to *path*.

    A training outlives the recipe that started it when that is killed. Then nobody reads the output, and
    *path* gets its epochs all the same.
    """
    for line in lines:
        told = _json(line.decode("utf-8", "replace"))
        if "valid_loss" in told or "train_loss" in told:
            with path.open("a") as file:
                file.write(json.dumps(told) + "\n")
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when fairseq-train does
    keep_history(sys.stdin.buffer, Path(sys.argv[1]))
