"""fairseq_rope/patches: killed trainings, and commands with wrong files."""

import errno
import hashlib
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from unittest.mock import Mock

import pytest
import torch
from fairseq import checkpoint_utils, file_io

from fairseq_rope.checkpoints import CheckpointError, load_checkpoint, naming_the_file
from fairseq_rope.patches.ending import refusal as refusal_of
from fairseq_rope.tools.average import main as average
from fairseq_rope.transformer import TransformerRopeModel
from tests.commands import BIN, ENVIRONMENT, LIMIT, PLUGIN, call, run_program, train, training, valid_losses
from tests.patches.contents import RunsCode


def losses_by_update(log):
    """The logged losses by number of updates, and the validation losses by epoch."""
    entries = [json.loads(line) for line in re.findall(r"^.*?(\{.*\})$", log, re.MULTILINE) if '"loss"' in line]
    return {int(entry["num_updates"]): entry["loss"] for entry in entries if "num_updates" in entry}, valid_losses(log)


EVERY_UPDATE = ["--log-interval", 1, "--save-interval-updates", 5, "--keep-interval-updates", 3]


@pytest.mark.slow
def test_training_killed_five_times_has_the_losses_and_weights_of_an_uninterrupted_one(data_bin, tmp_path):
    options = [*EVERY_UPDATE, "--max-epoch", 20, "--keep-last-epochs", 2]
    undisturbed = run_program(*training(data_bin, tmp_path / "undisturbed", *options))
    expected, expected_valid = losses_by_update(undisturbed.stdout + undisturbed.stderr)
    total = max(expected)
    assert total >= 60 and sorted(expected) == list(range(1, total + 1))

    draw = random.Random(7)
    folder = tmp_path / "killed"
    words, log = training(data_bin, folder, *options), tmp_path / "log"
    command = [str(BIN / words[0]), *map(str, words[1:])]
    curve, valid, reached = {}, {}, 0
    for kill in range(5):
        stop_at = min(total - 3, reached + draw.randint(1, total // 5))
        with open(log, "w") as file:
            process = subprocess.Popen(command, env=ENVIRONMENT, stdout=file, stderr=file)
        deadline = time.time() + 120
        while max(losses_by_update(log.read_text())[0], default=0) < stop_at:
            assert time.time() < deadline, log.read_text()
            time.sleep(0.02)
        time.sleep(draw.random() * 0.2)
        process.kill()
        assert process.wait(timeout=LIMIT) == -signal.SIGKILL
        seen, seen_valid = losses_by_update(log.read_text())
        assert min(seen) == 1 or kill > 0
        reached = max(reached, max(seen))
        curve.update(seen)
        valid.update(seen_valid)
        checkpoints = sorted(folder.glob("*.pt"))
        for path in checkpoints:
            load_checkpoint(str(path))  # raises if the file is incomplete
        if sum(re.fullmatch(r"checkpoint_\d+_\d+\.pt", path.name) is not None for path in checkpoints) >= 2:
            average(["--inputs", str(folder), "--num-update-checkpoints", "2", "--output", str(tmp_path / "a.pt")])
    finished = run_program(*words)
    seen, seen_valid = losses_by_update(finished.stdout + finished.stderr)
    assert min(seen) > 1, "the last run resumed"
    curve.update(seen)
    valid.update(seen_valid)
    assert curve == expected
    assert valid == expected_valid
    assert weights_equal(folder / "checkpoint_last.pt", tmp_path / "undisturbed" / "checkpoint_last.pt")
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize(
    "arch, in_shards",
    [("transformer_rope_tiny", False), pytest.param("transformer_tiny", True, marks=pytest.mark.slow)],
)
def test_training_resumed_within_an_epoch_continues_with_the_next_batches(data_bin, tmp_path, arch, in_shards):
    if in_shards:
        shutil.copytree(data_bin, tmp_path / "other")
        data_bin = f"{data_bin}{os.pathsep}{tmp_path / 'other'}"
    options = ["--arch", arch, "--log-interval", 1, "--max-epoch", 4, "--no-epoch-checkpoints"]
    options += ["--save-interval-updates", 2, "--keep-interval-updates", 3]
    expected, expected_valid = losses_by_update(train(data_bin, tmp_path / "one", *options))
    middle = max(expected) * 5 // 8
    per_epoch = max(expected) // 4
    assert middle % per_epoch != 0, "the middle of an epoch"
    train(data_bin, tmp_path / "two", *options, "--max-update", middle)
    curve, valid = losses_by_update(train(data_bin, tmp_path / "two", *options))
    assert curve == {number: loss for number, loss in expected.items() if number > middle}
    assert valid == {epoch: loss for epoch, loss in expected_valid.items() if epoch in valid} and valid
    # The checkpoint of an interval is also written at the end of an epoch.
    assert per_epoch == 4
    for folder in ("one", "two"):
        of_updates = {path.name for path in (tmp_path / folder).glob("checkpoint_*_*.pt")}
        assert of_updates == {"checkpoint_3_12.pt", "checkpoint_4_14.pt", "checkpoint_4_16.pt"}


# -- the wrong file ------------------------------------------------------------------------------------


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).digest() for path in folder.iterdir() if path.is_file()}


