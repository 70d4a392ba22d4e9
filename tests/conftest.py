"""What every test shares: markers that skip in one place, and a fixed seed."""

from __future__ import annotations

import importlib.util

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this environment cannot run, and say why."""
    has_gpu = torch.cuda.is_available()
    has_hypothesis = importlib.util.find_spec("hypothesis") is not None
    has_mock = importlib.util.find_spec("pytest_mock") is not None
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "testing.strategies" in item.nodeid and not has_hypothesis:
            item.add_marker(pytest.mark.skip(reason="its example needs hypothesis"))
        if "mocker" in getattr(item, "fixturenames", ()) and not has_mock:
            item.add_marker(pytest.mark.skip(reason="needs pytest-mock"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # many small operations: threads would only wait for each other
