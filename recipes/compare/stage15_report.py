"""Stage 15: compare the systems' scores and write the report: a page, tables, and the numbers."""

import hashlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fairseq_rope.scorers import Scorer
from fairseq_rope.text.languages import TOKENIZERS
from recipes.compare import bootstrap, page, stage13_join, stage14_translate_joined
from recipes.compare.curves import read_history
from recipes.compare.results import in_order, read_results, without
from recipes.compare.stage12_score_with import ScoreWith
from recipes.compare.stage13_join import lines
from recipes.compare.stages import finished
from recipes.compare.tuning import Tuning
from recipes.pipeline.checkpoints import to_average
from recipes.pipeline.experiment import SETS, Experiment
from recipes.pipeline.fairseq_train import patience
from recipes.pipeline.stages import SCORE, TRAIN
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.moves import Moves, next_earlier
from recipes.run.run import ROOT, StageError
from recipes.run.runner import Runner
from recipes.run.shell import Shell
from recipes.run.stamps import Stamps
from recipes.text.segments import Divided

SEEDS = 3  # the default of --seeds
SAME = ("recipe", "settings", "baseline", "signatures")  # keys of results that identify a report
DEFINED = ("architecture", "flags", "training_of", "generate")  # keys of a run that identify its system

Scores = Mapping[str, Mapping[int, np.ndarray]]  # system: seed: BLEU of every draw


