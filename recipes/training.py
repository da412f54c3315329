"""The steps that train a model and average its last checkpoints."""

import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_rope.errors import InputError
from fairseq_rope.files import NUMBERS, write_whole
from recipes import machine
from recipes.report.history import history, logged, progress_of
from recipes.script import run_script, say
from recipes.settings import Settings
from recipes.work import Step, StepError, Work

# Settings that change what a model learns, besides its data, seed and precision.
LEARNT = (
    *("arch", "layers", "width", "ffn_width", "heads", "dropout", "adam_betas", "adam_eps", "warmup_init_lr"),
    *("learning_rate", "label_smoothing", "warmup_updates", "tokens_per_update", "train_flags"),
)
LIMITS = ("max_epochs", "max_updates", "patience")


def plugin(step: Step) -> str:
    """Return ``--user-dir`` of fairseq's programs: the plugin, or the user's folder, which imports it."""
    own = step.options.get("user_dir")
    return f"--user-dir {shlex.quote(str(Path(own).absolute()))}" if own else '--user-dir "$FAIRSEQ_ROPE/fairseq_rope"'


class Train(Step):
    """Trains a model in its folder. A longer training continues a shorter one; an interrupted one resumes.

    Its options are the limits of the training, and what describes the machine.
    """

    @classmethod
    def of(cls, label: str, s: Settings, precision: str, seed: int, data: Step) -> "Train":
        read = {"langs": [s.source_lang, s.target_lang], **{name: getattr(s, name) for name in LEARNT}}
        if s.user_dir:
            read["user_dir"] = machine.code_of(Path(s.user_dir))
        read |= {"precision": precision, "seed": seed}
        others = ("user_dir", "gpus", "tokens_per_device", "save_every_updates", "average_checkpoints")
        options = {name: getattr(s, name) for name in (*LIMITS, *others)}
        return cls("train", label, read, {"data": data}, options)

    @property
    def limits(self) -> dict[str, int]:
        return {name: self.options[name] for name in LIMITS}

    def ended(self, folder: Path) -> dict[str, Any] | None:
        """Return the epochs and updates with which this training has ended at its limits; None if it has not."""
        path = folder / "ended.json"
        ends = json.loads(path.read_text()) if path.exists() else []
        return next((end for end in reversed(ends) if end["limits"] == self.limits), None)

    def is_finished(self, work: Work) -> bool:
        return self.ended(work.folder(self)) is not None

    def make(self, work: Work) -> None:
        """Train until the limits, in the folder with its final name."""
        folder = work.folder(self)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "settings.yaml", self.record())
        self._refuse_shorter(folder)
        devices = machine.devices(self.options["gpus"], self.settings["precision"])
        say(f"== {self.name}")
        (folder / "failed").unlink(missing_ok=True)
        is_auto, largest = self.options["tokens_per_device"] == "auto", self._largest_batch(folder, devices)
        try:
            while not self._runs(folder, devices, largest):
                largest = self.batches(devices, largest)[0] // 2
                if not (is_auto and devices and largest):
                    raise InputError("a batch does not fit into memory; set a smaller tokens_per_device")
        except Exception as error:
            write_whole(folder / "failed", f"{error}\n")
            raise StepError(f"{self.name}: {error}") from None
        self._note_end(folder)

    def _largest_batch(self, folder: Path, devices: int) -> int:
        """Return the most tokens of a batch: for "auto" on GPUs those of the latest process, or of an update."""
        if self.options["tokens_per_device"] != "auto":
            return int(self.options["tokens_per_device"])
        if not devices:
            return 4096
        batches = [entry["process"]["batches"]["max_tokens"] for entry in history(folder) if "process" in entry]
        return int(batches[-1]) if batches else int(self.settings["tokens_per_update"])

    def _runs(self, folder: Path, devices: int, largest: int) -> bool:
        """Train with batches of at most *largest* tokens. Returns False if one does not fit into a GPU's memory."""
        max_tokens, frequency = self.batches(devices, largest)
        device = f"{devices} GPU{'s' * (devices > 1)}" if devices else "the CPU"
        form = self.settings["precision"]
        say(f"  on {device} in {form}: {max(1, devices)} × {frequency} batches of {max_tokens} tokens")
        command = self.command(devices, largest)
        sizes = {"device": device, "precision": form, "max_tokens": max_tokens, "update_freq": frequency}
        process = {**machine.describe(), "batches": sizes, "command": command}
        with (folder / "log").open("a", encoding="utf-8") as log:  # the first newline ends a line that a crash cut off
            log.write("\n" + json.dumps({"process": process}) + "\n")
        try:
            with self._bar() as bar:
                peak = run_script(folder, [command], lambda line: self._follow(bar, line))
        except MemoryError:
            return False
        with (folder / "log").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"peak_memory_mib": peak}) + "\n")
        return True

    def _note_end(self, folder: Path) -> None:
        epochs, updates = progress_of(folder)
        path = folder / "ended.json"
        ends = json.loads(path.read_text()) if path.exists() else []
        ends.append({"limits": self.limits, "epochs": epochs, "updates": updates})
        write_whole(path, json.dumps(ends, indent=1) + "\n")

    def _refuse_shorter(self, folder: Path) -> None:
        """Raise a StepError if the training is beyond its limits: the checkpoints for their average are deleted."""
        epochs, updates = progress_of(folder)
        for name, trained in (("max_epochs", epochs), ("max_updates", updates)):
            if self.limits[name] and trained > self.limits[name]:
                must = f"has {trained} {name[4:]}, more than {name}={self.limits[name]}"
                raise StepError(f"{self.name}: {must}: set {name}={trained}, or train in another folder, work=DIR")

    def batches(self, devices: int, largest: int) -> tuple[int, int]:
        """Return --max-tokens (a batch of one device, at most *largest*) and --update-freq (batches in an update).

        fairseq counts the tokens of the longer side, including padding.
        """
        tokens, devices = self.settings["tokens_per_update"], max(1, devices)
        frequency = math.ceil(tokens / (largest * devices))
        return tokens // (devices * frequency), frequency

    def command(self, devices: int, largest: int) -> str:
        """Return the fairseq-train command on *devices* GPUs (0: on the CPU), with batches of *largest* tokens."""
        s, (source, target) = self.settings, self.settings["langs"]
        sizes = " ".join(
            f"--{side}-layers {s['layers']} --{side}-embed-dim {s['width']} --{side}-ffn-embed-dim {s['ffn_width']} "
            f"--{side}-attention-heads {s['heads']}"
            for side in ("encoder", "decoder")
        )
        max_tokens, update_freq = self.batches(devices, largest)
        flags = {"max_epochs": "--max-epoch", "max_updates": "--max-update", "patience": "--patience"}
        limits = "".join(f"{flag} {self.limits[name]} " for name, flag in flags.items() if self.limits[name])
        every, last = self.options["save_every_updates"], self.options["average_checkpoints"]
        saved = f"--keep-last-epochs {last}"
        if every:
            saved = f"--save-interval-updates {every} --keep-interval-updates {last} --no-epoch-checkpoints"
        # Without a number of processes, fairseq starts one for each GPU, also with --cpu.
        device = f"--distributed-world-size {devices}" if devices else "--cpu --distributed-world-size 1"
        fused = "" if devices else "fused_"  # which is faster on CPUs, and slower on GPUs
        precision = "" if s["precision"] == "fp32" else f"--{s['precision']} "
        return (
            f"fairseq-train {self.at('data')} --source-lang {source} --target-lang {target} {plugin(self)} --arch "
            f"{shlex.quote(s['arch'])} {sizes} --share-all-embeddings --dropout {s['dropout']} --optimizer adam "
            f"--adam-betas {shlex.quote(s['adam_betas'])} --adam-eps {s['adam_eps']} --lr {s['learning_rate']} "
            f"--lr-scheduler inverse_sqrt --warmup-init-lr {s['warmup_init_lr']} --warmup-updates "
            f"{s['warmup_updates']} --criterion {fused}label_smoothed_cross_entropy --label-smoothing "
            f"{s['label_smoothing']} --max-tokens {max_tokens} --update-freq {update_freq} {limits}{saved} --save-dir "
            f"checkpoints {device} {precision}--seed {s['seed']} --log-format json --log-interval 20 "
            f"{shlex.join(shlex.split(s['train_flags']))}"
        ).strip()

    def _bar(self) -> Any:
        """Return a progress bar of updates, or of epochs if the updates are not limited."""
        updates, epochs = self.limits["max_updates"], self.limits["max_epochs"]
        form = "  {l_bar}{bar}| {unit} {n:.1f}/{total} [{elapsed}<{remaining}{postfix}]"
        every = 1 if sys.stderr.isatty() else 30
        unit = "update" if updates else "epoch"
        return tqdm(total=updates or epochs or None, unit=unit, bar_format=form, mininterval=every, delay=0.1)

    def _follow(self, bar: Any, line: str) -> None:
        """Move *bar* to the epoch or update that *line* of fairseq's log names.

        Raises a MemoryError if the line says that a batch does not fit: fairseq would go on without the batch.
        """
        if "out of memory" in line.lower():
            raise MemoryError
        entry = logged(line)
        if "valid_loss" in entry:
            bar.set_postfix(valid_loss=entry["valid_loss"], refresh=False)
        reached = entry.get("num_updates", entry.get("train_num_updates"))
        if bar.unit == "epoch":
            reached = entry.get("update", entry.get("epoch") if "train_loss" in entry else None)
        if reached is not None:
            bar.update(float(reached) - bar.n)


