"""A kernel moves the vertices of an OpenGL buffer; OpenGL draws them where they are now.

Teaches: `register_buffer`, `map_mut()` and `Runtime.launch` with a kernel that has a NumPy twin.
Shows:   a sine wave travelling through a vertex buffer, frame by frame, checked against NumPy.
Needs:   OpenGL. Runs on a CUDA device or on the simulated one.
"""

import ctypes
import os

os.environ.setdefault("PYOPENGL_PLATFORM", "egl")

import numpy as np
from OpenGL import GL

import cuglue
from cuglue import InOut, Kernel, Runtime

KERNELS = {
    "wave": r"""
extern "C" __global__ void wave(float* xy, int count, float phase) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) xy[2 * i + 1] = 0.5f * sinf(6.2831853f * xy[2 * i] + phase);
}
"""
}


def wave_twin(grid, block, xy, count, phase):
    """What the kernel does, over a NumPy view; runs on the simulated device."""
    points = xy.view(np.float32).reshape(-1, 2)[:count]
    points[:, 1] = np.float32(0.5) * np.sin(np.float32(6.2831853) * points[:, 0] + np.float32(phase))


WAVE = Kernel("wave", KERNELS["wave"], sim=wave_twin)


def main(count: int = 1000, frames: int = 5) -> None:
    if not cuglue.is_cuda_available():
        cuglue.use_driver("sim")
    points = np.zeros((count, 2), np.float32)
    points[:, 0] = np.linspace(-1.0, 1.0, count, dtype=np.float32)
    with cuglue.gl.headless() as context, Runtime() as runtime:
        name = int(GL.glGenBuffers(1))
        GL.glBindBuffer(GL.GL_ARRAY_BUFFER, name)
        GL.glBufferData(GL.GL_ARRAY_BUFFER, points.nbytes, points, GL.GL_DYNAMIC_DRAW)
        with cuglue.register_buffer(name, ops=context.ops) as vertices:
            for frame in range(frames):
                with vertices.map_mut() as m:
                    runtime.launch(WAVE, -(-count // 256), 256, InOut(m), count, np.float32(0.3 * frame))
                # ... and here a program would draw: the unmap above is the hand-off, no host wait needed
        now = np.empty_like(points)
        GL.glGetBufferSubData(GL.GL_ARRAY_BUFFER, 0, now.nbytes, ctypes.c_void_p(now.ctypes.data))
        expected = 0.5 * np.sin(2 * np.pi * points[:, 0].astype(np.float64) + 0.3 * (frames - 1))
        print(f"{context.renderer}: largest error {np.abs(now[:, 1] - expected).max():.1e}")
        GL.glDeleteBuffers(1, [name])


if __name__ == "__main__":
    main()
