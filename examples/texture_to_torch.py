"""A rendered frame goes into a PyTorch network without touching the host.

Teaches: `torch.from_dlpack(m)` shares the mapped memory; the tensor lives as long as the map.
Shows:   a small convolution over a frame that OpenGL drew.
Needs:   OpenGL and PyTorch (a CPU build is enough on the simulated device).
"""

import os

os.environ.setdefault("PYOPENGL_PLATFORM", "egl")

import torch
from OpenGL import GL

import cuglue


def draw(width: int, height: int) -> int:
    """A frame with a bright square; returns the texture."""
    texture = int(GL.glGenTextures(1))
    GL.glBindTexture(GL.GL_TEXTURE_2D, texture)
    GL.glTexStorage2D(GL.GL_TEXTURE_2D, 1, GL.GL_RGBA8, width, height)
    frame = int(GL.glGenFramebuffers(1))
    GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, frame)
    GL.glFramebufferTexture2D(GL.GL_FRAMEBUFFER, GL.GL_COLOR_ATTACHMENT0, GL.GL_TEXTURE_2D, texture, 0)
    GL.glClearColor(0.0, 0.0, 0.2, 1.0)
    GL.glClear(GL.GL_COLOR_BUFFER_BIT)
    GL.glEnable(GL.GL_SCISSOR_TEST)
    GL.glScissor(width // 4, height // 4, width // 2, height // 2)
    GL.glClearColor(1.0, 0.6, 0.2, 1.0)
    GL.glClear(GL.GL_COLOR_BUFFER_BIT)
    GL.glDisable(GL.GL_SCISSOR_TEST)
    GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, 0)
    GL.glDeleteFramebuffers(1, [frame])
    return texture


def main() -> None:
    if not cuglue.is_cuda_available():
        cuglue.use_driver("sim")
    with cuglue.gl.headless() as context:
        texture = draw(256, 192)
        with cuglue.register_texture(texture, GL.GL_TEXTURE_2D, ops=context.ops) as image, image.map() as m:
            tensor = torch.from_dlpack(m)  # (H, W, 4) uint8 at m.device_ptr
            print(f"{tuple(tensor.shape)} on {tensor.device}, shared: {tensor.data_ptr() == m.device_ptr}")
            batch = tensor[..., :3].permute(2, 0, 1).unsqueeze(0).float() / 255.0  # a copy: (1, 3, H, W)
            del tensor  # the map's memory is not referred to any more
            network = torch.nn.Conv2d(3, 1, 3, padding=1, bias=False).to(batch.device)
            torch.nn.init.constant_(network.weight, 1.0 / 27.0)
            with torch.no_grad():
                answer = network(batch)
            print(f"network output {tuple(answer.shape)}, mean {answer.mean().item():.4f}")
        GL.glDeleteTextures([texture])


if __name__ == "__main__":
    main()
