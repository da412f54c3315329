"""fairseq_rope/patches: each patch keeps the behaviour of fairseq alone, where that works.

"fairseq alone" is a second copy of a module of fairseq, loaded from its file, or the function that a replacement wraps.
"""

import builtins
import contextlib
import errno
import io
import itertools
import os
import pkgutil
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import traceback
from argparse import Namespace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, nan_detector, ngram_repeat_block, tasks, trainer, utils
from fairseq import options as fairseq_options
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.data import Dictionary, FastaDataset, LanguagePairDataset, data_utils, token_block_dataset
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder as Builder
from fairseq.data.iterators import CountingIterator, EpochBatchIterator, GroupedIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.file_io import PathManager
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import BaseFairseqModel
from fairseq.models.ema.ema import EMA
from fairseq.models.roberta.hub_interface import RobertaHubInterface
from fairseq.models.transformer import TransformerModel
from fairseq.modules import AdaptiveSoftmax
from fairseq.nan_detector import NanDetector
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.optim import adam, amp_optimizer, fp16_optimizer
from fairseq.options import get_training_parser, parse_args_and_arch
from fairseq.search import DiverseBeamSearch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer

from fairseq_rope import patches
from fairseq_rope.errors import InputError
from fairseq_rope.patches import optimizers, options, saving
from fairseq_rope.plugin import REPLACEMENTS
from fairseq_rope.search.ensemble import FastEnsemble
from tests.commands import ENVIRONMENT, LIMIT, PLUGIN, QUICK_START, ROOT, call, outputs, train
from tests.patches.contents import same_contents
from tests.patches.fairseq_alone import fairseq_alone, fasta_dataset_alone, translation_task, without_replacements


def test_each_file_of_patches_is_in_the_list():
    files = {str(path) for path in (PLUGIN / "patches").rglob("*.py") if "import replaces" in path.read_text()}
    assert files == {module.__file__ for module in patches.MODULES}


@pytest.mark.slow
def test_the_patches_know_nothing_of_the_plugins_models():
    sources = [path.read_text() for path in (PLUGIN / "patches").rglob("*.py")]
    assert not any(re.search("transformer_rope|rotary", source) for source in sources)


def test_the_page_of_differences_lists_each_patch():
    page = without_replacements(ROOT / "docs" / "hooks.py")._patches()
    assert re.findall("(?m)^## `(.*)`$", page) == [patch.target for patch in REPLACEMENTS]
    assert all(patch.reason in page and patch.until in page for patch in REPLACEMENTS)


# -- the same with and without each patch --------------------------------------------------------------


def loading_gives_the_same_state(request, folder):
    path = request.getfixturevalue("trained") / "checkpoint_last.pt"
    with open(path, "rb") as file:
        state = checkpoint_utils.torch.load(file, map_location="cpu")
    assert same_contents(state, torch.load(path, map_location="cpu", weights_only=False))


def upgrading_gives_the_same_state(request, folder):
    path = str(request.getfixturevalue("trained") / "checkpoint_last.pt")
    for overrides in (None, {"dropout": 0.3, "data": "elsewhere"}):
        state = checkpoint_utils.load_checkpoint_to_cpu(path, overrides)
        assert same_contents(state, fairseq_alone().load_checkpoint_to_cpu(path, overrides))


def an_ensemble_has_the_same_weights(request, folder):
    paths = [str(request.getfixturevalue("trained") / "checkpoint_last.pt")]
    overrides = {"data": str(request.getfixturevalue("data_bin"))}
    (ours,), _, _ = checkpoint_utils.load_model_ensemble_and_task(paths, overrides)
    (theirs,), _, _ = fairseq_alone().load_model_ensemble_and_task(paths, overrides)
    assert same_contents(ours.state_dict(), theirs.state_dict())


def resuming_reads_the_same(request, folder):
    """load_checkpoint must give the trainer the same file and flags, and return the same."""
    (folder / "pretrained.pt").touch()
    for changes in (
        {},
        {"restore_file": str(folder / "missing.pt")},
        {"restore_file": str(folder / "pretrained.pt"), "reset_optimizer": True},
        {"finetune_from_model": str(folder / "pretrained.pt")},
        {"finetune_from_model": str(folder / "pretrained.pt"), "continue_once": str(folder / "pretrained.pt")},
    ):
        cfg = Namespace(
            save_dir=str(folder), restore_file="checkpoint_last.pt", finetune_from_model=None,
            reset_optimizer=False, reset_lr_scheduler=False, reset_meters=False, reset_dataloader=False,
            optimizer_overrides="{}", continue_once=None, patience=-1,
        )  # fmt: skip
        vars(cfg).update(changes)
        results = []
        for module in BOTH():
            parts = Namespace(model=Namespace(), task=Namespace(), optimization=Namespace(max_update=9))
            trainer = mock.Mock(checkpoint_suffix="", cfg=parts)
            trainer.get_num_updates.return_value = 8
            trainer.task.cfg = Namespace(source_lang="en", target_lang="de")
            trainer.get_model.return_value = torch.nn.Module()
            trainer.load_checkpoint.return_value = {"train_iterator": {"epoch": 3}, "best": 2.5}
            trainer.get_train_iterator.return_value.epoch = 3
            results.append((module.load_checkpoint(cfg, trainer)[0], trainer.load_checkpoint.call_args))
        assert results[0] == results[1], changes


def BOTH():
    return checkpoint_utils, fairseq_alone()


def expressions_have_the_same_value(request, folder):
    """test_loading.py has more expressions."""
    for text in ("5e-4/2", "[(512, 10, 5)] + [(512, 3, 2)] * 4"):
        assert options.literal(text) == builtins.eval(text), text


