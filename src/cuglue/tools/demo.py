"""``python -m cuglue demo``: the main job, start to end, on whatever this machine has.

OpenGL draws a mesh into a texture; the texture becomes an array without touching the host; a kernel finds its edges;
the result goes back into the texture; OpenGL reads it. Owns the sequence and the table it prints, nothing else.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..command.runtime import Runtime
    from .scene import Scene

SUMMARY = "draw with OpenGL, process the texture as an array, show the result in the texture"
GL_TEXTURE_2D = 0x0DE1
WARM_UP_FRAMES = 20  # clocks rise, kernels are loaded, pools are filled: none of it belongs into a rate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the demo."""
    parser.add_argument("--size", default="1280x720", help="WIDTHxHEIGHT in pixels (default %(default)s)")
    parser.add_argument("--frames", type=int, default=0, help="then run this many frames and compare speeds")
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="picture to write (default %(default)s)"
    )
    parser.add_argument(
        "--no-gl", action="store_true", help="do not use OpenGL: a picture made on the host instead"
    )


class Table:
    """Lines of the summary and the time of each stage."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def add(self, label: str, value: object) -> None:
        """One line."""
        self.rows.append((label, str(value)))

    @contextmanager
    def stage(self, label: str, finish: Any = None) -> Iterator[None]:
        """Time a stage in milliseconds, until ``finish()`` returned."""
        start = time.perf_counter()
        yield
        if finish is not None:
            finish()
        self.add(f"time: {label}", f"{(time.perf_counter() - start) * 1e3:8.2f} ms")

    def print(self) -> None:
        """Print it."""
        width = max(len(label) for label, _ in self.rows)
        for label, value in self.rows:
            print(f"  {label:<{width}}  {value}")


def check_picture(path: Path) -> None:
    """Refuse, before any work, a picture that could not be written."""
    if path.suffix.lower() != ".png":
        raise SystemExit(f"--out: got {str(path)!r}, expected the name of a .png file")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise SystemExit(f"--out: got {str(path)!r}, expected a file in a directory that can be written")


def run(options: argparse.Namespace) -> int:
    """Run the demo; 0 if the texture holds what the kernel made."""
    width, height = parse_size(options.size)
    if options.frames < 0:
        raise SystemExit(f"--frames: got {options.frames}, expected 0 or more")
    check_picture(options.out)
    # PyOpenGL picks its platform when first imported; this is our own program, so the choice is ours.
    os.environ.setdefault("PYOPENGL_PLATFORM", "egl")
    import cuglue

    table = Table()
    with ExitStack() as stack:
        if not os.environ.get("CUGLUE_DRIVER") and not cuglue.is_cuda_available():
            print(
                "No CUDA device here: using the simulated device (CUGLUE_DRIVER=sim). Speeds are not claimed."
            )
            stack.enter_context(cuglue.use_driver("sim"))
        driver = cuglue.current_driver()
        table.add("driver", f"{driver.name}: {driver.device_name(0)}")
        memory = stack.enter_context(cuglue.DirectCudaResource(device=0))
        runtime = stack.enter_context(cuglue.Runtime(device=0, resource=memory))
        context = None if options.no_gl else open_gl(stack)
        if context is None:
            before, after = without_gl(runtime, width, height, table)
        else:
            from .scene import Scene

            table.add("GL renderer", f"{context.renderer} ({context.vendor})")
            scene = Scene(width, height)
            stack.callback(scene.close)
            before, after = with_gl(runtime, scene, context, table)
            if options.frames:
                frames(runtime, scene, context, options.frames, table)
    write_png(options.out, before, after)
    table.add("picture", f"{options.out} (before | after)")
    table.print()
    return 0


def parse_size(text: str) -> tuple[int, int]:
    """``"1280x720"`` as two ints."""
    try:
        width, height = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise SystemExit(f"--size: got {text!r}, expected WIDTHxHEIGHT such as 1280x720") from None
    if not (1 <= width <= 16384 and 1 <= height <= 16384):
        raise SystemExit(f"--size: got {text!r}, expected sides of 1 to 16384 pixels")
    return width, height


def open_gl(stack: ExitStack) -> Any:
    """A headless context, or None where there is no OpenGL (and says so)."""
    import cuglue

    try:
        return stack.enter_context(cuglue.gl.headless(device=0))
    except (cuglue.errors.CuglueError, ImportError, OSError) as error:
        print(f"No OpenGL here ({error}). Using a picture in the device's memory instead.")
        return None


def with_gl(
    runtime: Runtime, scene: Scene, context: Any, table: Table
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The main job once, on a texture."""
    import cuglue
    from cuglue import In, Out

    from .edges import BLOCK, EDGE_STRENGTH, PAINT_EDGES, grid_for

    width, height = scene.width, scene.height
    grid = grid_for(width, height)
    with table.stage("draw (OpenGL)", finish=_gl_finish):
        scene.draw(0.7)
    before = scene.pixels()
    with (
        cuglue.register_texture(scene.texture, GL_TEXTURE_2D, ops=context.ops) as image,
        runtime.empty(width * height) as strength,
    ):
        start = time.perf_counter()
        with image.map() as m:
            m.stream.synchronize()
            table.add("time: map (texture -> array)", f"{(time.perf_counter() - start) * 1e3:8.2f} ms")
            table.add("texture", f"{image.format.name} {image.shape} {image.dtype}, row 0 is the bottom row")
            table.add("mapped at", f"{m.device_ptr:#x}, {m.size} bytes")
            show_consumers(m, table)
            with table.stage("edge kernel", finish=m.stream.synchronize):
                runtime.launch(EDGE_STRENGTH, grid, BLOCK, In(m), Out(strength), width, height)
        with (
            table.stage("write back (array -> texture)", finish=_gl_finish),
            image.map_mut(overwrite=True) as m,
        ):
            runtime.launch(PAINT_EDGES, grid, BLOCK, In(strength), Out(m), width, height)
        with table.stage("read back (OpenGL, for the picture)"):
            after = scene.pixels()
        edges = runtime.read(strength, (height, width), "u1").result()
        if not np.array_equal(after[..., 0], np.asarray(edges)):
            raise SystemExit("the texture does not hold what the kernel wrote")
        table.add(
            "bytes over the bus",
            f"0 (a texture costs one copy on the device each way: {2 * before.nbytes} bytes)",
        )
    return before, after


