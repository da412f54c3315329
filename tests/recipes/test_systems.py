"""recipes/compare: systems by name, and runs side by side."""

import argparse
import ast
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fairseq_rope.errors import InputError
from fairseq_rope.launch import jobs, local, slurm
from fairseq_rope.positions.scaling import KEYS, RopeScaling
from recipes.compare import systems
from recipes.compare.__main__ import Comparison, build_parser
from recipes.compare.stages import stages_of
from recipes.compare.systems import System
from recipes.pipeline.stage08_average import Average
from recipes.run import launch, shell
from recipes.run.run import StageError
from recipes.run.runner import Runner
from recipes.run.stamps import Stamps
from recipes.run.yaml_file import SettingsError
from tests import forked_programs
from tests.commands import ENVIRONMENT, LIMIT, ROOT
from tests.recipes.small_demo import SHORT_OUTPUTS, SMALL, describe, label, run_here, setting_flags, small_corpus

ROPE = System("rope", "transformer_rope")
HALF = System("half", "transformer_rope", "--rope-layout half")


def chosen(*flags):
    return systems.chosen(build_parser().parse_args(["demo", *map(str, flags)]))


def test_systems_are_read_from_a_file_and_the_command_line(tmp_path):
    file = tmp_path / "systems.yaml"
    file.write_text("rope: --arch transformer_rope\nhalf: --arch transformer_rope --rope-layout half\n")
    assert chosen("--systems", file) == ([ROPE, HALF], [ROPE, HALF])
    more = System("wide", "transformer", "--dropout '0.1 '")
    given = ["--systems", file, "--system", "wide = --dropout '0.1 ' -a transformer"]
    assert chosen(*given) == ([ROPE, HALF, more], [ROPE, HALF, more])
    assert chosen(*given, "--baseline", "half", "--only", "wide") == ([HALF, ROPE, more], [more])
    names = [System(name, name) for name in ("transformer", "transformer_rope")]
    assert chosen() == (names, names) == chosen("--archs", *(system.name for system in names))


def test_the_encodings_of_the_recipes_are_all_encodings_and_variants_of_rope():
    from fairseq import options

    from fairseq_rope.positions import ENCODINGS
    from fairseq_rope.transformer.meaning import meaning, option_differences

    (all_systems, _) = chosen("--systems", ROOT / "recipes" / "compare" / "encodings.yaml")
    assert all_systems[0].name == "sinusoidal"
    meanings = {}
    for system in all_systems:
        flags = ["data", "--arch", system.arch, *shlex.split(system.flags)]
        meanings[system.name] = meaning(options.parse_args_and_arch(options.get_training_parser(), flags))
    variants = {
        name: option_differences(meanings[name], meanings["rope"]) for name in meanings if name not in ENCODINGS
    }
    assert meanings.keys() == {*ENCODINGS, *variants}
    assert {name: [each.name for each in changes] for name, changes in variants.items()} == {
        "p-rope": ["rope_scaling"],
        "cross-attention": ["cross_attention_positions"],
        "layers-without": ["encoder_layers_without_positions", "decoder_layers_without_positions"],
    }


def test_the_parts_of_the_block_have_equal_parameters_where_possible():
    from fairseq import options
    from fairseq.tasks.translation import TranslationTask

    from benchmarks.subjects import dictionary

    words = dictionary(4000)
    sizes = "layers=2 embed-dim=128 ffn-embed-dim=256 attention-heads=4".split()
    sizes = [f"--{side}-{size}" for side in ("encoder", "decoder") for size in sizes]
    numbers = {}
    for system in chosen("--systems", ROOT / "recipes" / "compare" / "block.yaml")[0]:
        flags = ["data", "--arch", system.arch, *shlex.split(system.flags), *sizes, "--share-all-embeddings"]
        args = options.parse_args_and_arch(options.get_training_parser(), flags)
        model = TranslationTask(args, words, words).build_model(args)
        numbers[system.name] = sum(parameter.numel() for parameter in model.parameters())
    rope, fewer = numbers["rope"], numbers.pop("one-kv-head")
    assert all(abs(number - rope) < 0.01 * rope for number in numbers.values()), numbers
    # keys and values of 6 attention layers have 32 rows instead of 128, and as many biases
    assert fewer == rope - 6 * 2 * 96 * (128 + 1)


def test_a_system_of_a_file_can_have_the_model_of_another_one(tmp_path):
    flags = "--model-overrides \"{'a': 1}\" --beam 9"
    systems_of_file = {"long": {"of": "half", "generate": flags}, "half": f"--arch {HALF.arch} {HALF.flags}"}
    file = tmp_path / "systems.yaml"
    file.write_text(yaml.safe_dump(systems_of_file, sort_keys=False))
    assert chosen("--systems", file)[0] == [System("long", HALF.arch, HALF.flags, "half", flags), HALF]


