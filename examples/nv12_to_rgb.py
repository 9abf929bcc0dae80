"""A texture that carries an NV12 video frame becomes an RGB array, in one kernel.

Teaches: `register_texture(..., format="NV12")` and `m.planes`, whose strides are the kernel's arguments.
Shows:   BT.601 and BT.709, limited and full range, exact against NumPy on an odd-sized frame.
Needs:   OpenGL. Runs on a CUDA device or on the simulated one.
"""

import os

os.environ.setdefault("PYOPENGL_PLATFORM", "egl")

import numpy as np
from OpenGL import GL

import cuglue
from cuglue import In, Kernel, Out, Runtime

KERNELS = {
    "nv12_to_rgb": r"""
__device__ unsigned char clamped(int v) { v = (v + 32768) >> 16; return v < 0 ? 0 : v > 255 ? 255 : v; }

extern "C" __global__ void nv12_to_rgb(const unsigned char* y, const unsigned char* uv, unsigned char* rgb,
        int width, int height, int y_pitch, int uv_pitch, int black, int scale, int vr, int ug, int vg, int ub) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y * blockDim.y + threadIdx.y;
    if (i >= width || j >= height) return;
    const unsigned char* pair = uv + (j / 2) * uv_pitch + (i / 2) * 2;
    int luma = scale * (y[j * y_pitch + i] - black), u = pair[0] - 128, v = pair[1] - 128;
    unsigned char* out = rgb + 3 * (j * width + i);
    out[0] = clamped(luma + vr * v);
    out[1] = clamped(luma - ug * u - vg * v);
    out[2] = clamped(luma + ub * u);
}
"""
}


def twin(grid, block, y, uv, rgb, width, height, y_pitch, uv_pitch, black, scale, vr, ug, vg, ub):
    """What the kernel does, over NumPy views; runs on the simulated device."""
    pairs = uv.astype(np.int32)[np.arange(height) // 2][:, np.arange(width) // 2] - 128
    u, v = pairs[..., 0], pairs[..., 1]
    luma = scale * (y.astype(np.int32) - black)
    channels = np.stack([luma + vr * v, luma - ug * u - vg * v, luma + ub * u], axis=-1)
    rgb.reshape(height, width, 3)[...] = np.clip((channels + 32768) >> 16, 0, 255)


NV12_TO_RGB = Kernel("nv12_to_rgb", KERNELS["nv12_to_rgb"], sim=twin)


def coefficients(standard: str, limited: bool) -> tuple[int, ...]:
    """Black level and the matrix of the standard, in units of 1/65536."""
    red, blue = {"BT.601": (0.299, 0.114), "BT.709": (0.2126, 0.0722)}[standard]
    green = 1 - red - blue
    luma, chroma = (255 / 219, 255 / 224) if limited else (1.0, 1.0)
    vr, ub = 2 * (1 - red) * chroma, 2 * (1 - blue) * chroma
    matrix = (luma, vr, ub * blue / green, vr * red / green, ub)
    return (16 if limited else 0, *(round(value * 65536) for value in matrix))


def reference(frame: np.ndarray, width: int, height: int, standard: str, limited: bool) -> np.ndarray:
    """The same from the raw bytes of the frame: chroma repeated over its pixels, in wide integers."""
    black, *matrix = coefficients(standard, limited)
    luma, vr, ug, vg, ub = (np.int64(value) for value in matrix)
    chroma = frame[height:].astype(np.int64).repeat(2, axis=0)[:height] - 128
    u, v = (chroma[:, start::2].repeat(2, axis=1)[:, :width] for start in (0, 1))
    y = (frame[:height, :width].astype(np.int64) - black) * luma
    rgb = np.dstack((y + vr * v, y - ug * u - vg * v, y + ub * u))
    return np.minimum(np.maximum((rgb + 2**15) // 2**16, 0), 255).astype(np.uint8)


def convert(runtime: Runtime, video, width: int, height: int, standard: str, limited: bool) -> np.ndarray:
    """One frame on the device; only the result comes back."""
    rgb = runtime.empty(3 * width * height)
    with video.map() as m:
        y, uv = m.planes["y"], m.planes["uv"]
        numbers = (width, height, y.strides[0], uv.strides[0], *coefficients(standard, limited))
        grid = (-(-width // 32), -(-height // 8))
        planes = In(y, strided=True), In(uv, strided=True)
        runtime.launch(NV12_TO_RGB, grid, (32, 8), *planes, Out(rgb), *map(np.int32, numbers))
    pixels = np.asarray(runtime.read(rgb, (height, width, 3)).result()).copy()
    rgb.close()
    return pixels


def main(width: int = 321, height: int = 241) -> None:
    if not cuglue.is_cuda_available():
        cuglue.use_driver("sim")
    pitch, rows = width + width % 2, height + (height + 1) // 2
    frame = np.random.default_rng(0).integers(0, 256, (rows, pitch), np.uint8)  # a decoder would write it
    exact = True
    with cuglue.gl.headless() as context, Runtime() as runtime:
        name = int(GL.glGenTextures(1))
        GL.glBindTexture(GL.GL_TEXTURE_2D, name)
        GL.glPixelStorei(GL.GL_UNPACK_ALIGNMENT, 1)
        GL.glTexStorage2D(GL.GL_TEXTURE_2D, 1, GL.GL_R8, pitch, rows)
        GL.glTexSubImage2D(GL.GL_TEXTURE_2D, 0, 0, 0, pitch, rows, GL.GL_RED, GL.GL_UNSIGNED_BYTE, frame)
        options = {"ops": context.ops, "format": "NV12", "width": width, "height": height}
        with cuglue.register_texture(name, GL.GL_TEXTURE_2D, **options) as video:
            for standard in ("BT.601", "BT.709"):
                for limited in (True, False):
                    found = convert(runtime, video, width, height, standard, limited)
                    same = bool((found == reference(frame, width, height, standard, limited)).all())
                    print(f"{standard} {'limited' if limited else 'full'}: exact {same}")
                    exact &= same
        GL.glDeleteTextures([name])
    print(f"{context.renderer}: all four exact: {exact}")


if __name__ == "__main__":
    main()
