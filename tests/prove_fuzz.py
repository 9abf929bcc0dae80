"""Random inputs for everything that reads what others wrote: each gives a right result or a typed error of ours.

A target takes a random generator, makes one input, and says whether it was accepted; what is wrong raises. The oracle
is NumPy, the other end of a round trip, or a rule written out here.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

import cuglue
from cuglue import Direct, Exclusive, MemoryConfiguration, Persistent, Sliced, formats
from cuglue.command.signature import signature
from cuglue.driver.sim import SimDriver
from cuglue.errors import CuglueError
from cuglue.exchange.dlpack import CPU, Route, negotiate
from cuglue.layout import Layout, pitched
from cuglue.memory.records import Action, AllocationRecord, Failure

Choose = random.Random
Target = Callable[[Choose], bool]

REFUSED = object()
DTYPES = ["u1", "i1", "u2", "i4", "f2", "f4", "f8", "c8", "c16", "?", ">i4", "S3", "V5", "u8"]
WORDS = ["", "RGBA8", "rgba8", " R8", "R16F", "NV12", "nv 12", "DEPTH24", "é", "\0", "R" * 5000, "%s", "None"]


def attempt(call: Callable[[], Any], *others: type[BaseException]) -> Any:
    """What ``call`` gives, or REFUSED if it raised an error of ours (or one of ``others``) that says something."""
    try:
        return call()
    except (CuglueError, *others) as error:
        said = str(error)
    assert said, "an error that says nothing"
    return REFUSED


def junk(choose: Choose) -> Any:
    """Anything that somebody might pass."""
    return choose.choice([
        None, True, -1, 0, 1, 2, 7, 2**31, 2**63, -(2**63), 2**64, 1.0, float("nan"), float("inf"), "", "1", b"x", (),
        (1,), [1, 2], {}, object(), np.int32(3), np.float64(2.0), np.array([1, 2]), np.array(5), Ellipsis, int,
    ])  # fmt: skip


def extent(choose: Choose) -> int:
    return choose.choice([0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33, -1, 2**31, 2**40]) if choose.random() < 0.5 else (
        choose.randrange(1, 12)
    )  # fmt: skip


# --- formats and layouts ----------------------------------------------------------------------------------------


def format_names(choose: Choose) -> bool:
    name = choose.choice([*WORDS, *(f.name for f in formats.FORMATS)])
    if choose.random() < 0.5:
        letters = list(name)
        for _ in range(choose.randrange(3)):
            letters.insert(choose.randrange(len(letters) + 1), choose.choice("R8GBA_ FxN1\0é"))
        name = "".join(letters)
    found = attempt(lambda: formats.by_name(name))
    assert found is REFUSED or found.name == name.removeprefix("GL_")
    return found is not REFUSED


def format_numbers(choose: Choose) -> bool:
    known = [f.gl for f in formats.FORMATS if f.gl]
    number = choose.choice([choose.choice(known), choose.randrange(0x1900, 0x9400), choose.randrange(2**32)])
    which = choose.choice([formats.by_gl, formats.by_dxgi, formats.by_fourcc, formats.check_registrable])
    found = attempt(lambda: which(number))
    if found is not REFUSED and which is formats.by_gl:
        assert found.gl == number
    return found is not REFUSED


def texel_descriptors(choose: Choose) -> bool:
    bits, kind, channels = choose.randrange(70), choose.choice("usfx"), choose.randrange(-1, 6)
    found = attempt(lambda: formats.from_descriptor(bits, kind, channels))
    assert found is REFUSED or found.nbytes * 8 == bits * channels
    return found is not REFUSED


def tensors(choose: Choose) -> bool:
    """Junk for every argument; what is taken holds its pixels."""
    shape = choose.choice([junk(choose), [extent(choose) % 50 for _ in range(choose.choice([2, 2, 3, 1]))]])
    name = choose.choice([junk(choose), choose.choice(list(formats.FORMATS)).name, choose.choice(WORDS)])
    stride = choose.choice([None, None, junk(choose), choose.randrange(400)])
    made = attempt(lambda: cuglue.Tensor(shape, name, row_stride=stride))
    if made is REFUSED:
        return False
    with made, made.map() as pixels:
        pixels[...] = 1
        assert pixels.strides[-1] == pixels.itemsize
    return True


def image_geometry(choose: Choose) -> bool:
    """The planes of an image lie within its bytes and apart from each other."""
    format_ = choose.choice(list(formats.FORMATS))
    width, height = extent(choose), extent(choose)
    pitch = choose.choice([None, None, width, width + choose.randrange(64), -1])
    if max(width, height) > 100:
        geometry = attempt(lambda: formats.tight_geometry(format_, width, height, pitch))
        return geometry is not REFUSED
    views = attempt(lambda: formats.plane_views(format_, width, height, pitch))
    if views is REFUSED:
        return False
    geometry = formats.tight_geometry(format_, width, height, pitch)
    seen = np.zeros(geometry.nbytes, np.uint8)
    for view in views.values():
        layout = view.layout
        view.layout.fits(view.offset, geometry.nbytes)
        plane = np.ndarray(
            (*layout.shape, layout.itemsize), np.uint8, seen, view.offset, (*layout.strides, 1)
        )
        assert not plane.any(), "two planes share bytes"
        plane[...] = 1
    return True


def layouts(choose: Choose) -> bool:
    """Sizes and contiguity as NumPy has them."""
    rank = choose.randrange(5)
    shape = tuple(extent(choose) for _ in range(rank))
    dtype = np.dtype(choose.choice(DTYPES))
    strides = tuple(
        choose.choice([0, 1, 4, 8, 24, 64, -4, 2**33]) for _ in range(choose.choice([rank, rank, 3]))
    )
    given = choose.choice([None, strides])
    if choose.random() < 0.1:
        shape = junk(choose)
    layout = attempt(lambda: Layout.of(shape, dtype, given), TypeError)
    if layout is REFUSED:
        return False
    if layout.size and max(layout.shape, default=1) < 100 and layout.nbytes < 1 << 20:
        array = np.ndarray(layout.shape, layout.dtype, bytearray(layout.nbytes), 0, layout.strides)
        first, last = np.lib.array_utils.byte_bounds(array)
        assert last - first == layout.nbytes
        assert array.flags.c_contiguous == layout.is_c_contiguous
    else:
        assert layout.nbytes >= 0
    return True


def copies(choose: Choose) -> bool:
    """One copy moves exactly the bytes of the array."""
    rank = choose.randrange(5)
    shape = tuple(choose.randrange(0, 6) for _ in range(rank))
    dense = [math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(rank)]
    if rank > 1 and choose.random() < 0.5:
        pad = choose.randrange(1, 5)
        dense = [
            math.prod(max(n, 1) for n in shape[i + 1 : -1]) * (shape[-1] + pad) for i in range(rank - 1)
        ] + [1]
    strides = [s if choose.random() < 0.9 else choose.randrange(-2, 40) for s in dense]
    size = choose.choice([1, 2, 4, 8, 16])
    moved = attempt(lambda: pitched(shape, strides, size))
    if moved is REFUSED:
        return False
    rows = {(moved.pitch * r, moved.pitch * r + moved.width) for r in range(moved.height)}
    covered = {byte for start, end in rows for byte in range(start, end)}
    wanted = {
        sum(i * s for i, s in zip(index, strides, strict=True)) * size + byte
        for index in np.ndindex(*shape)
        for byte in range(size)
    }
    assert covered == wanted
    return True


# --- exchange ---------------------------------------------------------------------------------------------------


def dlpack(choose: Choose) -> bool:
    """The plan keeps the protocol's rules, whatever a consumer asks."""
    own = choose.choice([CPU, (2, 0), (2, 1), (13, 0)])
    asked: dict[str, Any] = {
        "stream": choose.choice([None, -1, 0, 1, 2, 3, 2**63, np.int64(1), junk(choose)]),
        "max_version": choose.choice([None, (0, 8), (1, 0), (1, 3), (2, 0), junk(choose)]),
        "dl_device": choose.choice([None, own, CPU, (2, 0), (10, 0), junk(choose)]),
        "copy": choose.choice([None, True, False, np.bool_(True), junk(choose)]),
        "readonly": choose.random() < 0.3,
        "legacy_readonly": choose.random() < 0.2,
    }
    plan = attempt(lambda: negotiate(own, **asked), BufferError, ValueError, TypeError)
    if plan is REFUSED:
        return False
    moves = asked["dl_device"] not in (None, own)
    assert plan.route is (Route.HOST_COPY if moves else Route.COPY if asked["copy"] else Route.VIEW)
    assert not (moves and asked["copy"] is not None and not asked["copy"]), "a copy that was forbidden"
    assert plan.versioned == (asked["max_version"] is not None and asked["max_version"][0] >= 1)
    assert plan.readonly <= plan.versioned, "READ_ONLY cannot be said without a version"
    assert plan.stream not in (0, -1)
    return True