@dataclass
class Report(TranslationStage):
    """The stage that compares systems."""

    runs: Mapping[str, Sequence[Experiment]]  # the finished runs of each system, one for each seed, the baseline first
    recipe: str
    failed: Mapping[str, str] = field(default_factory=dict)  # why a run is not among *runs*, by its title
    tuning: Tuning | None = None

    number = 15
    title = "compare"
    of_test_set = True
    settings = ("source_lang", "target_lang")
    depends_on_bpe = True

    experiments = property(lambda self: [run for runs in self.runs.values() for run in runs])

    def depends_on(self, experiment: Experiment) -> dict[str, Any]:
        """What changes the report besides its inputs: also the systems, their order, and the code of the report."""
        files = [path for path in sorted(Path(__file__).parent.iterdir()) if path.suffix in (".py", ".j2")]
        code = b"".join(path.read_bytes() for path in files)
        return {
            "systems": [[system, [run.seed for run in runs]] for system, runs in self.runs.items()],
            "failed": dict(self.failed),
            "recipe": self.recipe,
            "tuning": self._tuning(),
            "scorers": [asdict(scorer) for scorer in experiment.scorers],
            "recipes/compare": hashlib.sha256(code).hexdigest(),
            **SCORE.depends_on(experiment),
            **super().depends_on(experiment),
        }

    def inputs(self, experiment: Experiment) -> list[Path]:
        paths = [*experiment.texts("raw", experiment.with_references)]
        paths += [experiment.text(experiment.in_subwords, name, experiment.source) for name in SETS]
        paths += stage13_join.Join().outputs(experiment)
        if experiment.unit.has_documents:
            paths += [*experiment.test_references, *experiment.reference_documents]
        for run in self.experiments:
            paths += [run.hypotheses, run.history, run.score, *stage14_translate_joined.TranslateJoined().outputs(run)]
            paths += [run.separators, run.document_hypotheses] if run.unit.has_documents else []
            scored = (stage for stage in map(ScoreWith, run.scorers) if stage.is_done(run))
            paths += [path for stage in scored for path in stage.outputs(run)]
        return paths

    def outputs(self, experiment: Experiment) -> list[Path]:
        images = page.IMAGES if self.tuning is None else (*page.IMAGES, *page.IMAGES_OF_TUNING)
        return [self.folder(experiment) / name for name in (*page.TEXTS, *images, "results.json")]

    def folder(self, experiment: Experiment) -> Path:
        """The folder of the report, with the same label as the models' folders."""
        return experiment.work / f"compare{experiment.label and '.'}{experiment.label}"

    def prepare(self, experiment: Experiment, stamps: Stamps, moves: Moves) -> None:
        if experiment.dry_run:
            self._set_aside(experiment, _finite(self._identity(experiment)), moves)

    def run(self, experiment: Experiment, shell: Shell) -> None:
        if experiment.dry_run:
            return
        results = self.results(experiment)
        as_json = json.dumps(_finite(results), indent=1) + "\n"
        files = {**page.files(results), "results.json": as_json.encode()}
        self._set_aside(experiment, json.loads(as_json), Moves(experiment))
        page.write(self.folder(experiment), files)

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
            differ += _missing(earlier["runs"], results["runs"])
            commands = {name: one["command"] for name, one in results["scorers"].items()}
            if any(commands.get(name) != one["command"] for name, one in earlier.get("scorers", {}).items()):
                differ.append("scorers")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            differ = ["results.json, which cannot be read"]
        if differ:
            target = next_earlier(folder)
            for path in reports:
                moves.move(path, target / path.name, f"is another report (differs in {', '.join(differ)})")

    def summary(self, experiment: Experiment) -> str:
        """The lines to print at the end: the path of the report, and its verdict."""
        results = read_results(self.folder(experiment) / "results.json")
        return "\n".join([f"report:  {self.folder(experiment) / 'report.html'}", *page.verdict(results)])

    def _tuning(self) -> dict[str, Any] | None:
        """The tuned setting, and what came out for each system of the report; None if nothing is tuned."""
        if self.tuning is None:
            return None
        outcomes = self.tuning.outcomes(finished)
        compared = {name: outcome for name, outcome in outcomes.items() if name in self.runs}
        return {"setting": self.tuning.setting, "values": [*self.tuning.experiments], "systems": compared}

    def _identity(self, experiment: Experiment) -> dict[str, Any]:
        """The entries of the results that are known before training."""
        tuned = {} if self.tuning is None else {self.tuning.setting: ", ".join(self.tuning.experiments)}
        return {
            "recipe": self.recipe,
            "baseline": next(iter(self.runs)),
            "settings": asdict(experiment.settings) | tuned,
            "scorers": {scorer.name: asdict(scorer) for scorer in experiment.scorers},
            "runs": {system: [_definition(run) for run in runs] for system, runs in self.runs.items() if runs},
        }

    def results(self, experiment: Experiment) -> dict[str, Any]:
        """All numbers of the report."""
        if not self.experiments:
            raise self.error("no training has finished")
        runs = {system: [_run(run) for run in of_system] for system, of_system in self.runs.items() if of_system}
        metrics = next(iter(runs.values()))[0]["metrics"]
        training = lines(experiment.text(experiment.in_subwords, "train", experiment.source))
        sizes = [len(line.split()) for line in training]
        longest = max(sizes)
        programs = {scorer.name: self._by_program(scorer) for scorer in experiment.scorers}
        return {
            **self._identity(experiment),
            "systems": [*runs],
            "runs": runs,
            "failed": dict(self.failed),
            "signatures": {name: metric["signature"] for name, metric in metrics.items()},
            "scorers": {name: of for name, of in programs.items() if of["scores"]},
            "bootstrap": {"resamples": bootstrap.RESAMPLES, "seed": bootstrap.SEED},
            "joined": [self._joined(experiment, n, longest) for n in (None, *stage13_join.lengths(experiment))],
            "longest_in_training": longest,
            "data": self._data(experiment),
            "sizes": self._sizes(experiment),
            "command": self._command(experiment),
            "tuning": self._tuning(),
        }

    def _data(self, experiment: Experiment) -> dict[str, Any]:
        """The title of the data, and the files of each set.

        The recipe names data that its manifest or its own folder has. The user's texts have the name of their folder.
        """
        folder, recipe = experiment.data_dir, ROOT / "recipes" / self.recipe
        title = recipe.name
        if folder is not None and folder.parent != recipe and experiment.manifest is None:
            title = f"{folder.name} ({experiment.source}-{experiment.target})"
        sets = experiment.given(SETS)
        files = {name: [file for corpus in experiment.corpora(name) for file in corpus] for name in sets}
        return {"title": title, "files": files}

    def _sizes(self, experiment: Experiment) -> dict[str, int]:
        """The number of pairs or segments for training and validation, and that of the sentences of the test set."""
        paths = {name: experiment.text(experiment.in_subwords, name, experiment.source) for name in ("train", "valid")}
        return {name: len(lines(path)) for name, path in (*paths.items(), ("test", experiment.test_source))}

    def _command(self, experiment: Experiment) -> str:
        """The commands that repeat all runs, one a line: that of the last launch, with seeds and systems of the report.

        Systems with other seeds than the rest need a command of their own.
        """
        last = yaml.safe_load((experiment.work / "run.yaml").read_text(encoding="utf-8"))["command"]
        one_line = [" ".join(word.split("\n")) for word in shlex.split(last)]
        words = without(one_line, {"--seeds": 1, "--only": len(last)})
        numbers = {system: [run.seed for run in runs] for system, runs in self.runs.items() if runs}
        commands = []
        for first, last in sorted({(min(seeds), max(seeds)) for seeds in numbers.values()}):
            systems = [name for name, seeds in numbers.items() if min(seeds) <= first and last <= max(seeds)]
            only = ["--only", *systems] if len(systems) < len(numbers) else []
            given = ["--seeds", str(last) if first == 1 else f"{first}-{last}"] if (first, last) != (1, SEEDS) else []
            end = words.index("--") if "--" in words else len(words)
            commands.append(shlex.join([*words[:end], *given, *only, *words[end:]]))
        return "\n".join(commands)

    def _joined(self, experiment: Experiment, length: int | None, longest: int) -> dict[str, Any]:
        """Source lengths and scores of all systems on the set of stage 13 with *length*; None: on that of stage 9.

        *longest* is the number of subwords of the longest source in training.
        """
        if length is None:
            texts = experiment.test_references
            subwords = experiment.text(experiment.in_subwords, "test", experiment.source)
        else:
            texts = stage13_join.texts(experiment, length)[1:]
            subwords = stage13_join.in_subwords(experiment, length)[0]
        references = [*map(lines, texts)]
        tokenize = _tokeniser(_score(self.experiments[0])["metrics"][0]["signature"])
        drawn = bootstrap.draw(len(references[0]), bootstrap.RESAMPLES)
        scores: dict[str, dict[int, np.ndarray]] = {}
        ratios: dict[str, list[float]] = {}
        for run in self.experiments:
            path = run.hypotheses if length is None else stage14_translate_joined.files(run, length).hypotheses
            hypotheses = lines(path)
            if len(hypotheses) != len(references[0]):
                has = f"{path} has {len(hypotheses)} lines, and {texts[0]} has {len(references[0])}"
                raise StageError(f"{has}: remove it, and run the comparison again")
            rows = bootstrap.statistics(hypotheses, *references, tokenize=tokenize)
            scores.setdefault(run.system, {})[run.seed] = bootstrap.scores_of_draws(rows, drawn)
            ratios.setdefault(run.system, []).append(float(rows[:, 8].sum() / rows[:, 9].sum()))
        words = [len(line.split()) for line in lines(subwords)]
        size: dict[str, Any] = {"times": length or 1}
        if experiment.unit.has_documents:
            size = {"tokens": length or experiment.settings.segment_tokens}
            size |= self._documents(experiment, length, tokenize)
        return {
            **size,
            "lines": len(words),
            "subwords": sum(words) / len(words),
            "longer_than_in_training": sum(count > longest for count in words),
            "length_ratio": ratios,
            **self._compared(scores),
        }

    def _by_program(self, scorer: Scorer) -> dict[str, Any]:
        """The scores of the systems by *scorer*, over the runs that it has scored."""
        stage, scores = ScoreWith(scorer), dict[str, dict[int, np.ndarray]]()
        for run in self.experiments:
            if stage.is_done(run):
                sentences = np.array(stage.scores(run))
                drawn = bootstrap.draw(len(sentences), bootstrap.RESAMPLES)
                scores.setdefault(run.system, {})[run.seed] = drawn @ sentences / len(sentences)
        seeds = {system: [*of_system] for system, of_system in scores.items()}
        return {**asdict(scorer), "seeds": seeds, **self._compared(scores, scorer.lower_is_better)}

    def _compared(self, scores: Scores, lower_is_better: bool = False) -> dict[str, Any]:
        """The scores of the systems on the test set, the best one, and the bootstraps."""
        measured = {system: [float(one[0]) for one in seeds.values()] for system, seeds in scores.items()}
        baseline = next(iter(self.runs))
        against_baseline = _against(baseline, scores)
        best = next(iter(in_order(measured, baseline, against_baseline, lower_is_better)), "")
        return {
            "scores": measured,
            "best": best,
            "against_baseline": against_baseline,
            "against_best": _against(best, scores),
            "by_seed": {
                system: [
                    {"seed": seed, **bootstrap.paired_bootstrap([first[seed]], [one])} for seed, one in seeds.items()
                ]
                for system, seeds, first in _sharing(baseline, scores)
            },
        }

    def _documents(self, experiment: Experiment, length: int | None, tokenize: str) -> dict[str, Any]:
        """The BLEU of documents, and the share of the segments with other separators than their source."""
        references = [*map(lines, experiment.reference_documents)]
        scores: dict[str, list[float]] = {}
        shares: dict[str, list[float]] = {}
        for run in self.experiments:
            hypotheses, separators = run.document_hypotheses, run.separators
            if length is not None:
                hypotheses = stage14_translate_joined.documents(run, length)
                separators = stage14_translate_joined.files(run, length).separators
            rows = bootstrap.statistics(lines(hypotheses), *references, tokenize=tokenize)
            scores.setdefault(run.system, []).append(bootstrap.corpus_bleu(rows.sum(axis=0)))
            counts = Divided(**json.loads(separators.read_text(encoding="utf-8")))
            shares.setdefault(run.system, []).append(counts.with_other_separators / counts.segments)
        return {"document_scores": scores, "other_separators": shares}


