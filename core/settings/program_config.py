"""The configuration of a program: a YAML file, overridden by flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from qb.core.settings.config_file import checked, read_config
from qb.core.settings.program_table import PROGRAM_TABLE, ProgramConfig

_NAMES = {setting.name for setting in PROGRAM_TABLE}


def program_config(
    path: str | None, given: Mapping[str, Any] | None = None, named_by: str = "the argument path"
) -> ProgramConfig:
    """Return what a file says, and over it what is `given` by name: {"producer.topic": "orders"}; None is not given.

    An error about the file as a whole says what it was `named_by`.

    Raises SettingsError, which names file, line, key and reason.
    """
    sections: dict[str, dict[str, Any]] = {"broker": {}, "producer": {}, "consumer": {}}
    for setting, value, origin in read_config(path, named_by) if path is not None else ():
        if setting.name in _NAMES:
            section, field = setting.name.split(".")
            sections[section][field] = checked(setting, value, origin)
    for name, value in (given or {}).items():
        section, field = name.split(".")
        if value is not None:
            sections[section][field] = value
    return msgspec.convert(sections, ProgramConfig)