def array_views(choose: Choose) -> bool:
    """Views of a buffer, read back by NumPy."""
    with cuglue.use_driver(SimDriver()), cuglue.Runtime() as rt:
        content = np.random.default_rng(choose.randrange(2**32)).integers(0, 256, 256, "u1")
        with rt.create(content) as buffer:
            shape = choose.choice(
                [None, junk(choose), [choose.randrange(6) for _ in range(choose.randrange(4))]]
            )
            dtype = choose.choice([*DTYPES, junk(choose)])
            view = attempt(lambda: buffer.array(shape, dtype))
            if view is REFUSED:
                return False
            got = np.asarray(view)
            expected = content[: got.nbytes].view(np.uint8)
            np.testing.assert_array_equal(np.ascontiguousarray(got).reshape(-1).view("u1"), expected)
    return True


def copy_descriptors(choose: Choose) -> bool:
    """What a read through a descriptor gives is what NumPy sees with the same strides."""
    with cuglue.use_driver(SimDriver()), cuglue.Runtime() as rt:
        content = np.random.default_rng(choose.randrange(2**32)).integers(0, 256, 512, "u1")
        with rt.create(content) as buffer:
            rank = choose.randrange(1, 4)
            shape: Any = [choose.randrange(1, 6) for _ in range(rank)]
            dtype = choose.choice(["u1", "i2", "f4", "f8"])
            row = shape[-1] + choose.randrange(4)
            strides: Any = [math.prod(shape[i + 1 : -1]) * row for i in range(rank - 1)] + [1]
            if choose.random() < 0.3:
                strides = None
            if choose.random() < 0.2:
                shape = junk(choose)
            if choose.random() < 0.2:
                strides = junk(choose)
            result = attempt(lambda: rt.command(cuglue.In(buffer)).read_async(
                buffer.descriptor(shape, dtype, strides)).result())  # fmt: skip
            if result is REFUSED:
                return False
            item = np.dtype(dtype)
            sides = tuple(int(n) for n in (shape if np.iterable(shape) else (shape,)))
            dense = [math.prod(sides[i + 1 :]) for i in range(len(sides))]
            steps = [int(s) * item.itemsize for s in (dense if strides is None else strides)]
            expected = np.ndarray(sides, item, content, 0, steps)
            got = np.asarray(result).reshape(-1).view("u1")
            np.testing.assert_array_equal(got, np.ascontiguousarray(expected).reshape(-1).view("u1"))
    return True


