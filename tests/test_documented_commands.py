"""Every command in the documentation runs as it is printed, with small sizes appended, or NOT_RUN says why not.

The commands of a page run in their order, in a folder that has the files they name. Those of recipes are dry runs,
which check the settings and print all steps; other tests run the steps.
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
from pathlib import Path

import pytest
from fairseq import utils

from fairseq_rope.__main__ import main as fairseq_rope
from recipes.__main__ import main as recipes
from tests.commands import BIN, LIMIT, ROOT, call, train
from tests.commands_on_gpus import SEVERAL_PROCESSES
from tests.recipes.small_demo import small_corpus

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("recipes/*/README.md"))]
COMMAND = re.compile(
    r"([A-Z_]+=\S+ )*(fairseq-|env |torchrun |s(run|batch) |python3? |bash |make |pip |source |lt/bin/|for |segments"
    r"|parallel |mkdir |paste |head |sed |tail )"
)
SHELL = re.compile("(mkdir|paste|head|sed|tail) ")  # run by bash, as they are printed
PYTHON = re.compile("from |import ")
# The beginnings of the blocks that are neither commands nor Python: outputs, formulas, drawings, flags, YAML
TEXTS = (
    *("source  Displays", "output of query m", "x (T, B, C)", "one sentence, beam 3", "cache  "),
    *("--encoder-normalize-before ", "rope: {}", "sinusoidal: {", "model: {_name: "),
)
# The beginnings of commands that do not run here, and another test that runs them or the reason
NOT_RUN = {
    **{command.split(" … ")[0]: "tests/test_several_gpus.py" for command in SEVERAL_PROCESSES[1:]},
    "fairseq-train … --cpu --ddp-backend": "tests/test_several_gpus.py",
    "fairseq-train … --user-dir my_positions": "tests/test_encodings.py",
    "fairseq-hydra-train --config-dir configs": "tests/test_end_to_end.py#test_hydra_trains_the_same_model",
    "python -m recipes demo user_dir=$PWD/my_positions": "tests/recipes/test_user_dir.py",
    "sbatch --array": "tests/recipes/test_slurm.py, tests/serving/test_parts.py",
    **{
        each: "tests/recipes/test_documents_script.py" for each in ("python -m recipes.doc", "segments", "for ", "done")
    },
    "python -m recipes.text.fetch": "tests/recipes/test_fetch.py",
    "python -m recipes.synthetic": "tests/recipes/test_synthetic.py",
    **{f"ENCODING={encoding} SEED=1 ": "tests/recipes/test_paper.py" for encoding in ("none", "learned", "rope")},
    "fairseq-generate binarise-test-…": "needs a trained model of its recipe",
    "make install": "tests/test_install.py",
    "make bench": "tests/test_benchmarks.py",
    "source .venv/bin/activate": "changes the shell",
    "make test-gpu": "needs a GPU",
    "pip install": "downloads packages",
    "python3 -m venv lt": "downloads packages",
    "ARGOS_PACKAGES_DIR=": "needs LibreTranslate; tests/serving/test_argos_programs.py runs it if it is installed",
    "bash tests/other_fairseqs.sh": "downloads packages",
    "parallel ": "needs GNU parallel, which runs the same command as sbatch",
}
# What a reader writes in place of words of a command
PLACEHOLDERS = {
    "^fairseq-train …": "fairseq-train data-bin/wmt17_en_de --user-dir fairseq_rope --arch transformer_rope",
    "^fairseq-generate …": "fairseq-generate data-bin/wmt17_en_de --user-dir fairseq_rope --path averaged.pt",
    "^fairseq-rope export …": "fairseq-rope export --path averaged.pt --data data-bin --output new",
    "…your other flags…$| …$": "",
    "^fairseq-rope package --model served": "fairseq-rope package --model exported",  # served has segments of documents
    r"\bRECIPE\b": "demo",
    r"recipes/\w+/work/(model/)?|my-work/(?=exported)": "",
    r"=(/data|\$PWD/(more|student|joined))/\w+": "=$PWD/test",
    r"\bdata=DIR\b": "",  # the manifest has other checksums
    r"\bgpus=1\b": "gpus=0",
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


def commands_to_run(page):
    return [command for command in commands(page) if not command.startswith(tuple(NOT_RUN))]


# -- the folder --------------------------------------------------------------------------------------


def link(path, target):
    """Make *path* a link to *target*, and the folders around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.fixture(scope="module")
def files(data_bin, text_bin, pairs_bin, made_once):
    """A folder with the files that commands name: binary data, texts, and checkpoints of a tiny model."""
    return made_once("documented", lambda folder: write_files(folder, data_bin, text_bin, pairs_bin))


def write_files(folder, data_bin, text_bin, pairs_bin):
    train(data_bin, folder / "checkpoints", "--max-epoch", 5)
    last = folder / "checkpoints" / "checkpoint_last.pt"
    for path in ("averaged.pt", "model/averaged.pt", "checkpoint_best.pt", "old/checkpoint_best.pt"):
        link(folder / path, last)
    for data in ("data-bin", "old/data-bin"):
        for path in data_bin.iterdir():
            link(folder / data / path.name, path)
        (folder / data / "bpecodes").write_text(codes_of((data_bin / "dict.en.txt").read_text().split()[::2]))
    for name, data in (("wmt17_en_de", data_bin), ("wikitext", text_bin), ("pairs", pairs_bin)):
        link(folder / "data-bin" / name, data)
    (folder / "data-bin" / "segments.json").write_text('{"tokens": 30, "separator": "over"}')
    for path in (ROOT / "fairseq_rope", *ROOT.glob("recipes/*")):
        link(folder / path.relative_to(ROOT), path)
    write_texts(folder, data_bin.parent / "text")
    (folder / "bin").mkdir()
    for name, code in STUBS.items():
        head = f"#!{sys.executable}\nimport sys\nfiles = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        (folder / "bin" / name).write_text(f"{head}{code}\n")
        (folder / "bin" / name).chmod(0o755)
    of_model = ["--path", str(last), "--data", str(folder / "data-bin"), "--output", str(folder / "exported")]
    fairseq_rope(["export", *of_model, "--segment-tokens", "1"])


