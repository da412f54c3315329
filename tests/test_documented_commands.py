"""Every command in the documentation runs as it is printed, with small sizes appended, or a table says why not.

The commands of a page run in their order, in a folder that has the files they name. Those of recipes are dry runs,
which check flags and settings, and print the commands of all stages; other tests run the stages.
"""

import contextlib
import gzip
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from fairseq import utils

from fairseq_rope.__main__ import main as fairseq_rope
from recipes.pipeline import __main__ as pipeline
from tests.commands import BIN, LIMIT, ROOT, call, train
from tests.commands_on_gpus import SEVERAL_PROCESSES
from tests.recipes.small_demo import check_flags_here, small_corpus

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("recipes/*/README.md"))]
COMMAND = re.compile(
    r"([A-Z_]+=\S+ )*(fairseq-|env |torchrun |srun |python3? |bash |make |pip |source |export |set |lt/bin/)"
)
PYTHON = re.compile("from |import ")
# The beginnings of the blocks that are neither commands nor Python: outputs, formulas, drawings, flags, YAML
TEXTS = (
    *("source  Displays", "output of query m", "x (T, B, C)", "one sentence, beam 3", "model folder: "),
    *("--encoder-normalize-before ", "rope: --arch", "model: {_name: ", "cache  "),
)
# The beginnings of commands that another test runs, and that test
ELSEWHERE = {
    **{command.split(" … ")[0]: "tests/test_several_gpus.py" for command in SEVERAL_PROCESSES[1:]},
    "fairseq-train … --cpu --ddp-backend": "tests/test_distributed.py",
    "fairseq-train … --user-dir my_positions": "tests/test_encodings.py",
    "fairseq-hydra-train --config-dir configs": "tests/test_end_to_end.py#test_hydra_trains_the_same_model",
    "python -m recipes.compare demo --set user_dir=my_positions": "tests/recipes/test_user_dir.py",
    "python -m recipes.compare.plots": "tests/recipes/test_compare_page.py",
    "python -m recipes.compare.draw_encodings": "tests/recipes/test_draw_encodings.py",
    "python -m recipes.compare.page": "tests/recipes/test_compare_page.py",
    "python -m recipes.documents_en_de.long_test_set": "tests/recipes/test_long_test_set.py",
    "fairseq-rope score --sys hypotheses.de --ref test.de --target-lang de --src test.en --lower-is-better MetricX": (
        "tests/tools/test_score.py#test_metricx_is_called_with_its_own_format"
    ),
    "fairseq-rope translate --launcher slurm": "tests/serving/test_corpus_on_slurm.py",
    "bash recipes/demo/run.sh --work-dir more": "tests/recipes/test_translated_texts.py",
    "bash recipes/demo/run.sh --work-dir student": "tests/recipes/test_translated_texts.py",
    **{f"ENCODING={encoding} SEED=1 ": "tests/recipes/test_paper.py" for encoding in ("none", "learned", "rope")},
    "make install": "tests/test_install.py",
    "make bench": "tests/test_benchmarks.py",
}
# The beginnings of commands that no test runs, and the reason
NOT_RUN = {
    "source .venv/bin/activate": "changes the shell",
    "make test-gpu": "needs a GPU",
    "pip install": "downloads packages",
    "python3 -m venv lt": "downloads packages",
    "ARGOS_PACKAGES_DIR=": "needs LibreTranslate; tests/serving/test_argos_programs.py runs it if it is installed",
    "bash tests/other_fairseqs.sh": "downloads packages",
    "bash recipes/NAME/run.sh [": "a list of flags",
    "[--": "more of the list",
}
# What a reader writes in place of words of a command
PLACEHOLDERS = {
    "^fairseq-train …": "fairseq-train data-bin/wmt17_en_de --user-dir fairseq_rope --arch transformer_rope",
    "^fairseq-generate …": "fairseq-generate data-bin/wmt17_en_de --user-dir fairseq_rope --path averaged.pt",
    "^fairseq-rope export …": "fairseq-rope export --path averaged.pt --data data-bin --output new",
    "…your other flags…$| …$": "",
    r"\bRECIPE\b(?!=)": "demo",
    "^(fairseq-rope export --path) recipes/demo/work/transformer_rope.seed1/": r"\1 ",
    "recipes/demo/work/transformer": "recipes/multi30k_en_de/work/transformer",  # demo is a link to the repository's
    "recipes/demo/work/data-bin": "data-bin",
}
# Programs that the commands call and that need not be installed: Python with the paths of the flags in "files"
STUBS = {
    "comet-score": "for number, _ in enumerate(open(files['-t'])): print(f'text\\tSegment {number}\\tscore: 0.5')",
    "eflomal-align": "for flag in ('-f', '-r'): open(files[flag], 'w').writelines('0-0\\n' for _ in open(files['-s']))",
}
# What is appended to fairseq-train: the sizes of transformer_rope_tiny, and two updates
SIDE = "--{0}-layers 2 --{0}-embed-dim 64 --{0}-ffn-embed-dim 64 --{0}-attention-heads 2 "
BRIEF = "--max-update 2 --max-tokens 500 --optimizer adam --lr 0.001 --cpu --num-workers 0 "
SIZES = {
    "roberta": SIDE.format("encoder") + "--max-positions 40 ",
    "transformer_lm": SIDE.format("decoder") + "--decoder-input-dim 64 --decoder-output-dim 64 --tokens-per-sample 32 ",
    "": SIDE.format("encoder") + SIDE.format("decoder") + "--share-all-embeddings ",
}


