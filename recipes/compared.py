"""The last step of a comparison: the report of its finished runs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from recipes.plan import Plan
from recipes.report import page
from recipes.report.contents import Contents, FinishedRun, Sweep, TestSet
from recipes.steps import STEPS, Pipeline
from recipes.work import Step, StepError, Work


@dataclass(frozen=True)
class Report(Step):
    """Compares the finished runs of a plan. Another run, or another reason why one is missing, is another report."""

    contents: Contents = field(kw_only=True)

    @classmethod
    def of(cls, plan: Plan, command: str, failed: Mapping[str, str]) -> "Report":
        """Return the report of what is finished. Raises a StepError if nothing can be compared."""
        finished: dict[str, list[Pipeline]] = {name: [] for name in plan.systems}
        missing = {}
        for run in (run for run in plan.runs if not run.setting):
            try:
                pipeline = plan.pipeline(run)
                lacking = [step for step in STEPS["score"](pipeline) if not step.is_finished(plan.corpus.work)]
                problem = "is not finished" if lacking else ""
            except StepError as error:
                problem = str(error)
            if problem:
                missing[run.title] = failed.get(run.title, problem)
            else:
                finished[run.system].append(pipeline)
        baseline = next(iter(finished))
        if not finished[baseline]:
            raise StepError(f"no report: the baseline, {baseline}, has no finished run")
        compared = {name: pipelines for name, pipelines in finished.items() if pipelines}
        first = finished[baseline][0]
        if not first.settings.test_files:
            raise StepError("test_files: is empty, and a report needs a test set")
        scores = [
            pipeline.score(test) for of in compared.values() for pipeline in of for test in pipeline.settings.test_files
        ]
        read = {
            "systems": {name: [pipeline.seed for pipeline in of] for name, of in compared.items()},
            **{"missing": missing, "command": command},
        }
        inputs = {step.name: step for step in scores}
        return cls("report", "", read, inputs, contents=contents_of(plan, compared, missing, command))

    def produce(self, work: Work, part: Path) -> None:
        page.write(part, self.contents)


def contents_of(
    plan: Plan, compared: Mapping[str, list[Pipeline]], missing: Mapping[str, str], command: str
) -> Contents:
    """Return what the report is made from."""
    folder = plan.corpus.work.folder
    first = next(iter(compared.values()))[0]
    tests = []
    source = first.langs[0]
    for name in first.settings.test_files:
        text = first.text(name)
        references = [folder(text) / name for name in text.references()]
        tests.append(TestSet(name, folder(text) / f"text.{source}", tuple(references)))
    sweeps = {}
    for name in compared:
        for setting in plan.sweep(name):
            losses = plan.losses(name) or {}
            sweeps[name] = Sweep(setting, losses, plan.chosen(name))
    return Contents(
        recipe=plan.name,
        command=command,
        settings=asdict(first.settings),
        runs={
            name: [finished_run(plan.corpus.work, pipeline, name) for pipeline in of] for name, of in compared.items()
        },
        definitions={name: dict(plan.systems[name]) for name in compared},
        test_sets=tests,
        train_sources=folder(first.in_subwords("train")) / f"text.{source}",
        tokenize=first.tokenize,
        sweeps=sweeps,
        missing=missing,
    )


def finished_run(work: Work, pipeline: Pipeline, system: str) -> FinishedRun:
    """Return the folders and files of a run that is finished."""
    training, tests = work.folder(pipeline.train), [*pipeline.settings.test_files]
    end = pipeline.train.ended(training) or {}
    translations = {name: work.folder(pipeline.translate(name)) for name in tests}
    return FinishedRun(
        system,
        pipeline.seed,
        asdict(pipeline.settings) | {"precision": pipeline.precision},
        training,
        end.get("updates", 0),
        end.get("epochs", 0),
        {name: path / f"hypotheses.{pipeline.langs[1]}" for name, path in translations.items()},
        {name: work.folder(pipeline.score(name)) / "score.json" for name in tests},
        {name: path / "generate.txt" for name, path in translations.items()},
    )