# --- memory -----------------------------------------------------------------------------------------------------


def size(choose: Choose) -> Any:
    return choose.choice(
        [1, 100, 512, 1000, 4096, 1 << 16, 1 << 20, (1 << 20) + 1, choose.randrange(1, 1 << 21)]
    )


def layout_of_pools(choose: Choose) -> Any:
    def maybe(value: Any) -> Any:
        return junk(choose) if choose.random() < 0.1 else value

    kind = choose.choice([Sliced, Exclusive, Direct, Persistent, None])
    if kind is Sliced:
        return Sliced(
            maybe(size(choose)),
            maybe(choose.choice([None, size(choose)])),
            maybe(choose.choice([None, 1 << 23])),
        )
    if kind is Exclusive:
        return Exclusive(maybe(size(choose)), maybe(choose.choice([None, 1, 3])))
    if kind is Direct:
        return Direct(maybe(choose.choice([None, size(choose)])))
    return Persistent() if kind else junk(choose)


def pool_configurations(choose: Choose) -> bool:
    """A configuration that is taken works: blocks do not overlap, are aligned, and all comes back."""
    pools: Any = [layout_of_pools(choose) for _ in range(choose.randrange(4))]
    if choose.random() < 0.1:
        pools = junk(choose)
    persistent = choose.choice(["auto", "auto", "disabled", "enforced", junk(choose)])
    given = choose.choice(
        [lambda: pools, lambda: MemoryConfiguration(tuple(pools), choose.random() < 0.3, persistent)]
    )
    configuration = attempt(lambda: MemoryConfiguration.of(given()), TypeError)
    if configuration is REFUSED:
        return False
    with cuglue.use_driver(SimDriver(seed=choose.randrange(99))) as driver:
        pool = cuglue.PoolResource(cuglue.AsyncCudaResource(), layout=configuration)
        streams = [driver.Stream() for _ in range(2)]
        blocks: list[Any] = []
        for _ in range(12):
            if blocks and choose.random() < 0.4:
                pool.deallocate(blocks.pop(choose.randrange(len(blocks))))
                continue
            block = attempt(lambda: pool.allocate(size(choose), choose.choice(streams)))
            if block is not REFUSED:
                assert block.ptr % 256 == 0
                blocks.append(block)
        spans = sorted((b.ptr, b.ptr + b.nbytes) for b in blocks)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans)), "two blocks share bytes"
        assert pool.bytes_outstanding >= sum(b.nbytes for b in blocks)
        for block in blocks:
            pool.deallocate(block)
        driver.device_synchronize(0)
        pool.reap_pending()
        assert pool.bytes_outstanding == 0
        pool.close()
        driver.check()
    return True


