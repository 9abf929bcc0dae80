"""A texture becomes an array, the array changes, the texture shows it.

Teaches: register a texture once; `map()` to read it, `map_mut()` to change it; leaving `with` hands it back.
Shows:   the picture's colours inverted in place, checked by OpenGL.
Needs:   OpenGL. With a CUDA device the array is CuPy's; without one it is NumPy's, on the simulated device.
"""

import os

os.environ.setdefault("PYOPENGL_PLATFORM", "egl")  # before the first import of OpenGL

import numpy as np
from OpenGL import GL

import cuglue


def make_texture(pixels: np.ndarray) -> int:
    """Any renderer's texture would do; here it is filled from the host."""
    height, width = pixels.shape[:2]
    name = int(GL.glGenTextures(1))
    GL.glBindTexture(GL.GL_TEXTURE_2D, name)
    GL.glTexStorage2D(GL.GL_TEXTURE_2D, 1, GL.GL_RGBA8, width, height)
    GL.glTexSubImage2D(GL.GL_TEXTURE_2D, 0, 0, 0, width, height, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, pixels)
    return name


def main() -> None:
    if cuglue.is_cuda_available():
        import cupy as xp
    else:
        cuglue.use_driver("sim")
        xp = np

    pixels = np.random.default_rng(0).integers(0, 256, (480, 640, 4), np.uint8)
    with cuglue.gl.headless() as context:
        texture = make_texture(pixels)
        with cuglue.register_texture(texture, GL.GL_TEXTURE_2D, ops=context.ops) as image:
            with image.map() as m:
                frame = xp.asarray(m)  # no copy: the mapped memory itself
                print(f"{context.renderer}: {frame.shape} {frame.dtype}, mean {float(frame.mean()):.2f}")
                del frame
            with image.map_mut() as m:
                xp.asarray(m)[..., :3] ^= 255  # published to the texture on exit

        out = np.empty_like(pixels)
        GL.glGetTextureImage(texture, 0, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, out.nbytes, out)
        expected = pixels.copy()
        expected[..., :3] = 255 - expected[..., :3]
        print("the texture shows the inverted picture:", bool((out == expected).all()))
        GL.glDeleteTextures([texture])


if __name__ == "__main__":
    main()
