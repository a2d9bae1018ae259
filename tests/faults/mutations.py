"""Changes of a program by its syntax tree, which outlive new lines, other formatting and other places in a file.

A change finds its place within one function: by the kind of the expression, then by a token (`beside`) in the same
statement or condition. Of several places the one counts that shares the smallest expression with that token; `nth`
chooses among those that are equally close, from 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from syntax import below, text_of
from tree_sitter import Node

CALLS = {"call_expression", "call"}
BINARY = {"binary_expression", "binary_operator", "boolean_operator", "comparison_operator"}
ASSIGNMENTS = {"assignment_expression", "assignment", "augmented_assignment"}
CONNECTIVES = {"&&", "||", "and", "or"}
# what holds several statements
BODIES = re.compile(
    r"block|.*(compound|if|for|while|try|with|switch|case)_statement|for_range_loop|.*_definition|elif.*"
)


class NoPlaceError(Exception):
    """The function has no such place, or several."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The new text of a node."""

    beside: str = ""
    nth: int | None = None

    def matches(self, node: Node) -> bool:
        """Whether the change is possible at this node."""
        raise NotImplementedError

    def changed(self, node: Node) -> tuple[Node, str]:
        """The node to replace, and its replacement."""
        raise NotImplementedError

    def edit(self, function: Node) -> tuple[int, int, bytes]:
        """From this byte to that one of the file: these bytes."""
        near = [(node, near) for node in below(function) if self.matches(node) and (near := self.distance(node))]
        places = [node for node, distance in near if distance == min(distance for _, distance in near)]
        if len(places) <= (self.nth or 0) or (self.nth is None and len(places) > 1):
            raise NoPlaceError(f"expected one place for {self}, found {len(places)}")
        old, new = self.changed(places[self.nth or 0])
        return old.start_byte, old.end_byte, new.encode()

    def distance(self, node: Node) -> tuple[int, int] | None:
        """How far the smallest expression with the token is, and its length; nothing where no expression has it."""
        if not self.beside:
            return 1, 0
        around: Node | None = node
        n = 1
        while around is not None and not BODIES.fullmatch(around.type):
            if self.beside in (text_of(leaf) for leaf in below(around) if not leaf.children):
                return n, around.end_byte - around.start_byte
            around, n = around.parent, n + 1
        return None


@dataclass(frozen=True)
class Swap(Change):
    """A token (an operator, a name, a number) becomes another text."""

    old: str
    new: str

    def matches(self, node: Node) -> bool:
        return not node.children and text_of(node) == self.old

    def changed(self, node: Node) -> tuple[Node, str]:
        return node, self.new


@dataclass(frozen=True)
class Omit(Change):
    """A statement is left out; of: the function that it calls, or a name in what it assigns to."""

    of: str

    def matches(self, node: Node) -> bool:
        if node.type != "expression_statement":
            return False
        first = node.named_children[0]
        target = first.child_by_field_name("left") if first.type in ASSIGNMENTS else None
        return is_call(first, self.of) or (target is not None and self.of in map(text_of, below(target)))

    def changed(self, node: Node) -> tuple[Node, str]:
        return node, ";" if text_of(node).endswith(";") else "pass"


class Condition(Change):
    """A condition, or one operand of its and/or."""

    def matches(self, node: Node) -> bool:
        is_whole = node.type == "parenthesized_expression" or is_connected(node)
        return node.is_named and not is_whole and is_condition(node)


class Always(Condition):
    def changed(self, node: Node) -> tuple[Node, str]:
        return node, "(0 == 0)"


class Never(Condition):
    def changed(self, node: Node) -> tuple[Node, str]:
        return node, "(0 != 0)"


class Negated(Condition):
    """In C++."""

    def changed(self, node: Node) -> tuple[Node, str]:
        return node, f"!({text_of(node)})"


@dataclass(frozen=True)
class Left(Change):
    """An expression of two operands becomes the left one."""

    operator: str

    def matches(self, node: Node) -> bool:
        return node.type in BINARY and len(node.children) == 3 and node.children[1].type == self.operator

    def changed(self, node: Node) -> tuple[Node, str]:
        return node, text_of(node.children[0])


class Right(Left):
    def changed(self, node: Node) -> tuple[Node, str]:
        return node, text_of(node.children[2])


@dataclass(frozen=True)
class Argument(Change):
    """The i-th argument of a call becomes another text."""

    call: str
    i: int
    new: str

    def matches(self, node: Node) -> bool:
        return is_call(node, self.call) and self.i < len(arguments(node))

    def changed(self, node: Node) -> tuple[Node, str]:
        return arguments(node)[self.i], self.new


@dataclass(frozen=True)
class Result(Change):
    """A call becomes another text."""

    call: str
    new: str

    def matches(self, node: Node) -> bool:
        return is_call(node, self.call)

    def changed(self, node: Node) -> tuple[Node, str]:
        return node, self.new


def arguments(call: Node) -> list[Node]:
    found = call.child_by_field_name("arguments")
    return found.named_children if found is not None else []


def is_call(node: Node, name: str) -> bool:
    function = node.child_by_field_name("function") if node.type in CALLS else None
    return function is not None and re.split(r"::|->|\.", re.sub(r"<.*", "", text_of(function)))[-1] == name


def is_connected(node: Node) -> bool:
    return node.type in BINARY and node.children[1].type in CONNECTIVES


def is_condition(node: Node) -> bool:
    """Whether this decides an if, a loop or a choice, alone or as an operand of and/or."""
    parent = node.parent
    while parent is not None and parent.type in ("condition_clause", "parenthesized_expression"):
        node, parent = parent, parent.parent
    if parent is None:
        return False
    return is_connected(parent) or parent.child_by_field_name("condition") == node