def _sharing(reference: str, scores: Scores) -> list[tuple[str, Mapping[int, np.ndarray], Mapping[int, np.ndarray]]]:
    """The other systems, with their *scores* and those of *reference*, both without the seeds that the other lacks."""
    first = scores.get(reference, {})
    shared = {
        system: {seed: one for seed, one in seeds.items() if seed in first}
        for system, seeds in scores.items()
        if system != reference
    }
    return [(system, seeds, {seed: first[seed] for seed in seeds}) for system, seeds in shared.items() if seeds]


def _against(reference: str, scores: Scores) -> dict[str, dict[str, Any]]:
    """The paired bootstraps of all systems that share a seed with *reference*, with p corrected for their number."""
    compared: dict[str, dict[str, Any]] = {
        system: {"seeds": [*seeds], **bootstrap.paired_bootstrap([*first.values()], [*seeds.values()])}
        for system, seeds, first in _sharing(reference, scores)
    }
    corrected = bootstrap.holm([one["p_value"] for one in compared.values()])
    return {name: {**one, "p_holm": p} for (name, one), p in zip(compared.items(), corrected, strict=True)}


def _missing(earlier: dict[str, Any], runs: dict[str, Any]) -> list[str]:
    """What of the runs of an *earlier* report is not among *runs*: ["systems"], ["seeds"] or []."""
    for system, before in earlier.items():
        if [runs.get(system, [{}])[0].get(key) for key in DEFINED] != [before[0].get(key) for key in DEFINED]:
            return ["systems"]
    seeds = [({run["seed"] for run in before}, {run["seed"] for run in runs[name]}) for name, before in earlier.items()]
    return [] if all(before <= now for before, now in seeds) else ["seeds"]


