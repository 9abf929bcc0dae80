"""The parameters of a kernel, read from its CUDA C++ source.

Owns the little that must be understood of a source: comments, simple aliases, and the parameter list of one
``extern "C"`` kernel. Must not know arrays, devices or launches. What it does not understand it says
(:attr:`Parameter.kind` "opaque", or a signature of None), and nothing is checked there; it never guesses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np

from ..errors import LaunchError
from .scalars import Convert, c_type, converter

Kind = Literal["pointer", "scalar", "surface", "texture", "opaque"]

# Written apart, so that this module does not look like one that holds a kernel.
_GLOBAL = "__" + "global" + "__"
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\\n])*\")", re.DOTALL)
_ALIASES = re.compile(
    r"^[ \t]*#[ \t]*define[ \t]+(?P<macro>\w+)[ \t]+(?P<macro_is>[\w \t]+?)[ \t]*$"
    r"|\btypedef\s+(?P<typedef_is>[\w\s]+?)\s+(?P<typedef>\w+)\s*;"
    r"|\busing\s+(?P<using>\w+)\s*=\s*(?P<using_is>[\w\s]+?)\s*;",
    re.MULTILINE,
)
_QUALIFIERS = {
    "const",
    "volatile",
    "__restrict__",
    "__restrict",
    "restrict",
    "__grid_constant__",
    "register",
    "struct",
}
_OBJECTS: dict[str, Kind] = {"cudaSurfaceObject_t": "surface", "cudaTextureObject_t": "texture"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: as declared; empty where it has none.
        type: as written, for messages.
        kind: what it takes.
        const: a pointer through which the kernel only reads.
        dtype: of the scalar or of what is pointed to; None where the type is not known.
        components: of a vector type (``float4`` has 4).
        align: bytes that an address it takes is a multiple of.
        convert: makes the value of a scalar, or refuses.
    """

    name: str
    type: str
    kind: Kind
    const: bool
    dtype: np.dtype[Any] | None
    components: int = 1
    align: int = field(init=False, repr=False, compare=False)
    convert: Convert | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        together = self.components if self.components in (2, 4) else 1
        set_(self, "align", 1 if self.dtype is None else self.dtype.itemsize * together)
        set_(
            self,
            "convert",
            converter(self.dtype) if self.kind == "scalar" and self.dtype is not None else None,
        )

    def __str__(self) -> str:
        return f"{self.type} {self.name}".strip()


@cache
def signature(name: str, source: str) -> tuple[Parameter, ...] | None:
    """Parameters of the kernel ``name`` in ``source``; None if the list is made by macros we do not expand.

    Raises:
        LaunchError: there is no such kernel, or its name is changed by the compiler: a template, or not extern "C".
    """
    text = _COMMENTS.sub(_without_words, source)
    defined = _find(name, text)
    if defined is None:
        others = sorted(set(re.findall(_GLOBAL + r"[^;{]*?(\w+)\s*\((?!\s*\d)", text)))
        raise LaunchError(
            f"kernel {name!r}",
            got=f"a source that defines {', '.join(others) or 'no kernel'}",
            expected="its definition",
        )
    start, inside = defined
    _check_linkage(name, text, start)
    aliases = _aliases(text)
    declared = [part.strip() for part in _split(inside)]
    if declared in ([""], ["void"]):
        return ()
    parameters = [_parameter(part, aliases) for part in declared]
    return None if None in parameters else tuple(p for p in parameters if p is not None)


def _without_words(match: re.Match[str]) -> str:
    """What stands for a comment or a string: strings are kept only in ``extern "C"``."""
    quoted = match.group(1)
    return " " if quoted is None else quoted if quoted == '"C"' else '""'


def _find(name: str, text: str) -> tuple[int, str] | None:
    """Where the declaration of a kernel begins, and the text between the parentheses after its name."""
    for mark in re.finditer(_GLOBAL, text):
        for opening in re.finditer(r"(\w+)\s*\(", text[mark.end() :]):
            at = mark.end() + opening.end()
            if opening.group(1).startswith("__"):  # an attribute such as __launch_bounds__(256)
                continue
            if opening.group(1) == name:
                return mark.start(), text[at : _closing(text, at)]
            break
    return None


