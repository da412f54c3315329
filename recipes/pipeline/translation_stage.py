"""The interface that every file ``stageNN_….py`` implements."""

import os
from typing import Any

from fairseq_rope.files import checksum
from fairseq_rope.serving.exported_folder import SETTINGS
from recipes.pipeline.experiment import Experiment
from recipes.run.precision import last_process, of_process
from recipes.run.stage import Stage


class TranslationStage(Stage[Experiment]):
    """A stage of a recipe."""

    settings: tuple[str, ...]  # the names of the settings that change its outputs
    depends_on_bpe = False  # whether its outputs depend on --bpe
    depends_on_documents = False  # whether its outputs depend on the text having documents
    of_test_set = False  # whether it needs the test set; without one, a run leaves it out
    of_translated = False  # whether it is only for back-translation and distillation
    of_monolingual = False  # whether it is only for back-translation

    def depends_on(self, experiment: Experiment) -> dict[str, Any]:
        depends: dict[str, Any] = {name: getattr(experiment.settings, name) for name in self.settings}
        if self.depends_on_bpe:
            depends["--bpe"] = experiment.bpe
        if self.depends_on_documents and experiment.unit.has_documents:
            depends["documents"] = True
        return depends

    def noted(self, experiment: Experiment) -> dict[str, Any]:
        noted: dict[str, Any] = {}
        if experiment.translator:
            # The file has the checksums of the model's other files.
            described = checksum(os.path.join(experiment.translator, SETTINGS))
            noted["translator"] = {"model": experiment.translator, f"sha256 of {SETTINGS}": described}
        process = last_process(experiment.training.history) if self.per_model else {}
        if process:
            device = process.get("batches", {}).get("device", "not noted")
            noted["training"] = {"device": device, "precision": of_process(process) or "not noted"}
        return noted