def of_equal_length(runs: Mapping[str, Sequence[Experiment]]) -> tuple[dict[str, list[Experiment]], dict[str, str]]:
    """The systems with those of their *runs* that average the same epochs or updates as the first of all runs.

    If all runs end by ``--patience``, they can have different lengths. Also returns the other runs, "system, seed N",
    and why they cannot be compared. Systems without a run are left out.
    """
    early = all(patience(run.training) for of_system in runs.values() for run in of_system)
    averaged = {
        (system, run.seed): [number for number, _ in to_average(run.training)]
        for system, of_system in runs.items()
        for run in of_system
    }
    (system, seed), expected = next(iter(averaged.items()), (("", 0), []))
    others = {
        f"{name}, seed {number}": f"its training ended at {numbers[-1]} and that of {system}, seed {seed}, at "
        f"{expected[-1]} (epochs or updates; the checkpoints {numbers} and {expected} are averaged): train both for "
        "the same length, or train again with --name NAME"
        for (name, number), numbers in averaged.items()
        if numbers != expected and not early
    }
    equal = {name: [run for run in of if early or averaged[name, run.seed] == expected] for name, of in runs.items()}
    return {name: of for name, of in equal.items() if of}, others


def _score(system: Experiment) -> dict[str, Any]:
    """The scores of *system*, from its score.json."""
    return json.loads(system.score.read_text(encoding="utf-8"))["systems"][0]


def _tokeniser(signature: str) -> str:
    """The tokeniser in a sacreBLEU signature, without a version as in ja-mecab-0.996-IPA."""
    tokeniser = signature.partition("|tok:")[2].partition("|")[0]
    return next((name for name in TOKENIZERS if re.match(rf"{name}(-\d|$)", tokeniser)), tokeniser)


def _finite(value: Any) -> Any:
    """*value*, with None in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _definition(run: Experiment) -> dict[str, Any]:
    """What a run is, known before training."""
    definition = {"seed": run.seed, "architecture": run.arch, "flags": run.settings.fairseq_train_flags}
    search = {"training_of": run.training_of, "generate": run.settings.fairseq_generate_flags}
    return definition | (search if run.training_of else {})


def _run(run: Experiment) -> dict[str, Any]:
    """The scores and the training of one run."""
    score = _score(run)
    training = read_history(run.history)
    log = Runner(run.training).log(TRAIN).read_text(encoding="utf-8")
    parameters = re.findall(r"num\. shared model params: ([\d,]+)", log)
    by_length = score["sacreBLEU_by_source_length"]
    metrics = {one["name"]: {"score": one["score"], "signature": one["signature"]} for one in score["metrics"]}
    return {
        **_definition(run),
        "metrics": metrics,
        "by_length": [{key: row[key] for key in ("words", "sentences", "score")} for row in by_length],
        "training": vars(training),
        "patience": patience(run.training),
        "curve_is_whole": bool(run.settings.save_every_updates)
        or training.last_epoch == to_average(run.training)[-1][0],
        "parameters": int(parameters[-1].replace(",", "")) if parameters else None,
    }
