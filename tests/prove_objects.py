"""The fault sweep's operations on graphics objects and memory of other owners: made, mapped, left, given away, ended.

The objects are files of memory, arrays and Direct3D textures of the simulated device; those of OpenGL are the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from graphics.shared_memory import memory_file
from prove_operations import Case, Subject

import cuglue
from cuglue import CudaHandle, Tensor, external
from cuglue.core.device import device_state
from cuglue.driver.protocol import ArrayInfo, TexelKind
from cuglue.graphics.together import MapList

INFO = ArrayInfo(16, 9, 0, 8, 4, TexelKind.UINT)
BYTES = 16 * 9 * 4
KEPT = {
    "keeps": ("kernels", "events"),
    "atomic": False,
}  # compiled kernels and an image's copy stay for the next

Make = Callable[[Any], Subject]


def settle(driver: Any) -> None:
    device_state(driver, 0).retire.drain(block=True)


# --- the objects ------------------------------------------------------------------------------------------------


def imported(nbytes: int) -> external.ExternalMemory:
    fd = memory_file(nbytes)
    memory = external.import_fd(fd, allocation_size=nbytes)
    os.close(fd)
    return memory


def from_memory(driver: Any) -> CudaHandle:
    return CudaHandle.from_external(imported(4096), size=BYTES)


def from_array(driver: Any) -> CudaHandle:
    array = driver.array_create(INFO, 0)
    handle = CudaHandle.from_array(array, texels=16, rows=9, bytes_per_texel=4, device=0, driver=driver)
    handle.__dict__["ending"] = lambda: driver.array_destroy(array)
    return handle


def from_texture(driver: Any) -> CudaHandle:
    return CudaHandle.from_d3d11(driver.fake_d3d11(16, 9), driver=driver)


BACKINGS: dict[str, Callable[[Any], CudaHandle]] = {
    "external memory": from_memory,
    "imported array": from_array,
    "Direct3D texture": from_texture,
}


def subject_of(make: Callable[[Any], CudaHandle], method: str = "") -> Make:
    def setup(driver: Any) -> Subject:
        handle = make(driver)
        data = np.arange(handle.size, dtype=np.uint32).astype("u1").reshape(handle.shape)
        handle.write(data)
        live = getattr(handle, method)() if method else None
        return SimpleNamespace(driver=driver, handle=handle, data=data, map=live)

    return setup


def end(subject: Subject, result: Any = None) -> None:
    """Leave, close, and end what stands behind the handle."""
    for m in (result, subject.map):
        if m is not None:
            m.release()
    subject.handle.close()
    settle(subject.driver)
    subject.handle.__dict__.pop("ending", lambda: None)()


def shows(subject: Subject, m: Any) -> None:
    np.testing.assert_array_equal(m.numpy(), subject.data)


def holds(subject: Subject, result: Any = None) -> None:
    np.testing.assert_array_equal(subject.handle.read(), subject.data)


def write_other(subject: Subject) -> None:
    subject.handle.write(~subject.data, subject.driver.Stream())


def holds_other(subject: Subject, result: Any = None) -> None:
    np.testing.assert_array_equal(subject.handle.read(), ~subject.data)


def map_cases(backings: dict[str, Callable[[Any], CudaHandle]]) -> Iterator[Case]:
    """Maps of each backing, left and cancelled, and the end of the handle."""
    for name, make in backings.items():
        yield Case(
            f"{name}: map",
            subject_of(make),
            lambda s: s.handle.map(),
            end,
            shows,
            options=KEPT,
            of=("CudaHandle.map",),
        )
        yield Case(
            f"{name}: map_mut",
            subject_of(make),
            lambda s: s.handle.map_mut(),
            end,
            shows,
            options=KEPT,
            of=("CudaHandle.map_mut",),
        )
        yield Case(
            f"{name}: map_mut, overwriting",
            subject_of(make),
            lambda s: s.handle.try_map_mut(overwrite=True),
            end,
            options=KEPT,
            of=("CudaHandle.try_map_mut",),
        )
        for method in ("map", "map_mut"):
            yield Case(
                f"{name}: leave {method}",
                subject_of(make, method),
                lambda s: s.map.release(),
                end,
                holds,
                options=KEPT,
                of=("CudaMap.release",),
            )
        yield Case(
            f"{name}: cancel",
            subject_of(make, "map_mut"),
            lambda s: s.map.cancel(),
            end,
            options=KEPT,
            of=("CudaMap.cancel",),
        )
        yield Case(
            f"{name}: read",
            subject_of(make),
            lambda s: s.handle.read(s.driver.Stream()),
            lambda s, array: end(s),
            lambda s, array: np.testing.assert_array_equal(array, s.data),
            options=KEPT,
            of=("WholeContents.read",),
        )
        yield Case(
            f"{name}: write",
            subject_of(make),
            write_other,
            end,
            holds_other,
            options=KEPT,
            of=("WholeContents.write",),
        )
        yield Case(
            f"{name}: record a use of a map",
            subject_of(make, "map"),
            lambda s: s.map.record(s.driver.Stream()),
            end,
            options=KEPT,
            of=("MapUsers.record",),
        )
        yield Case(
            f"{name}: DLPack of a map",
            subject_of(make, "map_mut"),
            lambda s: s.map.__dlpack__(max_version=(1, 0)) is None,
            lambda s, nobody_took_it: end(s),
            options=KEPT,
            of=("Exporter.__dlpack__",),
        )
        yield Case(
            f"{name}: numpy() of a map",
            subject_of(make, "map"),
            lambda s: s.map.numpy(),
            lambda s, array: end(s),
            lambda s, array: np.testing.assert_array_equal(array, s.data),
            options=KEPT,
            of=("Exporter.numpy",),
        )
        yield Case(
            f"{name}: close",
            subject_of(make),
            lambda s: s.handle.close(),
            end,
            options=KEPT,
            of=("CudaHandle.close",),
        )


# --- imports and fences -----------------------------------------------------------------------------------------


def descriptor(make: Callable[[Any], int]) -> Make:
    return lambda driver: SimpleNamespace(driver=driver, fd=make(driver))


def close_both(subject: Subject, result: Any) -> None:
    result.close()
    settle(subject.driver)
    os.close(subject.fd)


def image_of(subject: Subject) -> CudaHandle:
    image = external.import_image(subject.fd, width=16, height=9, format="RGBA8", allocation_size=4096)
    try:
        return CudaHandle.from_external_image(image)
    except BaseException:
        image.close()
        raise


def fence(driver: Any) -> Subject:
    fd = driver.semaphore_fd(1)
    made = external.import_semaphore_fd(fd)
    os.close(fd)
    return SimpleNamespace(driver=driver, fence=made, stream=driver.Stream())


def end_fence(subject: Subject, result: Any = None) -> None:
    subject.fence.close()
    settle(subject.driver)


def win32(driver: Any) -> Subject:
    fd = memory_file(4096)
    return SimpleNamespace(driver=driver, fd=fd, handle=external.D3D12Heap(driver.fake_win32(fd)))


def semaphore_win32(driver: Any) -> Subject:
    fd = driver.semaphore_fd(1)
    return SimpleNamespace(driver=driver, fd=fd, handle=external.D3D12Fence(driver.fake_win32(fd)))


def import_cases() -> Iterator[Case]:
    yield Case(
        "external.import_fd",
        descriptor(lambda driver: memory_file(4096)),
        lambda s: external.import_fd(s.fd, allocation_size=4096),
        close_both,
        of=("import_fd",),
    )
    yield Case(
        "external.import_fd of a dma-buf",
        descriptor(lambda driver: memory_file(8192, bytes(range(256)) * 32)),
        lambda s: external.import_fd(s.fd, allocation_size=8192, kind="dma_buf"),
        close_both,
        lambda s, memory: np.testing.assert_array_equal(
            np.frombuffer(os.pread(s.fd, 8192, 0), "u1"), np.arange(8192) % 256
        ),
        options={"keeps": ("kernels", "events"), "modes": ("once", "method")},
        of=("import_fd",),
    )
    yield Case(
        "external.import_win32",
        win32,
        lambda s: external.import_win32(s.handle, allocation_size=4096),
        close_both,
        of=("import_win32",),
    )
    yield Case(
        "external.import_image, from_external_image",
        descriptor(lambda driver: memory_file(4096)),
        image_of,
        close_both,
        options={
            **KEPT,
            "modes": ("once", "method"),
        },  # what the second failure leaves open is the user's to close
        of=("import_image", "HandleMakers.from_external_image"),
    )
    yield Case(
        "external.export_fd",
        lambda driver: SimpleNamespace(driver=driver),
        lambda s: external.export_fd(1),
        lambda s, result: (result[0].close(), settle(s.driver), os.close(result[1])),
        of=("export_fd",),
    )
    yield Case(
        "external.import_semaphore_fd",
        descriptor(lambda driver: driver.semaphore_fd(1)),
        lambda s: external.import_semaphore_fd(s.fd),
        close_both,
        of=("import_semaphore_fd",),
    )
    yield Case(
        "external.import_semaphore_win32",
        lambda driver: semaphore_win32(driver),
        lambda s: external.import_semaphore_win32(s.handle),
        close_both,
        of=("import_semaphore_win32",),
    )
    for call in ("wait", "signal"):
        yield Case(
            f"Fence.{call}",
            fence,
            lambda s, call=call: getattr(s.fence, call)(1, s.stream),  # type: ignore[misc]
            end_fence,
            of=(f"Fence.{call}",),
        )
    yield Case("Fence.close", fence, lambda s: s.fence.close(), end_fence, options={"atomic": False})
    yield Case(
        "CudaHandle.from_external",
        lambda driver: SimpleNamespace(driver=driver, memory=imported(4096)),
        lambda s: CudaHandle.from_external(s.memory, size=BYTES),
        lambda s, handle: (handle.close(), settle(s.driver)),
        of=("HandleMakers.from_external",),
    )
    yield Case(
        "CudaHandle.from_d3d11",
        lambda driver: SimpleNamespace(driver=driver, texture=driver.fake_d3d11(16, 9)),
        lambda s: CudaHandle.from_d3d11(s.texture, driver=s.driver),
        lambda s, handle: (handle.close(), settle(s.driver)),
        options=KEPT,
        of=("HandleMakers.from_d3d11",),
    )
    yield Case(
        "CudaHandle.from_array",
        lambda driver: SimpleNamespace(driver=driver, array=driver.array_create(INFO, 0)),
        lambda s: CudaHandle.from_array(
            s.array, texels=16, rows=9, bytes_per_texel=4, device=0, driver=s.driver
        ),
        lambda s, handle: (handle.close(), settle(s.driver), s.driver.array_destroy(s.array)),
        options=KEPT,
        of=("HandleMakers.from_array",),
    )


# --- OpenGL -----------------------------------------------------------------------------------------------------


def renderbuffer() -> int:
    from graphics.subjects import make_renderbuffer

    return make_renderbuffer(8, 8)


def gl_backings(buffer: int, texture: int) -> dict[str, Callable[[Any], CudaHandle]]:
    """Handles of OpenGL objects of the current context."""
    return {
        "GL buffer": lambda driver: cuglue.register_buffer(buffer),
        "GL texture": lambda driver: cuglue.register_texture(texture),
    }


def tensor(buffer: int) -> Make:
    def setup(driver: Any) -> Subject:
        made = Tensor((4, 16), "RGBA8", row_stride=80, cuda=cuglue.register_buffer(buffer))
        with made.map() as pixels:
            pixels[...] = 3
        return SimpleNamespace(driver=driver, tensor=made)

    return setup


def change(subject: Subject) -> None:
    with subject.tensor.map() as pixels:
        pixels[...] = 9


def changed(subject: Subject, result: Any) -> None:
    with subject.tensor.map(readonly=True) as pixels:
        assert (pixels == 9).all()


def end_tensor(subject: Subject, result: Any = None) -> None:
    if result is not None:
        result.release()
    subject.tensor.close()
    settle(subject.driver)


def give_away(buffer: int) -> Make:
    def setup(driver: Any) -> Subject:
        return SimpleNamespace(driver=driver, handle=cuglue.register_buffer(buffer), parts=None)

    return setup


def hand_over(subject: Subject) -> CudaHandle:
    """A registration that goes from one handle to another."""
    if subject.parts is None:
        subject.parts = subject.handle.into_client_parts()
    return CudaHandle.from_client_parts(subject.parts)


def end_parts(subject: Subject, handle: Any) -> None:
    with handle.map():
        pass
    handle.close()
    subject.parts.close()
    settle(subject.driver)


def attached(buffer: int) -> Make:
    def setup(driver: Any) -> Subject:
        with cuglue.register_buffer(buffer) as handle:
            parts = handle.into_client_parts()
        return SimpleNamespace(driver=driver, tensor=Tensor((4, 16), "RGBA8"), parts=parts)

    return setup


def attach_and_map(subject: Subject) -> Any:
    if subject.tensor.cuda is None:
        subject.tensor.attach(subject.parts)
    return subject.tensor.cuda_map_mut()


def end_attached(subject: Subject, m: Any) -> None:
    end_tensor(subject, m)
    subject.parts.close()


def pair(buffer: int, texture: int) -> Make:
    def setup(driver: Any) -> Subject:
        handles = [cuglue.register_buffer(buffer), cuglue.register_texture(texture)]
        with cuglue.map_all(handles):
            pass
        return SimpleNamespace(driver=driver, handles=handles, maps=None)

    return setup


def written_together(make: Make) -> Make:
    """Mapped by one call, and written; OpenGL has not seen it yet."""

    def setup(driver: Any) -> Subject:
        subject = make(driver)
        subject.maps = cuglue.map_all(subject.handles, mutable=True)
        for m in subject.maps:
            driver.fill_async(m.device_ptr, 7, m.size, m.stream.handle)
            m.record(m.stream)
        return subject

    return setup


def buffers_by_a_plan(buffer: int) -> Make:
    """A buffer, and one more, which were mapped together before: they go the short way."""
    from graphics.subjects import make_buffer, map_before

    def setup(driver: Any) -> Subject:
        handles = [cuglue.register_buffer(name) for name in (buffer, make_buffer(256))]
        map_before(*handles)
        return SimpleNamespace(driver=driver, handles=handles, maps=None)

    return setup


def leave_then_one_by_one(subject: Subject) -> None:
    """The maps alone must do for another attempt: the list that they came in is gone by then."""
    maps, subject.maps = subject.maps, list(subject.maps)
    if isinstance(maps, MapList):
        maps.release()
    for m in maps:
        m.release()


def mapped_as_the_driver_says(subject: Subject) -> None:
    """What a handle says of itself after a failure: nobody looks again for what it takes to be left."""
    assert sum(handle.mapped for handle in subject.handles) == subject.driver.inventory()["mapped"]


def opengl_has_them(subject: Subject, result: Any = None) -> None:
    """Nothing is mapped, so that OpenGL has seen it: a map would show what only CUDA sees."""
    assert subject.driver.inventory()["mapped"] == 0
    for handle in subject.handles:
        with handle.map() as m:
            assert (m.numpy() == 7).all()


def end_pair(subject: Subject, maps: Any) -> None:
    for m in maps or subject.maps:
        m.release()
    for handle in subject.handles:
        handle.close()
    settle(subject.driver)


def in_place(subject: Subject) -> Any:
    m = subject.handle.map_mut(in_place=True)
    try:
        m.surface()
        m.texture()
    except BaseException:
        m.leave_later()
        raise
    return m


def gl_cases(buffer: int, texture: int) -> Iterator[Case]:
    """Over a buffer of 256 bytes and a texture of 8 x 8 RGBA8 of the current context."""
    yield from map_cases(gl_backings(buffer, texture))
    for name, make in gl_backings(buffer, texture).items():
        yield Case(
            f"register a {name}",
            lambda driver: SimpleNamespace(driver=driver),
            lambda s, make=make: make(s.driver),  # type: ignore[misc]
            lambda s, handle: (handle.close(), settle(s.driver)),
            options=KEPT,
            of=(f"register_{name.split()[1]}",),
        )
    yield Case(
        "GL texture: map in place, surface, texture",
        lambda driver: SimpleNamespace(driver=driver, handle=cuglue.register_texture(texture), map=None),
        in_place,
        end,
        options=KEPT,
        of=("CudaMap.surface", "CudaMap.texture"),
    )
    yield Case(
        "register a GL renderbuffer",
        lambda driver: SimpleNamespace(driver=driver, name=renderbuffer()),
        lambda s: cuglue.register_renderbuffer(s.name),
        lambda s, handle: (handle.close(), settle(s.driver)),
        options=KEPT,
        of=("register_renderbuffer",),
    )
    for mutable in (False, True):
        yield Case(
            f"map_all{', mutable' if mutable else ''}",
            pair(buffer, texture),
            lambda s, mutable=mutable: cuglue.map_all(s.handles, mutable=mutable),  # type: ignore[misc]
            end_pair,
            options=KEPT,
            of=("map_all",),
        )
    for name, make in (("", pair(buffer, texture)), (", short", buffers_by_a_plan(buffer))):
        for again, leave in (("", lambda s: s.maps.release()), (", then one by one", leave_then_one_by_one)):
            yield Case(
                f"map_all: leave{name}{again}",
                written_together(make),
                leave,
                end_pair,
                opengl_has_them,
                options=KEPT | {"recover": mapped_as_the_driver_says},
            )
    yield Case("Tensor.map", tensor(buffer), change, end_tensor, changed, options=KEPT, of=("Tensor.map",))
    for method in ("cuda_map", "cuda_map_mut"):
        yield Case(
            f"Tensor.{method}",
            tensor(buffer),
            lambda s, method=method: getattr(s.tensor, method)(),  # type: ignore[misc]
            end_tensor,
            options=KEPT,
            of=(f"Tensor.{method}",),
        )
    yield Case(
        "Tensor.attach, cuda_map_mut",
        attached(buffer),
        attach_and_map,
        end_attached,
        options=KEPT,
        of=("Tensor.attach",),
    )
    yield Case("Tensor.close", tensor(buffer), lambda s: s.tensor.close(), end_tensor, options=KEPT)
    yield Case(
        "into_client_parts, from_client_parts",
        give_away(buffer),
        hand_over,
        end_parts,
        options=KEPT,
        of=("HandleMakers.into_client_parts", "HandleMakers.from_client_parts"),
    )


SECTIONS = {
    "maps of other owners' objects": [*map_cases(BACKINGS)],
    "imports, exports of memory, fences": [*import_cases()],
}
CASES = [case for cases in SECTIONS.values() for case in cases]