def codes_of(words):
    """The codes of a BPE that joins the letters of each of *words*."""
    merges = [f"{word[:n]} {word[n]}{'</w>' * (n + 1 == len(word))}" for word in words for n in range(1, len(word))]
    return "\n".join(["#version: 0.2", *dict.fromkeys(merges)]) + "\n"


def write_texts(folder, text):
    """Write the texts that commands read."""
    for name in ("train", "valid", "test", "test.sentences"):
        for lang in ("en", "de"):
            for place in ("", "data"):
                link(folder / place / f"{name}.{lang}", text / f"{name.split('.')[0]}.{lang}")
    for name in ("some.yaml", "two.yaml"):
        (folder / name).write_text("rope: {}\nsinusoidal: {arch: transformer}\n")
    link(folder / "hypotheses.de", text / "test.de")
    (folder / "raw.en").write_text("a dog sees the house\nthe cat\n")
    (folder / "book.en").write_text("a dog sees the house\nthe cat\n\nthe old book\n")
    for name in ("sinusoidal.txt", "rope.txt"):
        lines = (text / "test.de").read_text().splitlines()
        (folder / name).write_text("".join(f"D-{number}\t-0.5\t{line}\n" for number, line in enumerate(lines)))
    (folder / "my-texts").mkdir()
    for name in ("train", "valid", "test"):
        for lang, other in (("de", "en"), ("fr", "de")):
            link(folder / "my-texts" / f"{name}.{lang}", text / f"{name}.{other}")
    link(folder / "all.de", text / "train.en")
    link(folder / "all.fr", text / "train.de")
    shutil.copytree(small_corpus(), folder / "DIR")
    for lang in ("en", "de"):  # the names of Multi30k, too
        for name in ("val", "test_2016_flickr"):
            (folder / "DIR" / f"{name}.{lang}.gz").write_bytes(gzip.compress(b"a\n"))


# -- running -----------------------------------------------------------------------------------------


def run(line):
    """Run a command, or Python, in the current folder, with small sizes appended to what is printed."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if PYTHON.match(line):
            exec(line, {})
        elif SHELL.match(line):
            subprocess.run(["bash", "-ec", line], check=True, timeout=LIMIT)
        elif program := re.match("[a-z-]+", line):
            words = words_of(line)
            redirect(words, stack)
            RUN[program[0]](words)


def words_of(line):
    """The words of a command, as a shell gives them to the program."""
    for printed, written in PLACEHOLDERS.items():
        line = re.sub(printed, written, line)
    return [word.replace("$PWD", os.getcwd()) for word in shlex.split(line, comments=True)]


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
    arch, folder = value_of("--arch", words), Path(value_of("--save-dir", words, "trained"))
    sizes = next(sizes for name, sizes in SIZES.items() if arch.startswith(name))
    more = "--tokens-per-sample 32" if value_of("--task", words) == "masked_lm" else ""
    shutil.rmtree(folder, ignore_errors=True)
    log = call(*words, *f"{sizes} {BRIEF} {more} --save-dir {folder}".split())
    assert (folder / "checkpoint_best.pt").exists() and "usual criterion" not in log


def generate(words):
    printed = call(*words, "--cpu", "--max-len-b", "9")
    assert len(re.findall("^H-", printed, re.M)) == 20


def run_module(words):
    """Run a module as python -m does: the flags of a benchmark are looked up in its help; a recipe makes a dry run."""
    if words[2] == "recipes":
        run_recipe(words[3:])
    else:
        known = output_of_help(importlib.import_module(words[2]).main, words[2])
        assert [word for word in words if word.lstrip("[").startswith("--") and word.strip("[]") not in known] == []


def output_of_help(main, name):
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit, match="^0$"):
            main()
    return printed.getvalue()


def run_recipe(words):
    """Run a recipe with --list, if it has that flag, or --dry-run in place of the flags that say what to run."""
    if "--list" not in words:
        words = [*shlex.split(re.sub(" --(jobs|run) [^ ]+| --report", "", shlex.join(words))), "--dry-run"]
    recipes([words[0], "work=work", *words[1:]])  # a later work=DIR wins


def make(words):
    """Run the command that make would run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    words = ["make", "-n", *words[1:]]  # not as a part of the make that runs the tests
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT)
    *_, line = done.stdout.splitlines()
    run_module(shlex.split(re.sub("^.*?python ", "python ", line)))


RUN = {
    "fairseq-train": train_briefly,
    "fairseq-generate": generate,
    "fairseq-rope": lambda words: fairseq_rope(words[1:]),
    "python": run_module,
    "make": make,
}


@pytest.mark.slow
@pytest.mark.parametrize("page", filter(commands_to_run, PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_run(page, files, tmp_path, monkeypatch):
    folder = tmp_path / "work"
    shutil.copytree(files, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"bin{os.pathsep}{BIN}", prepend=os.pathsep)
    # as if fairseq had imported the folder fairseq_rope; here it is a link to the folder that the tests import
    imported = utils.import_user_module.memo | {str(folder / "fairseq_rope")}
    monkeypatch.setattr(utils.import_user_module, "memo", imported)
    for command in commands_to_run(page):
        try:
            run(command)
        except BaseException as error:
            raise AssertionError(f"{page.name}: {command}") from error
