"""fairseq's own tests, with the plugin loaded and with our models in place of the transformer and models made of it.

The suite is not part of this repository. ``FAIRSEQ_SOURCE`` is the path of a checkout of fairseq, or of an archive with
its folders ``tests`` and ``examples``.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.commands import ENVIRONMENT, LIMIT, PLUGIN, QUICK_START, ROOT

# Tests that train, generate or script with a transformer. The others train other models.
OF_BINARIES = """
    transformer multilingual_transformer translation_multi_simple_epoch translation_multi_simple_epoch_no_vepoch
    translation_multi_simple_epoch_dicts translation_multi_simple_epoch_src_tgt_dict_spec
    transformer_cross_self_attention mixture_of_experts alignment alignment_full_context transformer_layerdrop
    generation eval_bleu update_freq max_positions raw
""".split()
FILES = """
    sequence_generator export multihead_attention reproducibility activation_checkpointing inference_dropout
    checkpoint_utils transformer roberta valid_subset_checks lm_context_window
""".split()
OF_LANGUAGE_MODELS = [
    *(f"LanguageModeling::test_{name}" for name in ("transformer_lm", "normformer_lm")),
    "LanguageModeling::test_transformer_lm_with_adaptive_softmax",
    *(f"MaskedLanguageModel::test_roberta_{name}" for name in ("masked_lm", "sentence_prediction")),
    *(f"MaskedLanguageModel::test_roberta_regression_{name}" for name in ("single", "multiple")),
    "MaskedLanguageModel::test_r4f_roberta",
]
TRANSFORMERS = [
    *(f"tests/test_binaries.py::TestTranslation::test_{name}" for name in OF_BINARIES),
    *(f"tests/test_binaries.py::Test{name}" for name in OF_LANGUAGE_MODELS),
    "tests/test_binaries.py::TestActivationCheckpointing",
    *(f"tests/test_{name}.py" for name in FILES),
]
# FAIRSEQ_SUITE=whole runs all tests but those of xFormers. Otherwise, tests are left out that take most of the time:
# - trainings with fairseq's models and the plugin that run with the rotary model in any case, but for one of a language
#   model; for --eval-bleu and the multilingual model, tests/test_compatibility.py has one
# - tests whose names contain a word of LONG. Those of its first line train models without our positions, and without a
#   beam search from left to right; the gradients of latent_depth are at random not finite. Those of the second line
#   call no function of the plugin, or only NumPy's old names, which shorter tests need, too. Those of the third and
#   fourth line call the same functions of the plugin as tests with similar names, which remain, or as those of
#   reproducibility; tests/patches/test_faults.py has a storage without renaming.
# - with the rotary models: tests that are like another one that runs, here or in tests/test_compatibility.py, and those
#   of the choice of validation data
IS_WHOLE = os.environ.get("FAIRSEQ_SUITE") == "whole"
LONG = """
    laser insertion cmlm nonautoregressive latent_depth
    distributed_timeout_wrapper vggtransformer test_data_utils multi_corpus_dataset
    linformer_roberta_regression linformer_roberta_sentence fconv_lm lightconv_lm lstm_lm
    fconv_self_att_wp iopath