def show_consumers(m: Any, table: Table) -> None:
    """Who sees the mapped memory, and at which address."""
    if hasattr(m, "__cuda_array_interface__"):
        array = m.cupy()
        table.add(
            "cupy sees", f"{array.shape} {array.dtype} at {array.data.ptr:#x}: {same(array.data.ptr, m)}"
        )
    else:
        array = np.asarray(m)
        table.add(
            "numpy sees",
            f"{array.shape} {array.dtype} at {array.ctypes.data:#x}: {same(array.ctypes.data, m)}",
        )
    try:
        import torch
    except ImportError:
        table.add("torch sees", "not installed")
        return
    tensor = torch.from_dlpack(m)
    table.add(
        "torch sees",
        f"{tuple(tensor.shape)} {tensor.dtype} at {tensor.data_ptr():#x}: {same(tensor.data_ptr(), m)}",
    )


def same(pointer: int, m: Any) -> str:
    """Whether a consumer got the mapped memory itself."""
    return "the same memory" if pointer == m.device_ptr else "A COPY"


def without_gl(
    runtime: Runtime, width: int, height: int, table: Table
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The same kernels on a picture that the host made."""
    from cuglue import In, Out

    from .edges import BLOCK, EDGE_STRENGTH, PAINT_EDGES, grid_for

    before = host_picture(width, height)
    grid = grid_for(width, height)
    table.add("GL renderer", "none: a picture made on the host")
    with table.stage("upload"):
        image = runtime.create(before)
        strength = runtime.empty(width * height)
    with table.stage("edge kernels"):
        runtime.launch(EDGE_STRENGTH, grid, BLOCK, In(image), Out(strength), width, height)
        runtime.launch(PAINT_EDGES, grid, BLOCK, In(strength), Out(image), width, height)
        after = np.asarray(runtime.read(image, before.shape, "u1").result())
    table.add("bytes over the bus", f"{2 * before.nbytes} (without OpenGL the picture comes from the host)")
    for buffer in (image, strength):
        buffer.close()
    return before, after


def host_picture(width: int, height: int) -> NDArray[np.uint8]:
    """Shaded balls on a chequered floor, ``(height, width, 4)``, row 0 at the bottom."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    out = np.empty((height, width, 4), np.uint8)
    floor = ((x // 40 + y // 40) % 2 * 60 + 40).astype(np.uint8)
    out[..., :3] = floor[..., None]
    out[..., 3] = 255
    for i in range(5):
        cx, cy = width * (0.15 + 0.175 * i), height * (0.5 + 0.25 * math.sin(2.0 * i))
        radius = height * 0.16
        inside = 1.0 - ((x - cx) ** 2 + (y - cy) ** 2) / radius**2
        z = np.sqrt(np.maximum(inside, 0.0))
        light = np.clip((0.4 * (x - cx) / radius + 0.5 * (y - cy) / radius + 0.75 * z), 0.08, 1.0)
        colour = 0.5 + 0.5 * np.cos(i * 1.3 + np.array([0.0, 2.0, 4.0]))
        out[inside > 0, :3] = (255 * light[..., None] * colour).astype(np.uint8)[inside > 0]
    return out


def frames(runtime: Runtime, scene: Scene, context: Any, count: int, table: Table) -> None:
    """Frames per second of the whole loop, against the same work through ``glReadPixels``."""
    from tqdm import tqdm

    import cuglue
    from cuglue import In, Out

    from .edges import BLOCK, EDGE_STRENGTH, PAINT_EDGES, grid_for

    width, height = scene.width, scene.height
    grid = grid_for(width, height)
    with (
        cuglue.register_texture(scene.texture, GL_TEXTURE_2D, ops=context.ops) as image,
        runtime.empty(width * height) as strength,
        runtime.empty(4 * width * height) as pixels,
    ):

        def mapped() -> None:
            # One map for both kernels: each hand-over makes the GPU change between graphics and compute.
            with image.map_mut() as m:
                runtime.launch(EDGE_STRENGTH, grid, BLOCK, In(m), Out(strength), width, height)
                runtime.launch(PAINT_EDGES, grid, BLOCK, In(strength), Out(m), width, height)

        def through_the_host() -> None:
            with runtime.command() as command:
                command.write_to_gpu(pixels.descriptor((4 * width * height,), "u1"), scene.pixels())
            runtime.launch(EDGE_STRENGTH, grid, BLOCK, In(pixels), Out(strength), width, height)
            runtime.launch(PAINT_EDGES, grid, BLOCK, In(strength), Out(pixels), width, height)
            scene.upload(np.asarray(runtime.read(pixels, (height, width, 4), "u1").result()))

        rates = {}
        for label, work in (("mapped texture", mapped), ("glReadPixels", through_the_host)):
            for i in range(WARM_UP_FRAMES):
                scene.draw(0.02 * i)
                work()
            _gl_finish()
            start = time.perf_counter()
            for i in tqdm(range(count), desc=label, unit="frame", file=sys.stderr):
                scene.draw(0.7 + 0.02 * i)
                work()
            _gl_finish()
            rates[label] = count / (time.perf_counter() - start)
            table.add(f"frames per second: {label}", f"{rates[label]:.1f}")
    if runtime.driver.capabilities(0).simulated:
        table.add("", "(simulated device: these rates say nothing about a GPU)")
    else:
        table.add("mapped / glReadPixels", f"{rates['mapped texture'] / rates['glReadPixels']:.2f}x")


def write_png(path: Path, before: NDArray[np.uint8], after: NDArray[np.uint8]) -> None:
    """Both pictures side by side; PNG counts rows from the top."""
    from PIL import Image

    both = np.concatenate([before, after], axis=1)[::-1, :, :3]
    Image.fromarray(np.ascontiguousarray(both)).save(path)


def _gl_finish() -> None:
    from OpenGL import GL

    GL.glFinish()