def _closing(text: str, at: int) -> int:
    """Index of the parenthesis that closes the one just before ``at``."""
    depth = 1
    for index in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def _check_linkage(name: str, text: str, start: int) -> None:
    """Refuse kernels whose name in the compiled module is not the one in the source."""
    before = text[:start]
    declaration = before[max(before.rfind(";"), before.rfind("}")) + 1 :]
    if re.search(r"\btemplate\s*<", declaration):
        raise LaunchError(
            f"kernel {name!r}",
            got="a template",
            expected='an extern "C" kernel',
            hint='Write an extern "C" kernel that calls it, or pass a function of a cupy.RawModule',
        )
    if re.search(r'extern\s*"C"', declaration):
        return
    for block in re.finditer(r'extern\s*"C"\s*\{', before):
        inside = before[block.end() :]
        if inside.count("{") >= inside.count("}"):
            return
    raise LaunchError(
        f"kernel {name!r}",
        got="a C++ function",
        expected='an extern "C" kernel',
        hint=f'Declare it: extern "C" {_GLOBAL} void {name}(...)',
    )


def _aliases(text: str) -> dict[str, list[str]]:
    """Names that stand for other words."""
    found: dict[str, list[str]] = {}
    for match in _ALIASES.finditer(text):
        for kind in ("macro", "typedef", "using"):
            if match.group(kind):
                found[match.group(kind)] = match.group(f"{kind}_is").split()
    return found


def _split(inside: str) -> list[str]:
    """Split a parameter list at its outer commas."""
    parts, depth, last = [], 0, 0
    for index, character in enumerate(inside):
        if character in "<([{":
            depth += 1
        elif character in ">)]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(inside[last:index])
            last = index + 1
    return [*parts, inside[last:]]


def _parameter(declared: str, aliases: dict[str, list[str]]) -> Parameter | None:
    """One declaration; None if it is a single unknown word, which may be a macro for any number of them."""
    declared = declared.split("=")[0].strip()
    if "(" in declared or "&" in declared:  # a function pointer or an alignment attribute: not ours to read
        return Parameter("", declared, "opaque", False, None)
    stars = declared.count("*") + declared.count("[")
    head, _, tail = declared.partition("*")
    brackets = declared.partition("[")[0]
    words = _words(head if "*" in declared else brackets)
    name = ""
    if "*" in declared:
        rest = [word for word in _words(tail.replace("*", " ").partition("[")[0]) if word not in _QUALIFIERS]
        name = rest[0] if rest else ""
    const = "const" in words
    kept = [word for word in words if word not in _QUALIFIERS]
    if "*" not in declared and len(kept) > 1 and not _is_type_word(kept[-1]):
        name = kept.pop()
    elif (
        len(kept) == 1 and not stars and c_type(_expand(kept, aliases))[0] is None and kept[0] not in _OBJECTS
    ):
        return None
    kept = _expand(kept, aliases)
    const = const or "const" in kept
    kept = [word for word in kept if word not in _QUALIFIERS]
    written = (
        re.sub(r"\s+", " ", declared.removesuffix(name)).strip() if name and "[" not in declared else declared
    )
    dtype, components = c_type(kept)
    if stars:
        return Parameter(
            name, written, "pointer", const and stars == 1, dtype if stars == 1 else None, components
        )
    kind = _OBJECTS.get(kept[0]) if len(kept) == 1 else None
    if kind is not None:
        return Parameter(name, written, kind, False, np.dtype("u8"))
    if dtype is None or components > 1:
        return Parameter(name, written, "opaque", False, None, components)
    return Parameter(name, written, "scalar", False, dtype)


def _words(text: str) -> list[str]:
    """Words of a type; a template's arguments and a namespace belong to their word."""
    text = re.sub(r"\s*([<,])\s*|\s+(>)", r"\1\2", text)
    return [re.sub(r"^(std|thrust|cuda::std|cuda)::", "", word) for word in text.split()]


def _is_type_word(word: str) -> bool:
    return word in {"int", "char", "short", "long", "unsigned", "signed", "float", "double", "bool"}


def _expand(words: list[str], aliases: dict[str, list[str]]) -> list[str]:
    """Replace aliases, also of aliases, a few levels deep."""
    for _ in range(8):
        if not any(word in aliases for word in words):
            break
        words = [new for word in words for new in aliases.get(word, [word])]
    return words
