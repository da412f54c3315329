"""Stage 23: compare the systems' scores and write the report: a page, a table, and the numbers."""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from fairseq_rope.files import write_whole
from fairseq_rope.tools.score import TOKENIZERS
from recipes.compare import page, stage21_join, stage22_translate_joined
from recipes.compare.bootstrap import RESAMPLES, SEED, corpus_bleu, paired_bootstrap, statistics
from recipes.compare.curves import read_history
from recipes.compare.stage21_join import lines
from recipes.pipeline.checkpoints import to_average
from recipes.pipeline.commands import Shell
from recipes.pipeline.experiment import Experiment, StageError
from recipes.pipeline.model_folder import Moves, next_earlier
from recipes.pipeline.runner import Runner
from recipes.pipeline.stage import Stage
from recipes.pipeline.stages import SCORE, TRAIN

SEEDS = 3  # the default of --seeds
SAME = ("recipe", "settings", "architectures", "signatures")  # keys of results that identify a report


@dataclass
class Report(Stage):
    """The stage that compares *pairs*: for each seed, one training of every architecture, the baseline first."""

    pairs: Sequence[Sequence[Experiment]]
    recipe: str

    number = 23
    title = "compare"
    settings = ("source_lang", "target_lang")
    depends_on_bpe = True

    def also(self, experiment: Experiment) -> dict[str, Any]:
        """What the report depends on besides its inputs: the systems, their order, and the code of the report."""
        files = [path for path in sorted(Path(__file__).parent.iterdir()) if path.suffix in (".py", ".j2")]
        code = b"".join(path.read_bytes() for path in files)
        return {
            "systems": [[system.arch, system.seed] for pair in self.pairs for system in pair],
            "recipe": self.recipe,
            "recipes/compare": hashlib.sha256(code).hexdigest(),
            **SCORE.also(experiment),
        }

    def inputs(self, experiment: Experiment) -> list[Path]:
        paths = [*experiment.texts("raw", ["test"]), experiment.text("bpe", "train", experiment.source)]
        paths += stage21_join.Join().outputs(experiment)
        for system in (system for pair in self.pairs for system in pair):
            paths += [system.hypotheses, system.history, system.score]
            paths += [stage22_translate_joined.hypotheses(system, times) for times in stage21_join.TIMES]
        return paths

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [self.folder(experiment) / name for name in ("report.html", "results.md", "results.json")]

    def folder(self, experiment: Experiment) -> Path:
        """The folder of the report, with the same label as the models' folders."""
        return experiment.work / f"compare{experiment.label and '.'}{experiment.label}"

    def prepare(self, runner: Runner) -> None:
        if runner.experiment.dry_run:
            self._set_aside(runner.experiment, _finite(self._identity(runner.experiment)), runner.moves)

    def run(self, experiment: Experiment, shell: Shell) -> None:
        if experiment.dry_run:
            return
        results = self.results(experiment)
        as_json = json.dumps(_finite(results), indent=1) + "\n"
        texts = {"results.json": as_json, "results.md": page.table(results), "report.html": page.html(results)}
        self._set_aside(experiment, json.loads(as_json), Moves(experiment))
        for name, text in texts.items():
            write_whole(self.folder(experiment) / name, text)

    def _set_aside(self, experiment: Experiment, results: dict[str, Any], moves: Moves) -> None:
        """Move an existing report to ``earlier/1``, ``2``, …, unless *results* contain all of it.

        In a dry run, *results* have no scores, and the signature of the future scores is unknown.
        """
        folder = self.folder(experiment)
        reports = [path for path in self.outputs(experiment) if path.exists()]
        try:
            earlier = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            differ = [name for name in SAME if name in results and earlier[name] != results[name]]
            if "signatures" not in results and _tokeniser(earlier["signatures"]["sacreBLEU"]) != experiment.tokenize:
                differ.append("signatures")
            if not set(earlier["seeds"]) <= set(results["seeds"]):
                differ.append("seeds")
        except (OSError, ValueError, KeyError, TypeError):
            differ = ["results.json, which cannot be read"]
        if differ:
            target = next_earlier(folder)
            for path in reports:
                moves.move(path, target / path.name, f"is another report (differs in {', '.join(differ)})")

    def summary(self, experiment: Experiment) -> str:
        """The lines to print at the end: the path of the report, and its verdict."""
        results = json.loads((self.folder(experiment) / "results.json").read_text())
        return "\n".join([f"report:  {self.folder(experiment) / 'report.html'}", *page.verdict(results)])

    def _identity(self, experiment: Experiment) -> dict[str, Any]:
        """The entries of the results that are known before training."""
        return {
            "recipe": self.recipe,
            "architectures": [system.arch for system in self.pairs[0]],
            "seeds": [pair[0].seed for pair in self.pairs],
            "settings": asdict(experiment.settings),
        }

    def results(self, experiment: Experiment) -> dict[str, Any]:
        """All numbers of the report. Raises a StageError if the systems were not trained for the same length."""
        _refuse_unequal_lengths([system for pair in self.pairs for system in pair])
        systems = [[_system(system) for system in pair] for pair in self.pairs]
        longest = max(len(line.split()) for line in lines(experiment.text("bpe", "train", experiment.source)))
        return {
            **self._identity(experiment),
            "systems": systems,
            "signatures": {name: metric["signature"] for name, metric in systems[0][0]["metrics"].items()},
            "bootstrap": {"resamples": RESAMPLES, "seed": SEED},
            "joined": [self._joined(experiment, times, longest) for times in (1, *stage21_join.TIMES)],
            "longest_in_training": longest,
            "command": self._command(experiment),
        }

    def _command(self, experiment: Experiment) -> str:
        """The command of the last run, with --seeds set to the number of seeds in the report."""
        command = yaml.safe_load((experiment.work / "run.yaml").read_text(encoding="utf-8"))["command"]
        seeds = len(self.pairs)
        if re.search("--seeds[ =]", command) or seeds == SEEDS:
            return re.sub(r"(--seeds[ =])\d+", rf"\g<1>{seeds}", command)
        return command.replace("recipes.compare ", f"recipes.compare --seeds {seeds} ", 1)

    def _joined(self, experiment: Experiment, times: int, longest: int) -> dict[str, Any]:
        """Source lengths and scores of all systems on the test set with *times* sentences a line.

        Args:
            longest: subwords of the longest source in training
        """
        if times == 1:
            reference, subwords = experiment.test_reference, experiment.text("bpe", "test", experiment.source)
            files = [[system.hypotheses for system in pair] for pair in self.pairs]
        else:
            reference = stage21_join.texts(experiment, times)[1]
            subwords = experiment.text("joined", f"{times}.bpe", experiment.source)
            files = [[stage22_translate_joined.hypotheses(system, times) for system in pair] for pair in self.pairs]
        references = lines(reference)
        for path in (path for pair in files for path in pair):
            if len(lines(path)) != len(references):
                raise StageError(
                    f"{path} has {len(lines(path))} lines, and {reference} has {len(references)}: remove it, "
                    "and run the comparison again"
                )
        tokenize = _tokeniser(_score(self.pairs[0][0])["metrics"][0]["signature"])
        of_files = [[statistics(lines(path), references, tokenize) for path in pair] for pair in files]
        of_each = list(zip(*of_files, strict=True))  # architecture, then seed
        words = [len(line.split()) for line in lines(subwords)]
        return {
            "times": times,
            "lines": len(references),
            "subwords": sum(words) / len(words),
            "longer_than_in_training": sum(count > longest for count in words),
            "length_ratio": [[float(s[:, 8].sum() / s[:, 9].sum()) for s in seeds] for seeds in of_each],
            "scores": [[corpus_bleu(rows.sum(axis=0)) for rows in seeds] for seeds in of_each],
            "against_baseline": [paired_bootstrap(of_each[0], seeds) for seeds in of_each[1:]],
            "by_seed": [
                [paired_bootstrap([first], [one]) for first, one in zip(of_each[0], seeds, strict=True)]
                for seeds in of_each[1:]
            ],
        }


