"""Where the values of settings come from: flags, the environment, a file, the defaults.

Flags win over the environment, the environment over the file, the file over the defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import msgspec

from qb.core.settings.settings_table import TABLE, Setting, Settings
from qb.core.wire.value_kinds import BOOLEAN, TEXT

CONFIG_FILE, CONFIG_FILE_FLAG = "QB_CONFIG_FILE", "--config-file"
DEBUG = "QB_DEBUG"  # read by the command line: show tracebacks

_BY_NAME = {setting.name: setting for setting in TABLE}
_BY_VARIABLE = {setting.environment: setting for setting in TABLE}
_BY_FLAG = {flag: setting for setting in TABLE for flag in setting.flags}
_SECTIONS = tuple(get_type_hints(Settings))


class SettingsError(ValueError):
    """A setting that is unknown or malformed: one line that names it, where it came from and what is wrong."""

    def __init__(self, what: str) -> None:
        super().__init__(" ".join(what.split()))


class LoadedSettings(NamedTuple):
    """The settings in force and, for each name, `default`, `file F`, `environment V` or `flag --f`."""

    settings: Settings
    origins: Mapping[str, str]


def load(argv: Sequence[str], environ: Mapping[str, str], switches: Collection[str] = ()) -> LoadedSettings:
    """Return what the flags, the environment and the file say. Blocks only to read the file.

    `argv` is without the program's name. `switches` are flags without a value that the caller looks after.
    Raises SettingsError.
    """
    flags, file = _read_flags(argv, switches)
    variables = _read_environment(environ)
    if file is None and CONFIG_FILE in environ:
        file = environ[CONFIG_FILE], f"environment {CONFIG_FILE}"
    values = {setting.name: setting.default for setting in TABLE}
    origins = dict.fromkeys(values, "default")
    for setting, value, origin in [*_read_file(file), *variables, *flags]:  # the later wins
        values[setting.name] = _checked(setting, value, origin)
        origins[setting.name] = origin
    return LoadedSettings(_assemble(values), origins)


def render(loaded: LoadedSettings) -> str:
    """Return the settings in force as aligned lines: name, value, where it came from."""
    rows = [(row.name, row.kind.show(_value(loaded.settings, row)), loaded.origins[row.name]) for row in TABLE]
    return _aligned(rows)


def describe_flags() -> str:
    """Return aligned help lines: flag, variable, default, meaning."""
    rows = [(", ".join(row.flags), row.environment, row.kind.show(row.default), row.help) for row in TABLE]
    return _aligned([*rows, (CONFIG_FILE_FLAG, CONFIG_FILE, "", "YAML file with settings, by section")])


# --- the three sources: each yields (setting, raw value, origin) ---

Given = tuple[Setting, object, str]
File = tuple[str, str]  # its path, and who named it


def _read_flags(argv: Sequence[str], switches: Collection[str]) -> tuple[list[Given], File | None]:
    given: list[Given] = []
    file: File | None = None
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if word in switches:
            continue
        if not word.startswith("-"):
            raise SettingsError(f"{word!r}: unexpected argument; settings are given as --name VALUE")
        if flag in switches:
            raise SettingsError(f"{flag}: this flag takes no value")
        if flag != CONFIG_FILE_FLAG and flag not in _BY_FLAG:
            raise SettingsError(f"{flag}: unknown flag{_nearest(flag, [*_BY_FLAG, CONFIG_FILE_FLAG, *switches])}")
        text = value if equals else next(words, None)
        if text is None or (not equals and text.startswith("--")):
            raise SettingsError(f"{flag}: this flag needs a value")
        if flag == CONFIG_FILE_FLAG:
            file = text, f"flag {flag}"
        else:
            given.append((_BY_FLAG[flag], text, f"flag {flag}"))
    return given, file


def _read_environment(environ: Mapping[str, str]) -> list[Given]:
    names = sorted(name for name in environ if name.startswith("QB_") and name not in (CONFIG_FILE, DEBUG))
    for name in names:
        if name not in _BY_VARIABLE:
            hint = _nearest(name, [*_BY_VARIABLE, CONFIG_FILE, DEBUG])
            raise SettingsError(f"{name}: unknown setting in the environment{hint}")
    return [(_BY_VARIABLE[name], environ[name], f"environment {name}") for name in names]


def _read_file(file: File | None) -> Iterator[Given]:
    if file is None:
        return
    origin = f"file {file[0]}"
    for section, fields in _mapping(_parse_yaml(*file), "the settings file", origin).items():
        if section not in _SECTIONS:
            raise SettingsError(f"{section}: unknown section in {origin}{_nearest(str(section), _SECTIONS)}")
        for field, value in _mapping(fields, section, origin).items():
            name = f"{section}.{field}"
            if name not in _BY_NAME:
                raise SettingsError(f"{name}: unknown setting in {origin}{_nearest(name, _BY_NAME)}")
            yield _BY_NAME[name], value, origin


def _parse_yaml(path: str, named_by: str) -> object:
    import yaml  # here, because most starts have no file

    from qb.core.wire.strict_yaml import MistakeInYaml, load_strictly

    try:
        with open(path, "rb") as file:
            return load_strictly(file)
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


# --- checking and assembling ---


def _checked(setting: Setting, value: object, origin: str) -> Any:
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
    if isinstance(value, int | float) and not isinstance(value, bool) and setting.kind is not TEXT:
        return str(value)
    raise ValueError(value)


def _assemble(values: Mapping[str, Any]) -> Settings:
    sections: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for name, value in values.items():
        section, field = name.split(".")
        sections[section][field] = value
    return msgspec.convert(sections, Settings)


def _value(settings: Settings, setting: Setting) -> Any:
    section, field = setting.name.split(".")
    return getattr(getattr(settings, section), field)


def _nearest(name: str, known: Collection[str]) -> str:
    from difflib import get_close_matches  # here, because most starts have no mistake

    matches = get_close_matches(name, known, n=1, cutoff=0.75)
    return f"; did you mean {matches[0]}?" if matches else ""


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