def copies_and_renames_are_the_same(request, folder):
    for name, manager in (("ours", checkpoint_utils.PathManager), ("theirs", PathManager)):
        (folder / name).mkdir()
        (folder / name / "disk").mkdir()
        source, target, link = (folder / name / file for file in ("1.pt", "last.pt", "link.pt"))
        source.write_bytes(b"new" * 1000)
        (folder / name / "disk" / "big.pt").write_bytes(b"old")
        link.symlink_to(Path("disk") / "big.pt")
        private, device = folder / name / "private.pt", folder / name / "null.pt"
        private.touch(mode=0o600)
        device.symlink_to("/dev/null")
        for copy in (target, target, link, private, device):
            assert manager.copy(str(source), str(copy), overwrite=True)
        assert stat.S_IMODE(private.stat().st_mode) == 0o600
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
        manager.rename(str(source), str(folder / name / "renamed.pt"))
    described = [
        sorted(
            (str(path.relative_to(top)), path.is_symlink(), path.is_file() and path.read_bytes(), path.stat().st_mode)
            for path in top.rglob("*")
        )
        for top in (folder / "ours", folder / "theirs")
    ]
    assert described[0] == described[1]
    assert ("link.pt", True, b"new" * 1000) in [entry[:3] for entry in described[0]]


def a_saved_state_is_the_same(request, folder):
    state = {"model": {"w": torch.arange(3.0)}, "args": Namespace(x=1)}
    loaded = []
    for name, module in zip(("ours", "theirs"), BOTH(), strict=True):
        path = folder / f"{name}.pt"
        module.torch_persistent_save(state, str(path))
        loaded.append(torch.load(path))
    assert same_contents(*loaded) and sorted(os.listdir(folder)) == ["ours.pt", "theirs.pt"]


