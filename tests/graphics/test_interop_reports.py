"""What people trip over when CUDA and OpenGL share memory: the public reports that no other test stands for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import glpixels
import numpy as np
import OpenGL.GL as GL
import pytest
from graphics.subjects import make_buffer, make_texture, registered_texture

import cuglue
from cuglue.driver.protocol import Driver
from cuglue.driver.sim import SimDriver
from cuglue.errors import UnsupportedError
from cuglue.graphics.glcontext import GlContext, headless
from cuglue.testing import trace
from cuglue.testing.handle_suite import peek

pytestmark = pytest.mark.gl


def test_row_6_the_driver_is_never_asked_for_an_image_s_pointer(driver: Driver, context: GlContext) -> None:
    with registered_texture(driver) as subject, trace(only={"graphics_pointer"}) as calls:
        with subject.handle.map() as m:
            assert m.device_ptr == m.block.ptr != 0  # its linear copy
    assert calls == []


def test_row_9_depth_goes_by_a_texture_of_floats(driver: Driver, context: GlContext) -> None:
    """A depth texture does not register, and the error says what does."""
    depth = GL.GLuint()
    GL.glCreateTextures(GL.GL_TEXTURE_2D, 1, depth)
    GL.glTextureStorage2D(depth.value, 1, GL.GL_DEPTH_COMPONENT32F, 32, 32)
    with pytest.raises(UnsupportedError, match="R32F"):
        cuglue.register_texture(depth.value)
    values = np.linspace(0, 1, 32 * 32, dtype=np.float32).reshape(32, 32, 1)
    copy = make_texture(32, 32, "R32F")
    glpixels.write_image(copy, values)
    with cuglue.register_texture(copy) as handle:
        assert (handle.shape, handle.dtype) == ((32, 32, 1), np.float32)
        np.testing.assert_array_equal(np.asarray(handle.read()), values)


def test_row_23_rows_that_are_apart_in_the_source_are_tight_in_the_image(
    driver: Driver, context: GlContext
) -> None:
    padded = np.random.default_rng(0).integers(0, 256, (5, 256), np.uint8)
    texture = make_texture(200, 5, "R8")
    with cuglue.register_texture(texture) as handle:
        handle.write(padded[:, :200, np.newaxis])
    np.testing.assert_array_equal(glpixels.read_image(texture)[..., 0], padded[:, :200])


TORCH = """
import torch
tensor = torch.arange(64, dtype=torch.uint8, device="cuda")
"""
INTEROP = """
import OpenGL.GL as GL, cuglue
from cuglue import gl
context = gl.headless()
name = GL.GLuint()
GL.glCreateBuffers(1, name)
GL.glNamedBufferData(name.value, 64, None, GL.GL_DYNAMIC_DRAW)
handle = cuglue.register_buffer(name.value)
"""
BOTH = """
with handle.map_mut() as m:
    m.torch()[:] = tensor
print(handle.read().get().tolist() == list(range(64)))
handle.close()
context.close()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("program", [TORCH + INTEROP, INTEROP + TORCH], ids=["torch first", "interop first"])
def test_row_36_either_may_come_first(program: str) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", program + BOTH],
        env=os.environ | {"CUGLUE_DRIVER": "cuda"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr


def test_row_40_eight_contexts_stay_on_their_eight_threads(driver: Driver) -> None:
    contexts = [headless(thread="worker") for _ in range(8)]
    seen: list[set[int]] = [set() for _ in contexts]

    def frames(number: int) -> None:
        ops = contexts[number].ops
        name = ops.call(make_buffer, 64)
        ops.call(glpixels.write_buffer, name, np.full(64, number, np.uint8))
        with cuglue.register_buffer(name, ops=ops) as handle:
            for _ in range(5):
                with handle.map() as m:
                    assert (peek(m) == number).all()
                seen[number].add(ops.call(threading.get_ident))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(frames, range(8)))
    assert len(set.union(*seen)) == len(contexts)
    assert all(len(threads) == 1 for threads in seen)
    for context in contexts:
        context.close()


def test_row_48_the_environment_stays_as_it_is() -> None:
    """To choose a renderer is advised, never done: a window system may be running already."""
    program = """
import os
before = dict(os.environ)
import cuglue
from cuglue import gl
with cuglue.use_driver("sim"), gl.headless():
    import OpenGL.GL as GL
    name = GL.GLuint()
    GL.glCreateBuffers(1, name)
    GL.glNamedBufferData(name.value, 64, None, GL.GL_STATIC_DRAW)
    with cuglue.register_buffer(name.value) as handle, handle.map():
        pass
print({k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)})
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"


def test_row_52_where_no_driver_shares_with_opengl_wsl_is_named(context: GlContext) -> None:
    with cuglue.use_driver(SimDriver(disable=["graphics_gl"])), pytest.raises(UnsupportedError, match="WSL"):
        cuglue.register_buffer(make_buffer(64))


def test_A16_a_map_keeps_what_its_handle_keeps_until_it_was_left(driver: Driver, context: GlContext) -> None:
    """Whoever owns the OpenGL object must not go, and delete it, under a live map."""
    order: list[str] = []

    class Owner:
        def __del__(self) -> None:
            order.append("owner")

    handle = cuglue.register_buffer(make_buffer(64))
    handle.keep = Owner()
    m = handle.map_mut()
    del handle
    assert order == []
    with trace(only={"graphics_unmap"}) as calls, pytest.warns(ResourceWarning, match="never closed"):
        m.release()
    assert len(calls) == 1
    assert order == ["owner"]


def test_A24_mapped_left_and_closed_on_three_threads(driver: Any) -> None:
    def on_a_thread(call: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result(20)

    with headless(thread="worker") as context:
        name = context.ops.call(make_texture, 8, 8)
        handle = on_a_thread(lambda: cuglue.register_texture(name, ops=context.ops))
        m = on_a_thread(handle.map_mut)
        on_a_thread(m.release)
        on_a_thread(handle.close)
        assert driver.inventory()["resources"] == 0