""".split()
LEFT_OUT = ("xformers", *(() if IS_WHOLE else LONG))
LIKE_OTHERS = {
    "tests/test_binaries.py::TestActivationCheckpointing",
    "tests/test_binaries.py::TestTranslation::test_alignment_full_context",
    "tests/test_binaries.py::TestTranslation::test_eval_bleu",
    "tests/test_binaries.py::TestTranslation::test_multilingual_transformer",
    "tests/test_binaries.py::TestTranslation::test_translation_multi_simple_epoch",
    "tests/test_binaries.py::TestTranslation::test_translation_multi_simple_epoch_src_tgt_dict_spec",
    "tests/test_binaries.py::TestLanguageModeling::test_transformer_lm",
    "tests/test_binaries.py::TestMaskedLanguageModel::test_roberta_regression_single",
    "tests/test_valid_subset_checks.py",
}
# Refused by design: docs/compatibility.md, "Refused".
REFUSED = {
    "tests/test_binaries.py::TestTranslation::test_transformer_cross_self_attention",
    "tests/test_multihead_attention.py::test_add_bias_parity",
    # torch.jit.script
    *(f"tests/test_export.py::TestExportModels::test_export_{name}" for name in ("multihead_attention", "transformer")),
    "tests/test_export.py::TestExportModels::test_export_transformer_no_token_pos_emb",
    "tests/test_export.py::TestExportModels::test_incremental_state_multihead_attention",
    "tests/test_sequence_generator.py::TestJitSequenceGenerator::test_ensemble_sequence_generator",
    *(
        f"tests/test_sequence_generator.py::TestJitSequenceGenerator::test_export_{name}"
        for name in ("ensemble_model", "transformer")
    ),
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A folder with fairseq's tests/ and examples/, and a copy of the plugin's folder."""
    if "FAIRSEQ_SOURCE" not in os.environ:
        pytest.skip("FAIRSEQ_SOURCE is not set to a checkout of fairseq or an archive of its tests")
    source = Path(os.environ["FAIRSEQ_SOURCE"])
    folder = tmp_path_factory.mktemp("fairseq")
    if source.is_dir():
        for part in ("tests", "examples"):
            shutil.copytree(source / part, folder / part)
    else:
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
    unfinished = shutil.ignore_patterns("*.pyc.*")  # which another process writes
    shutil.copytree(PLUGIN, folder / "fairseq_rope", ignore=unfinished)
    return folder


def outcomes(suite: Path, mode: str, cases: Iterable[str]) -> dict[str, str]:
    """The outcome of each test in *cases*, and of files that cannot be imported. fairseq_with.py describes *mode*."""
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-p", "fairseq_with", "-p", "no:cacheprovider", "--tb=line"),
        *("-k", f"not ({' or '.join(LEFT_OUT)})", "-c", os.devnull, "--rootdir", str(suite)),
        *("--continue-on-collection-errors", *sorted(cases)),
    ]
    path = os.pathsep.join([str(suite), str(ROOT / "tests"), QUICK_START])
    alone = str(ROOT / "benchmarks" / "fairseq_alone")
    environment = {**ENVIRONMENT, "FAIRSEQ_WITH": mode, "FAIRSEQ_ALONE": alone, "PYTHONPATH": path}
    an_hour = 12 * LIMIT
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True, timeout=an_hour)
    assert re.search(r"\d (passed|failed|skipped).* in \d", done.stdout), done.stdout + done.stderr
    of_files = dict.fromkeys(re.findall(r"^ERROR (tests/\S+\.py)(?: - .*)?$", done.stdout, re.M), "ERROR")
    return {**of_files, **dict(re.findall(r"^(tests/\S+::\S.*?) (PASSED|FAILED|SKIPPED|ERROR)\b", done.stdout, re.M))}


def passing_only_with(other: str, mode: str, suite: Path, cases: Iterable[str], refused: set[str]) -> set[str]:
    """The tests of *cases* that pass with the *other* mode, and fail with *mode*, at first and then alone.

    Tests that are *refused* need not fail alone.
    """
    with_mode = outcomes(suite, mode, cases)
    missing = {case for case, outcome in with_mode.items() if outcome != "PASSED"}
    print(f"{len(with_mode) - len(missing)} of {len(with_mode)} tests of fairseq pass with {mode}")
    assert len(missing) < len(with_mode) / 2
    with_other = outcomes(suite, other, missing) if missing else {}
    only_other = {case for case, outcome in with_other.items() if outcome == "PASSED"}
    # Some of fairseq's tests fail at random or because of an earlier test.
    return {case for case in only_other if case in refused or outcomes(suite, mode, [case]).get(case) != "PASSED"}


@pytest.mark.slow
def test_all_tests_that_pass_with_fairseq_alone_pass_with_the_plugin(suite):
    trainings = {name for name in TRANSFORMERS if re.search("binaries|reproducibility|checkpoint_utils", name)}
    left_out = () if IS_WHOLE else trainings - {"tests/test_binaries.py::TestLanguageModeling::test_transformer_lm"}
    cases = ["tests", *(f"--deselect={name}" for name in sorted(left_out))]
    assert passing_only_with("nothing", "plugin", suite, cases, refused=set()) == set()


@pytest.mark.slow
def test_tests_of_transformers_pass_with_the_rotary_models(suite):
    cases = [case for case in TRANSFORMERS if IS_WHOLE or case not in LIKE_OTHERS]
    assert passing_only_with("transformer", "transformer_rope", suite, cases, REFUSED) == REFUSED
