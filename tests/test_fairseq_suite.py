"""fairseq's own tests, with transformer_rope in the transformer's place.

The suite is not ours to copy: it is fetched when the test runs.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest

from .commands import ENVIRONMENT, ROOT

# What trains, generates or scripts with a transformer. The rest of test_binaries.py trains other models.
CASES = [
    *(
        f"tests/test_binaries.py::{case}"
        for case in (
            "TestTranslation::test_transformer",
            "TestTranslation::test_multilingual_transformer",
            "TestTranslation::test_translation_multi_simple_epoch",
            "TestTranslation::test_translation_multi_simple_epoch_no_vepoch",
            "TestTranslation::test_translation_multi_simple_epoch_dicts",
            "TestTranslation::test_translation_multi_simple_epoch_src_tgt_dict_spec",
            "TestTranslation::test_transformer_cross_self_attention",
            "TestTranslation::test_mixture_of_experts",
            "TestTranslation::test_alignment",
            "TestTranslation::test_alignment_full_context",
            "TestTranslation::test_transformer_layerdrop",
            "TestTranslation::test_generation",
            "TestTranslation::test_eval_bleu",
            "TestTranslation::test_update_freq",
            "TestTranslation::test_max_positions",
            "TestTranslation::test_raw",
            "TestActivationCheckpointing",
        )
    ),
    "tests/test_sequence_generator.py",
    "tests/test_export.py",
    "tests/test_multihead_attention.py",
    "tests/test_reproducibility.py",
    "tests/test_activation_checkpointing.py",
    "tests/test_inference_dropout.py",
    "tests/test_checkpoint_utils.py",
    "tests/test_transformer.py",
]
# Not there by design: COMPATIBILITY.md, "Refused".
REFUSED = {
    "tests/test_binaries.py::TestTranslation::test_transformer_cross_self_attention",
    "tests/test_multihead_attention.py::test_add_bias_parity",
}


# The last state of fairseq's main branch. (Its source packages lack tests/utils.py.)
SOURCE = "https://github.com/facebookresearch/fairseq/archive/3d262bb25690e4eb2e7d3c1309b1e9c406ca4b99.tar.gz"


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A folder with fairseq's tests/, from the checkout FAIRSEQ_SOURCE or else from GitHub."""
    folder = tmp_path_factory.mktemp("fairseq")
    if "FAIRSEQ_SOURCE" in os.environ:
        shutil.copytree(Path(os.environ["FAIRSEQ_SOURCE"]) / "tests", folder / "tests")
        return folder
    try:
        with urllib.request.urlopen(SOURCE, timeout=60) as answer:
            archive = io.BytesIO(answer.read())
    except OSError as error:
        pytest.skip(
            f"fairseq's tests cannot be fetched ({error}); FAIRSEQ_SOURCE can name a checkout of fairseq"
        )
    with tarfile.open(fileobj=archive) as package:
        package.extractall(folder, filter="data")
    # Only the tests: fairseq itself is the installed one, which has its compiled parts.
    (tests,) = folder.glob("*/tests")
    tests.rename(folder / "tests")
    return folder


def outcomes(suite: Path, transformer: str, cases: Iterable[str] = CASES) -> dict[str, str]:
    """Name of each test to PASSED, FAILED, SKIPPED or ERROR."""
    environment = {
        **ENVIRONMENT,
        "FAIRSEQ_TRANSFORMER": transformer,
        "PYTHONPATH": os.pathsep.join([str(suite), str(ROOT), str(ROOT / "tests")]),
    }
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "in_place_of_transformer", "-p", "no:cacheprovider", "-v",
            "--tb=line", "-k", "not xformers", "-c", os.devnull, "--rootdir", str(suite), *cases,
        ],
        cwd=suite, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    found = dict(re.findall(r"^(tests/\S+) (PASSED|FAILED|SKIPPED|ERROR)", done.stdout, re.MULTILINE))
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.slow
def test_fairseqs_own_tests_pass_as_they_do_with_its_own_transformer(suite):
    stock, rotary = outcomes(suite, "stock"), outcomes(suite, "rotary")
    passing = {name for name, outcome in stock.items() if outcome == "PASSED"}
    print(f"{len(passing)} of fairseq's {len(stock)} tests pass with its own transformer")
    assert len(passing) > 50
    assert REFUSED <= passing
    failing = {name for name in passing if rotary.get(name) != "PASSED"}
    # fairseq's reproducibility tests sometimes miss their tolerance, with its own transformer too.
    again = outcomes(suite, "rotary", failing)
    assert {name for name in failing if again.get(name) != "PASSED"} == REFUSED