def test_the_scalings_of_the_documents_fit_the_small_model_of_the_recipe():
    folder = ROOT / "recipes" / "documents_en_de"
    section = (ROOT / "docs" / "recipes.md").read_text().partition("\n## Documents\n")[2].partition("\n## ")[0]
    width, heads = (int(re.search(rf"--set {name}=(\d+)", section)[1]) for name in ("width", "heads"))
    (all_systems, _) = chosen("--systems", folder / "lengths.yaml")
    encodings = {system.name: system for system in chosen("--systems", folder.parent / "compare" / "encodings.yaml")[0]}
    trained = [system for system in all_systems if not system.of]
    assert [system.name for system in trained] == ["sinusoidal", "rope", "alibi", "t5", "none"]
    assert all(system == encodings[system.name] for system in trained)
    scalings = {}
    for system in all_systems[len(trained) :]:
        flag, overrides = shlex.split(system.generate)
        (given,) = ast.literal_eval(overrides).values()
        assert (system.of, flag, list(ast.literal_eval(overrides))) == ("rope", "--model-overrides", ["rope_scaling"])
        scaling = RopeScaling(given)
        scaling.refuse_dimensions(width // heads, width // heads)
        assert scaling.values.get("original_max_position_embeddings", 129) == 129 and scaling.values["factor"] == 4
        scalings[scaling.rope_type] = system.name
    # p-RoPE is trained without a factor, so the name of the system with the same type says the factor
    names = {kind: f"rope-{kind}" for kind in KEYS if kind != "default"}
    assert scalings == {**names, "proportional": "rope-proportional-4"}
    assert encodings["p-rope"].flags.count("proportional") == 1 and 'factor": 4' not in encodings["p-rope"].flags


@pytest.mark.parametrize(
    "others, message",
    [
        ("b: {of: c, generate: --beam 2}", "b is of c, which must be a system with flags"),
        ("b: {of: a, generate: --beam 2}\nc: {of: b, generate: --beam 3}", "c is of b, which must be a system with"),
        ("b: {of: a, generate: --beam 2, arch: y}", "b has of, generate, arch, and must have of and generate"),
        ("b: {of: a}", "b has of, and must have of and generate"),
        ("b: {of: a, generate: ' '}", "generate of b must be flags of fairseq-generate"),
        ("b: {of: a, generate: 3}", "generate of b must be flags of fairseq-generate"),
        ("b: {of: a, generate: --beam '2}", "the flags of b, --beam '2, cannot be read"),
        ("b/c: {of: a, generate: --beam 2}", "the system's name b/c must consist"),
        ("b: --lr 1", "the flags of b, --lr 1, must contain --arch, like --arch transformer_rope --lr 1"),
        ("b: ''", "the flags of b must contain --arch"),
        ("b/c: --arch y", "the system's name b/c must consist of letters, digits, _ and -"),
        ("b: --arch 'y", "the flags of b, --arch 'y, cannot be read"),
        ("a: --arch y", 'line 2: is not YAML: found duplicate key "a"'),
        ("010: --arch y", "YAML reads a system's name as 10: write it in quotes"),  # as YAML 1.2
        ("b:", "must be lines of the form NAME: flags of fairseq-train"),
    ],
)
def test_wrong_systems_of_a_file_are_refused_by_name(tmp_path, others, message):
    file = tmp_path / "systems.yaml"
    file.write_text(f"a: --arch x\n{others}\n")
    with pytest.raises(SettingsError, match=f"^{re.escape(f'--systems {file}')}(: |, ){re.escape(message)}"):
        chosen("--systems", file)


@pytest.mark.parametrize(
    "text, flags, message",
    [
        ("{}", [], "--systems FILE: has no system"),
        ("- a\n- b", [], "--systems FILE: must be lines of the form NAME: flags of fairseq-train"),
        (None, [], "--systems FILE: No such file or directory"),
        (
            "a: --arch x",
            [],
            "--systems a: a comparison needs a second system; add the line 'transformer: --arch transformer'",
        ),
        ("a: --arch x", ["--system", "a=--arch y"], "--systems a a: names a twice; give each system another name"),
        ("a: --arch x", ["--system", "b"], "--system b: must have the form NAME=FLAGS, as in 'b=--arch transformer'"),
        (
            "a: --arch x",
            ["--system", "b="],
            "--system b=: the flags of b must contain --arch, like --arch transformer_rope",
        ),
        ("a: --arch x\nb: --arch y", ["--baseline", "c"], "--baseline c: must be one of a, b"),
        ("a: --arch x\nb: --arch y", ["--only", "a", "d"], "--only d: must be one of a, b"),
        ("a: --arch x\nb: --arch y", ["--archs", "x", "y"], "--archs: cannot be combined with --systems or --system"),
    ],
)
def test_wrong_choices_of_systems_are_refused_by_name(tmp_path, text, flags, message):
    file = tmp_path / "systems.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match=f"^{re.escape(message.replace('FILE', str(file)))}$"):
        chosen("--systems", file, *flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--jobs", "0"], "--jobs 0: must be 1 or more"),
        (["--slurm-partition", "gpu"], "--slurm-partition gpu: needs --launcher slurm"),
        (["--slurm", "time=60"], "--slurm time=60: needs --launcher slurm"),
        (["--launcher", "slurm", "--slurm", "time"], "--slurm time: must have the form KEY=VALUE"),
        (["--launcher", "slurm", "--slurm", "time=1h"], "--slurm time=1h: must be a number of minutes, 1 or more"),
        (
            ["--launcher", "slurm", "--slurm", "additional_parameters=x"],
            "--slurm additional_parameters=x: submitit's additional_parameters is a dictionary, and not a flag here",
        ),
        (["--launcher", "slurm", "--slurm", "nodes=2"], "--slurm nodes=2: must be 1, because each job is one process"),
        (
            ["--launcher", "slurm", "--slurm", "nodes=12"],
            "--slurm nodes=12: must be 1, because each job is one process",
        ),
        (
            ["--launcher", "slurm", "--slurm", "ntasks_per_node=2"],
            "--slurm ntasks_per_node=2: must be 1, because each job is one process",
        ),
        (["--launcher", "slurm"], "--launcher slurm: needs --slurm time=MINUTES; submitit would ask for 5 minutes"),
    ],
)
def test_wrong_flags_of_the_launcher_are_refused_by_name(flags, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        launch.refuse_contradictions(build_parser().parse_args(["demo", *flags]))
    one = ["--slurm", "nodes=1", "--slurm", "time=9"]
    launch.refuse_contradictions(build_parser().parse_args(["demo", "--launcher", "slurm", *one]))


# -- runs -------------------------------------------------------------------------------------------


def runs(tmp_path, *names):
    experiment = replace(describe("demo", "--gpus", 0), work=tmp_path)
    return [replace(experiment, system=name) for name in names]


def arguments(**options):
    return argparse.Namespace(**{"launcher": "local", "jobs": 1, "slurm": [], "slurm_partition": None, **options})


@pytest.mark.parametrize("jobs", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, jobs):
    names = ["first", "search", "fails", *(["dies"] if jobs > 1 else []), "last"]
    monkeypatch.setattr(launch, "run_stages", training_stub(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    all_runs = runs(tmp_path, *names)
    all_runs[1].training_of = "first"
    outcomes = {run.system: why for run, why in launch.outcomes(all_runs, stages_of, "x", arguments(jobs=jobs))}
    assert list(outcomes) == names or jobs > 1
    assert [*launch.outcomes([], stages_of, "x", arguments(jobs=jobs))] == []
    assert outcomes["first"] == outcomes["last"] == "" and "no memory" in outcomes["fails"]
    if jobs > 1:
        assert "its process ended without a result" in outcomes["dies"]
        assert (tmp_path / "first.threads").read_text() == "1"  # a thread for each run
        times = [list(map(float, (tmp_path / f"{name}.times").read_text().split())) for name in ("first", "fails")]
        assert max(begun for begun, _ in times) < min(ended for _, ended in times)  # side by side
        begun = float((tmp_path / "search.times").read_text().split()[0])
        assert begun > times[0][1], "a system with the model of another one begins after its training"


class Clock:
    """A clock that a training moves."""

    seconds = 0.0

    def __call__(self):
        return self.seconds

    def move(self, seconds):
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for name in ("monotonic", "time"):
        monkeypatch.setattr(launch.time, name, clock)
    monkeypatch.setattr(launch.time, "sleep", clock.move)
    return clock


def test_the_screen_shows_which_run_trains_and_the_time_left(tmp_path, monkeypatch, clock, capsys):
    """Runs that are trained, or use the model of another one, take little time, and say nothing about the others."""
    of_minutes = {"before": 0, "one": 90, "search": 2, "fails": 1, "two": 120, "last": 100}
    all_runs = runs(tmp_path, *of_minutes)
    all_runs[2].training_of = "one"
    monkeypatch.setattr(launch, "is_trained", lambda run, _: run.system in ("before", "search"))

    def train(run, stages_of, program):
        clock.move(60 * of_minutes[run.system])
        return "no memory" if run.system == "fails" else ""

    monkeypatch.setattr(launch, "run_stages", train)
    assert len([*launch.outcomes(all_runs, stages_of, "x", arguments())]) == 6
    assert capsys.readouterr().out.splitlines() == [
        "== run 1 of 6: before, seed 1",
        "== run 2 of 6: one, seed 1",
        "== run 3 of 6: search, seed 1, about 4 h 30 min left",  # 3 * 90 minutes
        "== run 4 of 6: fails, seed 1, about 4 h 30 min left",
        "== run 5 of 6: two, seed 1, about 3 h 0 min left",
        "== run 6 of 6: last, seed 1, about 1 h 45 min left",  # the mean of 90 and 120 minutes
    ]


def test_the_screen_shows_how_many_runs_have_ended_side_by_side(tmp_path, monkeypatch, clock, capsys):
    """The jobs begin together and end after 60, 90 and 60 seconds; the third waits for the end of the first."""

    class Job(Ended):
        def __init__(self, seconds):
            super().__init__("")
            self.end = clock() + seconds

        def done(self):
            return clock() >= self.end

        def cancel(self, check):
            pass

    seconds = iter((60, 90, 60))
    executor = Submitted()
    executor.submit = lambda *_: Job(next(seconds))
    monkeypatch.setattr(local, "executor", executor)
    monkeypatch.setattr(jobs, "POLL", 1)
    for name in ("PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    handler = signal.getsignal(signal.SIGINT)
    assert len([*launch.outcomes(runs(tmp_path, "a", "b", "c"), stages_of, "x", arguments(jobs=2))]) == 3
    assert signal.getsignal(signal.SIGINT) == handler, "that of the caller"
    assert capsys.readouterr().out.splitlines() == [
        "== a, seed 1: begun, run 1 of 3, log: a.log",
        "== b, seed 1: begun, run 2 of 3, log: a.log",
        "== a, seed 1: done, 60 s; 1 of 3 runs have ended, about 1 min left",
        "== c, seed 1: begun, run 3 of 3, log: a.log",
        "== b, seed 1: done, 90 s; 2 of 3 runs have ended, about 1 min left",
        "== c, seed 1: done, 60 s; 3 of 3 runs have ended",
    ]


@pytest.mark.parametrize(
    "took, waiting, running, jobs, text",
    [
        ([], 3, [10], 1, ""),
        ([60], 0, [], 1, ""),
        ([50], 1, [], 1, ", about 1 min left"),
        ([600, 1200], 4, [], 2, ", about 30 min left"),  # two after each other, side by side
        ([600], 1, [], 8, ", about 10 min left"),  # a run is not divided
        ([600], 0, [900], 1, ", about 1 min left"),
        ([3600], 3, [1800], 2, ", about 1 h 45 min left"),  # (3 + 1/2) / 2 hours
    ],
)
def test_the_time_left_is_that_of_the_runs_that_have_not_ended(took, waiting, running, jobs, text):
    assert launch.time_left(took, waiting, running, jobs) == text


def training_stub(folder):
    """What takes the place of launch.run_stages: fails or ends its process for some systems.

    submitit pickles it by value.
    """

    def train(experiment, stages_of, program):
        import os
        import time

        begun, name = time.time(), experiment.system
        time.sleep(1)
        (folder / f"{name}.threads").write_text(os.environ["OMP_NUM_THREADS"])
        if name == "dies":
            os._exit(3)
        (folder / f"{name}.times").write_text(f"{begun} {time.time()}")
        return "stage 7 (train) failed with status 1: no memory" if name == "fails" else ""

    return train


def test_a_system_with_another_search_takes_the_present_model(tmp_path, monkeypatch):
    (trained,) = runs(tmp_path, "rope")
    search = replace(trained, system="search", training_of="rope")
    average = Average()
    refused = f"{average.description}: takes the averaged model of rope, seed 1, which has none ({trained.model})"
    assert launch.run_stages(search, stages_of, "x") == refused
    trained.checkpoints.mkdir(parents=True)
    for number in (1, 2):
        for path in (trained.averaged, trained.history):
            path.unlink(missing_ok=True)
            path.write_text(f"{path.name} {number}")
        assert launch.run_stages(search, stages_of, "x") == refused, "no stage has written these files"
        with monkeypatch.context() as patch:
            patch.setattr(Stamps, "is_done", lambda stamps, _: stamps._run.system == "rope")
            Runner(search).ensure(average)
        assert search.averaged.samefile(trained.averaged)
        assert search.history.read_text() == f"history.jsonl {number}"
    assert (search.model / "earlier" / "1" / "averaged.pt").read_text() == "averaged.pt 1"
    search.history.unlink()
    monkeypatch.setattr(Stamps, "is_done", lambda *_: True)
    Runner(search).ensure(average)
    assert search.history.exists() and search.averaged.samefile(trained.averaged)


class Ended:
    """An ended job, in place of submitit's."""

    def __init__(self, failure):
        self.failure = failure
        none = Path("/none")
        self.paths = argparse.Namespace(stdout=Path("a.log"), submitted_pickle=none, result_pickle=none)

    def done(self):
        return True

    def exception(self):
        return None

    def result(self):
        return self.failure


class Submitted:
    """An executor that notes what is submitted."""

    def __init__(self):
        self.submissions = []

    def __call__(self, folder):
        return self

    def submit(self, in_job, function, run, fatal, starter):
        self.submissions.append((run.system, run.gpus, starter.gpus))
        return Ended("")


@pytest.mark.parametrize(
    "visible, asked, jobs, expected",
    [
        ("2,GPU-ab,5", None, 2, ["2", "GPU-ab", "2"]),
        ("2,GPU-ab,5", None, 8, ["2", "GPU-ab", "5"]),
        ("", 2, 8, ["0", "1", "0"]),
        ("", 1, 8, ["0", "0", "0"]),
        ("", 0, 2, ["", "", ""]),
    ],
)
def test_each_job_has_one_of_the_visible_and_requested_gpus(tmp_path, monkeypatch, visible, asked, jobs, expected):
    executor = Submitted()
    monkeypatch.setattr(local, "executor", executor)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for name, value in (("PYTHONPATH", ""), ("OMP_NUM_THREADS", "7"), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.setenv(name, value)
    three = [replace(run, gpus=asked) for run in runs(tmp_path, "a", "b", "c")]
    assert len([*launch.outcomes(three, stages_of, "x", arguments(jobs=jobs))]) == 3
    gpus = 0 if asked == 0 else 1
    assert executor.submissions == [(name, gpus, gpu) for name, gpu in zip("abc", expected, strict=True)]


@pytest.fixture
def with_slurm(tmp_path, monkeypatch):
    """Programs in place of SLURM's, which note their calls. Each prints the next line of its file; "error" fails.

    squeue knows no other jobs.
    """
    monkeypatch.setattr(slurm.SlurmExecutor, "affinity", classmethod(lambda cls: 1))
    monkeypatch.setattr("submitit.slurm.slurm.shutil.which", lambda name: "/usr/bin/srun")
    monkeypatch.setenv("PYTHONPATH", "")
    programs = tmp_path / "slurm"
    programs.mkdir()
    for name in ("sbatch", "squeue", "sacct", "scancel"):
        text = f"#!/bin/bash\ncd {programs}; echo {name} >> calls; line=$(head -n 1 {name}.txt 2> /dev/null)\n"
        text += f"sed -i 1d {name}.txt 2> /dev/null; [[ $line == error* ]] && echo $line >&2 && exit 1; echo -e $line\n"
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name in ("ASKING", "LATE", "UNKNOWN"):
        monkeypatch.setattr(slurm, name, 0)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return programs


ONE_SLURM_JOB = arguments(launcher="slurm", jobs=None, slurm=["time=600"])


def slurm_outcomes(of_runs):
    return launch.outcomes(of_runs, stages_of, "x", ONE_SLURM_JOB)


NOT_UNDERSTOOD = ("gone fishing", 'Could not make sense of sbatch output "gone fishing"')
INVALID = "error: Invalid job id specified"
SILENT = "error: Unable to contact slurm controller (connect failure)"


def answer(programs, program, *lines):
    """Let a program print these lines, one at each call."""
    (programs / f"{program}.txt").write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("printed, why", [NOT_UNDERSTOOD, ("error: too many jobs", "error: too many jobs")])
def test_a_failed_submission_waits_for_a_job_or_fails_alone(tmp_path, with_slurm, capfd, printed, why):
    answer(with_slurm, "sbatch", printed, "Submitted batch job 7", printed, "Submitted batch job 9")
    answer(with_slurm, "squeue", *4 * [INVALID])
    (a, refused), (b, unknown), (c, again) = slurm_outcomes(runs(tmp_path, "a", "b", "c"))
    assert [run.system for run in (a, b, c)] == [*"abc"]
    assert refused == f"it could not be submitted: {why}"
    screen = capfd.readouterr()
    assert f"== c, seed 1: {refused}; it waits for the end of a job" in screen.out and screen.err == ""
    assert unknown == "SLURM does not know its job 7 any more, which has no result, and it has no log"
    assert "job 9 " in again and "scancel" not in (with_slurm / "calls").read_text()


def test_after_each_end_of_a_job_one_more_is_tried_and_the_refusal_is_shown_once(tmp_path, with_slurm, capsys):
    refused = "error: too many jobs"
    of_sbatch = [refused if number is None else f"Submitted batch job {number}" for number in (5, None, 6, None, 7, 8)]
    answer(with_slurm, "sbatch", *of_sbatch)
    answer(with_slurm, "squeue", "5|FAILED|", "6|RUNNING|", "6|FAILED|", r"7|FAILED|\n8|FAILED|")
    assert len([*slurm_outcomes(runs(tmp_path, *"abcd"))]) == 4
    screen = capsys.readouterr().out
    assert re.findall("== (.), seed 1: (begun|it could|failed)", screen) == [
        *(("a", "begun"), ("b", "it could"), ("a", "failed")),
        *(("b", "begun"), ("b", "failed")),
        *(("c", "begun"), ("d", "begun"), ("c", "failed"), ("d", "failed")),
    ]


@pytest.mark.parametrize(
    "shown, recorded, state",
    [
        (["8|RUNNING|None", SILENT, "8|TIMEOUT|TimeLimit"], [], "TIMEOUT"),
        (["8|PENDING|Resources", "8|CANCELLED|Resources"], [], "CANCELLED"),
        (["8|RUNNING|", "8|REQUEUED|", "8|PENDING|", "8|NODE_FAIL|"], [], "NODE_FAIL"),
        (["8|SUSPENDED|", "8|COMPLETING|", "8|OUT_OF_MEMORY|"], [], "OUT_OF_MEMORY"),
        ([INVALID, INVALID], ["8|RUNNING", "8|CANCELLED by 1000"], "CANCELLED"),
        ([INVALID, ""], ["8|PENDING", "8|FAILED"], "FAILED"),
        (["8|PREEMPTED|"], [], "PREEMPTED"),
    ],
)
def test_a_job_is_waited_for_until_slurm_names_the_state_that_ended_it(
    tmp_path, with_slurm, capfd, shown, recorded, state
):
    """slurmctld knows ended jobs for some minutes. Then the accounting does, if there is one."""
    answer(with_slurm, "sbatch", "Submitted batch job 8")
    answer(with_slurm, "squeue", *shown)
    answer(with_slurm, "sacct", *recorded)
    ((_, why),) = slurm_outcomes(runs(tmp_path, "a"))
    assert why == f"SLURM ended its job 8: {state}, and it has no log"
    calls = (with_slurm / "calls").read_text().split()
    assert (calls.count("squeue"), calls.count("sacct")) == (len(shown), len(recorded))
    screen = capfd.readouterr()
    assert screen.err == "" and len(screen.out.splitlines()) == 2, "one line a change, not one a question"


def test_a_run_is_submitted_again_until_slurmctld_answers(tmp_path, with_slurm, capfd):
    answer(with_slurm, "sbatch", SILENT, SILENT, "Submitted batch job 7")
    answer(with_slurm, "squeue", "7|FAILED|")
    ((_, why),) = slurm_outcomes(runs(tmp_path, "a"))
    assert why.startswith("SLURM ended its job 7: FAILED")
    screen = capfd.readouterr()
    refused, *others = screen.out.splitlines()
    assert refused == f"== a, seed 1: it could not be submitted: {SILENT}; tried again until it can be"
    assert len(others) == 2 and screen.err == ""


def test_one_question_is_for_all_jobs(tmp_path, with_slurm):
    """Each question lasts some 20 seconds while slurmctld does not answer."""
    answer(with_slurm, "sbatch", "Submitted batch job 7", "Submitted batch job 8")
    answer(with_slurm, "squeue", SILENT, SILENT, r"7|CANCELLED|\n8|RUNNING|", "8|TIMEOUT|")
    outcomes = {run.system: why for run, why in slurm_outcomes(runs(tmp_path, "a", "b"))}
    assert "7: CANCELLED" in outcomes["a"] and "8: TIMEOUT" in outcomes["b"]
    assert (with_slurm / "calls").read_text().split().count("squeue") == 4


def test_the_reason_of_a_pending_job_is_shown_once_for_each_change(tmp_path, with_slurm, monkeypatch, capsys):
    """Resources and Priority alternate while a job waits for its turn."""
    monkeypatch.setattr(slurm, "PENDING", 0)
    answer(with_slurm, "sbatch", "Submitted batch job 7")
    reasons = ("None", "Priority", "Resources", "JobHeldUser", "JobHeldUser", "PartitionDown")
    states = [f"7|PENDING|{reason}" for reason in reasons]
    answer(with_slurm, "squeue", *states, "7|RUNNING|None", "7|PENDING|JobHeldUser", "7|FAILED|")
    assert len([*slurm_outcomes(runs(tmp_path, "a"))]) == 1
    of_reasons = re.findall(
        r"== a, seed 1: SLURM has not begun its job 7 for a minute: (\w+)\n", capsys.readouterr().out
    )
    assert of_reasons == ["Priority", "JobHeldUser", "PartitionDown", "JobHeldUser"]


def test_one_line_names_the_jobs_that_wait_for_the_same_reason(tmp_path, with_slurm, monkeypatch, capsys):
    monkeypatch.setattr(slurm, "PENDING", 0)
    monkeypatch.setattr(jobs, "NAMED", 1)
    answer(with_slurm, "sbatch", *(f"Submitted batch job {number}" for number in (7, 8, 9)))
    pending = r"7|PENDING|Priority\n8|PENDING|Priority\n9|PENDING|PartitionDown"
    answer(with_slurm, "squeue", pending, r"7|FAILED|\n8|FAILED|\n9|FAILED|")
    assert len([*slurm_outcomes(runs(tmp_path, *"abc"))]) == 3
    assert [line for line in capsys.readouterr().out.splitlines() if "has not begun" in line] == [
        "== a, seed 1: SLURM has not begun its jobs 7 and 1 more for a minute: Priority",
        "== c, seed 1: SLURM has not begun its job 9 for a minute: PartitionDown",
    ]


def test_a_job_that_has_just_been_submitted_needs_no_reason(tmp_path, with_slurm, capsys):
    answer(with_slurm, "sbatch", "Submitted batch job 7")
    answer(with_slurm, "squeue", "7|PENDING|Priority", "7|FAILED|")
    assert len([*slurm_outcomes(runs(tmp_path, "a"))]) == 1
    assert "Priority" not in capsys.readouterr().out


def test_a_finished_run_is_not_submitted_and_does_not_count_as_failed(tmp_path, with_slurm, monkeypatch, capsys):
    one, two, search = runs(tmp_path, "one", "two", "search")
    search.training_of = "two"
    average = Average()
    monkeypatch.setattr(Average, "inputs", lambda *_: [])
    monkeypatch.setattr(Average, "prepare", lambda *_: None)
    monkeypatch.setattr(Average, "run", lambda _, run, shell: [path.touch() for path in average.outputs(run)])
    for run in (one, search):
        run.checkpoints.mkdir(parents=True)
        Runner(run).ensure(average)
    (tmp_path / "data-bin").mkdir()
    two.binary_data[0].touch()  # other data: two has to be trained again, and its model is not that of search
    outcomes = launch.outcomes([one, two, search], lambda run: (average,), "x", ONE_SLURM_JOB)
    assert next(outcomes) == (one, "")
    assert [why[:28] for _, why in outcomes] == ["it could not be submitted: C"] * 2, "the model of search is outdated"
    assert "== one, seed 1: done before" in capsys.readouterr().out


def test_a_slurm_job_has_the_parameters_that_are_given(tmp_path, with_slurm):
    (run,) = runs(tmp_path, "one")
    given = ["time=600", "mem=16GB", "exclusive=true", "setup=module load a", "setup=b", "srun_args=--x 1"]
    launcher = launch.launcher_of(arguments(launcher="slurm", slurm=given, slurm_partition="gpu"), run)
    text = launcher.executor(tmp_path)._make_submission_file_text("python", "1")
    for line in ("--partition=gpu", "--time=600", "--mem=16GB", "--exclusive"):
        assert f"#SBATCH {line}\n" in text
    assert "module load a\nb\n" in text and re.search("^srun .* --x 1 ", text, re.M)
    assert "#SBATCH --error" not in text, "the log that messages name has all output"
    two = replace(run, gpus=2)
    assert launch.launcher_of(arguments(launcher="slurm", slurm=["time=9"]), two).slurm["gpus_per_node"] == 2
    own = arguments(launcher="slurm", slurm=["time=9", "gpus_per_node=4"])
    assert launch.launcher_of(own, two).slurm["gpus_per_node"] == 4
    with pytest.raises(InputError, match="^--gpus 2: --slurm gpus_per_node=1 requests fewer; drop one of them$"):
        launch.launcher_of(arguments(launcher="slurm", slurm=["time=9", "gpus_per_node=1"]), two)
    with pytest.raises(InputError, match="--slurm tme=600: "):
        launch.launcher_of(arguments(launcher="slurm", slurm=["tme=600"]), run)


def test_the_devices_of_slurm_jobs_are_not_those_of_the_machine_that_submits_them(tmp_path, with_slurm, monkeypatch):
    """This machine has no GPUs for the flags."""
    (run,) = runs(tmp_path, "one")
    compared = {}
    for name, precision, flags in (("bf16", "bf16", ""), ("fp16", "fp16", ""), ("flag", "auto", "--fp16")):
        settings = replace(run.settings, precision=precision, fairseq_train_flags=flags)
        compared[name] = replace(run, system=name, gpus=99, settings=settings)
    given = arguments(launcher="slurm", slurm=["time=60"], systems=None, system=["one=--arch transformer"], archs=None)
    Comparison(given, "", compared, [*compared.values()]).check()
    of_cpus = {"fp16": replace(compared["fp16"], gpus=0)}
    with pytest.raises(StageError, match="precision=fp16: fairseq trains in fp16 on GPUs only"):
        Comparison(given, "", of_cpus, [*of_cpus.values()]).check()
    with monkeypatch.context() as patch:  # with finished models, nothing is trained
        patch.setattr(launch, "is_trained", lambda *_: True)
        Comparison(given, "", of_cpus, [*of_cpus.values()]).check()
    given.launcher = "local"
    with pytest.raises(StageError, match="--gpus 99: this machine has "):
        Comparison(given, "", compared, [*compared.values()]).check()


def test_the_signal_before_slurms_time_limit_does_not_end_a_command_before_its_job(tmp_path):
    command = "kill -USR2 $$; bash -c 'kill -USR2 $$'; echo goes on"
    shell.run_logged(Average(), command, None, tmp_path / "logs" / "log", ())
    assert (tmp_path / "logs" / "log").read_text() == "goes on\n"


@pytest.mark.parametrize(
    "missing, message",
    [
        (["srun"], "^--launcher slurm --slurm time=60: .*srun"),
        (["scancel"], "^--launcher slurm: sbatch, squeue, scancel must be .*, which has no scancel$"),
        (["sbatch", "squeue", "scancel", "srun"], "which has no sbatch, squeue, scancel$"),
    ],
)
def test_a_machine_without_slurm_is_refused_in_one_sentence(tmp_path, monkeypatch, missing, message):
    monkeypatch.setattr(shutil, "which", lambda name: None if name in missing else f"/usr/bin/{name}")
    with pytest.raises(InputError, match=message):
        launch.launcher_of(arguments(launcher="slurm", slurm=["time=60"]), runs(tmp_path, "one")[0])


HOLD = """
import sys, time
from pathlib import Path
from recipes.run.lock import locked_when_free
with locked_when_free(Path(sys.argv[1])):
    print("locked", time.time(), flush=True)
    time.sleep(float(sys.argv[2]))
    print("free", time.time(), flush=True)
"""


def test_a_run_that_another_process_trains_is_waited_for(tmp_path):
    def hold(seconds):
        command = [sys.executable, "-c", HOLD, str(tmp_path / "locks" / "a.lock"), str(seconds)]
        return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)

    with hold(1.5) as first:
        assert first.stdout.readline().startswith("locked")
        with hold(0) as second:
            assert f"is locked by process {first.pid}" in second.stdout.readline()
            ended = float(first.stdout.readline().split()[1])
            assert float(second.stdout.readline().split()[1]) >= ended


SETTINGS = [*SMALL, *SHORT_OUTPUTS, "max_epochs=1", "average_checkpoints=1"]


@pytest.mark.slow
def test_systems_train_side_by_side_one_fails_and_the_same_command_resumes(tmp_path):
    two = {"rope": f"--arch {ROPE.arch}", "half": f"--arch {HALF.arch} {HALF.flags}"}
    where = ["--data-dir", str(small_corpus(200, 17)), "--work-dir", str(tmp_path)]
    named = [word for name, flags in two.items() for word in ("--system", f"{name}={flags}")]
    command = [sys.executable, "-m", "recipes.compare", "demo", *where, *setting_flags(*SETTINGS), "--seeds", "1"]
    command += ["--gpus", "0"]

    def start(*more, **variables):
        words = [*command, *named, "--jobs", "2", *more]
        in_background = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *words]  # as scripts start "command &"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(in_background, cwd=ROOT, env={**ENVIRONMENT, **variables}, text=True, **pipes)

    run_here(["demo", *where, *setting_flags(*SETTINGS), "--gpus", "0", "--stop-stage", "6"])
    with start() as process:  # stopped while two runs train
        while len([*tmp_path.glob("*.seed1.*/checkpoints/history.jsonl")]) < len(two):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 128 + signal.SIGTERM
        assert "Traceback" not in process.stdout.read()
    for _ in range(100):  # on a busy machine, a killed process needs some time to end
        pgrep = ["pgrep", "-f", str(tmp_path)]
        remaining = subprocess.run(pgrep, capture_output=True, text=True, timeout=LIMIT).stdout
        if not remaining:
            break
        time.sleep(0.1)
    assert not remaining
    broken = ["--system", "broken=--arch transformer --max-tokens-valid 3"]  # no validation sentence fits
    with start(*broken, FORKED_PROGRAMS=forked_programs.folder()) as process:
        printed = process.stdout.read()
    assert process.returncode == 1 and "1 of 3 runs failed: broken, seed 1" in printed, printed
    folder = tmp_path / f"compare.{label('demo', SETTINGS)}"
    page = (folder / "report.html").read_text()
    assert all(name in page for name in (*two, "broken, seed 1"))
    commands = {path.parts[-3]: path.read_text() for path in tmp_path.glob("*/commands/stage07_train.sh")}
    halves = {name.split(".")[0]: "--rope-layout half" in text for name, text in commands.items()}
    assert halves == {name: name == "half" for name in (*two, "broken")}
    assert Path(tmp_path / "jobs").is_dir()
