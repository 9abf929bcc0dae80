"""The demo's scene: a lit, rotating torus knot, drawn with depth test into an RGBA8 texture.

Owns the GL objects of the picture. Must not know CUDA or cuglue's maps: it stands for any renderer.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_VERTEX = """
#version 330 core
layout(location = 0) in vec3 position;
layout(location = 1) in vec3 normal;
uniform mat4 model;
uniform mat4 camera;
out vec3 surface;
out vec3 place;
void main() {
    vec4 world = model * vec4(position, 1.0);
    place = world.xyz;
    surface = mat3(model) * normal;
    gl_Position = camera * world;
}
"""
_FRAGMENT = """
#version 330 core
in vec3 surface;
in vec3 place;
out vec4 colour;
void main() {
    vec3 n = normalize(surface);
    vec3 light = normalize(vec3(2.0, 3.0, 4.0));
    vec3 half_way = normalize(light + normalize(vec3(0.0, 0.0, 4.0) - place));
    float diffuse = max(dot(n, light), 0.0);
    float shine = pow(max(dot(n, half_way), 0.0), 48.0);
    vec3 paint = 0.5 + 0.5 * cos(3.0 * place.yzx + vec3(0.0, 2.0, 4.0));
    colour = vec4(paint * (0.15 + 0.85 * diffuse) + 0.5 * shine, 1.0);
}
"""
BACKGROUND = (0.07, 0.09, 0.13, 1.0)


class Scene:
    """A torus knot in an off-screen frame. Needs a current OpenGL 3.3 context, which its methods use.

    Attributes:
        texture: GL name of the RGBA8 texture that :meth:`draw` fills.
        width, height: pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        from OpenGL import GL

        self.width, self.height = width, height
        self.texture = int(GL.glGenTextures(1))
        GL.glBindTexture(GL.GL_TEXTURE_2D, self.texture)
        GL.glTexStorage2D(GL.GL_TEXTURE_2D, 1, GL.GL_RGBA8, width, height)
        GL.glBindTexture(GL.GL_TEXTURE_2D, 0)
        self._depth = int(GL.glGenRenderbuffers(1))
        GL.glBindRenderbuffer(GL.GL_RENDERBUFFER, self._depth)
        GL.glRenderbufferStorage(GL.GL_RENDERBUFFER, GL.GL_DEPTH_COMPONENT24, width, height)
        self._frame = int(GL.glGenFramebuffers(1))
        GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, self._frame)
        GL.glFramebufferTexture2D(
            GL.GL_FRAMEBUFFER, GL.GL_COLOR_ATTACHMENT0, GL.GL_TEXTURE_2D, self.texture, 0
        )
        GL.glFramebufferRenderbuffer(
            GL.GL_FRAMEBUFFER, GL.GL_DEPTH_ATTACHMENT, GL.GL_RENDERBUFFER, self._depth
        )
        if GL.glCheckFramebufferStatus(GL.GL_FRAMEBUFFER) != GL.GL_FRAMEBUFFER_COMPLETE:
            raise RuntimeError("this OpenGL cannot draw into an RGBA8 texture with a depth buffer")
        self._vertex_array = int(GL.glGenVertexArrays(1))
        GL.glBindVertexArray(self._vertex_array)
        vertices, triangles = torus_knot()
        self._count = triangles.size
        self._buffers = [int(name) for name in GL.glGenBuffers(2)]
        GL.glBindBuffer(GL.GL_ARRAY_BUFFER, self._buffers[0])
        GL.glBufferData(GL.GL_ARRAY_BUFFER, vertices.nbytes, vertices, GL.GL_STATIC_DRAW)
        GL.glBindBuffer(GL.GL_ELEMENT_ARRAY_BUFFER, self._buffers[1])
        GL.glBufferData(GL.GL_ELEMENT_ARRAY_BUFFER, triangles.nbytes, triangles, GL.GL_STATIC_DRAW)
        from ctypes import c_void_p

        for location in (0, 1):
            GL.glEnableVertexAttribArray(location)
            GL.glVertexAttribPointer(location, 3, GL.GL_FLOAT, GL.GL_FALSE, 24, c_void_p(12 * location))
        GL.glBindVertexArray(0)
        self._program = _program(GL)

    def draw(self, angle: float) -> None:
        """Draw the knot turned by ``angle`` radians into the texture."""
        from OpenGL import GL

        GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, self._frame)
        GL.glViewport(0, 0, self.width, self.height)
        GL.glEnable(GL.GL_DEPTH_TEST)
        GL.glClearColor(*BACKGROUND)
        GL.glClear(GL.GL_COLOR_BUFFER_BIT | GL.GL_DEPTH_BUFFER_BIT)
        GL.glUseProgram(self._program)
        for name, matrix in (("model", rotation(angle)), ("camera", camera(self.width / self.height))):
            # transpose=True: our matrices are row-major
            GL.glUniformMatrix4fv(GL.glGetUniformLocation(self._program, name), 1, GL.GL_TRUE, matrix)
        GL.glBindVertexArray(self._vertex_array)
        GL.glDrawElements(GL.GL_TRIANGLES, self._count, GL.GL_UNSIGNED_INT, None)
        GL.glBindVertexArray(0)
        GL.glUseProgram(0)
        GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, 0)

    def pixels(self) -> NDArray[np.uint8]:
        """The texture as OpenGL sees it, ``(height, width, 4)``, row 0 at the bottom. Blocks the host."""
        from OpenGL import GL

        GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, self._frame)
        out = np.empty((self.height, self.width, 4), np.uint8)
        GL.glPixelStorei(GL.GL_PACK_ALIGNMENT, 4)
        GL.glReadPixels(0, 0, self.width, self.height, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, out)
        GL.glBindFramebuffer(GL.GL_FRAMEBUFFER, 0)
        return out

    def upload(self, pixels: NDArray[np.uint8]) -> None:
        """Put ``(height, width, 4)`` bytes from the host into the texture."""
        from OpenGL import GL

        GL.glBindTexture(GL.GL_TEXTURE_2D, self.texture)
        GL.glPixelStorei(GL.GL_UNPACK_ALIGNMENT, 4)
        GL.glTexSubImage2D(
            GL.GL_TEXTURE_2D, 0, 0, 0, self.width, self.height, GL.GL_RGBA, GL.GL_UNSIGNED_BYTE, pixels
        )
        GL.glBindTexture(GL.GL_TEXTURE_2D, 0)

    def close(self) -> None:
        """Delete the GL objects."""
        from OpenGL import GL

        GL.glDeleteProgram(self._program)
        GL.glDeleteBuffers(len(self._buffers), self._buffers)
        GL.glDeleteVertexArrays(1, [self._vertex_array])
        GL.glDeleteFramebuffers(1, [self._frame])
        GL.glDeleteRenderbuffers(1, [self._depth])
        GL.glDeleteTextures([self.texture])


