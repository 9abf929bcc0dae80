"""What maps, their arrays and image copies cost, beside the bare calls underneath, in one process.

Teaches: nothing; measures.   Needs: a CUDA device, CuPy, PyOpenGL.   Run: python benchmarks/map.py

Contestants take turns, batch after batch, so that a machine that slows down slows all of them. Batches of maps are
short and begin with an idle device: to change hands takes the GPU a third of a millisecond, whoever asks, and the
driver's queue holds a few hundred of them; a longer loop measures that. Tables have medians in microseconds of host
time (of copies: GB/s on the device) and ratios to the first line; --raw FILE keeps every sample.
PyTorch and cuda.core are left out, and named, where they are not installed. Without a CUDA device only our own host
cost is printed, over a driver that does nothing: it is no claim about any device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

os.environ.setdefault("PYOPENGL_PLATFORM", "egl")  # PyOpenGL chooses at its first import

import cuglue
from cuglue import gl
from cuglue.driver.protocol import Driver

NBYTES, GROUP, BURST = 1 << 20, 16, 20
IMAGES = {"1920x1080 RGBA8": (0x8058, 1920, 1080), "4096x4096 RGBA8": (0x8058, 4096, 4096)}
IMAGES |= {"1024x1024 RGBA32F": (0x8814, 1024, 1024), "4096x4096 R8": (0x8229, 4096, 4096)}
DEVICE_TO_DEVICE, COPIES = 3, 20

METHODS: tuple[str, ...] = (
    "graphics_map",
    "graphics_pointer",
    "graphics_unmap",
    "capture_status",
    "stream_current",
)
METHODS += ("event_record", "stream_wait_event", "event_query", "context_wait")

Work = Callable[[], Any]
Samples = dict[str, list[float]]


# --- measuring ------------------------------------------------------------------------------------------------------


def compare(works: dict[str, Work], settle: Work, *, batch: int = 100, rounds: int = 21) -> Samples:
    """Microseconds of one call of each, by turns; everything is idle before each batch. Two rounds warm up."""
    found: Samples = {name: [] for name in works}
    for _ in range(rounds + 2):
        for name, work in works.items():
            settle()
            start = time.perf_counter()
            for _ in range(batch):
                work()
            found[name].append((time.perf_counter() - start) / batch * 1e6)
    return {name: samples[2:] for name, samples in found.items()}


def device_rate(works: dict[str, Work], stream: Any, nbytes: int, rounds: int = 9) -> Samples:
    """GB/s of each copy of so many bytes on the device. All are queued behind a latch: the host's pace has no part."""
    import cupy

    from cuglue.testing import Latch

    found: Samples = {name: [] for name in works}
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    for _ in range(rounds + 1):
        for name, work in works.items():
            with Latch(stream.ptr) as latch:
                first.record(stream)
                for _ in range(COPIES):
                    work()
                last.record(stream)
                latch.release()
            stream.synchronize()
            milliseconds = cupy.cuda.get_elapsed_time(first, last)
            found[name].append(COPIES * nbytes / milliseconds / 1e6)
    return {name: samples[1:] for name, samples in found.items()}


def table(title: str, unit: str, found: Samples) -> None:
    """Print medians, and what each is to the first line."""
    print(f"\n{title}\n\n| | {unit} | to the first |\n|---|---|---|")
    base = statistics.median(next(iter(found.values())))
    for name, samples in found.items():
        median = statistics.median(samples)
        print(f"| {name} | {median:.1f} | {median / base:.2f} |", flush=True)