OF_THE_OLD_MODEL = ("layers=2", "width=64", "ffn_width=64", "heads=2")  # settings of recipes for the same sizes


def commands(page):
    """The commands of *page* and its Python, in their order, each a string; other blocks must be in TEXTS."""
    text = re.sub(r"^```python\n.*?^```$", "", page.read_text(), flags=re.S | re.M)
    assert "```" not in text, "commands are indented blocks"
    for block in re.findall(r"(?:\A|(?<=\n\n))((?: {4}.*\n)+)", text):
        block = re.sub(r"^ {4}", "", block, flags=re.M)
        if PYTHON.match(block):
            yield block
        elif COMMAND.match(block):
            yield from joined(block)
        else:
            assert block.lstrip().startswith(TEXTS), f"a command? {block}"


def joined(block):
    """The commands of *block*; a backslash or an open quotation mark at the end of a line continues it."""
    line = ""
    for more in block.replace("\\\n", " ").splitlines():
        line = f"{line} {more}".strip()
        with contextlib.suppress(ValueError):  # no closing quotation mark
            shlex.split(line, comments=True)
            yield re.sub(r"\s+", " ", line)
            line = ""
    assert not line


def entry_of(command):
    """The entry of *command* in ELSEWHERE or NOT_RUN; None if the command runs here."""
    return max((entry for entry in (*ELSEWHERE, *NOT_RUN) if command.startswith(entry)), key=len, default=None)


# -- the folder --------------------------------------------------------------------------------------