def a_second_try_succeeds(request, folder):
    """The first write fails. fairseq leaves its beginning in the file; ours starts again."""
    real, tries = torch.save, []

    def save(obj, file):
        tries.append(file.write(b"half of it"))
        if len(tries) % 2:
            raise OSError("Stale file handle")
        file.seek(-len(b"half of it"), os.SEEK_CUR)
        real(obj, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", save)
        patch.setattr(saving, "PAUSE", 0)
        patch.setattr("time.sleep", lambda seconds: None)
        for name, module in zip(("ours", "theirs"), BOTH(), strict=True):
            module.torch_persistent_save({"model": {}}, str(folder / name))
    assert len(tries) == 4
    assert (folder / "theirs").read_bytes().startswith(b"half of it"), "fairseq is fixed: remove the patch"
    assert not (folder / "ours").read_bytes().startswith(b"half of it")
    assert torch.load(folder / "ours") == {"model": {}}


def fasta_files_have_the_same_index(request, folder):
    (folder / "x.fasta").write_text(">first one\nACGT\nAC\n>second\nA\n>3 > 2\nACGTACGT\n\nAC\n")
    offsets, sizes = FastaDataset(str(folder / "x"))._build_index(str(folder / "x"))
    assert (offsets.tolist(), sizes.tolist()) == ([0, 19, 29], [6, 1, 10])
    if shutil.which("tqdm"):  # fairseq needs it
        alone = fasta_dataset_alone().FastaDataset(str(folder / "x"))
        assert (alone.offsets.tolist(), alone.sizes.tolist()) == ([0, 19, 29], [6, 1, 10])


def other_errors_and_other_programs_keep_their_tracebacks(request, folder):
    errors = {"fairseq-generate": OSError(errno.ENOENT, "No such file", "x.pt"), "mine.py": InputError("of a program")}
    for program, error in errors.items():
        printed = io.StringIO()
        with mock.patch.object(sys, "argv", [program]), contextlib.redirect_stderr(printed):
            sys.excepthook(type(error), error, None)
        assert printed.getvalue() == "".join(traceback.format_exception(error))


def the_same_checkpoints_are_written(request, folder):
    """Test all combinations of flags. The only difference may be the checkpoint that fairseq does not write."""
    moments = ((1, 10, True), (2, 20, True), (2, 15, False), (2, 17, True))
    intervals = ((1, 0), (2, 0), (1, 5), (2, 5))
    for (epoch, updates, ends), no_epoch, (interval, every) in itertools.product(moments, (False, True), intervals):
        written = []
        for module in BOTH():
            with tempfile.TemporaryDirectory(dir=folder) as save_dir:
                cfg = Namespace(
                    **dict.fromkeys(("keep_best_checkpoints", "keep_interval_updates", "keep_last_epochs"), 0),
                    **dict.fromkeys(("no_save", "no_last_checkpoints", "maximize_best_checkpoint_metric"), False),
                    save_dir=save_dir, no_epoch_checkpoints=no_epoch, save_interval=interval,
                    save_interval_updates=every, write_checkpoints_asynchronously=False,
                )  # fmt: skip
                trainer = mock.Mock(data_parallel_rank=0, checkpoint_suffix="", task=None)
                trainer.get_num_updates.return_value = updates
                trainer.save_checkpoint = lambda name, extra_state: (Path(name).touch(), name)[1]
                iterator = mock.Mock(epoch=epoch, **{"end_of_epoch.return_value": ends})
                module.save_checkpoint(cfg, trainer, iterator, None)
                written.append(set(os.listdir(save_dir)))
        left_out = every and updates % every == 0 and ends and (no_epoch or epoch % interval)
        extra = {f"checkpoint_{epoch}_{updates}.pt"} if left_out else set()
        assert written[0] == written[1] | extra, (epoch, updates, ends, no_epoch, interval, every)


def batches_are_the_same(request, folder):
    """Test all kinds of iterables. The only difference may be the last batch, which fairseq drops."""
    assert data_utils.batch_by_size([], None, max_tokens=400) == []
    draw = np.random.RandomState(1)
    for count in (1, 7, 8, 20, 100, 1014):
        order, sizes = draw.permutation(count), np.arange(count) % 30 + 1
        kinds = (np.asarray, list, iter, lambda numbers: dict.fromkeys(numbers).keys())
        limits = ({"max_tokens": 400}, {"max_sentences": 16})
        for kind, limit, multiple in itertools.product(kinds, limits, (1, 8)):
            alone, ours = (
                list(map(list, compose(kind(order), sizes.item, required_batch_size_multiple=multiple, **limit)))
                for compose in (data_utils.batch_by_size.__wrapped__, data_utils.batch_by_size)
            )
            assert ours[: len(alone)] == alone and len(ours) - len(alone) <= 1
            assert sum(ours, []) == order.tolist()
            assert all(len(batch) < multiple or len(batch) % multiple == 0 for batch in ours)


def merged_data_sets_are_the_same(request, folder):
    """test_the_places_of_sentences_in_large_files_are_right has sizes with which fairseq alone is wrong."""
    parts = [[torch.tensor([4, 5, 2]), torch.tensor([6, 2])], [torch.tensor([7, 8, 9, 2])]]
    files = {}
    for name, merge in (("ours", Builder.merge_file_), ("alone", Builder.merge_file_.__wrapped__)):
        builder = Builder(str(folder / f"{name}.bin"), dtype=np.uint16)
        for number, sentences in enumerate(parts):
            part = Builder(str(folder / f"{name}{number}.bin"), dtype=np.uint16)
            for sentence in sentences:
                part.add_item(sentence)
            part.finalize(str(folder / f"{name}{number}.idx"))
            merge(builder, str(folder / f"{name}{number}"))
        builder.finalize(str(folder / f"{name}.idx"))
        files[name] = [(folder / f"{name}.{end}").read_bytes() for end in ("bin", "idx")]
    assert files["ours"] == files["alone"]


def a_training_from_the_beginning_takes_the_same_batches(request, folder):
    ours = tasks.FairseqTask.get_batch_iterator
    of_start = {}
    for name, get_iterator in (("ours", ours), ("fairseq's", ours.__wrapped__)):
        for first in (1, 3):
            task = translation_task(request.getfixturevalue("data_bin"))
            task.load_dataset("train")
            iterator = get_iterator(task, task.dataset("train"), max_tokens=200, seed=5, epoch=first)
            of_start[name, first] = []
            while iterator.next_epoch_idx < 5:
                batches = list(iterator.next_epoch_itr(shuffle=True))
                of_start[name, first].append([batch["id"].tolist() for batch in batches])
    assert of_start["ours", 1] == of_start["fairseq's", 1]
    assert of_start["ours", 3] == of_start["ours", 1][2:]
    assert of_start["fairseq's", 3] != of_start["fairseq's", 1][2:], "fairseq is fixed: remove the patch"


def averages_of_weights_are_the_same(request, folder):
    """test_compatibility.py has models whose norms an average lost."""
    averages = []
    for restore in (EMA.restore, EMA.restore.__wrapped__):
        with mock.patch.object(EMA, "restore", restore):
            average = EMA(
                torch.nn.Linear(2, 2), Namespace(ema_decay=0.5, ema_seed_model=None, ema_fp32=False, ema_update_freq=1)
            )
            with torch.no_grad():
                for weight in average.model.parameters():
                    weight.fill_(2.0)
            changed = torch.nn.Linear(2, 2)
            torch.nn.init.ones_(changed.weight), torch.nn.init.zeros_(changed.bias)
            average.step(changed)
            averages.append(average.get_model().state_dict())
    assert same_contents(*averages) and set(averages[0]["weight"].flatten().tolist()) == {1.5}


def modules_with_nan_are_named(request, folder):
    """Encoders, on which fairseq's hook fails, are in test_a_training_with_nan_names_the_module."""
    named = []
    for add_hooks in (NanDetector.add_hooks, NanDetector.add_hooks.__wrapped__):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        torch.nn.init.constant_(model[1].weight, float("nan"))
        with mock.patch.object(NanDetector, "add_hooks", add_hooks), contextlib.ExitStack() as stack:
            warning = stack.enter_context(mock.patch.object(nan_detector.logger, "warning"))
            with NanDetector(model):
                model(torch.ones(3, 2)).sum().backward()
        named.append([call.args[0].partition(",")[0] for call in warning.call_args_list])
    assert named[0] == named[1] and named[0][0] == "NaN detected in output of 1"


class NumbersTo20(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return index

    def __len__(self):
        return 20


def iterators_resume_at_the_same_place(request, folder):
    """test_resuming.py has other batches than those of the checkpoint."""
    batches = [[2 * number, 2 * number + 1] for number in range(10)]
    made = [EpochBatchIterator(NumbersTo20(), list, batches, persistent_workers=False) for _ in range(3)]
    epoch = made[0].next_epoch_itr()
    seen = [next(epoch) for _ in range(4)]
    state = made[0].state_dict()
    alone = EpochBatchIterator.state_dict.__wrapped__(made[0])
    assert state == {**alone, "batches_seen": [4, 10]}
    EpochBatchIterator.load_state_dict.__wrapped__(made[1], state)
    made[2].load_state_dict(state)
    grouped = [object.__new__(GroupedIterator) for _ in range(2)]
    GroupedIterator.__init__(grouped[0], CountingIterator([*range(9)], start=4, total=13), 4)
    GroupedIterator.__init__.__wrapped__(grouped[1], CountingIterator([*range(9)], start=4, total=13), 4)
    assert [*grouped[0]] == [*grouped[1]] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    rests = [list(iterator.next_epoch_itr()) for iterator in made[1:]]
    assert rests[0] == rests[1] and sorted(sum(seen + rests[0], [])) == [*range(20)]


def outputs_without_unknown_words_are_the_same(request, folder):
    data, trained = (request.getfixturevalue(name) for name in ("data_bin", "trained"))
    path, lines = trained / "checkpoint_last.pt", (data.parent / "text" / "test.en").read_text()
    search = ["--cpu", "--max-len-b", 9, "--buffer-size", 20, "--replace-unk"]
    words = [data, "-s", "en", "-t", "de", "--path", path, "--user-dir", PLUGIN, *search]
    printed = [call("fairseq-interactive", *words, stdin=lines)]
    with pytest.MonkeyPatch.context() as alone:
        for owner, name in ((utils, "post_process_prediction"), *((tasks.FairseqTask, name) for name in OF_THE_TASK)):
            alone.setattr(owner, name, getattr(owner, name).__wrapped__)
        words[-1:] = ["--replace-unk", os.devnull]
        printed.append(call("fairseq-interactive", *words, stdin=lines))
        with pytest.raises(IndexError):  # what the patches mend
            call("fairseq-interactive", *words, "--unkpen", -1000, stdin=lines)
    for letter in "SHD":
        ours, theirs = (outputs(lines, letter) for lines in printed)
        assert ours == theirs and len(ours) == 20


def generators_find_the_same(request, folder):
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(request.getfixturevalue("trained") / "checkpoint_last.pt")]
    )
    model.make_generation_fast_(need_attn=False)
    tokens = torch.randint(4, len(task.source_dictionary), (3, 7))
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": torch.full((3,), 7)}}
    ours, fairseqs = (SequenceGenerator([model], task.target_dictionary, max_len_b=9) for _ in range(2))
    SequenceGenerator.__init__.__wrapped__(fairseqs, [model], task.target_dictionary, max_len_b=9)
    assert (type(ours.model), type(fairseqs.model)) == (FastEnsemble, EnsembleModel)
    for each, other in zip(
        *(sum(generator.generate([model], sample), []) for generator in (ours, fairseqs)), strict=True
    ):
        assert each["tokens"].tolist() == other["tokens"].tolist()
        torch.testing.assert_close(each["positional_scores"], other["positional_scores"], rtol=0, atol=1e-5)


