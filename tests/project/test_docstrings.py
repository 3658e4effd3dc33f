"""Everything that `qb` exports explains itself: its purpose, and each of its parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import qb


def public_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what a class of ours offers, wherever in its family it is written; what a subclass overrides comes last."""
    for family in reversed(kind.__mro__):
        if family.__module__.partition(".")[0] == "qb":
            for name, member in vars(family).items():
                if not name.startswith("_"):
                    yield f"{kind.__name__}.{name}", getattr(member, "__func__", member)  # of a class or static method


def exported() -> dict[str, Any]:
    """Return every exported name and every public method and property of the classes among them."""
    found: dict[str, Any] = {}
    for name in qb.__all__:
        thing = getattr(qb, name)
        found[name] = thing
        if isinstance(thing, type):
            found |= dict(public_members(thing))
    return {name: thing for name, thing in found.items() if callable(thing) or isinstance(thing, property)}


EXPORTED = exported()


def parameters(thing: Callable[..., Any]) -> list[str]:
    """Return what a caller may pass."""
    if isinstance(thing, type) and issubclass(thing, BaseException) and thing.__init__ is Exception.__init__:
        return []
    return [name for name in inspect.signature(thing).parameters if name not in ("self", "cls", "args", "kwargs")]


def explained(docstring: str) -> set[str]:
    """Return the names that a docstring has a line for, in Args or Attributes."""
    sections = re.findall(r"^ *(?:Args|Attributes):\n((?: +.*\n?|\n(?= +))+)", docstring, re.MULTILINE)
    return {name for section in sections for name in re.findall(r"^ +\*{0,2}(\w+): \S", section, re.MULTILINE)}


@pytest.mark.parametrize("name", EXPORTED)
def test_what_is_exported_has_a_docstring_that_begins_with_a_sentence(name: str) -> None:
    written = vars(EXPORTED[name]).get("__doc__") if isinstance(EXPORTED[name], type) else EXPORTED[name].__doc__
    first = (written or "").strip().split("\n")[0]
    assert re.match(r"[A-Z0-9`].*[.:;]?", first)
    assert not first.startswith(f"{name}("), "made by the interpreter, not written"


@pytest.mark.parametrize("name", [name for name, thing in EXPORTED.items() if not isinstance(thing, property)])
def test_every_parameter_is_named_in_the_docstring(name: str) -> None:
    thing = EXPORTED[name]
    documents = [thing] if not isinstance(thing, type) else [each for each in thing.__mro__ if each.__doc__]
    named = {each for document in documents for each in explained(inspect.cleandoc(document.__doc__ or ""))}
    assert set(parameters(thing)) - named == set()


@pytest.mark.parametrize("name", [name for name, thing in EXPORTED.items() if inspect.isfunction(thing)])
def test_a_function_says_what_it_returns(name: str) -> None:
    docstring = inspect.cleandoc(EXPORTED[name].__doc__ or "")
    returned = inspect.signature(EXPORTED[name]).return_annotation
    assert returned == "None" or re.match(r"Returns? ", docstring) or "\nReturns:\n" in docstring


def test_only_names_in_args_and_attributes_count() -> None:
    docstring = "Do it: now.\n\nArgs:\n    one: First.\n    **more: Others.\n\nReturns:\n    two: Not an argument.\n"
    assert explained(docstring) == {"one", "more"}