def link(path, target):
    """Make *path* a link to *target*, and the folders around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.fixture(scope="module")
def files(data_bin, text_bin, pairs_bin, tmp_path_factory):
    """A folder with the files that commands name: binary data, texts, and checkpoints of a tiny model."""
    folder = tmp_path_factory.mktemp("documented")
    train(data_bin, folder / "checkpoints", "--max-epoch", 5)
    last = folder / "checkpoints" / "checkpoint_last.pt"
    for path in ("averaged.pt", "checkpoint_best.pt", "old/checkpoint_best.pt", "transformer_rope.seed1/averaged.pt"):
        link(folder / path, last)
    for data in ("data-bin", "old/data-bin", "work-1/data-bin"):
        for path in data_bin.iterdir():
            link(folder / data / path.name, path)
        (folder / data / "bpecodes").write_text(codes_of((data_bin / "dict.en.txt").read_text().split()[::2]))
    for name, data in (("wmt17_en_de", data_bin), ("wikitext", text_bin), ("pairs", pairs_bin)):
        link(folder / "data-bin" / name, data)
    (folder / "data-bin" / "segments.json").write_text('{"tokens": 30, "separator": "over"}')
    for path in (ROOT / "fairseq_rope", *ROOT.glob("recipes/*")):
        if path.name != "multi30k_en_de":  # it has a work folder here
            link(folder / path.relative_to(ROOT), path)
    for system in ("sinusoidal", "rope", "alibi", "t5", "none"):
        for path in ("checkpoints/checkpoint_5_4500.pt", "averaged.pt"):
            link(folder / "work-1" / f"{system}.seed1.21adb4cd" / path, last)
    write_texts(folder, data_bin.parent / "text")
    prefixes = [word for name in ("train", "valid", "test") for word in (f"--{name}pref", folder / "my-texts" / name)]
    mine = folder / "my-work" / "data-bin"
    call("fairseq-preprocess", "-s", "en", "-t", "fr", *prefixes, "--joined-dictionary", "--destdir", mine)
    shutil.copy(folder / "data-bin" / "bpecodes", mine)
    train(mine, mine.parent / "transformer_rope.seed1", "--max-update", 1)
    link(mine.parent / "transformer_rope.seed1" / "averaged.pt", "checkpoint_last.pt")
    (folder / "bin").mkdir()
    for name, code in STUBS.items():
        head = f"#!{sys.executable}\nimport sys\nfiles = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        (folder / "bin" / name).write_text(f"{head}{code}\n")
        (folder / "bin" / name).chmod(0o755)
    exported = folder / "recipes" / "multi30k_en_de" / "work" / "transformer_rope.seed1" / "ctranslate2"
    exported.parent.mkdir(parents=True)
    of_model = ["--path", str(last), "--data", str(folder / "data-bin"), "--output", str(exported)]
    fairseq_rope(["export", *of_model])
    return folder


def codes_of(words):
    """The codes of a BPE that joins the letters of each of *words*."""
    merges = [f"{word[:n]} {word[n]}{'</w>' * (n + 1 == len(word))}" for word in words for n in range(1, len(word))]
    return "\n".join(["#version: 0.2", *dict.fromkeys(merges)]) + "\n"


def write_texts(folder, text):
    """Write the texts that commands read."""
    for name in ("train", "test"):
        for lang in ("en", "de"):
            link(folder / f"{name}.{lang}", text / f"{name}.{lang}")
    link(folder / "hypotheses.de", text / "test.de")
    (folder / "raw.en").write_text("a dog sees the house\nthe cat\n")
    (folder / "book.en").write_text("a dog sees the house\nthe cat\n\nthe old book\n")
    for name in ("sinusoidal.txt", "rope.txt"):
        lines = (text / "test.de").read_text().splitlines()
        (folder / name).write_text("".join(f"D-{number}\t-0.5\t{line}\n" for number, line in enumerate(lines)))
    (folder / "my-texts").mkdir()
    for name in ("train", "valid", "test"):
        for lang, other in (("en", "en"), ("fr", "de")):
            link(folder / "my-texts" / f"{name}.{lang}", text / f"{name}.{other}")
    for name in ("DIR", "lo-help", "LO_HELP", "long_lo_help"):
        shutil.copytree(small_corpus(), folder / name)
    for lang in ("en", "de"):  # the names of Multi30k, too
        for name in ("val", "test_2016_flickr"):
            (folder / "DIR" / f"{name}.{lang}.gz").write_bytes(gzip.compress(b"a\n"))


# -- running -----------------------------------------------------------------------------------------


class Shell:
    """Runs commands in the current folder."""

    def __init__(self):
        self.arguments, self.variables = [], {}  # $@, and the others by their names

    def run(self, line):
        """Run a command, or Python, with small sizes appended to what is printed. Returns its output."""
        with contextlib.ExitStack() as stack:
            printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            if PYTHON.match(line):
                exec(line, {})
            elif words := self.words_of(line):
                redirect(words, stack)
                RUN[re.match("[a-z-]+", line)[0]](words)
        return printed.getvalue()

    def words_of(self, line):
        """The words of a command, as a shell gives them to the program; none if it sets variables."""
        for printed, written in PLACEHOLDERS.items():
            line = re.sub(printed, written, line)
        words = []
        for word in shlex.split(line, comments=True):
            words += self.arguments if word == "$@" else [self.variables.get(word, word)]
        if words[:2] == ["set", "--"]:
            self.arguments = words[2:]
            return []
        if words and (assigned := re.match(r"(\w+)=(.*)", words[0])):
            self.variables[f"${assigned[1]}"] = assigned[2]
            return []
        return words


def redirect(words, stack):
    """Open the files after < and > in place of standard input and output, and remove them from *words*."""
    for sign, name, mode in (("<", "stdin", "r"), (">", "stdout", "w")):
        if sign in words:
            place = words.index(sign)
            file = stack.enter_context(open(words[place + 1], mode, encoding="utf-8"))
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(sys, name, file)
            del words[place : place + 2]


def value_of(flag, words, default=""):
    return words[words.index(flag) + 1] if flag in words else default


def train_briefly(words):
    arch, folder = value_of("--arch", words), Path(value_of("--save-dir", words, "checkpoints"))
    sizes = next(sizes for name, sizes in SIZES.items() if arch.startswith(name))
    more = "--tokens-per-sample 32" if value_of("--task", words) == "masked_lm" else ""
    shutil.rmtree(folder, ignore_errors=True)
    log = call(*words, *f"{sizes} {BRIEF} {more}".split())
    assert (folder / "checkpoint_best.pt").exists() and "usual criterion" not in log


def generate(words):
    printed = call(*words, "--cpu", "--max-len-b", "9")
    assert len(re.findall("^H-", printed, re.M)) == 20


def interact(words):
    assert re.search("^D-0\t", call(*words, "--cpu", stdin="a small dog runs.\n"), re.M)


def run_module(words):
    """Run a module as python -m does: a benchmark's flags are looked up in its help; the recipes make a dry run."""
    name, words = words[2], words[3:]
    if name.startswith("benchmarks."):
        known = output_of_help(importlib.import_module(name).main, name)
        assert [word for word in words if word.lstrip("[").startswith("--") and word.strip("[]") not in known] == []
    elif words == ["--help"]:
        assert output_of_help(importlib.import_module(name).cli_main, name)
    else:
        module = importlib.import_module({"recipes.compare": "recipes.compare.__main__"}.get(name, name))
        dry_run(
            pipeline.main if name == "recipes.pipeline" else getattr(module, "cli_main", None) or module.main, words
        )


