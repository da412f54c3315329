"""The runs of RoFormer's experiments. Their stages: the data, then a training and a test for each training of a run."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError
from fairseq_rope.files import checksum, write_whole
from recipes.run.history import logged
from recipes.run.machine import describe
from recipes.run.moves import Moves, next_earlier
from recipes.run.run import Run
from recipes.run.shell import Shell, quoted, say
from recipes.run.stage import Stage
from recipes.run.stamps import Stamps

OF_START = ("begun.json", "valid.json")  # beside a checkpoint from which another training starts
ON_ONE_GPU = ("f1", "spearman")  # metrics for which fairseq cannot join the predictions of several GPUs


@dataclass(frozen=True)
class Training:
    """A fairseq-train command of a run."""

    name: str  # of its folder in the run's
    data: Path  # binary data
    task: str  # of fairseq
    flags: str  # for fairseq-train
    start: Path | None = None  # the checkpoint from which it starts
    metric: str = "loss"  # a name in fairseq's log, which chooses the checkpoint that is tested, if it is not the loss
    is_tested: bool = False  # whether the data have a test set


@dataclass(frozen=True)
class PaperRun(Run):
    """One system with one seed. It has one or more trainings, each with a folder of its own."""

    system: str
    seed: int
    work: Path
    trainings: tuple[Training, ...]
    gpus: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the experiment, and the flags after a lone --

    @property
    def title(self) -> str:
        return f"{self.system}, seed {self.seed}"

    @property
    def model(self) -> Path:
        return self.work / f"{self.system}.seed{self.seed}"

    @property
    def resumable(self) -> tuple[Path, ...]:
        return tuple(map(self.folder, self.trainings))

    def values(self) -> Mapping[str, Any]:
        return self.settings

    def folder(self, training: Training) -> Path:
        """The folder of the checkpoints and results of *training*."""
        return self.model / training.name

    def devices(self, training: Training) -> int:
        """The number of GPUs for *training*; 0: the CPU."""
        if self.gpus is None or training.metric in ON_ONE_GPU:
            return min(gpus_here() if self.gpus is None else self.gpus, 1)
        return self.gpus

    def command(self, training: Training) -> str:
        """The command of *training*. It resumes from its last checkpoint."""
        gpus = self.devices(training)
        device = f"--distributed-world-size {gpus}" if gpus else "--cpu --distributed-world-size 1"
        if gpus > 1 and training.task.startswith("sentence_"):  # they do not use the head of the masked language model
            device += " --find-unused-parameters"
        start = f" --finetune-from-model {quoted(training.start)}" if training.start else ""
        best = f" --best-checkpoint-metric {training.metric} --maximize-best-checkpoint-metric"
        return (
            f"fairseq-train {quoted(training.data)} --user-dir fairseq_rope {device} --seed {self.seed} "
            f"--save-dir {quoted(self.folder(training))} --no-epoch-checkpoints --log-format json "
            f"--task {training.task} {training.flags}{start}{'' if training.metric == 'loss' else best}"
        )

    def checkpoint(self, training: Training) -> Path:
        """The checkpoint that is tested: the last one, or that with the best *metric* in validation."""
        return self.folder(training) / f"checkpoint_{'last' if training.metric == 'loss' else 'best'}.pt"

    def validations(self, name: str) -> list[dict[str, str]]:
        """fairseq's log of each validation of the training *name*, which has ended."""
        return json.loads((self.model / name / "valid.json").read_text())

    def test(self, name: str) -> dict[str, str]:
        """fairseq's log of the test of the training *name*."""
        return json.loads((self.model / name / "test.json").read_text())


def gpus_here() -> int:
    """The number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def stages_of(run: PaperRun) -> list[Stage[PaperRun]]:
    """The stages of *run* after that of the data: the training and, if the data have a test set, the test of each."""
    stages: list[Stage[PaperRun]] = []
    for training in run.trainings:
        stages.append(TrainingStage(training, 2 + len(stages)))
        if training.is_tested:
            stages.append(TestStage(training, 2 + len(stages)))
    return stages


@dataclass(frozen=True)
class Data(Stage[PaperRun]):
    """Makes the binary data, in a folder that gets its name when it is complete."""

    sources: Mapping[str, Path]  # the files that it reads, by their names
    make: Callable[[Path], None]  # writes the data into a folder
    more: Mapping[str, Any] = field(default_factory=dict)  # what the data also depend on

    number = 1
    title = "prepare the data"

    @property
    def file(self) -> str:
        return "stage01_data"

    def inputs(self, run: PaperRun) -> list[Path]:
        return []  # the sources are in depends_on, by their roles: they can have other names

    def outputs(self, run: PaperRun) -> list[Path]:
        return binary_data(run.work / "data") or [run.work / "data" / "dict.txt"]

    def depends_on(self, run: PaperRun) -> dict[str, Any]:
        checksums = {name: checksum(path) for name, path in self.sources.items()}
        return json.loads(json.dumps({**run.values(), **self.more, **checksums}))

    def prepare(self, run: PaperRun, stamps: Stamps, moves: Moves) -> None:
        """Raise an InputError if the work folder was begun with other settings, files or flags.

        Its trainings cannot be compared with others.
        """
        last = stamps.last(self)
        if last is None:
            return
        now = self.depends_on(run)
        changed = ", ".join(name for name in now if last["of"].get(name) != now[name])
        if changed:
            other = f"was begun with another value of {changed}; choose another folder"
            raise InputError(f"--work-dir {run.work}: {other}")

    def run(self, run: PaperRun, shell: Shell) -> None:
        say(", ".join(map(str, self.sources.values())))
        data, made = run.work / "data", run.work / "data.tmp"
        for folder in made, data:
            shutil.rmtree(folder, ignore_errors=True)
        self.make(made)
        made.rename(data)


def binary_data(folder: Path) -> list[Path]:
    """The files in *folder* and in its folders."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


