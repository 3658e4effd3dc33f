"""The YAML file of settings, for the broker and for programs: what it names, in which line, and whether that may be.

A file may hold the sections of the broker's settings and those of programs at once. Each reader checks all of it and
takes its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from qb.core.settings.program_table import PROGRAM_TABLE
from qb.core.settings.settings_table import TABLE, Setting
from qb.core.wire.value_kinds import BOOLEAN, OPTIONAL_TEXT, TEXT

_KNOWN = {setting.name: setting for setting in (*TABLE, *PROGRAM_TABLE)}
_SECTIONS = tuple(dict.fromkeys(name.partition(".")[0] for name in _KNOWN))


class SettingsError(ValueError):
    """A setting that is unknown or malformed: one line that names it, where it came from and what is wrong."""

    def __init__(self, what: str) -> None:
        super().__init__(" ".join(what.split()))


class ConfigEntry(NamedTuple):
    """One key of a file, with the value as YAML read it and where it stands."""

    setting: Setting
    value: object
    origin: str


def read_config(path: str, named_by: str) -> list[ConfigEntry]:
    """Return what a file sets, each value checked. Raises SettingsError with file, line, key and reason."""
    content, lines = _parse_yaml(path, named_by)
    entries = []
    for section, fields in _mapping(content, "the settings file", f"file {path}").items():
        where = f"file {path}, line {lines.get((section,), 1)}"
        if section not in _SECTIONS:
            raise SettingsError(f"{section}: unknown section in {where}{nearest(str(section), _SECTIONS)}")
        for field, value in _mapping(fields, section, where).items():
            name, where = f"{section}.{field}", f"file {path}, line {lines.get((section, field), 1)}"
            if name not in _KNOWN:
                raise SettingsError(f"{name}: unknown setting in {where}{nearest(name, _KNOWN)}")
            checked(_KNOWN[name], value, where)
            entries.append(ConfigEntry(_KNOWN[name], value, where))
    return entries


def _parse_yaml(path: str, named_by: str) -> tuple[object, Mapping[tuple[object, ...], int]]:
    import yaml  # here, because most starts have no file

    from qb.core.wire.strict_yaml import MistakeInYaml, load_with_lines

    try:
        with open(path, "rb") as file:
            return load_with_lines(file)
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        kind = "has a mistake" if isinstance(error, MistakeInYaml) else "is not YAML"
        what = f"{kind}{line}: {error.problem}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = f"is not YAML: {error}"
    raise SettingsError(f"settings file {path!r} (from {named_by}) {what}")


def _mapping(value: object, name: object, origin: str) -> Mapping[object, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SettingsError(f"{name}: must be settings by name, not {_short(value)} (from {origin})")
    return value


def checked(setting: Setting, value: object, origin: str) -> Any:
    """Return the value that a setting is given. Raises SettingsError."""
    try:
        return setting.kind.parse(_as_text(setting, value))
    except ValueError:
        given = "empty" if isinstance(value, str) and not value.strip() else _short(value)
        must = f"must be {setting.kind.must_be}, not {given}"
        raise SettingsError(f"{setting.name}: {must} (from {origin})") from None


def _as_text(setting: Setting, value: object) -> str:
    """Return what a person would have written: YAML has already turned `9999` or `yes` into something else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) and setting.kind is BOOLEAN:
        return BOOLEAN.show(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and setting.kind not in (TEXT, OPTIONAL_TEXT):
        return str(value)
    raise ValueError(value)


def nearest(name: str, known: Collection[str]) -> str:
    """Return a hint at the known name that is meant, empty if there is none."""
    from difflib import get_close_matches  # here, because most starts have no mistake

    matches = get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {matches[0]}?" if matches else ""


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
