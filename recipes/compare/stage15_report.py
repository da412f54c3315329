"""Stage 15: compare the systems' scores and write the report: a page, tables, and the numbers."""

import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes.compare import bootstrap, page, stage13_join, stage14_translate_joined
from recipes.compare.collect import definition, numbers_of_data, numbers_of_run, tokeniser_of
from recipes.compare.comparison import compared_by_program, compared_sets
from recipes.compare.results import read_results, without
from recipes.compare.stage12_score_with import ScoreWith
from recipes.compare.stages import finished
from recipes.compare.tuning import Tuning
from recipes.pipeline.checkpoints import to_average
from recipes.pipeline.experiment import SETS, Experiment
from recipes.pipeline.fairseq_train import patience
from recipes.pipeline.stages import SCORE
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.moves import Moves, next_earlier
from recipes.run.shell import Shell
from recipes.run.stamps import Stamps

SEEDS = 3  # the default of --seeds
SAME = ("recipe", "settings", "baseline", "signatures")  # keys of results that identify a report
DEFINED = ("architecture", "flags", "training_of", "generate")  # keys of a run that identify its system


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
            **self._identity(experiment),
            "tuning": self._tuning(),
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
            if "signatures" not in results and tokeniser_of(earlier["signatures"]["sacreBLEU"]) != experiment.tokenize:
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
            "runs": {system: [definition(run) for run in runs] for system, runs in self.runs.items() if runs},
        }

    def results(self, experiment: Experiment) -> dict[str, Any]:
        """All numbers of the report."""
        if not self.experiments:
            raise self.error("no training has finished")
        runs = {system: [*map(numbers_of_run, of_system)] for system, of_system in self.runs.items() if of_system}
        data, baseline = numbers_of_data(experiment, self.recipe), next(iter(self.runs))
        programs = {
            scorer.name: {**asdict(scorer), **compared_by_program(scorer, runs, baseline)}
            for scorer in experiment.scorers
        }
        metrics = next(iter(runs.values()))[0]["metrics"]
        return {
            **self._identity(experiment),
            "systems": [*runs],
            "runs": {system: [without_sets(run) for run in of_system] for system, of_system in runs.items()},
            "failed": dict(self.failed),
            "signatures": {name: metric["signature"] for name, metric in metrics.items()},
            "scorers": {name: program for name, program in programs.items() if program["scores"]},
            "bootstrap": {"resamples": bootstrap.RESAMPLES, "seed": bootstrap.SEED},
            "joined": compared_sets(data, runs, baseline),
            **{name: data[name] for name in ("longest_in_training", "data", "sizes")},
            "command": self._command(experiment),
            "tuning": self._tuning(),
        }

    def _command(self, experiment: Experiment) -> str:
        """The commands that repeat all runs, one a line: that of the last launch, with seeds and systems of the report.

        Systems with other seeds than the rest need a command of their own.
        """
        command = yaml.safe_load((experiment.work / "run.yaml").read_text(encoding="utf-8"))["command"]
        one_line = [" ".join(word.split("\n")) for word in shlex.split(command)]
        words = without(one_line, {"--seeds": 1, "--only": len(one_line)})
        numbers = {system: [run.seed for run in runs] for system, runs in self.runs.items() if runs}
        commands = []
        for first, last in sorted({run for seeds in numbers.values() for run in _without_gaps(seeds)}):
            systems = [name for name, seeds in numbers.items() if {*range(first, last + 1)} <= {*seeds}]
            only = ["--only", *systems] if len(systems) < len(numbers) else []
            seeds_flag = (
                ["--seeds", str(last) if first == 1 else f"{first}-{last}"] if (first, last) != (1, SEEDS) else []
            )
            end = words.index("--") if "--" in words else len(words)
            commands.append(shlex.join([*words[:end], *seeds_flag, *only, *words[end:]]))
        return "\n".join(commands)


def _without_gaps(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number of each part of *numbers* that has no gap: 1-3 and 5-5 of 1, 2, 3, 5."""
    for _, pairs in itertools.groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0]):
        part = [number for _, number in pairs]
        yield part[0], part[-1]


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


def _finite(value: Any) -> Any:
    """*value*, with None in place of numbers that JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def without_sets(run: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of *run* that results.json has."""
    return {name: value for name, value in run.items() if name not in ("sets", "scorers")}
