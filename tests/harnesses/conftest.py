"""The tests of this folder share a gateway with a scripted engine, and a place to work in."""

import pytest
from driving import Workplace
from house import house  # noqa: F401


@pytest.fixture
def place(house, tmp_path):  # noqa: F811
    """For one harness, whose prompts may be long."""
    house.engine.context = 10**7
    place = Workplace(tmp_path / "home", tmp_path / "work")
    place.home.mkdir()
    place.work.mkdir()
    return place