def lexicons_are_the_same(request, folder):
    (folder / "lexicon").write_text("dog HUND\nhouse HAUS 0.7\n")
    for flag in (None, "", str(folder / "lexicon")):
        assert utils.load_align_dict(flag) == utils.load_align_dict.__wrapped__(flag)
    assert utils.load_align_dict("@@ ") == {}
    with pytest.raises(FileNotFoundError):  # what the patch mends
        utils.load_align_dict.__wrapped__("@@ ")


OF_THE_TASK = ("build_generator", "get_interactive_tokens_and_lengths")


def token_blocks_are_the_same(request, tmp_path):
    words, sizes = [torch.arange(n) for n in (3, 5, 2)], [3, 5, 2]
    alone = without_replacements(token_block_dataset.__file__)
    for mode, block_size in (("none", 4), ("complete", 6)):
        ours, stock = (m.TokenBlockDataset(words, sizes, block_size, 1, 2, mode) for m in (token_block_dataset, alone))
        assert [block.tolist() for block in ours] == [block.tolist() for block in stock]
    by_sentence = token_block_dataset.TokenBlockDataset(words, sizes, None, 1, 2, "eos")
    assert [block.tolist() for block in by_sentence] == [sentence.tolist() for sentence in words]


def pairs_in_buckets_are_padded(request, tmp_path):
    """fairseq alone fails with NumPy 2. Two buckets end at the lower median of the lengths, and at the longest one."""
    dictionary = Dictionary()
    sizes = [2, 3, 5, 7]
    sentences = [torch.full((size,), dictionary.eos()) for size in sizes]
    data = LanguagePairDataset(sentences, np.array(sizes), dictionary, num_buckets=2)
    assert [len(data[n]["source"]) for n in range(4)] == [3, 3, 7, 7]
    assert data[0]["source"].tolist() == [dictionary.pad(), dictionary.eos(), dictionary.eos()]


def functions_on_data_are_the_same(request, tmp_path):
    alone = without_replacements(data_utils.__file__)
    draws = {"seed": 3, "epoch": 1, "indices": torch.arange(2)}
    masks = [module.compute_mask_indices((2, 20), None, 0.3, 4, **draws) for module in (data_utils, alone)]
    assert masks[0].any() and (masks[0] == masks[1]).all()
    sizes = np.array([1, 2, 4, 9])
    assert data_utils.get_buckets(sizes, 3).tolist() == [2, 4, 9]


def flags_have_the_same_meaning(request, folder):
    words = [str(folder), "--arch", "transformer_tiny", "-s", "en", "-t", "de"]
    with pytest.raises(SystemExit):  # the spelling of torch.distributed.launch
        fairseq_options.parse_args_and_arch.__wrapped__(get_training_parser(), [*words, "--local-rank=3"])
    assert fairseq_options.parse_args_and_arch(get_training_parser(), [*words, "--local-rank=3"]).device_id == 3
    for flags in ([], ["--fp16"], ["--memory-efficient-fp16", "--seed", "7"], ["--tpu"], ["--amp", "--cpu"]):
        ours, alone = (
            parse(get_training_parser(), [*words, *flags])
            for parse in (fairseq_options.parse_args_and_arch, fairseq_options.parse_args_and_arch.__wrapped__)
        )
        assert vars(ours) == vars(alone)
    ours, unknown = fairseq_options.parse_args_and_arch(get_training_parser(), [*words, "--x", "--bf16"], True)
    assert unknown == ["--x"] and not ours.tpu
    alone = fairseq_options.parse_args_and_arch.__wrapped__(get_training_parser(), [*words, "--bf16"])
    assert alone.tpu, "fairseq is fixed: remove the patch"


def of_flags(data, *flags):
    words = [str(data), "--arch", "transformer_tiny", "-s", "en", "-t", "de", "--cpu", "--lr", "0.1", *flags]
    return convert_namespace_to_omegaconf(parse_args_and_arch(get_training_parser(), words))


def trainers_are_the_same(request, folder):
    for flags, name in (([], "FairseqAdam"), (["--memory-efficient-fp16"], "MemoryEfficientFP16Optimizer")):
        cfg = of_flags(request.getfixturevalue("data_bin"), "--optimizer", "adam", *flags)
        task = tasks.setup_task(cfg.task)
        parts = [task.build_model(cfg.model), task.build_criterion(cfg.criterion)]
        for init in (trainer.Trainer.__init__, trainer.Trainer.__init__.__wrapped__):
            made = object.__new__(trainer.Trainer)
            init(made, cfg, task, *parts)
            types = {weight.dtype for weight in made.model.parameters()}
            assert types == {torch.float16 if flags else torch.float32} and type(made.optimizer).__name__ == name