def resource_arguments(choose: Choose) -> bool:
    """Whatever is given to a stack of resources, it takes it or says what it wants, and counts right."""
    with cuglue.use_driver(SimDriver(memory_bytes=1 << 24)) as driver:
        below = cuglue.AsyncCudaResource()
        made = attempt(lambda: choose.choice([
            lambda: cuglue.GlobalDeviceBudget(below, choose.choice([1 << 20, junk(choose)])),
            lambda: cuglue.DebugGuardResource(below, canary=choose.choice([64, junk(choose)])),
            lambda: cuglue.PoolResource(below, max_bytes=choose.choice([None, 1 << 22, junk(choose)])),
            lambda: cuglue.StatisticsResource(below),
        ])(), TypeError)  # fmt: skip
        mr = below if made is REFUSED else made
        nbytes = choose.choice([1, 1000, junk(choose)])
        stream = choose.choice([None, 0, driver.Stream(), junk(choose)])
        tag = choose.choice(["tag", junk(choose)])
        block = attempt(lambda: mr.allocate(nbytes, stream, tag), ValueError, TypeError)
        given = choose.choice([block, junk(choose)])
        if given is not REFUSED:
            attempt(lambda: mr.deallocate(given))
        if block is not REFUSED and block.state is cuglue.BlockState.LIVE:
            mr.deallocate(block)
        mr.reap_pending()
        assert mr.bytes_outstanding == 0
        while mr is not None:
            mr.close()
            mr = getattr(mr, "upstream", None)
    return block is not REFUSED


def text(choose: Choose) -> str:
    letters = "ab ,;\"'\n\r\t\0\\{}[]<>&%é漢🙂\u2028\ufeff=+-@"
    return "".join(choose.choice(letters) for _ in range(choose.randrange(12)))


