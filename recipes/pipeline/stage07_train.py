"""Stage 7: train (fairseq-train). An interrupted training resumes from its last checkpoint."""

import json
from pathlib import Path
from typing import Any

from fairseq_rope.files import write_whole
from recipes.pipeline import fairseq_train
from recipes.pipeline.checkpoints import check_checkpoints, check_limit, check_long_enough, to_average
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.lengths import check_lengths
from recipes.pipeline.model_folder import ARCH, begun, choose_training, learnt_from, trained_arch
from recipes.pipeline.settings import LEARNT_FROM
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run import history, precision
from recipes.run.machine import code_of, describe, device_in_words
from recipes.run.moves import Moves
from recipes.run.shell import Shell, quoted, say
from recipes.run.stamps import Stamps, differences

# Another machine can need other values, which do not change what is trained, and have no use after its end.
DEVICE_SETTINGS = ("tokens_per_device", "precision")


class Train(TranslationStage):
    number = 7
    title = "train"
    per_model = trains = True
    settings = (
        *LEARNT_FROM,
        # Settings that may change when a training resumes; the precision only from or to "auto", which keeps it.
        *(*DEVICE_SETTINGS, "max_epochs", "max_updates"),
        *("save_every_updates", "average_checkpoints"),
    )

    def depends_on(self, experiment: Experiment) -> dict[str, Any]:
        depends = super().depends_on(experiment)
        if ended := Stamps(experiment).last(self):
            depends |= {name: ended["of"][name] for name in DEVICE_SETTINGS if name in ended["of"]}
        if trained_arch(experiment.history) not in ("", experiment.arch):
            depends[ARCH] = experiment.arch  # the folder has the name of the system, whose architecture has changed
        return depends

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [*experiment.binary_data, *filter(None, [experiment.start_checkpoint])]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.last_checkpoint, *(path for _, path in to_average(experiment))]

    def prepare(self, experiment: Experiment, stamps: Stamps, moves: Moves) -> None:
        choose_training(experiment, self, stamps, moves)
        ended = stamps.last(self)
        if ended and differences(ended["of"], stamps.of(self)) == "average_checkpoints changed":
            check_checkpoints(experiment)  # before the average of fewer is moved
        if experiment.model not in moves.planned:
            fairseq_train.refuse_another(experiment, self.resumed(experiment))

    def resumed(self, experiment: Experiment) -> str:
        """The precision of the training in the model's folder that these settings resume; "" if there is none."""
        stamps = Stamps(experiment)
        if not experiment.last_checkpoint.exists() or not self._has_begun(experiment, stamps):
            return ""
        return precision.of_process(precision.last_process(experiment.history))

    def noted(self, experiment: Experiment) -> dict[str, Any]:
        gpus, number_format = fairseq_train.devices_and_precision(experiment, self.resumed(experiment))
        return {"training": {"device": device_in_words(gpus), "precision": number_format}}

    def refuse(self, experiment: Experiment, stamps: Stamps) -> None:
        if self._has_begun(experiment, stamps):
            check_limit(experiment)
            fairseq_train.refuse_another(experiment, self.resumed(experiment))

    def _has_begun(self, experiment: Experiment, stamps: Stamps) -> bool:
        """Whether the training in the model's folder is the one that the settings describe."""
        return begun(experiment, experiment.checkpoints, stamps) == learnt_from(experiment, self, stamps)

    def run(self, experiment: Experiment, shell: Shell) -> None:
        settings = experiment.settings
        resumed = self.resumed(experiment)
        gpus, number_format = fairseq_train.devices_and_precision(experiment, resumed)
        command = fairseq_train.command(experiment, gpus, number_format)
        sizes = fairseq_train.batches_of(command)
        device = device_in_words(gpus)
        an_update = f"{max(1, gpus)} × {sizes['update_freq']} batches of {sizes['max_tokens']} tokens an update"
        say(f"on {device} in {number_format}: {an_update} (tokens_per_update: {settings.tokens_per_update})")
        if fairseq_train.asked(experiment)[0] == "auto" and resumed:
            say(f"precision: auto keeps {resumed}, in which this training has begun")
        elif fairseq_train.asked(experiment)[0] == "auto" and experiment.precision_of_others == number_format:
            say(f"precision: auto takes {number_format}, the precision of the earlier runs of this comparison")
        if not experiment.dry_run:
            check_lengths(experiment, int(sizes["max_tokens"]))
            frequency = sizes["update_freq"]
            if isinstance(frequency, int) and "batch_size" not in sizes:  # else, tokens do not give the updates
                check_long_enough(experiment, max(1, gpus) * frequency * int(sizes["max_tokens"]))
            self._begin_or_resume(experiment)
            batches = {"device": device, "precision": number_format, **sizes}
            process = {**describe(), "batches": batches, "command": command}
            if settings.user_dir:
                process["commit"] = f"{process['commit']}, user_dir {code_of(Path(settings.user_dir))}"
            with experiment.history.open("a") as file:  # the first newline ends a line that a crash cut off
                file.write("\n" + json.dumps({"process": process}) + "\n")
        if experiment.start_checkpoint and not experiment.last_checkpoint.exists():
            source, target = (quoted(experiment.data_bin / path.name) for path in experiment.start_dictionaries)
            files = f"--input {quoted(experiment.start_checkpoint)} --output {quoted(experiment.start_copy)}"
            files += f" --source-dictionary {source} --target-dictionary {target}"
            shell.tool(f"python -m recipes.text.old_model checkpoint {files}")
        with history.training_bar(settings.max_updates, settings.max_epochs, disable=experiment.dry_run) as bar:
            peak = shell.command(
                f"{command} 2>&1 | python -m recipes.run.history {quoted(experiment.history)}",
                on_line=lambda line: history.follow(bar, line),
            )
        if peak is not None:
            with experiment.history.open("a") as file:
                file.write(json.dumps({"peak_memory_mib": round(peak)}) + "\n")
        if not experiment.dry_run:
            check_checkpoints(experiment)

    def _begin_or_resume(self, experiment: Experiment) -> None:
        """Write begun.json, which identifies the training, unless this training has already begun."""
        stamps = Stamps(experiment)
        if not self._has_begun(experiment, stamps):
            # The history can be that of another training, which ended before its first checkpoint.
            experiment.history.unlink(missing_ok=True)
            wanted = learnt_from(experiment, self, stamps)
            write_whole(experiment.checkpoints / "begun.json", json.dumps(wanted, indent=1))