def models_are_prepared_in_the_same_way(request, folder):
    build = request.getfixturevalue("build")
    cfg = of_flags(folder)
    cfg.common_eval.path = "x.pt"
    for prepare in (BaseFairseqModel.prepare_for_inference_, BaseFairseqModel.prepare_for_inference_.__wrapped__):
        model = build("transformer_tiny")
        prepare(model, cfg)
        assert next(model.parameters()).dtype == torch.float32 and not model.decoder.layers[0].need_attn


def adams_are_the_same(request, folder):
    """test_optimizers.py compares states and types."""
    ends = []
    for step in (adam.Adam.step, optimizers.FairseqAdam.step):
        weight = torch.arange(6.0).view(2, 3)
        optimizer = adam.Adam([weight], lr=0.1)
        for number in range(4):
            weight.grad = torch.cos(weight + number)
            step(optimizer)
        ends.append(weight)
    torch.testing.assert_close(*ends)


def gradients_have_the_same_norm(request, folder):
    """All numbers are equal to the last bit, also for weights without a gradient and for experts'."""
    made = []
    for clip in (utils.clip_grad_norm_, utils.clip_grad_norm_.__wrapped__):
        torch.manual_seed(1)
        weights = [torch.nn.Parameter(torch.randn(n, 3)) for n in (2, 5, 70, 9)]
        for weight in weights[:3]:
            weight.grad = torch.randn_like(weight)
        weights[1].expert = True
        norms = [clip(weights, 0), clip(weights, 1.5), clip(weights, 1.5, lambda norm: 2 * norm), clip(weights[0], 100)]
        norms += [clip(weights[3:], 1.0), clip([], 1.0)]
        made.append([*norms, *(weight.grad for weight in weights[:3])])
        narrow = torch.nn.Parameter(torch.randn(70000).bfloat16())
        narrow.grad = torch.randn(70000).bfloat16()
        made[-1] += [clip([narrow], 1.0), clip([narrow, weights[0]], 1.0), narrow.grad]
    assert all(map(torch.equal, *made)) and len(made[0]) == 12
    assert made[0][-2].dtype == torch.float32


def states_differ_in_the_copies_only(request, folder):
    state = {"state": {}, "param_groups": []}
    weights = [torch.ones(2, dtype=torch.bfloat16)]
    inner = mock.Mock(**{"state_dict.return_value": state})
    made = mock.Mock(fp32_optimizer=inner, scaler=None, fp16_params=weights, has_flat_params=False)
    made.fp32_params = [torch.nn.Parameter(torch.full((2,), 1.001))]
    mixin = fp16_optimizer._FP16OptimizerMixin
    ours, alone = mixin.state_dict(made), mixin.state_dict.__wrapped__(made)
    copies = ours.pop("float32_params")
    assert ours == alone and same_contents(copies, [torch.full((2,), 1.001)])
    made.fp32_params[0].data.fill_(1.0)
    for load in (mixin.load_state_dict, mixin.load_state_dict.__wrapped__):
        load(made, dict(state), {"lr": 1})
    assert inner.load_state_dict.call_args_list == [mock.call(state, {"lr": 1})] * 2
    assert same_contents(made.fp32_params[0].data, torch.ones(2))


def gradients_are_cleared(request, folder):
    for clear in (
        fp16_optimizer._FP16OptimizerMixin.zero_grad,
        fp16_optimizer._FP16OptimizerMixin.zero_grad.__wrapped__,
    ):
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        copy = torch.nn.Parameter(torch.ones(2))
        copy.grad = torch.ones(2)
        made = mock.Mock(fp16_params=[weight], fp32_params=[copy], has_flat_params=False, _multiply_factor=3.0)
        made.scaler.loss_scale = 4.0
        clear(made)
        assert weight.grad is None and not (copy.grad is not None and copy.grad.any()) and made._multiply_factor == 0.25
        made.scaler, made._multiply_factor = None, 3.0
        clear(made)
        assert made._multiply_factor == (1.0 if clear is optimizers.zero_grad else 3.0), (
            "fairseq is fixed: remove the patch"
        )


def weights_and_float32_copies_are_the_same(request, folder):
    mixin, results = fp16_optimizer._FP16OptimizerMixin, []
    functions = mixin._sync_fp16_grads_to_fp32, mixin._sync_fp32_params_to_fp16
    for copy_grads, copy_weights in (functions, [function.__wrapped__ for function in functions]):
        made = mock.Mock(has_flat_params=False, _needs_sync=True)
        made.fp16_params = [torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (2, 3)]
        made.fp32_params = [torch.nn.Parameter(torch.full((size,), 1.001)) for size in (2, 3)]
        for number, weight in enumerate(made.fp16_params):
            weight.grad = torch.full_like(weight, 0.1 + number)
        copy_grads(made)
        copy_weights(made)
        results.append([*(copy.grad for copy in made.fp32_params), *made.fp16_params, made._needs_sync])
    assert same_contents(*results)


def a_loss_scale_is_updated(request, folder):
    for step in (amp_optimizer.AMPOptimizer.step, amp_optimizer.AMPOptimizer.step.__wrapped__):
        made = mock.Mock()
        step(made)
        given = made.optimizer if step is optimizers.amp_step else made.fp32_optimizer
        assert made.scaler.mock_calls == [mock.call.step(given), mock.call.update()]