class Average(Step):
    """Averages the last checkpoints: ``averaged.pt``. It trains first if necessary, under the lock of the training."""

    speaks = False

    @classmethod
    def of(cls, label: str, s: Settings, train: Train) -> "Average":
        read = {name: getattr(s, name) for name in (*LIMITS, "save_every_updates", "average_checkpoints")}
        return cls("average", label, read, {"training": train}, {"user_dir": s.user_dir})

    @property
    def training(self) -> Train:
        train = self.inputs["training"]
        assert isinstance(train, Train)
        return train

    def needs(self) -> list[Step]:
        return self.training.needs()

    def make(self, work: Work) -> None:
        train = self.training
        with work.lock(train.name):  # a longer training would delete the checkpoints meanwhile
            if not train.is_finished(work):
                work.say_what_differs(train)
                train.make(work)
            self._check_checkpoints(work.folder(train))
            super().make(work)

    def commands(self) -> list[str]:
        kind = "update" if self.settings["save_every_updates"] else "epoch"
        return [
            f"python -m fairseq_rope average --inputs {self.at('training', 'checkpoints')} --num-{kind}-checkpoints "
            f"{self.settings['average_checkpoints']} {plugin(self)} --output averaged.pt"
        ]

    def _check_checkpoints(self, training: Path) -> None:
        """Raise a StepError unless the last checkpoints exist, one for each epoch or interval."""
        every, count = self.settings["save_every_updates"], self.settings["average_checkpoints"]
        numbers, interval = self.numbers(training), every or 1
        end = self.training.ended(training) or {}
        last = end.get("updates" if every else "epochs", 0) // interval * interval
        if numbers != [last - interval * n for n in reversed(range(count))]:
            has = f"has the checkpoints {', '.join(map(str, numbers)) or 'none'} of {'updates' if every else 'epochs'}"
            must = f"average_checkpoints={count} needs the last {count}"
            raise StepError(f"{self.training.name}: {has}, and {must}: average fewer, or train longer")

    def numbers(self, training: Path) -> list[int]:
        """Return the epochs or updates of the last checkpoints."""
        pattern = NUMBERS["update" if self.settings["save_every_updates"] else "epoch"]
        matches = (re.fullmatch(pattern, path.name) for path in (training / "checkpoints").glob("checkpoint*.pt"))
        return sorted(int(match[1]) for match in matches if match)[-self.settings["average_checkpoints"] :]
