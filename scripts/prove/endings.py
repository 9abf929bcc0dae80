"""The programs of the exit and fork matrix: what is alive, what went first, who forked when.

Owns the program texts. Must not know how they are run or judged. Each has to end with code 0 and nothing on stderr, on
the simulated device and on a real one; a forked child that touches the device has to get an error that says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple


class Program(NamedTuple):
    """One program: a row and a column of the table, and its text."""

    group: str
    row: str
    column: str
    text: str


PRELUDE = """
import atexit, ctypes, os, sys, threading, time
import numpy as np
import cuglue

first = second = None  # in this order they go when the interpreter ends
made = {}
making = threading.Lock()

def shared(name, make):
    with making:
        if name not in made:
            made[name] = make()
        return made[name]

def driver():
    return cuglue.current_driver()

def gl():
    return shared("gl", cuglue.gl.headless)

def runtime():
    return shared("runtime", cuglue.Runtime)

def stream():
    import cupy
    return driver().Stream() if driver().name == "sim" else cupy.cuda.Stream(non_blocking=True)

def buffer(nbytes=256):
    import OpenGL.GL as GL
    name = GL.GLuint()
    GL.glCreateBuffers(1, name)
    GL.glNamedBufferData(name.value, nbytes, None, GL.GL_DYNAMIC_DRAW)
    return int(name.value)

def texture():
    import OpenGL.GL as GL
    name = GL.GLuint()
    GL.glCreateTextures(GL.GL_TEXTURE_2D, 1, name)
    GL.glTextureStorage2D(name.value, 1, GL.GL_RGBA8, 8, 8)
    return int(name.value)

KERNEL = cuglue.Kernel(
    "increment",
    'extern "C" __global__ void increment(int* x, int n) { int i = threadIdx.x; if (i < n) x[i] += 1; }',
    sim=lambda grid, block, x, n: x.__iadd__(1),
)

def make_handle():
    gl()
    pair = cuglue.register_buffer(buffer()), cuglue.register_texture(texture())
    pair[1].write(np.zeros((8, 8, 4), "u1"))
    return pair

def make_map():
    handles = make_handle()
    maps = [handle.map_mut() for handle in handles]
    return handles, maps, [m.__dlpack__(max_version=(1, 0)) for m in maps]

def make_array():
    import cupy
    cupy.cuda.set_allocator(shared("resource", cuglue.AsyncCudaResource).malloc)
    return cupy.ndarray(100, "f4"), cupy.ndarray(100, "f4")[10:20]

def make_tensor():
    gl()
    tensor = cuglue.Tensor((4, 8), "RGBA8", cuda=cuglue.register_buffer(buffer(128)))
    host = tensor.map()
    pixels = host.__enter__()
    pixels[...] = 7
    return tensor, host, pixels

def make_future():
    x = runtime().create(np.arange(64, dtype="i4"), stream=stream())
    future = runtime().read(x, dtype="i4", stream=stream())
    future.add_done_callback(lambda f: None)
    return x, future

def make_capture():
    x = runtime().create(np.arange(64, dtype="i4"))
    on = stream()
    runtime().launch(KERNEL, 1, 64, cuglue.InOut(x), 64, stream=on)
    runtime().synchronize()
    capture = runtime().capture(on)
    capture.__enter__()
    runtime().launch(KERNEL, 1, 64, cuglue.InOut(x), 64, stream=on)
    return x, on, capture

def make_worker():
    context = cuglue.gl.headless(thread="worker")
    name = context.ops.call(buffer)
    return context, cuglue.register_buffer(name, ops=context.ops)

def gl_goes():
    native = gl().native
    native.release()
    native.destroy()

def cuda_goes():
    if driver().name == "cuda":
        libcuda = ctypes.CDLL("libcuda.so.1")
        libcuda.cuDevicePrimaryCtxReset(0)
        return
    from cuglue.driver.protocol import Driver
    def gone(*args, **kwargs):
        raise cuglue.errors.DriverError("gone", code=4, name="cudaErrorCudartUnloading", call="any")
    for name, value in vars(Driver).items():
        if callable(value) and not name.startswith("_"):
            setattr(driver(), name, gone)
