"""YAML for people: a key stands once, and nothing refers to something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import yaml

LARGEST = 1 << 20  # bytes of a file: more is no file of settings


class MistakeInYaml(yaml.MarkedYAMLError):
    """What is YAML, but not what we take."""


class StrictLoader(yaml.SafeLoader):
    """Refuses aliases, of which a few lines can stand for billions of values, and keys that stand twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            alias = self.peek_event()  # type: ignore[no-untyped-call]  # its types say nothing
            what = f"*{alias.anchor} refers to another value: write the value itself"
            raise MistakeInYaml(problem=what, problem_mark=alias.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # it is refused where settings are looked up
            if key.value in seen:
                raise MistakeInYaml(problem=f"{key.value} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_strictly(file: IO[bytes]) -> object:
    """Return what a YAML file says. Raises yaml.YAMLError, ValueError or RecursionError."""
    return load_with_lines(file)[0]


def load_with_lines(file: IO[bytes]) -> tuple[object, dict[tuple[object, ...], int]]:
    """Return what a YAML file says, and the line of every key: `("server", "port")` is in line 2. Raises as above."""
    text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST} bytes")
    loader = StrictLoader(text)
    try:
        node = loader.get_single_node()
        return (None, {}) if node is None else (loader.construct_document(node), dict(_lines(node, ())))
    finally:
        loader.dispose()


def _lines(node: yaml.Node, above: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], int]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            yield (*above, key.value), key.start_mark.line + 1
            yield from _lines(value, (*above, key.value))
