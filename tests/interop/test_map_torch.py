"""Maps of real OpenGL textures as PyTorch tensors and JAX arrays, on the simulated device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from graphics.subjects import download, make_texture, registered_buffer, registered_texture, upload

import cuglue
from cuglue.errors import DanglingExportWarning
from cuglue.graphics.glcontext import headless

pytestmark = [pytest.mark.interop, pytest.mark.gl]


@pytest.fixture(autouse=True)
def driver() -> Iterator[Any]:
    with cuglue.use_driver("sim") as sim, headless():
        yield sim
        sim.check()


def picture() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (48, 64, 4), np.uint8)


def test_the_main_job_with_torch() -> None:
    import torch

    pixels, name = picture(), make_texture(64, 48)
    upload(name, pixels)
    with cuglue.register_texture(name) as image:
        with image.map() as m:
            tensor = torch.from_dlpack(m)
            assert tensor.data_ptr() == m.device_ptr == m.torch().data_ptr()
            np.testing.assert_array_equal(tensor.numpy(), pixels)
            del tensor
        with image.map_mut() as m:
            m.torch()[..., :3] ^= 255
        expected = pixels.copy()
        expected[..., :3] ^= 255
        np.testing.assert_array_equal(download(name, 64, 48), expected)
        image.write(torch.from_numpy(pixels))
        np.testing.assert_array_equal(download(name, 64, 48), pixels)


def test_jax_reads_a_map() -> None:
    import jax

    pixels, name = picture(), make_texture(64, 48)
    upload(name, pixels)
    with cuglue.register_texture(name) as image, image.map() as m:
        np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(m)), pixels)


@pytest.mark.parametrize("how", ["torch", "dlpack", "slice"])
def test_a_tensor_kept_past_the_end(driver: Any, how: str) -> None:
    """Of memory that goes away it warns, naming the line; of an image it is a copy and lives on."""
    import torch

    keep = {
        "torch": lambda m: m.torch(),
        "dlpack": lambda m: torch.from_dlpack(m),
        "slice": lambda m: torch.from_dlpack(m)[1:],
    }[how]
    with registered_buffer(driver) as subject:
        m = subject.handle.map()
        kept = keep(m)
        with pytest.warns(DanglingExportWarning, match=__file__):
            m.release()
        del kept
        with subject.handle.map() as m:
            kept = keep(m)
            del kept
    with registered_texture(driver) as subject:
        subject.put(np.full(subject.handle.size, 7, np.uint8))
        with subject.handle.map() as m:
            kept = keep(m)
        del m
    gc.collect()
    assert (kept == 7).all()


def test_torch_that_is_loaded_changes_nothing_on_the_simulated_device(driver: Any) -> None:
    """Its maps have no CUDA array interface, so nobody has to be waited for; order holds all the same."""
    import torch

    with registered_texture(driver) as subject:
        for value in (1, 2, 3):
            with subject.handle.map_mut(driver.Stream()) as m:
                m.torch()[...] = value
            with subject.handle.map(driver.Stream()) as m:
                assert bool((torch.from_dlpack(m) == value).all())
