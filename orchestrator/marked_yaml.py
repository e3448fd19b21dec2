"""YAML and JSON texts written by people, with the line of every part of them.

Knows how a text becomes plain values and where each of them stands. Does not know what the values mean. Dates stay the
texts that they were written as, aliases and doubled keys are refused: what is read is what stands there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml

DEPTH_MAX = 40


class Unreadable(Exception):
    """The text is not YAML (or JSON). `line` counts from 1."""

    def __init__(self, line: int, words: str) -> None:
        super().__init__(words)
        self.line = line


class _Loader(yaml.SafeLoader):
    """As SafeLoader, with the plain values of JSON: `no`, `on`, 2026-11-30 and 04012 are texts, as they look."""


_PLAIN = {
    "tag:yaml.org,2002:bool": re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
    "tag:yaml.org,2002:int": re.compile(r"^[-+]?(?:0|[1-9][0-9]*)$"),
}
_LEFT_OUT = ("tag:yaml.org,2002:timestamp", *_PLAIN)
_Loader.yaml_implicit_resolvers = {
    sign: [(tag, pattern) for tag, pattern in found if tag not in _LEFT_OUT]
    for sign, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _PLAIN["tag:yaml.org,2002:bool"], list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _PLAIN["tag:yaml.org,2002:int"], list("-+0123456789"))


class Marked:
    """Values, and where they stand."""

    def __init__(self, value: Any, root: yaml.Node | None) -> None:
        self.value = value
        self._root = root

    def line(self, where: Sequence[str | int]) -> int:
        """The line of the deepest part of `where` that stands in the text."""
        node, line = self._root, 1
        for step in where:
            if isinstance(node, yaml.MappingNode):
                found = next(((k, v) for k, v in node.value if getattr(k, "value", None) == str(step)), None)
                if found is None:
                    break
                line, node = found[0].start_mark.line + 1, found[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.start_mark.line + 1
            else:
                break
        return line


def read_marked(text: str, *, is_json: bool = False) -> Marked:
    """The values of a text. JSON is YAML but for tabs between its parts, so it has a reader of its own.

    Raises Unreadable.
    """
    if is_json:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise Unreadable(error.lineno, f"not JSON: {error.msg}") from None
        except (RecursionError, ValueError):
            raise Unreadable(1, "not JSON that can be used") from None
        try:
            return Marked(value, _Loader(text).get_single_node())
        except (yaml.YAMLError, RecursionError, ValueError):
            return Marked(value, None)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise Unreadable(1, "the file is empty")
        _check(root, set(), DEPTH_MAX)
        return Marked(loader.construct_document(root), root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise Unreadable(mark.line + 1 if mark else 1, f"not YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise Unreadable(1, f"not readable as YAML ({type(error).__name__})") from None


def _check(node: yaml.Node, seen: set[int], depth_left: int) -> None:
    """Refuse what would be read otherwise than it looks."""
    line = node.start_mark.line + 1
    if id(node) in seen:
        raise Unreadable(line, "aliases (*name) are not taken here: write the part out")
    seen.add(id(node))
    if depth_left == 0:
        raise Unreadable(line, f"nested deeper than {DEPTH_MAX} levels")
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, value in node.value:
            name = str(getattr(key, "value", ""))
            if name in names:
                raise Unreadable(key.start_mark.line + 1, f"the key `{name}` stands here a second time; remove one")
            names.add(name)
            _check(value, seen, depth_left - 1)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check(value, seen, depth_left - 1)
