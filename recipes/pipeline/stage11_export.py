"""Stage 11: convert the averaged model to CTranslate2 (``fairseq-rope export``), to serve it."""

from pathlib import Path

from recipes.pipeline import stage06_binarise, stage08_average
from recipes.pipeline.experiment import Experiment

NUMBER = 11
TITLE = "export to CTranslate2"
PER_MODEL = True
SETTINGS = ("export_quantization", "beam", "length_penalty", "max_len_b")


def inputs(x: Experiment) -> list[Path]:
    return [*stage08_average.outputs(x), *stage06_binarise.outputs(x)]


def outputs(x: Experiment) -> list[Path]:
    return [x.model / "ctranslate2" / name for name in ("model.bin", "fairseq_rope.json")]


def run(x: Experiment) -> None:
    q = x.quoted
    x.tool(
        f"python -m fairseq_rope export --path {x.shell(x.model / 'averaged.pt')} "
        f"--data {x.shell(x.work / 'data-bin')} --output {x.shell(x.model / 'ctranslate2')} --replace "
        f"--quantization {q('export_quantization')} "
        f"--beam {q('beam')} --lenpen {q('length_penalty')} --max-len-b {q('max_len_b')}"
    )
