"""Stage 11: convert the averaged model to CTranslate2 (``fairseq-rope export``) for serving."""

import argparse
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fairseq_rope.errors import REQUIREMENTS, InputError
from fairseq_rope.serving.shortlist import find_aligner
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted


class Export(TranslationStage):
    number = 11
    title = "export to CTranslate2"
    per_model = True
    settings = ("export_quantization", "export_shortlist", "beam", "length_penalty", "max_len_b")

    def depends_on(self, experiment: Experiment) -> dict[str, Any]:
        overrides = _overrides(experiment)
        return super().depends_on(experiment) | ({"model_overrides": overrides} if overrides else {})

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.averaged, *experiment.binary_data]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.exported / name for name in ("model.bin", "fairseq_rope.json")]

    def check_programs(self, experiment: Experiment) -> None:
        """Raise an InputError if what exports is not installed."""
        if find_spec("ctranslate2") is None:
            raise self.error(f"ctranslate2 is not installed: pip install '{REQUIREMENTS['ctranslate2']}'")
        if experiment.settings.export_shortlist:
            try:
                find_aligner()
            except InputError as error:
                raise self.error(f"export_shortlist=true: {str(error).removeprefix('--shortlist: ')}") from None

    def run(self, experiment: Experiment, shell: Shell) -> None:
        settings = experiment.settings
        overrides = _overrides(experiment)
        flags = f" --model-overrides {quoted(overrides)}" if overrides else ""
        flags += " --shortlist" if settings.export_shortlist else ""
        shell.tool(
            f"python -m fairseq_rope export {experiment.own_user_dir}--path {quoted(experiment.averaged)} "
            f"--data {quoted(experiment.data_bin)} --output {quoted(experiment.exported)} --replace "
            f"--quantization {quoted(settings.export_quantization)} "
            f"--beam {settings.beam} --lenpen {settings.length_penalty} --max-len-b {settings.max_len_b}"
            f"{flags}"
        )


def _overrides(experiment: Experiment) -> str:
    """The ``--model-overrides`` of the search, such as a RoPE scaling; "" without them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-overrides", default="")
    return str(parser.parse_known_args(shlex.split(experiment.settings.fairseq_generate_flags))[0].model_overrides)