def _refuse_unequal_lengths(systems: Sequence[Experiment]) -> None:
    """Raise a StageError unless all *systems* average the same epochs or updates."""
    averaged = [[number for number, _ in to_average(system)] for system in systems]
    for system, numbers in zip(systems, averaged, strict=True):
        if numbers != averaged[0]:
            raise StageError(
                f"{system.model} was trained until {numbers[-1:]} and {systems[0].model} until "
                f"{averaged[0][-1:]} (epochs or updates; the checkpoints {numbers} and {averaged[0]} are "
                "averaged): train both for the same length, or train again with --name NAME"
            )


def _score(system: Experiment) -> dict[str, Any]:
    """The scores of *system*, from its score.json."""
    return json.loads(system.score.read_text(encoding="utf-8"))["systems"][0]


def _tokeniser(signature: str) -> str:
    """The tokeniser in a sacreBLEU signature, without a version as in ja-mecab-0.996-IPA."""
    tokeniser = re.search(r"\|tok:([^|]+)", signature)[1]
    return next((name for name in TOKENIZERS if re.match(rf"{name}(-\d|$)", tokeniser)), tokeniser)


def _finite(value: Any) -> Any:
    """*value*, with None in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _system(system: Experiment) -> dict[str, Any]:
    """The scores and the training of one system."""
    score = _score(system)
    training = read_history(system.history)
    log = Runner(system).log(TRAIN).read_text(encoding="utf-8")
    parameters = re.findall(r"num\. shared model params: ([\d,]+)", log)
    by_length = score["sacreBLEU_by_source_length"]
    metrics = {one["name"]: {"score": one["score"], "signature": one["signature"]} for one in score["metrics"]}
    return {
        "architecture": system.arch,
        "seed": system.seed,
        "metrics": metrics,
        "by_length": [{key: row[key] for key in ("words", "sentences", "score")} for row in by_length],
        "training": vars(training),
        "curve_is_whole": bool(system.settings.save_every_updates) or training.last_epoch == to_average(system)[-1][0],
        "parameters": int(parameters[-1].replace(",", "")) if parameters else None,
    }