class StageOfTraining(Stage[PaperRun]):
    """A stage of one training."""

    per_model = True
    verb: str

    def __init__(self, training: Training, number: int) -> None:
        self.training, self.number = training, number
        self.label = f".{training.name}"
        self.title = self.verb if training.name == self.verb else f"{self.verb} {training.name}"

    @property
    def file(self) -> str:
        return f"stage{self.number:02d}_{self.verb}{self.label}"


class TrainingStage(StageOfTraining):
    verb = "train"
    trains = True

    # A checkpoint that is the start of other trainings is known by what it was trained from and by its losses, and none
    # is among the outputs, so that users can delete checkpoints of finished trainings.
    def inputs(self, run: PaperRun) -> list[Path]:
        start = self.training.start
        return [*binary_data(self.training.data), *(start.with_name(name) for name in OF_START if start is not None)]

    def outputs(self, run: PaperRun) -> list[Path]:
        return [run.folder(self.training) / "valid.json"]

    def depends_on(self, run: PaperRun) -> dict[str, Any]:
        return {"flags": self.training.flags}

    def prepare(self, run: PaperRun, stamps: Stamps, moves: Moves) -> None:
        """Move a training aside that began with other flags, data or weights, since this one cannot resume from it.

        If the wanted training was moved aside before, it comes back.
        """
        folder, wanted = run.folder(self.training), stamps.of(self)
        if not all(path.exists() for path in self.inputs(run)) or self._begun(folder) == wanted:
            return
        if any(folder.iterdir() if folder.exists() else ()):
            moves.move(folder, next_earlier(run.model) / folder.name, "has other flags, data or weights")
        for earlier in sorted(run.model.glob(f"earlier/*/{folder.name}")):
            if self._begun(earlier) == wanted:
                folder.rmdir() if folder.exists() else None
                moves.move(earlier, folder, "has these flags, data and weights")
                break

    def _begun(self, folder: Path) -> object:
        """What the training in *folder* depends on; None if begun.json cannot be read."""
        try:
            return json.loads((folder / "begun.json").read_text())
        except (OSError, ValueError):
            return None

    def run(self, run: PaperRun, shell: Shell) -> None:
        folder, command = run.folder(self.training), run.command(self.training)
        start = self.training.start
        if start is not None and not start.exists():
            raise self.error(f"starts from {start}, which does not exist")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "valid.json").unlink(missing_ok=True)
        write_whole(folder / "begun.json", json.dumps(Stamps(run).of(self), indent=1) + "\n")
        history = folder / "history.jsonl"
        with history.open("a") as file:  # the first newline ends a line that a crash cut off
            file.write("\n" + json.dumps({"process": {**describe(), "command": command}}) + "\n")
        shell.command(f"{command} 2>&1 | python -m recipes.run.history {quoted(history)}", on_line=_print_validation)
        validations = [entry for line in history.read_text().splitlines() if "valid_loss" in (entry := logged(line))]
        key = f"valid_{self.training.metric}"
        if not validations or key not in validations[-1]:
            raise self.error(f"it ended without {key} in {history}")
        write_whole(folder / "valid.json", json.dumps(validations) + "\n")


class TestStage(StageOfTraining):
    verb = "test"

    def inputs(self, run: PaperRun) -> list[Path]:
        return [run.folder(self.training) / "valid.json", *binary_data(self.training.data)]

    def outputs(self, run: PaperRun) -> list[Path]:
        return [run.folder(self.training) / "test.json"]

    def run(self, run: PaperRun, shell: Shell) -> None:
        entries: list[dict[str, Any]] = []
        shell.command(
            f"fairseq-validate {quoted(self.training.data)} --user-dir fairseq_rope --task {self.training.task} "
            f"--batch-size 8 --path {quoted(run.checkpoint(self.training))} --valid-subset test --log-format json"
            f"{'' if run.devices(self.training) else ' --cpu'}",
            on_line=lambda line: entries.append(logged(line)),
        )
        tested = next((entry for entry in reversed(entries) if "test_loss" in entry), None)
        if tested is None:
            raise self.error("fairseq-validate printed no test_loss")
        (output,) = self.outputs(run)
        write_whole(output, json.dumps(tested) + "\n")


def _print_validation(line: str) -> None:
    entry = logged(line)
    if "valid_loss" in entry:
        say(f"update {entry['valid_num_updates']}: validation loss {entry['valid_loss']}")
