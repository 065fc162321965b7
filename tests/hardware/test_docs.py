"""Examples in the hardware docstrings."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module", ["units", "topology", "placement", "prices.cost", "prices.library", "prices.critical_path"]
)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(f"shardplan.hardware.{module}"), extraglobs={})
    assert result.attempted > 0
    assert result.failed == 0