def parts(work: Work, handles: list[Any], driver: Driver, settle: Work, rounds: int = 101) -> Samples:
    """Microseconds of one ``work`` by methods of the driver and OpenGL's question; the rest is our Python.

    Means over batches like those of :func:`compare`. Of each method the time inside it. What looking at the clock costs
    is measured, and taken off.
    """
    clock = time.perf_counter
    sums: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        taken = sums.setdefault(name, [])

        def call(*args: Any) -> Any:
            start = clock()
            try:
                return function(*args)
            finally:
                taken.append(clock() - start)

        return call

    sizes = [handle._life.backing.current_size for handle in handles]
    idle = timed("", int)
    start = clock()
    for _ in range(10000):
        idle()
    inside, around = statistics.median(sums.pop("")) * 1e6, (clock() - start) / 10000 * 1e6
    asked = [inside_of(size.number, clock) for size in sizes]
    with ExitStack() as undo:
        for name in METHODS:
            undo.enter_context(replaced(driver, name, timed(name, getattr(driver, name))))
        work()
        for taken in sums.values():
            taken.clear()
        calls, whole = rounds * BURST // 2, 0.0
        for _ in range(rounds):
            settle()
            start = clock()
            for _ in range(BURST // 2):
                work()
            whole += (clock() - start) / calls * 1e6
    spent = {name: (len(taken) / calls, sum(taken) / calls * 1e6) for name, taken in sums.items() if taken}
    found = {f"{name}, {count:.0f} a time": us - count * inside for name, (count, us) in spent.items()}
    found[f"OpenGL: the buffer's size, {len(asked)} a time"] = sum(asked) - len(asked) * inside
    whole -= around * sum(count for count, _ in spent.values())
    found = {"all of it": whole} | found | {"the rest: Python": whole - sum(found.values())}
    return {name: [us] for name, us in found.items()}


def inside_of(function: Callable[[], Any], clock: Callable[[], float], count: int = 1000) -> float:
    """Microseconds between two looks at the clock with one call between them; the median."""
    found = []
    for _ in range(count):
        start = clock()
        function()
        found.append(clock() - start)
    return statistics.median(found) * 1e6


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of this object alone, for a while."""
    former = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if former is None:
            delattr(owner, name)
        else:
            setattr(owner, name, former)


# --- OpenGL objects -------------------------------------------------------------------------------------------------


def buffers(count: int) -> list[int]:
    """Names of new buffers."""
    import OpenGL.GL as GL

    names = (GL.GLuint * count)()
    GL.glCreateBuffers(count, names)
    for name in names:
        GL.glNamedBufferData(name, NBYTES, None, GL.GL_DYNAMIC_DRAW)
    return list(names)


def texture(internal_format: int, width: int, height: int) -> int:
    """Name of a new texture."""
    import OpenGL.GL as GL

    name = GL.GLuint()
    GL.glCreateTextures(GL.GL_TEXTURE_2D, 1, name)
    GL.glTextureStorage2D(name.value, 1, internal_format, width, height)
    return int(name.value)


def clearing(names: list[int], then: Work) -> Work:
    """``then`` after OpenGL was told to clear the buffers."""
    import OpenGL.GL as GL

    zero = (ctypes.c_ubyte * 4)()

    def work() -> None:
        for name in names:
            GL.glClearNamedBufferData(name, GL.GL_R8UI, GL.GL_RED_INTEGER, GL.GL_UNSIGNED_BYTE, zero)
        then()

    return work


def map_once(handle: Any, stream: Any) -> Work:
    """One map and its end."""

    def work() -> None:
        with handle.map(stream):
            pass

    return work


def map_group(handles: list[Any], stream: Any) -> Work:
    """One map of several handles and its end."""

    def work() -> None:
        with cuglue.map_all(handles, stream):
            pass

    return work


# --- the bare calls -------------------------------------------------------------------------------------------------


@contextmanager
def registered(names: list[int], stream: int) -> Iterator[Work]:
    """Map, get each pointer, unmap, as ``cuda.bindings`` does it for whoever looks at every status."""
    from cuda.bindings import driver as cu

    def ok(answer: tuple[Any, ...]) -> tuple[Any, ...]:
        if answer[0] != cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"bare call: {answer[0]!r}")
        return answer[1:]

    resources = [ok(cu.cuGraphicsGLRegisterBuffer(name, 0))[0] for name in names]
    packed = (ctypes.c_void_p * len(resources))(*(int(resource) for resource in resources))
    address, count = ctypes.addressof(packed), len(resources)

    def work() -> None:
        ok(cu.cuGraphicsMapResources(count, address, stream))
        for resource in resources:
            ok(cu.cuGraphicsResourceGetMappedPointer(resource))
        ok(cu.cuGraphicsUnmapResources(count, address, stream))

    try:
        yield work
    finally:
        for resource in resources:
            ok(cu.cuGraphicsUnregisterResource(resource))


@contextmanager
def core_resource(name: int, stream: Any) -> Iterator[Work]:
    """The same through ``cuda.core``."""
    from cuda.core import Device, GraphicsResource

    device = Device(0)
    device.set_current()
    where = device.create_stream(stream)
    resource = GraphicsResource.from_gl_buffer(name)
    try:
        yield lambda: resource.map(stream=where).close()
    finally:
        resource.close()


# --- what is measured -----------------------------------------------------------------------------------------------


def maps(stream: Any, settle: Work, missing: dict[str, str], when: str) -> dict[str, Samples]:
    """Map and leave one buffer, and sixteen, idle and with OpenGL work pending."""
    one, pending, core, ours = buffers(4)
    bare_group, our_group = buffers(GROUP), buffers(GROUP)
    with ExitStack() as stack:
        bare = stack.enter_context(registered([one], stream.ptr))
        bare_pending = stack.enter_context(registered([pending], stream.ptr))
        bare_all = stack.enter_context(registered(bare_group, stream.ptr))
        handle = stack.enter_context(gl.register_buffer(ours))
        handles = [stack.enter_context(gl.register_buffer(name)) for name in our_group]
        single = {"bare calls": bare, "map, stream named": map_once(handle, stream)}
        single["map, current stream"] = map_once(handle, None)
        try:
            single["cuda.core GraphicsResource"] = stack.enter_context(core_resource(core, stream))
        except Exception as error:  # noqa: BLE001 - a peer that cannot run is told, and the others go on
            missing["cuda.core GraphicsResource"] = f"{type(error).__name__}: {error}"
        found = {f"map and leave a buffer, idle{when}": compare(single, settle, batch=BURST, rounds=101)}
        found[f"map and leave a buffer after OpenGL cleared it{when}"] = compare(
            {
                "bare calls": clearing([pending], bare_pending),
                "map": clearing([ours], map_once(handle, stream)),
                "the clear alone": clearing([pending], lambda: None),
            },
            settle,
            batch=BURST,
            rounds=101,
        )
        found[f"map and leave {GROUP} buffers, idle{when}"] = compare(
            {"bare calls, one each way": bare_all, "map_all": map_group(handles, stream)},
            settle,
            batch=BURST // 2,
            rounds=101,
        )
        driver = cuglue.current_driver()
        alone, together = map_once(handle, stream), map_group(handles, stream)
        found[f"a map of a buffer and its end, by part{when}"] = parts(alone, [handle], driver, settle)
        found[f"map_all of {GROUP} and its end, by part{when}"] = parts(together, handles, driver, settle)
        return found


class Bare:
    """An object with a CUDA array interface, and nothing else."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__cuda_array_interface__ = interface


def arrays(stream: Any, settle: Work, torch: Any) -> dict[str, Samples]:
    """Arrays made from a map that is live."""
    import cupy

    with gl.register_buffer(buffers(1)[0]) as handle:
        with handle.map(stream) as m:
            bare = Bare(m.__cuda_array_interface__)
            works: dict[str, Work] = {"cupy.asarray(bare object)": lambda: cupy.asarray(bare)}
            works |= {"cupy.asarray(m)": lambda: cupy.asarray(m), "m.cupy()": lambda: m.cupy()}
            found = {"CuPy array of a map": compare(works, settle)}
        if torch is not None:
            with handle.map(stream) as m:
                found["PyTorch tensor of a map"] = compare(tensors(m, torch), settle)
    return found


def tensors(m: Any, torch: Any) -> dict[str, Work]:
    """PyTorch tensors of a live map, and of what is least for one."""
    from cuda.core import Buffer
    from cuda.core.utils import StridedMemoryView

    def view() -> Any:
        memory = Buffer.from_handle(m.device_ptr, m.size, owner=m)
        return StridedMemoryView.from_buffer(memory, shape=m.shape, dtype=m.dtype)

    ready = view()
    return {
        "torch.from_dlpack(StridedMemoryView)": lambda: torch.from_dlpack(ready),
        "torch.from_dlpack(new StridedMemoryView)": lambda: torch.from_dlpack(view()),
        "torch.from_dlpack(m)": lambda: torch.from_dlpack(m),
        "m.torch()": lambda: m.torch(),
    }


def copies(stream: Any) -> dict[str, Samples]:
    """Rates on the device of what maps of an image copy, of the driver's own copies, and of linear memory."""
    import cupy

    from cuglue.core.stream import as_stream
    from cuglue.graphics.image_copy import image_copier

    runtime, where, found = cupy.cuda.runtime, as_stream(stream), {}
    for name, geometry in IMAGES.items():
        # A map for reading, which publishes nothing: what the copies below left in the linear memory is of no interest.
        with gl.register_texture(texture(*geometry)) as handle, handle.map(stream) as m:
            image, linear, row = m.share.keep.image, m.device_ptr, m.row_bytes
            copier, array, rows, size = image_copier(where.state), image.array, m.rows, m.size
            other = cupy.empty(size, "u1")

            def linear_copy(to: Any = other, of: int = linear, size: int = size) -> None:
                runtime.memcpyAsync(to.data.ptr, of, size, DEVICE_TO_DEVICE, stream.ptr)

            def bare_in(to: int = linear, of: int = array, row: int = row, rows: int = rows) -> None:
                runtime.memcpy2DFromArrayAsync(to, row, of, 0, 0, row, rows, DEVICE_TO_DEVICE, stream.ptr)

            def bare_out(to: int = array, of: int = linear, row: int = row, rows: int = rows) -> None:
                runtime.memcpy2DToArrayAsync(to, 0, 0, of, row, row, rows, DEVICE_TO_DEVICE, stream.ptr)

            def ours_in(copier: Any = copier, image: Any = image, linear: int = linear) -> None:
                copier.load(image, linear, where)

            def ours_out(copier: Any = copier, image: Any = image, linear: int = linear) -> None:
                copier.store(image, linear, where)

            works: dict[str, Work] = {"linear memory": linear_copy}
            works |= {"cudaMemcpy2DFromArrayAsync": bare_in, "map": ours_in}
            works |= {"cudaMemcpy2DToArrayAsync": bare_out, "leave map_mut": ours_out}
            key = f"copies of {name} ({size / 1e6:.1f} MB, {handle.copy_path.name.lower()})"
            found[key] = device_rate(works, stream, size)
    return found


def on_cuda(missing: dict[str, str]) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """``(microseconds, rates)`` by table; each is printed as soon as it is there."""
    import cupy
    import OpenGL.GL as GL

    stream = cupy.cuda.Stream(non_blocking=True)

    def settle() -> None:
        GL.glFinish()
        stream.synchronize()

    costs: dict[str, Samples] = {}
    rates: dict[str, Samples] = {}

    def show(into: dict[str, Samples], unit: str, found: dict[str, Samples]) -> None:
        into.update(found)
        for title, samples in found.items():
            table(title, unit, samples)

    with gl.headless(), stream:
        show(costs, "us", maps(stream, settle, missing, ""))
        show(rates, "GB/s", copies(stream))
        try:
            import torch

            torch.cuda.init()
        except Exception as error:  # noqa: BLE001 - a peer that cannot run is told, and the others go on
            missing["PyTorch"] = f"{type(error).__name__}: {error}"
            torch = None
        show(costs, "us", arrays(stream, settle, torch))
        if torch is not None:  # maps then order every stream of the device, for readers that name none
            show(costs, "us", maps(stream, settle, missing, ", PyTorch loaded"))
    return costs, rates


def on_nothing() -> Samples:
    """Our own host cost, over a simulated driver whose graphics calls answer at once."""
    with cuglue.use_driver("sim") as driver, gl.headless(), ExitStack() as stack:
        handles = [stack.enter_context(gl.register_buffer(name)) for name in buffers(GROUP)]
        with handles[0].map() as m:
            answer = m.device_ptr, m.size
        with answering(driver, answer):
            works = {"map and leave a buffer": map_once(handles[0], None)}
            works[f"map_all of {GROUP} buffers"] = map_group(handles, None)
            found = compare(works, lambda: None)
            spent = parts(map_once(handles[0], None), handles[:1], driver, lambda: None)
            table("a map of a buffer and its end, by part", "us", spent)
            return found


@contextmanager
def answering(driver: Driver, pointer: tuple[int, int]) -> Iterator[None]:
    """Let what a map asks of the driver be answered at once; graphics calls do nothing."""
    current = driver.stream_current(0)
    with ExitStack() as undo:
        undo.enter_context(replaced(driver, "stream_current", lambda device: current))
        for name in ("graphics_map", "graphics_unmap"):
            undo.enter_context(replaced(driver, name, lambda *args: None))
        undo.enter_context(replaced(driver, "graphics_pointer", lambda resource: pointer))
        yield


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raw", metavar="FILE", help="write every sample as JSON")
    options = parser.parse_args()
    missing: dict[str, str] = {}
    machine = {"python": platform.python_version(), "host": platform.processor(), "device": "none"}
    costs: dict[str, Samples] = {}
    rates: dict[str, Samples] = {}
    if cuglue.is_cuda_available():
        machine["device"] = cuglue.current_driver().device_name(0)
        print(f"{machine['device']}, Python {machine['python']}")
        costs, rates = on_cuda(missing)
    else:
        print("no CUDA device here: our own host cost, graphics calls do nothing; no claim about a device")
        costs["simulated device"] = on_nothing()
        table("host cost, simulated device", "us", costs["simulated device"])
    for name, why in missing.items():
        print(f"left out: {name}: {why}", file=sys.stderr)
    if options.raw:
        with open(options.raw, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "us": costs, "GB/s": rates, "left out": missing}, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