def _program(gl: Any) -> int:
    program = int(gl.glCreateProgram())
    for kind, source in ((gl.GL_VERTEX_SHADER, _VERTEX), (gl.GL_FRAGMENT_SHADER, _FRAGMENT)):
        shader = gl.glCreateShader(kind)
        gl.glShaderSource(shader, source)
        gl.glCompileShader(shader)
        if not gl.glGetShaderiv(shader, gl.GL_COMPILE_STATUS):
            raise RuntimeError(f"shader: {gl.glGetShaderInfoLog(shader)!r}")
        gl.glAttachShader(program, shader)
        gl.glDeleteShader(shader)
    gl.glLinkProgram(program)
    if not gl.glGetProgramiv(program, gl.GL_LINK_STATUS):
        raise RuntimeError(f"shader program: {gl.glGetProgramInfoLog(program)!r}")
    return program


def torus_knot(rings: int = 384, sides: int = 32) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
    """Vertices ``(n, 6)`` (position, normal) and triangles ``(m, 3)`` of a (2, 3) torus knot's tube."""
    t = np.linspace(0.0, 2.0 * math.pi, rings, endpoint=False)

    def curve(t: NDArray[np.float64]) -> NDArray[np.float64]:
        radius = 1.0 + 0.45 * np.cos(3.0 * t)
        return np.stack([radius * np.cos(2.0 * t), radius * np.sin(2.0 * t), 0.45 * np.sin(3.0 * t)], axis=1)

    centre, ahead = curve(t), curve(t + 1e-3)
    along = ahead - centre
    side = np.cross(along, centre + ahead)
    side /= np.linalg.norm(side, axis=1, keepdims=True)
    up = np.cross(side, along)
    up /= np.linalg.norm(up, axis=1, keepdims=True)
    a = np.linspace(0.0, 2.0 * math.pi, sides, endpoint=False)[None, :, None]
    normal = np.cos(a) * up[:, None, :] + np.sin(a) * side[:, None, :]
    position = centre[:, None, :] + 0.2 * normal
    vertices = np.concatenate([position, normal], axis=2).reshape(-1, 6).astype(np.float32)
    ring, corner = np.meshgrid(np.arange(rings), np.arange(sides), indexing="ij")
    here, next_ring = ring * sides, (ring + 1) % rings * sides
    right = (corner + 1) % sides
    quads = np.stack([here + corner, next_ring + corner, next_ring + right, here + right], axis=2)
    triangles = quads[..., [0, 1, 2, 0, 2, 3]].reshape(-1, 3).astype(np.uint32)
    return vertices, triangles


def rotation(angle: float) -> NDArray[np.float32]:
    """Turn by ``angle`` radians about y and half of it about x."""
    c, s = math.cos(angle), math.sin(angle)
    about_y = np.array([[c, 0, s, 0], [0, 1, 0, 0], [-s, 0, c, 0], [0, 0, 0, 1]], np.float32)
    c, s = math.cos(angle / 2), math.sin(angle / 2)
    about_x = np.array([[1, 0, 0, 0], [0, c, -s, 0], [0, s, c, 0], [0, 0, 0, 1]], np.float32)
    return about_x @ about_y


def camera(aspect: float, distance: float = 4.2, near: float = 0.5, far: float = 20.0) -> NDArray[np.float32]:
    """Perspective from ``distance`` along z; ``aspect`` is width over height."""
    f = 1.0 / math.tan(math.radians(50.0) / 2.0)
    projection = np.array(
        [
            [f / aspect, 0, 0, 0],
            [0, f, 0, 0],
            [0, 0, (far + near) / (near - far), 2 * far * near / (near - far)],
            [0, 0, -1, 0],
        ],
        np.float32,
    )
    view = np.eye(4, dtype=np.float32)
    view[2, 3] = -distance
    return projection @ view
