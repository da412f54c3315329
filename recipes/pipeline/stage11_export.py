"""Stage 11: convert the averaged model to CTranslate2 (``fairseq-rope export``) for serving."""

from pathlib import Path

from recipes.pipeline.experiment import Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted


class Export(TranslationStage):
    number = 11
    title = "export to CTranslate2"
    per_model = True
    settings = ("export_quantization", "export_shortlist", "beam", "length_penalty", "max_len_b")

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.averaged, *experiment.binary_data]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.exported / name for name in ("model.bin", "fairseq_rope.json")]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        settings = experiment.settings
        shortlist = " --shortlist" if settings.export_shortlist else ""
        shell.tool(
            f"python -m fairseq_rope export {experiment.own_user_dir}--path {quoted(experiment.averaged)} "
            f"--data {quoted(experiment.data_bin)} --output {quoted(experiment.exported)} --replace "
            f"--quantization {quoted(settings.export_quantization)} "
            f"--beam {settings.beam} --lenpen {settings.length_penalty} --max-len-b {settings.max_len_b}"
            f"{shortlist}"
        )
