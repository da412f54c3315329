"""Stage 2, part 4: translate texts for the training set with an exported model (``fairseq-rope translate``).

Back-translation makes sources for monolingual texts of the target language (Sennrich et al. 2016, arXiv:1511.06709),
distillation makes targets for the sources of the training set (Kim and Rush 2016, arXiv:1606.07947).
"""

import re
import shlex
from pathlib import Path
from typing import Any

from fairseq_rope.launch import available_cores
from fairseq_rope.lines import count_lines
from fairseq_rope.serving.exported_folder import SETTINGS
from recipes.pipeline.experiment import MONOLINGUAL, TRANSLATED, Experiment
from recipes.pipeline.settings import SEARCHES
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, part_of, quoted, say
from recipes.text.mix import most_translated


class TranslateTexts(TranslationStage):
    number = 2
    title = "translate texts for the training set"
    label = ".translated"
    settings = ("back_translation_model", "distillation_model", "source_lang", "target_lang")
    of_translated = True

    def depends_on(self, experiment: Experiment) -> dict[str, Any]:
        search = experiment.settings.back_translation_search if experiment.settings.back_translation_model else "beam"
        return super().depends_on(experiment) | {"back_translation_search": search}

    def inputs(self, experiment: Experiment) -> list[Path]:
        text = experiment.text("raw", MONOLINGUAL, experiment.target)
        if experiment.settings.distillation_model:
            text = experiment.text("raw", "train", experiment.source)
        return [Path(experiment.translator) / SETTINGS, text]  # SETTINGS has checksums of the model's other files

    def outputs(self, experiment: Experiment) -> list[Path]:
        return experiment.texts("raw", [TRANSLATED])

    def run(self, experiment: Experiment, shell: Shell) -> None:
        settings, (_, text) = experiment.settings, self.inputs(experiment)
        source, target = self.outputs(experiment)
        given, made = (source, target) if settings.distillation_model else (target, source)
        if settings.back_translation_model and settings.back_translation_share < 1 and not experiment.dry_run:
            parallel = count_lines(str(experiment.text("raw", "train", experiment.source)))
            lines, used = count_lines(str(text)), most_translated(parallel, settings.back_translation_share)
            if used < lines:
                at_most = f"at most {used:,} of them can be used (back_translation_share)"
                say(f"{lines:,} lines are translated, and {at_most}")
        shards, part = experiment.work / "raw" / "translations", Path(f"{given}.tmp")
        # A text that is written again, because it has changed, needs new shards.
        # The model has not learned from characters that do not print: stage 3 replaces them.
        side = experiment.source if settings.distillation_model else experiment.target
        clean = f"python -m recipes.text.tokenise --no-tokeniser --lang {side} --input {quoted(text)} --output"
        shell.tool(f"rm -rf {quoted(shards)} && {clean} {quoted(part)} && mv {quoted(part, given)}", makes=[given])
        search = SEARCHES[settings.back_translation_search] if settings.back_translation_model else ""
        model, out = quoted(Path(experiment.translator)), f"--output-dir {quoted(shards)}"
        flags = shlex.split(settings.translate_flags)
        is_elsewhere = {"cuda", "--device=cuda"} & {*flags}
        if not is_elsewhere and not re.search("--(jobs|launcher)", settings.translate_flags):
            flags += ["--jobs", str(available_cores())]
        translate = (
            f"python -m fairseq_rope translate --model {model} --input {quoted(given)} {out} {quoted(*flags)}{search}"
        )
        with part_of(made) as part:
            copy = f"cat {quoted(shards / given.name)} > {quoted(part)} && mv {quoted(part, made)}"
            shell.tool(f"{translate} && {copy}", makes=[made])
        shell.command(f"rm -rf {quoted(shards)}")
