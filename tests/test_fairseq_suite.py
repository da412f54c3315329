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

# Tests that train, generate or script with a transformer
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
# Refused by design: docs/compatibility.md, "Refused". The second model of an ensemble has other words.
OTHER_WORDS = "tests/test_checkpoint_utils.py::TestCheckpointUtils::test_load_model_ensemble_and_task"
REFUSED = {
    OTHER_WORDS,
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
        *("-k", "not xformers", "-c", os.devnull, "--rootdir", str(suite)),
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


@pytest.mark.nightly
def test_all_tests_that_pass_with_fairseq_alone_pass_with_the_plugin(suite):
    assert passing_only_with("nothing", "plugin", suite, ["tests"], refused={OTHER_WORDS}) == {OTHER_WORDS}


@pytest.mark.nightly
def test_tests_of_transformers_pass_with_the_rotary_models(suite):
    assert passing_only_with("transformer", "transformer_rope", suite, TRANSFORMERS, REFUSED) == REFUSED


@pytest.mark.slow
def test_a_training_and_a_search_of_fairseq_pass_with_the_plugin(suite):
    """The shortest form of the first test."""
    cases = ["tests/test_binaries.py::TestTranslation::test_transformer", "tests/test_sequence_generator.py"]
    assert passing_only_with("nothing", "plugin", suite, cases, refused=set()) == set()
