"""Where the values of settings come from: flags, the environment, a file, the defaults.

Flags win over the environment, the environment over the file, the file over the defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

import msgspec

from qb.core.settings.config_file import SettingsError, checked, nearest, read_config
from qb.core.settings.settings_table import TABLE, Setting, Settings

CONFIG_FILE, CONFIG_FILE_FLAG = "QB_CONFIG_FILE", "--config-file"
_CONFIG_FLAGS = (CONFIG_FILE_FLAG, "--config")
INSECURE = "--insecure"  # a setting that can be given without a value
DEBUG = "QB_DEBUG"  # read by the command line: show tracebacks

_BY_NAME = {setting.name: setting for setting in TABLE}
_BY_VARIABLE = {setting.environment: setting for setting in TABLE}
_BY_FLAG = {flag: setting for setting in TABLE for flag in setting.flags}
_SECTIONS = tuple(get_type_hints(Settings))


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
        values[setting.name] = checked(setting, value, origin)
        origins[setting.name] = origin.partition(", line ")[0]
    return LoadedSettings(_assemble(values), origins)


def render(loaded: LoadedSettings) -> str:
    """Return the settings in force as aligned lines: name, value, where it came from."""
    rows = [(row.name, row.kind.show(_value(loaded.settings, row)), loaded.origins[row.name]) for row in TABLE]
    return _aligned(rows)


def describe_flags() -> str:
    """Return aligned help lines: flag, variable, default, meaning."""
    rows = [(", ".join(row.flags), row.environment, row.kind.show(row.default), row.help) for row in TABLE]
    return _aligned([*rows, (", ".join(_CONFIG_FLAGS), CONFIG_FILE, "", "YAML file with settings, by section")])


# --- the three sources: each yields (setting, raw value, origin) ---

Given = tuple[Setting, object, str]
File = tuple[str, str]  # its path, and who named it


def _read_flags(argv: Sequence[str], switches: Collection[str]) -> tuple[list[Given], File | None]:
    given: list[Given] = []
    file: File | None = None
    words = iter(argv)
    while (word := next(words, None)) is not None:
        flag, equals, value = word.partition("=")
        if word in switches:
            continue
        if not word.startswith("-"):
            raise SettingsError(f"{word!r}: unexpected argument; settings are given as --name VALUE")
        if flag in switches:
            raise SettingsError(f"{flag}: this flag takes no value")
        if flag not in _CONFIG_FLAGS and flag not in _BY_FLAG:
            raise SettingsError(f"{flag}: unknown flag{nearest(flag, [*_BY_FLAG, *_CONFIG_FLAGS, *switches])}")
        text = value if equals else next(words, None)
        if flag == INSECURE and not equals and (text is None or text.startswith("--")):  # it reads as a switch
            words, text = iter([*([] if text is None else [text]), *words]), "true"
        if text is None or (not equals and text.startswith("--")):
            raise SettingsError(f"{flag}: this flag needs a value")
        if flag in _CONFIG_FLAGS:
            file = text, f"flag {flag}"
        else:
            given.append((_BY_FLAG[flag], text, f"flag {flag}"))
    return given, file


def _read_environment(environ: Mapping[str, str]) -> list[Given]:
    names = sorted(name for name in environ if name.startswith("QB_") and name not in (CONFIG_FILE, DEBUG))
    for name in names:
        if name not in _BY_VARIABLE:
            hint = nearest(name, [*_BY_VARIABLE, CONFIG_FILE, DEBUG])
            raise SettingsError(f"{name}: unknown setting in the environment{hint}")
    return [(_BY_VARIABLE[name], environ[name], f"environment {name}") for name in names]


def _read_file(file: File | None) -> Iterator[Given]:
    """Yield the settings of a file; what it says of programs is checked, and left to them."""
    for entry in read_config(*file) if file is not None else ():
        if entry.setting.name in _BY_NAME:
            yield entry.setting, entry.value, entry.origin


# --- checking and assembling ---


def _assemble(values: Mapping[str, Any]) -> Settings:
    sections: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for name, value in values.items():
        section, field = name.split(".")
        sections[section][field] = value
    return msgspec.convert(sections, Settings)


def _value(settings: Settings, setting: Setting) -> Any:
    section, field = setting.name.split(".")
    return getattr(getattr(settings, section), field)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
