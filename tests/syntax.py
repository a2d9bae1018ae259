"""Functions of C++ and Python files with their syntax trees, for the lint and for the seeded faults."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tree_sitter_cpp
import tree_sitter_python
from tree_sitter import Language, Node, Parser

CPP = (".c", ".cpp", ".cu", ".cuh", ".h")
LANGUAGES = {**dict.fromkeys(CPP, Language(tree_sitter_cpp.language())), ".py": Language(tree_sitter_python.language())}
SCOPES = {"namespace_definition", "class_specifier", "struct_specifier", "class_definition"}


@dataclass(frozen=True)
class Function:
    """A definition; name: with its classes and namespaces, as in `Window::resume`."""

    name: str
    path: Path
    node: Node

    @property
    def line(self) -> int:
        return int(self.node.start_point.row) + 1

    @property
    def n_lines(self) -> int:
        return int(self.node.end_point.row) - int(self.node.start_point.row) + 1

    def is_called(self, name: str) -> bool:
        return f"::{self.name}".endswith(f"::{name}")


def text_of(node: Node) -> str:
    assert node.text is not None
    return node.text.decode()


def below(node: Node) -> Iterator[Node]:
    """The nodes of a tree in the order of the text, with their root."""
    yield node
    for child in node.children:
        yield from below(child)


def parsed(text: bytes, suffix: str) -> Node:
    return Parser(LANGUAGES[suffix]).parse(text).root_node


@functools.cache
def functions(path: Path) -> list[Function]:
    """Every function of a file. A Python constant of a module counts as one, too."""
    return [*_functions(parsed(path.read_bytes(), path.suffix), path, "")]


def _functions(node: Node, path: Path, scope: str) -> Iterator[Function]:
    for child in node.children:
        inner = scope
        if (name := _name(child, node)) is not None:
            inner = f"{scope}::{name}" if scope and name else scope or name
            if child.type not in SCOPES:
                yield Function(inner, path, child)
        yield from _functions(child, path, inner)


def _name(node: Node, parent: Node) -> str | None:
    """The name of a function, of a class or of a constant; nothing for another node."""
    if node.type in SCOPES:
        name = node.child_by_field_name("name")
        return text_of(name) if name and node.child_by_field_name("body") else None
    if node.type == "assignment" and parent.type == "expression_statement" and parent.parent is not None:
        left = node.child_by_field_name("left")
        return text_of(left) if left and parent.parent.type == "module" else None
    if node.type != "function_definition":
        return None
    found = node.child_by_field_name("declarator") or node.child_by_field_name("name")
    while found is not None and (inner := found.child_by_field_name("declarator") or _referred(found)) is not None:
        found = inner
    return text_of(found) if found is not None else None


def _referred(node: Node) -> Node | None:
    """What a declarator of a reference declares, which has no field for it."""
    return node.named_children[-1] if node.type == "reference_declarator" else None