def refusal(run, *words):
    """The one-sentence error of *run*, a program or a function, with the arguments *words*."""
    try:
        call(run, *words) if isinstance(run, str) else run(*words)
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise AssertionError(f"argparse refused {words}") from error
        sentence = refusal_of(error) or str(error)
        assert "\n" not in sentence
        return sentence
    raise AssertionError(f"{run} did not refuse {words}")


def load(path):
    """Load *path* as fairseq-generate does."""
    checkpoint_utils.load_model_ensemble_and_task([str(path)])


def saved(state):
    """The bytes that torch.save writes for *state*."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def changed(good, **entries):
    """The bytes of the checkpoint *good* with changed *entries*."""
    return saved({**torch.load(good, weights_only=False), **entries})


def damaged(good):
    data = bytearray(good.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 100] = bytes(byte ^ 255 for byte in data[middle : middle + 100])
    return data


WEIGHTS = {"weight": torch.ones(2)}
# The contents that replace a good checkpoint (None: a folder), and the reason in the message.
BROKEN = {
    "truncated": (lambda good: good.read_bytes()[:-2000], r"is not a valid checkpoint: "),
    "empty": (lambda good: b"", r"is not a valid checkpoint: "),
    "damaged": (damaged, r"is not a valid checkpoint: its part \S+ is damaged"),
    "foreign": (lambda good: saved({"state": WEIGHTS}), r"is not a fairseq checkpoint: it has no entry 'model' with w"),
    "no model": (lambda good: changed(good, model=[1]), r"is not a fairseq checkpoint: it has no entry 'model'"),
    "a number in place of a name": (
        lambda good: changed(good, model={3: torch.ones(2)}),
        r"is not a fairseq checkpoint: it has a weight with the name 3",
    ),
    "text": (lambda good: b"This is no checkpoint.\n", r"was not loaded, and no code in it was run: "),
    "hostile": (
        lambda good: saved({"model": WEIGHTS, "cfg": RunsCode("was_run")}),
        r"was not loaded, and no code in it was run: it contains (posix|nt)\.mkdir",
    ),
    "a folder": (lambda good: None, r"(Is|is) a (directory|folder)"),
}


def generate(data, path, *more):
    return ["fairseq-generate", data, "--user-dir", PLUGIN, "--path", path, "--cpu", *more]


@pytest.mark.parametrize("fault", list(BROKEN))
def test_a_broken_checkpoint_is_named_and_no_file_changes(data_bin, trained, tmp_path, fault, monkeypatch):
    monkeypatch.chdir(tmp_path)
    good, path = trained / "checkpoint_last.pt", tmp_path / "checkpoint_last.pt"
    replacement, reason = BROKEN[fault]
    content = replacement(good)
    path.mkdir() if content is None else path.write_bytes(content)
    shutil.copy(good, tmp_path / "checkpoint1.pt")
    before = digests(tmp_path)
    commands = [(load, path), training(data_bin, tmp_path, "--max-epoch", 30)]
    if fault in ("truncated", "hostile", "a folder"):
        commands.append(training(data_bin, tmp_path / "new", "--finetune-from-model", path))
    for command in commands:
        sentence = refusal(*command)
        assert str(path.parent) in sentence and path.name in sentence, (command, sentence)
        assert re.search(reason, sentence), (command, sentence)
    assert digests(tmp_path) == before
    assert not (tmp_path / "was_run").exists()


def test_an_unreadable_checkpoint_is_named(trained):
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        path = os.path.join(open_to_all, "checkpoint_last.pt")
        shutil.copy(trained / "checkpoint_last.pt", path)
        os.chmod(path, 0)
        if os.geteuid() == 0:  # root may read everything, so become another user
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match=f"Permission denied: '{path}'"):
                checkpoint_utils.load_model_ensemble_and_task([path])
        finally:
            os.seteuid(os.getuid())


def test_data_of_the_other_direction_are_refused(data_bin, trained, tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    shutil.copy(trained / path.name, path)
    before = digests(tmp_path)
    swapped = ["--source-lang", "de", "--target-lang", "en"]
    reason = "was trained from en to de, and the data are from de to en"
    cure = "give data of its direction, or --source-lang en --target-lang de"
    both_ways = (
        """, or --model-overrides "{'source_lang': 'de', 'target_lang': 'en'}" if it was trained in both directions"""
    )
    assert refusal(*training(data_bin, tmp_path, "--max-epoch", 30), *swapped) == f"{path} {reason}: {cure}"
    cure += both_ways
    assert refusal(*generate(data_bin, path), *swapped) == f"{path} {reason}: {cure}"
    assert digests(tmp_path) == before
    shutil.copy(path, tmp_path / "checkpoint_last_a.pt")
    suffixed = generate(data_bin, path, "--checkpoint-suffix", "_a")
    assert refusal(*suffixed, *swapped) == f"{path.with_stem('checkpoint_last_a')} {reason}: {cure}"
    (tmp_path / "checkpoint_last_a.pt").unlink()
    # Finetuning on the other direction is allowed.
    train(data_bin, tmp_path / "new", "--finetune-from-model", path, *swapped, "--max-update", 1)
    assert (tmp_path / "new" / "checkpoint_last.pt").exists()
    validate = ["--path", path, "--task", "translation", "--cpu", "--max-tokens", 500, *swapped]
    assert reason in refusal("fairseq-validate", data_bin, "--user-dir", PLUGIN, *validate)
    with pytest.raises(CheckpointError, match=reason):
        TransformerRopeModel.from_pretrained(str(trained), path.name, str(data_bin), source_lang="de", target_lang="en")
    # --model-overrides can state that the model translates in both directions.
    both = ["--model-overrides", "{'source_lang': 'de', 'target_lang': 'en'}"]
    call(*generate(data_bin, path, *swapped, *both))
    call("fairseq-validate", data_bin, "--user-dir", PLUGIN, *validate, *both)


def test_another_dictionary_of_the_same_size_is_refused(data_bin, trained, tmp_path):
    other, path, old = tmp_path / "other", tmp_path / "checkpoint_last.pt", tmp_path / "old.pt"
    shutil.copy(trained / path.name, path)
    shutil.copytree(data_bin, other)
    for side in ("en", "de"):
        lines = (other / f"dict.{side}.txt").read_text().splitlines()
        (other / f"dict.{side}.txt").write_text("\n".join(reversed(lines)) + "\n")
    file = data_bin / "dict.en.txt"
    reason = rf"{path} was trained with the dictionary {file}, and {other / file.name} .* {file}"
    start = training(other, tmp_path / "new", "--finetune-from-model", path, "--max-epoch", 1)
    validate = ["fairseq-validate", other, "--path", path, "--task", "translation", "--cpu", "--max-tokens", 500]
    for command in (
        training(other, tmp_path, "--max-epoch", 21),
        start,
        generate(other, path),
        [*validate, "--user-dir", PLUGIN],
    ):
        assert re.fullmatch(reason, refusal(*command))
    with pytest.raises(CheckpointError, match=reason):
        TransformerRopeModel.from_pretrained(str(tmp_path), path.name, str(other))
    state = load_checkpoint(str(path))
    del state["extra_state"]["dictionaries"]  # as in checkpoints of fairseq
    torch.save(state, old)
    call(*generate(other, old))


def test_another_rotation_is_refused_although_all_weights_fit(data_bin, tmp_path):
    half, path = ["--rope-layout", "half"], tmp_path / "half" / "checkpoint_last.pt"
    train(data_bin, path.parent, *half, "--no-epoch-checkpoints", "--max-update", 1)
    resumed = training(data_bin, path.parent, "--max-epoch", 2)
    tuned = training(data_bin, tmp_path / "new", "--finetune-from-model", path, "--max-update", 1)
    once = training(data_bin, tmp_path / "new", "--continue-once", path, "--max-update", 1)
    cure = "use the same value, or convert the checkpoint first: python -m fairseq_rope convert-layout"
    for command in (resumed, tuned, once):
        assert refusal(*command) == f"{path} was trained with --rope-layout half, not interleaved; {cure}"
    start = f"start another training from it, in another --save-dir, with --finetune-from-model {path}"
    reason = f"was trained with --rope-base 10000.0, not 500.0; use the same value, or {start}"
    assert refusal(*resumed, *half, "--rope-base", 500) == f"{path} {reason}"
    call(*tuned, *half, "--rope-base", 500)  # finetuning for a longer context may change the base


@pytest.fixture
def without_pause(monkeypatch):
    monkeypatch.setattr("fairseq_rope.patches.saving.PAUSE", 0)


def test_an_error_other_than_a_failed_write_is_raised_unchanged(tmp_path, without_pause):
    class Fails:
        def __reduce__(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="an illegal memory access"):
        checkpoint_utils.torch_persistent_save({"model": Fails()}, str(tmp_path / "checkpoint1.pt"))
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_three_times_is_named_and_leaves_no_file(tmp_path, monkeypatch, without_pause):
    tries, path = [], tmp_path / "checkpoint1.pt"

    def save(obj, file):
        tries.append(file.write(b"the first half of it"))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError, match="could not be written .No space left on device") as refused:
        checkpoint_utils.torch_persistent_save({}, str(path))
    assert refused.value.filename == str(path) and len(tries) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["s3://bucket/checkpoint1.pt", "gone/checkpoint1.pt"])
def test_a_failed_write_is_named_if_the_free_space_is_unknown(path):
    with pytest.raises(OSError) as refused, naming_the_file(path):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    assert (refused.value.filename, refused.value.errno) == (path, errno.EDQUOT)
    assert refused.value.strerror == "could not be written (Disk quota exceeded)"


def test_copying_a_checkpoint_is_atomic(tmp_path, monkeypatch):
    source, target = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new" * 1000)
    target.write_bytes(b"old")

    def killed_halfway(source, target, length):
        target.write(source.read(2))
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.copyfileobj", killed_halfway)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_utils.PathManager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 2


def test_the_complete_checkpoint_is_named_if_its_copy_cannot_be_written(tmp_path, monkeypatch):
    """Without checkpoint_last.pt, training would begin at epoch 1."""
    source, target = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new")
    monkeypatch.setattr("shutil.copyfileobj", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match=f"--restore-file {source} ") as raised:
        checkpoint_utils.PathManager.copy(str(source), str(target), overwrite=True)
    assert raised.value.filename == str(target) and not target.exists()


def test_a_checkpoint_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    order = []
    for name in ("fsync", "rename", "replace"):
        real, step = getattr(os, name), name.replace("replace", "rename")
        monkeypatch.setattr(os, name, lambda *paths, real=real, step=step: (order.append(step), real(*paths))[1])
    path = tmp_path / "checkpoint1.pt"
    checkpoint_utils.torch_persistent_save({}, str(path))
    checkpoint_utils.PathManager.copy(str(path), str(tmp_path / "checkpoint_last.pt"), overwrite=True)
    assert order == ["fsync", "rename"] * 2


def test_a_storage_that_cannot_rename_gets_the_same_checkpoints(data_bin, tmp_path, monkeypatch):
    train(data_bin, tmp_path / "renamed")
    monkeypatch.setattr(file_io.PathManager, "supports_rename", lambda path: False)
    for by_rename in ("fairseq.file_io.PathManager.rename", "fairseq_rope.patches.saving.written_whole"):
        monkeypatch.setattr(by_rename, None)
    train(data_bin, tmp_path / "written")
    renamed, written = (
        {path.name: torch.load(path, weights_only=False) for path in (tmp_path / folder).glob("*.pt")}
        for folder in ("renamed", "written")
    )
    assert renamed.keys() == written.keys() == {f"checkpoint{which}.pt" for which in ("1", "_best", "_last")}
    for name, state in renamed.items():
        for part in ("model", "last_optimizer_state"):
            torch.testing.assert_close(written[name][part], state[part], rtol=0, atol=0)


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--rope-fraction", "0.3"], "--rope-fraction 0.3 of a head of 32 dimensions leaves 9.6 to rotate"),
        (["--decoder-kv-heads", "5"], "--decoder-kv-heads 5: "),
    ],
)
def test_wrong_flags_are_named_before_training_begins(data_bin, tmp_path, flags, reason):
    sentence = refusal(*training(data_bin, tmp_path / "new", *flags))
    assert reason in sentence
    assert not (tmp_path / "new").exists() or digests(tmp_path / "new") == {}


# -- a full disk ---------------------------------------------------------------------------------------

ON_A_SMALL_DISK = """
mkdir {disk} && mount -t tmpfs -o size={size}k tmpfs {disk} || exit 99
{command} > {log} 2>&1
echo "status $?"
cp -r {disk} {copy}
"""


def weights_equal(one, other):
    one, other = (load_checkpoint(str(path))["model"] for path in (one, other))
    return all(torch.equal(one[name], weight) for name, weight in other.items())


@pytest.mark.slow
def test_a_full_disk_is_reported_and_training_resumes_from_the_good_checkpoints(data_bin, trained, tmp_path):
    options = ["--max-epoch", 3, "--keep-last-epochs", 3]
    disk, copy, log = (tmp_path / name for name in ("disk", "copy", "log"))
    command = training(data_bin, disk, *options)
    # room for the three files of epoch 1 (checkpoint1, _best, _last) and one more, but not for copies of that
    size = int(4.5 * (trained / "checkpoint_last.pt").stat().st_size / 1024)
    words = shlex.join([str(BIN / command[0]), *map(str, command[1:])])
    script = ON_A_SMALL_DISK.format(disk=disk, copy=copy, log=log, size=size, command=words)
    small = ["unshare", "--mount", "--map-root-user", "bash", "-c", script]
    done = subprocess.run(small, capture_output=True, text=True, env=ENVIRONMENT, timeout=LIMIT)
    if "status" not in done.stdout:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    assert done.stdout == "status 1\n"
    last = log.read_text().splitlines()[-1]
    assert re.search(rf"{disk}/checkpoint\w+\.pt", last) and re.search(r"No space left on device; \d+ MiB free", last)
    assert {path.name for path in copy.iterdir()} == {f"checkpoint{name}.pt" for name in ("1", "2", "_best", "_last")}
    one, two = copy / "checkpoint1.pt", copy / "checkpoint2.pt"
    assert not weights_equal(one, two)
    for name in ("checkpoint_best.pt", "checkpoint_last.pt"):
        assert weights_equal(copy / name, one) or weights_equal(copy / name, two)
    log = call(*training(data_bin, copy, *options))
    assert "Loaded checkpoint" in log and (copy / "checkpoint3.pt").exists()


@pytest.mark.slow
def test_a_training_with_nan_names_the_module(data_bin, tmp_path):
    """A learning rate of 1e30 makes NaN of the weights, and fairseq searches the module in which it begins."""
    flags = ["--lr", "1e30", "--max-update", 4, "--clip-norm", 1, "--max-tokens", 200]
    done = run_program("fairseq-train", *training(data_bin, tmp_path, *flags)[1:], check=False)
    printed = done.stdout + done.stderr
    assert re.search("(NaN|Inf) detected in output of (en|de)coder", printed)
    assert done.stderr.splitlines()[-1].startswith("fairseq-train: error: ") or "FloatingPointError" in done.stderr
    assert "StopIteration" not in printed