def log_files(choose: Choose) -> bool:
    """What is logged is read back as it was: by csv, by json line by line, and by json as one trace."""
    outs = [io.StringIO(newline="") for _ in range(3)]
    sinks = [cuglue.CsvSink(outs[0]), cuglue.JsonLinesSink(outs[1]), cuglue.TraceSink(outs[2])]
    records = []
    for number in range(choose.randrange(1, 6)):
        failed = choose.random() < 0.3
        records.append(AllocationRecord(
            action=choose.choice([Action.ALLOCATE, Action.DEALLOCATE, Action.REAP_PENDING]),
            **{
                name: value
                for name, value in {
                    "timestamp_nanos": number * 1000, "thread_id": 7, "device_ordinal": 0, "stream": 3,
                    "bytes": choose.choice([1, 2**40]), "tag": text(choose), "generation": choose.randrange(9),
                    "ptr": 512, "bytes_outstanding": choose.randrange(2**40), "latency_nanos": 5,
                }.items()
                if name in AllocationRecord._fields
            },
            **{
                name: 0
                for name in AllocationRecord._fields
                if name not in (
                    "action", "result", "timestamp_nanos", "thread_id", "device_ordinal", "stream", "bytes", "tag",
                    "generation", "ptr", "bytes_outstanding", "latency_nanos",
                )
            },
            result=Failure("OutOfMemory", text(choose)) if failed else None,
        ))  # fmt: skip
    for sink in sinks:
        for record in records:
            sink.emit(record)
        sink.close()
    rows = list(csv.DictReader(io.StringIO(outs[0].getvalue(), newline="")))
    assert [row["tag"] for row in rows] == [record.tag for record in records]
    assert [row["message"] for row in rows] == [r.result.message if r.result else "" for r in records]
    lines = [json.loads(line) for line in outs[1].getvalue().split("\n")[:-1]]
    assert lines == [json.loads(json.dumps(record.as_dict())) for record in records]
    assert [line["tag"] for line in lines] == [record.tag for record in records]
    assert len(json.loads(outs[2].getvalue())) >= len(records)
    return True


# --- commands ---------------------------------------------------------------------------------------------------

SOURCES = [
    'extern "C" __global__ void f(const float* x, int n) { if (n) return; }',
    "typedef unsigned int u32;\n__global__ void f(u32* a, size_t b, const double c[]) {}",
    "template<class T> __global__ void f(T* x) {} // f(",
    "#define N 3\n__global__ __launch_bounds__(N) void f(float4 v, bool b = true) { f(v); }",
]


def kernel_sources(choose: Choose) -> bool:
    """Sources with pieces cut out, put in and doubled: parameters, nothing known, or a typed error."""
    source = choose.choice(SOURCES)
    for _ in range(choose.randrange(4)):
        at, end = sorted(choose.randrange(len(source) + 1) for _ in range(2))
        piece = choose.choice(
            ["", "(", ")", "{", "/*", "*/", '"', "\\\n", "//", "<", ",", "é", source[at:end]]
        )
        source = source[:at] + piece + source[end if choose.random() < 0.5 and end - at < 9 else at :]
    found = attempt(lambda: signature("f", source))
    if found is REFUSED or found is None:
        return False
    assert all(parameter.kind for parameter in found)
    return True


def scalar_arguments(choose: Choose) -> bool:
    """A scalar arrives in the kernel as C converts it, or is refused because it would not fit."""
    with cuglue.use_driver(SimDriver()), cuglue.Runtime() as rt:
        kind, code = choose.choice(
            [
                ("int", "i"),
                ("unsigned char", "B"),
                ("short", "h"),
                ("long long", "q"),
                ("float", "f"),
                ("double", "d"),
            ]
        )
        got: list[Any] = []
        kernel = cuglue.Kernel(
            "take",
            f'extern "C" __global__ void take(unsigned char* x, {kind} v) {{ x[0] = v > 0; }}',
            sim=lambda grid, block, x, v: got.append(v),
        )
        value = choose.choice(
            [choose.randrange(-(2**65), 2**65), choose.randrange(-300, 300), 0.5, junk(choose)]
        )
        with rt.empty(4) as x:
            launched = attempt(lambda: rt.launch(kernel, 1, 1, cuglue.Out(x), value) or True)
            rt.synchronize()
    if launched is REFUSED:
        return False
    struct.pack(code, got[0])  # fits
    number = value.item() if isinstance(value, np.generic | np.ndarray) else value
    if code not in "fd":
        assert int(got[0]) == int(number)
    elif math.isfinite(number):
        assert math.isclose(float(got[0]), float(number), rel_tol=1e-6)
    return True


TARGETS: dict[str, Target] = {
    "format names": format_names,
    "format numbers": format_numbers,
    "texel descriptors": texel_descriptors,
    "tensors": tensors,
    "image geometry": image_geometry,
    "layouts": layouts,
    "copies": copies,
    "DLPack negotiation": dlpack,
    "array views": array_views,
    "copy descriptors": copy_descriptors,
    "pool configurations": pool_configurations,
    "resource arguments": resource_arguments,
    "log files": log_files,
    "kernel sources": kernel_sources,
    "scalar arguments": scalar_arguments,
}