def groups_of_one_batch_are_the_same(request, folder):
    """A batch in the order of the data set, from which sentences are removed."""
    made = []
    for step in (DiverseBeamSearch.step, DiverseBeamSearch.step.__wrapped__):
        search, results = DiverseBeamSearch(mock.MagicMock(), 2, 0.5), []
        torch.manual_seed(1)
        for number, remaining in enumerate(([0, 1, 2], [0, 1, 2], [0, 2], [2])):
            scores, sums = torch.randn(len(remaining), 4, 9), torch.randn(len(remaining), 4, number)
            results += step(search, number, scores, sums, None, torch.tensor(remaining))
        made.append(results)
    assert same_contents(*made)
    with pytest.raises(IndexError):  # what the patch mends
        for number in (0, 1):
            step(search, number, torch.randn(2, 4, 9), torch.randn(2, 4, number), None, torch.tensor([7, 3]))


def words_that_would_repeat_are_excluded(request, folder):
    """In fairseq, all words of the tensor are words of the sentence. With padding after them, it excludes none."""
    alone = without_replacements(ngram_repeat_block.__file__)
    for size, step in itertools.product((2, 3), range(8)):
        words = torch.randint(4, 7, (6, step + 1), generator=torch.Generator().manual_seed(step))
        words[:, 0] = 2
        padded, scores = torch.cat([words, torch.ones(6, 4, dtype=torch.long)], 1), torch.zeros(6, 9)
        for block in (NGramRepeatBlock(size), torch.jit.script(NGramRepeatBlock(size))):
            stock, rest = alone.NGramRepeatBlock(size), (2, 3, step)
            assert torch.equal(block(padded, scores.clone(), *rest), stock(words, scores.clone(), *rest)), (size, step)
            assert step == 0 or not stock(padded, scores.clone(), *rest).any(), "fairseq is fixed: remove the patch"
    # Where only one word is possible, as in a prefix, it stays so. Each pair of words occurs a second time.
    forced = torch.full((1, 9), float("-inf"))
    forced[0, 6] = 0
    for block in (NGramRepeatBlock(2), torch.jit.script(NGramRepeatBlock(2))):
        assert torch.equal(block(torch.tensor([[2, 5, 6, 5, 1]]), forced.clone(), 1, 1, 3), forced)
    ones = NGramRepeatBlock(1)(torch.tensor([[2, 5, 6, 1, 1]]), torch.zeros(1, 9), 1, 1, 2)
    assert ones.isinf().nonzero().tolist() == [[0, 5], [0, 6]]


def one_sentence_has_the_same_hypotheses(request, folder):
    """test_compatibility.py has prefixes of several sentences."""
    path = request.getfixturevalue("sinusoidal")
    hub = TransformerModel.from_pretrained(str(path.parent), path.name, str(request.getfixturevalue("data_bin")))
    sentence, prefix = hub.encode("the dog"), torch.tensor([[hub.tgt_dict.index("HOUSE")]])
    for given in ({}, {"prefix_tokens": prefix}):
        ours, alone = (
            generate(hub, [sentence], 3, inference_step_args=given, max_len_b=5)[0]
            for generate in (GeneratorHubInterface.generate, GeneratorHubInterface.generate.__wrapped__)
        )
        assert same_contents(ours, alone) and len(ours) == 3


def an_ensemble_has_the_same_scores(request, folder):
    """test_compatibility.py has ensembles with models of the plugin."""
    path, data = str(request.getfixturevalue("sinusoidal")), request.getfixturevalue("data_bin")
    task, sources = translation_task(data), torch.tensor([[5, 6, 2], [7, 4, 2]])
    for paths in ([path], [path, path]):
        models, _ = checkpoint_utils.load_model_ensemble(paths, task=task)
        inputs = {"src_tokens": sources, "src_lengths": torch.tensor([3, 3]), "prev_output_tokens": sources.roll(1, 1)}
        results = []
        for score in (SequenceScorer.generate, SequenceScorer.generate.__wrapped__):
            for model in models:
                model.make_generation_fast_(need_attn=False)
            results.append(
                score(SequenceScorer(task.target_dictionary), models, {"net_input": inputs, "target": sources})
            )
        assert same_contents(*results)


def losses_without_the_words_left_out_are_the_same(request, folder):
    """test_language_model.py compares all words with a plain computation."""
    criterion = AdaptiveLoss(mock.Mock(**{"target_dictionary.pad.return_value": 1}), sentence_avg=False)
    softmax = AdaptiveSoftmax(20, 32, [6, 12], dropout=0.0)
    features, net_input = torch.randn(2, 5, 32, requires_grad=True), {}
    model = mock.Mock(return_value=(features, None))
    model.decoder.adaptive_softmax = softmax
    model.get_targets = lambda sample, output: sample["target"]
    for sentence_avg, words in itertools.product((False, True), ([[3, 6, 8, 2, 1], [12, 14, 19, 1, 1]], [[3] * 5] * 2)):
        criterion.sentence_avg = sentence_avg
        sample, made = {"net_input": net_input, "target": torch.tensor(words)}, []
        for forward in (AdaptiveLoss.forward, AdaptiveLoss.forward.__wrapped__):
            loss, size, logged = forward(criterion, model, sample)
            made.append([loss, size, logged, *torch.autograd.grad(loss, [features, *softmax.head.parameters()])])
        assert same_contents(*made)


def pieces_without_bytes_are_joined_in_the_same_way(request, folder):
    path, alone = str(request.getfixturevalue("byte_pieces")), without_replacements(data_utils.__file__).post_process
    bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=path))
    assert pkgutil.resolve_name("fairseq.criterions.ctc").post_process is data_utils.post_process
    lines = ("▁the ▁dog", "d o g ▁the", "▁ ▁the <unk> <x> ▁ ", "<unk> <unk>", "madeupword0000 ▁no", "▁the▁dog", "")
    for line in lines:
        expected = SentencepieceBPE.decode.__wrapped__(bpe, line)
        assert bpe.decode(line) == data_utils.post_process(line, "sentencepiece") == expected
    for symbol in ("subword_nmt", "@@ ", "wordpiece", "letter", "silence", "_EOW", "none", None):
        for line in ("Zwei Hun@@ de", "_a b_EOW c|d <SIL>"):
            assert data_utils.post_process(line, symbol) == alone(line, symbol)