def output_of_help(main, name):
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit, match="^0$"):
            main()
    return printed.getvalue()


def dry_run(main, words):
    place = words.index("--") if "--" in words else len(words)
    more = ["--dry-run"] if "--work-dir" in words else ["--dry-run", "--work-dir", "work"]
    if any("start_checkpoint" in word for word in words):
        more += [word for size in OF_THE_OLD_MODEL for word in ("--set", size)]
    main([*words[:place], *more, *words[place:]])


def run_script(words):
    """Run the run.sh of a recipe."""
    words = [Path(words[1]).parent.name, *words[2:]]
    (pipeline.main if "--list" in words else partial(dry_run, pipeline.main))(words)


def make(words):
    """Run the command that make would run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    words = ["make", "-n", *words[1:]]  # not as a part of the make that runs the tests
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT)
    *_, line = done.stdout.splitlines()
    line = re.sub(r"^.*?((bash|python) )", r"\1", line)
    (run_script if line.startswith("bash") else run_module)(shlex.split(line))


RUN = {
    "fairseq-train": train_briefly,
    "fairseq-generate": generate,
    "fairseq-interactive": interact,
    "fairseq-rope": lambda words: fairseq_rope(words[1:]),
    "python": run_module,
    "bash": run_script,
    "make": make,
}


SLOW = "comparing encodings long_context results results_details results_long_inputs serving training".split()


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=[pytest.mark.slow] if page.stem in SLOW else [])
        for page in PAGES
        if any(entry_of(command) is None for command in commands(page))
    ],
)
def test_the_commands_of_a_page_run(page, files, tmp_path, monkeypatch):
    folder = tmp_path / "work"
    shutil.copytree(files, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"bin{os.pathsep}{BIN}", prepend=os.pathsep)
    # as if fairseq had imported the folder fairseq_rope; here it is a link to the folder that the tests import
    imported = utils.import_user_module.memo | {str(folder / "fairseq_rope")}
    monkeypatch.setattr(utils.import_user_module, "memo", imported)
    check_flags_here(monkeypatch)
    shell = Shell()
    for command in commands(page):
        if entry_of(command) is None:
            try:
                shell.run(command)
            except BaseException as error:
                raise AssertionError(f"{page.name}: {command}") from error


def test_each_command_runs_or_has_a_reason_not_to():
    entries = set()
    for page in PAGES:
        for command in commands(page):
            entries.add(entry_of(command))
            is_run = PYTHON.match(command) or command.partition(" ")[0] in (*RUN, "set") or re.match(r"#|\w+=", command)
            assert is_run or entry_of(command), f"{page.name}: {command}"
    assert {*ELSEWHERE, *NOT_RUN} - entries == set(), "no page has these commands"
    for place in ELSEWHERE.values():
        path, _, function = place.partition("#")
        assert f"def {function or 'test_'}" in (ROOT / path).read_text()


def test_a_new_command_or_block_would_be_found(tmp_path):
    (tmp_path / "page.md").write_text("Text:\n\n    make new\n    fairseq-new \\\n        'one\n      two'   # three\n")
    assert list(commands(tmp_path / "page.md")) == ["make new", "fairseq-new 'one two' # three"]
    for unknown in ("    curl example.org\n", "```bash\nmake demo\n```\n"):
        (tmp_path / "page.md").write_text(f"Text:\n\n{unknown}")
        with pytest.raises(AssertionError):
            list(commands(tmp_path / "page.md"))