"""

#: What may be alive. A capture comes last wherever it stands: while one is open, CUDA refuses much of the rest.
THINGS = ("handle", "map", "array", "tensor", "future", "capture", "worker")
_WITH_GL = ("handle", "map", "tensor")

#: The use of a thing, as a forked child tries it.
USES = {
    "handle": "first[1].map()",
    "map": "first[1][1].release()",
    "array": "import cupy; cupy.ndarray(100, 'f4')",
    "tensor": "first[1].__exit__(None, None, None)",
    "future": "runtime().read(first[0], dtype='i4').result()",
    "capture": "runtime().launch(KERNEL, 1, 64, cuglue.InOut(first[0]), 64, stream=first[1])",
    "worker": "first[1].map()",
}

#: Something whole that a process does with the library.
WORK = """
def work():
    runtime().synchronize()  # ours first: what CuPy says in a forked child is CuPy's
    x = make_future()[0]
    runtime().launch(KERNEL, 1, 64, cuglue.InOut(x), 64)
    assert np.asarray(runtime().read(x, dtype="i4").result()).tolist() == list(range(1, 65))
    with make_handle()[1].map() as m:
        assert m.numpy().sum() == 0
    make_array()
"""

_FORK = """
def forked(child):
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        child()
        sys.exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}"

def refused(use):
    try:
        use()
    except cuglue.errors.CuglueError as error:
        assert "fork" in str(error), f"an error that does not say why: {error!r}"
    else:
        raise SystemExit("the child was let in")
"""

DAEMONS = {
    "maps": """
def loop():
    context = cuglue.gl.headless(thread="worker")
    handle = cuglue.register_buffer(context.ops.call(buffer), ops=context.ops)
    while True:
        with handle.map_mut() as m:
            ready.set()
""",
    "allocates": """
import cupy
resource = cuglue.AsyncCudaResource()
def loop():
    kept = []
    while True:
        kept[:] = [resource.malloc(64), resource.allocate(64)]
        resource.deallocate(kept.pop())
        ready.set()
""",
    "launches and reads": """
def loop():
    x = runtime().create(np.arange(64, dtype="i4"))
    while True:
        runtime().launch(KERNEL, 1, 64, cuglue.InOut(x), 64)
        runtime().read(x, dtype="i4").result()
        ready.set()
""",
    "waits for a future": """
def loop():
    x, future = make_future()
    while True:
        future.result()
        future = runtime().read(x, dtype="i4")
        future.add_done_callback(lambda f: ready.set())
""",
}
_DAEMON = """
ready = threading.Event()
{body}
for _ in range(2):
    threading.Thread(target=loop, daemon=True).start()
assert ready.wait(60)
time.sleep(0.05)
"""


def programs() -> Iterator[Program]:
    """Every program of the matrix."""
    yield from _ends()
    yield from _forks()
    for name, body in DAEMONS.items():
        yield Program("daemon threads", name, "goes on", PRELUDE + _DAEMON.format(body=body))


def _ends() -> Iterator[Program]:
    pairs: list[tuple[str, ...]] = [(thing,) for thing in THINGS]
    pairs += itertools.permutations(THINGS, 2)
    for alive in pairs:
        names = dict(zip(("first", "second"), alive, strict=False))
        order = sorted(names, key=lambda name: names[name] == "capture")
        text = PRELUDE + "".join(f"{name} = make_{names[name]}()\n" for name in order)
        row = ", then ".join(alive)
        yield Program("exit", row, "as it is", text)
        if set(alive) & set(_WITH_GL):
            yield Program("exit", row, "GL first", text + "atexit.register(gl_goes)\n")
        yield Program("exit", row, "CUDA first", text + "atexit.register(cuda_goes)\n")


def _forks() -> Iterator[Program]:
    before = PRELUDE + _FORK + WORK
    yield Program("fork", "before the import", "both work", "import os, sys\n" + _FORK + """
def child():
    exec(PROGRAM, globals())
    work()
PROGRAM = """ + repr(PRELUDE + WORK) + "\nforked(child)\nchild()\n")  # fmt: skip
    yield Program("fork", "before the first use", "both work", before + "forked(work)\nwork()\n")
    # Choosing a driver initialises CUDA, and a simulated device belongs to the process that made it.
    chosen = "driver()\nforked(lambda: refused(work))\nwork()\n"
    yield Program("fork", "after the driver was chosen", "child starts anew", before + chosen)
    yield Program(
        "fork", "after use", "child starts anew", before + "work()\nforked(lambda: refused(work))\nwork()\n"
    )
    for thing in THINGS:
        made = before + f"first = make_{thing}()\ndef use():\n    {USES[thing]}\n"
        again = "" if thing == "map" else "use()\n"  # left once, in the parent at exit
        yield Program("fork", thing, "child uses it", f"{made}forked(lambda: refused(use))\n{again}")
        yield Program("fork", thing, "child only ends", f"{made}forked(lambda: None)\n{again}")
    yield Program("fork", "workers of multiprocessing", "refused", before + """
work()
import multiprocessing
def one(_):
    refused(work)
    return 1
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(one, range(4)) == [1] * 4
work()
""")  # fmt: skip
