"""The interop run uses the versions that it says it uses."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

pytestmark = pytest.mark.interop


def test_the_pinned_versions_are_the_ones_that_run() -> None:
    pins = dict(pin.split("=") for pin in os.environ.get("CUGLUE_PINS", "").split())
    assert {name: version(name).split("+")[0] for name in pins} == pins


def test_torch_and_jax_run_here() -> None:
    import jax.numpy
    import torch

    assert torch.arange(4).sum().item() == 6
    assert int(jax.numpy.arange(4).sum()) == 6