def a_roberta_with_a_bpe_has_the_same_interface(request, folder):
    """other_tasks/test_roberta.py compares what the class adds with fairseq's results."""
    places = ("", "_camembert", "_gottbert", "_xlmr")
    (replacement,) = {
        pkgutil.resolve_name(f"fairseq.models.roberta.model{name}.RobertaHubInterface") for name in places
    }
    assert issubclass(replacement, RobertaHubInterface)
    task = Namespace(source_dictionary=Dictionary())
    interfaces = [kind(Namespace(bpe="characters"), task, None) for kind in (replacement, RobertaHubInterface)]
    assert len({interface.bpe.encode("a b") for interface in interfaces}) == 1


def moses_tokens_are_the_same(request, folder):
    """tests/text/test_text.py has languages with a region."""
    for source, target in (("en", "de"), ("de", "fr"), ("fr", "en"), (None, "cs")):
        cfg = Namespace(source_lang=source, target_lang=target, moses_no_dash_splits=False, moses_no_escape=False)
        ours, alone = MosesTokenizer(cfg), object.__new__(MosesTokenizer)
        MosesTokenizer.__init__.__wrapped__(alone, cfg)
        text = "l'ami, it's a well-known \"test\" etc. z. B. 3.5 % ?"
        assert ours.encode(text) == alone.encode(text) and ours.decode(text) == alone.decode(text)


SYNCED = ("fp16_grads_to_fp32", "fp32_params_to_fp16")
SAME = {
    "fairseq.data.encoders.moses_tokenizer.MosesTokenizer.__init__": moses_tokens_are_the_same,
    "fairseq.models.roberta.model*.RobertaHubInterface": a_roberta_with_a_bpe_has_the_same_interface,
    **dict.fromkeys(
        ("fairseq.data.encoders.sentencepiece_bpe.SentencepieceBPE.decode", "fairseq.*.post_process"),
        pieces_without_bytes_are_joined_in_the_same_way,
    ),
    "fairseq.criterions.adaptive_loss.AdaptiveLoss.forward": losses_without_the_words_left_out_are_the_same,
    "fairseq.ngram_repeat_block.NGramRepeatBlock._no_repeat_ngram": words_that_would_repeat_are_excluded,
    "fairseq.search.DiverseBeamSearch.step": groups_of_one_batch_are_the_same,
    "fairseq.hub_utils.GeneratorHubInterface.generate": one_sentence_has_the_same_hypotheses,
    "fairseq.sequence_scorer.SequenceScorer.generate": an_ensemble_has_the_same_scores,
    "fairseq.options.parse_args_and_arch": flags_have_the_same_meaning,
    "fairseq.trainer.Trainer.__init__": trainers_are_the_same,
    "fairseq.models.BaseFairseqModel.prepare_for_inference_": models_are_prepared_in_the_same_way,
    "fairseq.optim.adam.Adam": adams_are_the_same,
    "fairseq.utils.clip_grad_norm_": gradients_have_the_same_norm,
    **dict.fromkeys(
        (f"fairseq.optim.fp16_optimizer._FP16OptimizerMixin.{name}" for name in ("state_dict", "load_state_dict")),
        states_differ_in_the_copies_only,
    ),
    "fairseq.optim.fp16_optimizer._FP16OptimizerMixin.zero_grad": gradients_are_cleared,
    **dict.fromkeys(
        (f"fairseq.optim.fp16_optimizer._FP16OptimizerMixin._sync_{copied}" for copied in SYNCED),
        weights_and_float32_copies_are_the_same,
    ),
    "fairseq.optim.amp_optimizer.AMPOptimizer.step": a_loss_scale_is_updated,
    "fairseq.utils.load_align_dict": lexicons_are_the_same,
    "fairseq.utils.post_process_prediction": outputs_without_unknown_words_are_the_same,
    **dict.fromkeys(
        (f"fairseq.tasks.FairseqTask.{name}" for name in OF_THE_TASK), outputs_without_unknown_words_are_the_same
    ),
    "fairseq.checkpoint_utils.torch": loading_gives_the_same_state,
    "fairseq.*.eval": expressions_have_the_same_value,
    **dict.fromkeys(
        (
            "fairseq.data.iterators.GroupedIterator.__init__",
            *(f"fairseq.data.iterators.EpochBatchIterator.{name}" for name in ("state_dict", "load_state_dict")),
        ),
        iterators_resume_at_the_same_place,
    ),
    "fairseq.nan_detector.NanDetector.add_hooks": modules_with_nan_are_named,
    "fairseq.models.ema.ema.EMA.restore": averages_of_weights_are_the_same,
    "fairseq.data.fasta_dataset.FastaDataset._build_index": fasta_files_have_the_same_index,
    "sys.excepthook": other_errors_and_other_programs_keep_their_tracebacks,
    "fairseq.checkpoint_utils.PathManager": copies_and_renames_are_the_same,
    "fairseq.checkpoint_utils._torch_persistent_save": a_second_try_succeeds,
    "fairseq.checkpoint_utils.torch_persistent_save": a_saved_state_is_the_same,
    "fairseq.checkpoint_utils.save_checkpoint": the_same_checkpoints_are_written,
    "fairseq.tasks.FairseqTask.get_batch_iterator": a_training_from_the_beginning_takes_the_same_batches,
    "fairseq.data.data_utils.batch_by_size": batches_are_the_same,
    "fairseq.checkpoint_utils.load_checkpoint_to_cpu": upgrading_gives_the_same_state,
    "fairseq.checkpoint_utils.load_checkpoint": resuming_reads_the_same,
    "fairseq.checkpoint_utils.load_model_ensemble_and_task": an_ensemble_has_the_same_weights,
    "fairseq.sequence_generator.SequenceGenerator.__init__": generators_find_the_same,
    "fairseq.data.indexed_dataset.MMapIndexedDatasetBuilder.merge_file_": merged_data_sets_are_the_same,
    "fairseq.data.token_block_dataset.np": token_blocks_are_the_same,
    "fairseq.data.language_pair_dataset.np": pairs_in_buckets_are_padded,
    "fairseq.data.data_utils.np": functions_on_data_are_the_same,
}


