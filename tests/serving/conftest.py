"""Fixtures: models for the tests of serving."""

import pytest
from fairseq import checkpoint_utils

from tests.serving.exports import exported


@pytest.fixture(scope="session")
def model(trained, data_bin, tmp_path_factory):
    """The folder that fairseq-rope export makes from the trained checkpoint. Copy it before you change it."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    return exported(trained, data_bin, folder)


@pytest.fixture
def loaded(trained, data_bin):
    """The trained model and its task."""
    path = str(trained / "checkpoint_last.pt")
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], {"data": str(data_bin)})
    return model.eval(), task
