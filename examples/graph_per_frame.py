"""Twenty kernels a frame cost one call: a captured graph works on a copy of the texture, frame after frame.

Teaches: record work once in `rt.capture()`, with a warm-up for its temporary buffers; a map cannot be recorded, but
         a buffer can that it is copied into.
Shows:   ten frames blurred by the graph and shown by the texture, each checked against NumPy.
Needs:   OpenGL. With a CUDA device everything stays there; without one it runs on the simulated device.
"""

import os

os.environ.setdefault("PYOPENGL_PLATFORM", "egl")  # before the first import of OpenGL

import numpy as np
from OpenGL import GL

import cuglue
from cuglue import In, Kernel, Out, Runtime

WIDTH, HEIGHT, PASSES, FRAMES = 160, 96, 10, 10
KERNELS: dict[str, str] = {
    "copy": """
    extern "C" __global__ void copy(const unsigned char* from, unsigned char* to, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) to[i] = from[i];
    }""",
    "blur": """
    extern "C" __global__ void blur(const unsigned char* from, unsigned char* to, int step, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) to[i] = (from[i] + from[(i + step) % n]) / 2;
    }""",
}


def copy_sim(grid, block, source, target, n):
    target.reshape(-1)[:n] = source.reshape(-1)[:n]


def blur_sim(grid, block, source, target, step, n):
    target[:n] = (source[:n].astype("u2") + np.roll(source[:n], -step)) // 2


COPY = Kernel("copy", KERNELS["copy"], sim=copy_sim)
BLUR = Kernel("blur", KERNELS["blur"], sim=blur_sim)


def blur_passes(rt: Runtime, image, n: int) -> None:
    """Blur to the right and upwards, there and back through a temporary buffer."""
    grid = (n + 255) // 256
    for _ in range(PASSES):
        with rt.empty(n) as half:
            rt.launch(BLUR, grid, 256, In(image), Out(half), 4, n)
            rt.launch(BLUR, grid, 256, In(half), Out(image), 4 * WIDTH, n)


def expected(pixels: np.ndarray) -> np.ndarray:
    flat = pixels.reshape(-1).astype("u2")
    for _ in range(PASSES):
        for step in (4, 4 * WIDTH):
            flat = (flat + np.roll(flat, -step)) // 2
    return flat.astype("u1").reshape(pixels.shape)


def main() -> None:
    if cuglue.is_cuda_available():
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
    else:
        stream = cuglue.use_driver("sim").driver.Stream()
    n = WIDTH * HEIGHT * 4
    right = 0
    # The stream is current from here on: maps, launches and the capture all take it.
    with cuglue.gl.headless() as context, stream, Runtime() as rt, rt.empty(n) as image:
        name = int(GL.glGenTextures(1))
        GL.glBindTexture(GL.GL_TEXTURE_2D, name)
        GL.glTexStorage2D(GL.GL_TEXTURE_2D, 1, GL.GL_RGBA8, WIDTH, HEIGHT)
        with rt.capture() as capture:
            with capture.warmup():
                blur_passes(rt, image, n)  # runs, so that the memory of its temporaries is there
            blur_passes(rt, image, n)  # is recorded
        with cuglue.register_texture(name, ops=context.ops) as texture, capture.graph as graph:
            for frame in range(FRAMES):
                pixels = np.random.default_rng(frame).integers(0, 256, (HEIGHT, WIDTH, 4), np.uint8)
                size = (WIDTH, HEIGHT, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE)
                GL.glTexSubImage2D(GL.GL_TEXTURE_2D, 0, 0, 0, *size, pixels)  # a renderer would draw here
                with texture.map_mut() as m:
                    rt.launch(COPY, (n + 255) // 256, 256, In(m), Out(image), n)
                    graph.replay()
                    rt.launch(COPY, (n + 255) // 256, 256, In(image), Out(m), n)
                shown = np.empty_like(pixels)
                GL.glGetTextureImage(name, 0, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, shown.nbytes, shown)
                right += bool((shown == expected(pixels)).all())
            print(
                f"{graph.operations} kernels a frame in one call; frames shown exactly: {right} of {FRAMES}"
            )
        GL.glDeleteTextures([name])


if __name__ == "__main__":
    main()