@pytest.mark.parametrize("same", dict.fromkeys(SAME.values()), ids=lambda same: same.__name__)
def test_the_patches_keep_the_behaviour_of_fairseq_alone(same, request, tmp_path):
    same(request, tmp_path)


def test_each_patch_is_applied_once_and_has_a_reason():
    targets = [patch.target for patch in REPLACEMENTS]
    assert sorted(SAME) == sorted(targets)
    patches.apply(REPLACEMENTS)  # a second time
    for patch in REPLACEMENTS:
        assert patch.prevents in ("code execution", "lost data", "wrong results", "an unreadable error", "lost time")
        assert len(patch.reason.split()) > 12 and patch.until, patch.target
        places = patches.owners(patch.target)
        assert places
        for owner, name in places:
            assert vars(owner)[name] is patch.replacement
        # a replacement wraps fairseq's own function, not another patch
        wrapped = getattr(patch.replacement, "__wrapped__", None)
        if wrapped is not None:
            assert "fairseq_rope" not in wrapped.__code__.co_filename


def test_models_of_languages_with_any_name_train_and_translate(data_bin, tmp_path):
    data, language = tmp_path / "data", "tok.中文"
    shutil.copytree(data_bin, data)
    for path in list(data.iterdir()):
        name = path.name.replace("dict.en.", f"dict.{language}.").replace("en-de.de", f"{language}-de.de")
        path.rename(path.with_name(name.replace("en-de.en", f"{language}-de.{language}")))
    pair = ["-s", language, "-t", "de"]
    train(data, tmp_path / "model", *pair, "--max-update", 1)
    train(data, tmp_path / "model", *pair, "--max-update", 2)
    path = tmp_path / "model" / "checkpoint_last.pt"
    assert call("fairseq-generate", data, *pair, "--path", path, "--cpu", "--batch-size", 8).count("H-") == 20


# -- importing -----------------------------------------------------------------------------------------


def in_a_process(code, cwd=ROOT):
    """Run Python *code* in a new process, and return its output."""
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([QUICK_START, str(ROOT)])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REGISTERED = """
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq import checkpoint_utils
is_patched = type(checkpoint_utils.torch).__name__ == "TorchWithSafeLoad"
registered = is_patched and "transformer_rope_tiny" in ARCH_MODEL_REGISTRY
"""
USER_DIR = f"import argparse, fairseq.utils as u; u.import_user_module(argparse.Namespace(user_dir={str(PLUGIN)!r}))"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in PLUGIN.rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
)


IMPORTS = {
    "fairseq first": "import fairseq, fairseq_rope",
    "user-dir": USER_DIR,
    "plugin, user-dir": f"import fairseq_rope.plugin; {USER_DIR}",
    "search": "from fairseq_rope.search.step import bind_all",
    "criterion, plugin": "from fairseq_rope.criterion import output_weight; import fairseq_rope.plugin",
    "a name of transformer": "from fairseq_rope.transformer import TransformerRopeModel",
    "reload": "import fairseq_rope, importlib; importlib.reload(fairseq_rope); import fairseq; "
    "importlib.reload(fairseq_rope); importlib.reload(fairseq_rope)",
    "models first, a-z": "import fairseq_rope.transformer.models; "
    + "; ".join(f"import {module}" for module in MODULES),
    "z-a": "; ".join(f"import {module}" for module in reversed(MODULES)),
}
# Load fairseq's dependencies, but neither fairseq nor the plugin. Then fork a process for each case. The process of a
# package imports it, and forks a process for each of its cases.
EACH = """
import importlib, os, sys, torch, hydra, omegaconf, sacrebleu
def run_each(cases):
    for name, code in cases.items():
        child = os.fork()
        if child == 0:
            namespace = {{}}
            if isinstance(code, dict):
                exec(f"import {{name}}", namespace)
                run_each(code)
                os._exit(0)
            exec(code, namespace)
            os._exit(not namespace["registered"])
        if os.waitpid(child, 0)[1] != 0:
            print(name, flush=True)
assert not {{"fairseq", "fairseq_rope"}} & set(sys.modules)
run_each({cases!r})
"""


@pytest.mark.slow
def test_the_plugin_registers_in_any_order_of_imports():
    cases = {name: f"{code}\n{REGISTERED}" for name, code in IMPORTS.items()}
    assert in_a_process(EACH.format(cases=cases)) == "", "these register no plugin"


@pytest.mark.slow
def test_an_import_that_failed_fails_again_with_the_same_error():
    """Without the patches, a program that catches the error would go on with fairseq alone."""
    code = """
import fairseq, sys
sys.modules["fairseq.tasks"] = None
for _ in range(3):
    try:
        import fairseq_rope
    except ImportError as error:
        print(error)
"""
    assert in_a_process(code).splitlines() == ["import of fairseq.tasks halted; None in sys.modules"] * 3


@pytest.mark.slow
def test_each_module_can_be_imported_first():
    """Python imports a module's packages before it, and so its code runs after theirs."""
    patched = "import sys; registered = ('fairseq' in sys.modules) == ('fairseq_rope.patches.registry' in sys.modules)"
    cases = {}
    for module in MODULES:
        cases.setdefault(module.rpartition(".")[0], {})[module] = f"import {module}\n{patched}"
    assert in_a_process(EACH.format(cases=cases)) == "", "these fail, or load fairseq and apply no patches"


def test_importing_package_command_and_translator_loads_neither_torch_nor_fairseq(tmp_path):
    (tmp_path / "fairseq").mkdir()
    imports = "import sys; sys.path.insert(0, ''); import fairseq_rope.__main__, fairseq_rope.tools.translate"
    assert in_a_process(f"{imports}; print({{'torch', 'fairseq'}} & set(sys.modules))", tmp_path) == "set()"
