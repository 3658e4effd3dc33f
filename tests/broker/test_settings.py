"""tests.test_config: every setting from every source, and one clear line for every mistake."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qb.core.settings import PROGRAM_TABLE, TABLE, Setting, Settings, SettingsError, describe_flags, load, render
from qb.core.settings.settings_table import ENGINE
from qb.core.wire.value_kinds import (
    BOOLEAN,
    HOURS,
    INTEGER,
    LOG_LEVEL,
    NAMES,
    SECONDS,
    SIZE,
    TEXT,
    WORD,
    parse_size,
    show_size,
)
from tests.support.brokers import ROOT

BY_NAME = {setting.name: setting for setting in TABLE}
EXAMPLES = {  # by noun: what is written and what it means
    TEXT.noun: ("x", "x"),
    "text, or nothing": ("x", "x"),
    INTEGER.noun: ("7", 7),
    SIZE.noun: ("64MiB", 64 * 2**20),
    SECONDS.noun: ("1.5", 1.5),
    HOURS.noun: ("2.5", 2.5),
    BOOLEAN.noun: ("yes", True),
    LOG_LEVEL.noun: ("error", "error"),
    NAMES.noun: ("a, b", ("a", "b")),
    WORD.noun: ("east-1", "east-1"),
    ENGINE.noun: ("jetstream", "jetstream"),
}

every_setting = pytest.mark.parametrize("setting", TABLE, ids=lambda setting: setting.name)


def value_of(settings: Settings, name: str) -> object:
    section, field = name.split(".")
    return getattr(getattr(settings, section), field)


def refusal_line(argv: list[str] | None = None, environ: dict[str, str] | None = None) -> str:
    """Return the one line that load() refuses with."""
    with pytest.raises(SettingsError) as caught:
        load(argv or [], environ or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def yaml_file(directory: Path, text: str | bytes) -> str:
    path = directory / "qb.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_without_anything_given_the_defaults_are_in_force() -> None:
    loaded = load([], {"HOME": "/root", "PATH": "/bin"})
    assert loaded.settings == Settings()
    assert set(loaded.origins) == set(BY_NAME)
    assert set(loaded.origins.values()) == {"default"}


@every_setting
def test_a_default_is_of_its_own_kind_and_within_its_own_bounds(setting: Setting) -> None:
    assert setting.kind.parse(setting.kind.show(setting.default)) == setting.default


@every_setting
def test_a_setting_comes_from_its_environment_variable(setting: Setting) -> None:
    written, meant = EXAMPLES[setting.kind.noun]
    loaded = load([], {setting.environment: written})
    assert value_of(loaded.settings, setting.name) == meant
    assert loaded.origins[setting.name] == f"environment {setting.environment}"


@every_setting
def test_a_setting_comes_from_each_of_its_flags(setting: Setting) -> None:
    written, meant = EXAMPLES[setting.kind.noun]
    for flag in setting.flags:
        for argv in ([flag, written], [f"{flag}={written}"]):
            loaded = load(argv, {})
            assert value_of(loaded.settings, setting.name) == meant
            assert loaded.origins[setting.name] == f"flag {flag}"


@every_setting
def test_a_setting_comes_from_the_file(setting: Setting, tmp_path: Path) -> None:
    section, field = setting.name.split(".")
    written, meant = EXAMPLES[setting.kind.noun]
    path = yaml_file(tmp_path, f"{section}:\n  {field}: {written}\n")
    for loaded in (load(["--config-file", path], {}), load([], {"QB_CONFIG_FILE": path})):
        assert value_of(loaded.settings, setting.name) == meant
        assert loaded.origins[setting.name] == f"file {path}"


def test_names_variables_and_flags_are_all_different() -> None:
    flags = [flag for setting in TABLE for flag in setting.flags]
    for names in ([setting.name for setting in TABLE], [setting.environment for setting in TABLE], flags):
        assert len(set(names)) == len(names)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "server: {port: 1, host: file, max_connections: 1}")
    environ = {"QB_CONFIG_FILE": path, "QB_SERVER_PORT": "2", "QB_SERVER_HOST": "environment"}
    settings, origins = load(["--port", "3"], environ)
    assert (settings.server.port, settings.server.host, settings.server.max_connections) == (3, "environment", 1)
    assert settings.server.max_partitions == Settings().server.max_partitions
    assert origins["server.port"] == "flag --port"
    assert origins["server.host"] == "environment QB_SERVER_HOST"
    assert origins["server.max_connections"] == f"file {path}"
    assert origins["server.max_partitions"] == "default"


def test_the_file_named_by_a_flag_wins_over_the_one_named_by_the_environment(tmp_path: Path) -> None:
    path = yaml_file(tmp_path, "server: {port: 1}")
    assert load(["--config-file", path], {"QB_CONFIG_FILE": "/nowhere"}).settings.server.port == 1


def test_of_a_repeated_flag_the_last_one_counts() -> None:
    assert load(["--port", "1", "--server-port=2"], {}).settings.server.port == 2


@pytest.mark.parametrize("text", ["", "# nothing\n", "server:\n", "server: {}\n"])
def test_an_empty_file_or_section_changes_nothing(text: str, tmp_path: Path) -> None:
    assert load(["--config-file", yaml_file(tmp_path, text)], {}).settings == Settings()


@pytest.mark.parametrize("word", ["true", "TRUE", "1", "yes", "on"])
def test_true_has_several_spellings(word: str) -> None:
    assert load([], {"QB_AUTO_CREATE_TOPICS": word}).settings.server.auto_create_topics is True


@pytest.mark.parametrize("word", ["false", "False", "0", "no", "off"])
def test_false_has_several_spellings(word: str) -> None:
    assert load([], {"QB_FSYNC_ON_WRITE": word}).settings.storage.fsync_on_write is False


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("512k", 512 * 1024),
        ("64MiB", 64 * 2**20),
        ("64 mib", 64 * 2**20),
        ("1GB", 10**9),
        ("2T", 2**41),
    ],
)
def test_a_size_may_have_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(0, 2**64))
def test_a_size_is_shown_so_that_it_reads_back_exactly(size: int) -> None:
    assert parse_size(show_size(size)) == size


@given(st.floats(0.01, 1e9))
def test_a_duration_is_shown_so_that_it_reads_back_exactly(seconds: float) -> None:
    assert SECONDS.parse(SECONDS.show(seconds)) == seconds


def test_a_mistyped_name_is_answered_with_the_nearest_known_one(tmp_path: Path) -> None:
    assert refusal_line(environ={"QB_SERVER_PROT": "1"}) == (
        "QB_SERVER_PROT: unknown setting in the environment; did you mean QB_SERVER_PORT?"
    )
    assert refusal_line(["--prot", "1"]) == "--prot: unknown flag; did you mean --port?"
    path = yaml_file(tmp_path, "server: {prot: 1}")
    assert refusal_line(["--config-file", path]) == (
        f"server.prot: unknown setting in file {path}, line 1; did you mean server.port?"
    )
    path = yaml_file(tmp_path, "sever: {port: 1}")
    assert (
        refusal_line(["--config-file", path]) == f"sever: unknown section in file {path}, line 1; did you mean server?"
    )


def test_a_name_like_no_other_is_refused_without_a_guess() -> None:
    assert refusal_line(environ={"QB_ZZZ": "1"}) == "QB_ZZZ: unknown setting in the environment"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--port", "abc"], "server.port: must be a whole number (0 to 65535), not 'abc' (from flag --port)"),
        (["--port", "65536"], "server.port: must be a whole number (0 to 65535), not '65536' (from flag --port)"),
        (["--port", "-1"], "server.port: must be a whole number (0 to 65535), not '-1' (from flag --port)"),
        (["--host", " "], "server.host: must be text, not empty (from flag --host)"),
        (
            ["--log-level=loud"],
            "server.log_level: must be one of debug, info, warning, error, not 'loud' (from flag --log-level)",
        ),
        (
            ["--fsync-on-write", "perhaps"],
            "storage.fsync_on_write: must be true or false, not 'perhaps' (from flag --fsync-on-write)",
        ),
        (
            ["--shutdown-grace", "nan"],
            "server.shutdown_grace: must be a number of seconds (at least 0), not 'nan' (from flag --shutdown-grace)",
        ),
        (
            ["--segment-bytes", "64MXB"],
            "storage.segment_bytes: must be a size such as 4096, 512k, 64MiB or 1GB (at least 1KiB), not '64MXB' "
            "(from flag --segment-bytes)",
        ),
        (["--port"], "--port: this flag needs a value"),
        (["--port", "--host", "x"], "--port: this flag needs a value"),
        (["--bogus", "1"], "--bogus: unknown flag"),
        (["9999"], "'9999': unexpected argument; settings are given as --name VALUE"),
    ],
)
def test_a_malformed_flag_is_named_with_what_it_must_be(argv: list[str], line: str) -> None:
    assert refusal_line(argv) == line


def test_a_malformed_variable_is_refused_even_when_a_flag_overrides_it() -> None:
    line = refusal_line(["--port", "1"], {"QB_SERVER_PORT": ""})
    assert line == "server.port: must be a whole number (0 to 65535), not empty (from environment QB_SERVER_PORT)"


# 10 to the 30th values in 30 lines
ALIAS_BOMB = "x0: &x0 [1]\n" + "".join(f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]\n" for n in range(1, 30))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("server: {port: true}", "server.port: must be a whole number (0 to 65535), not True"),
        ("server: {port: [1]}", "server.port: must be a whole number (0 to 65535), not [1]"),
        ("server: {port: }", "server.port: must be a whole number (0 to 65535), not None"),
        ("server: {port: 99.5}", "server.port: must be a whole number (0 to 65535), not 99.5"),
        ("server: {host: 127}", "server.host: must be text, not 127"),
        ("server: {log_level: off}", "server.log_level: must be one of debug, info, warning, error, not False"),
        ("server: 5", "server: must be settings by name, not 5"),
        ("- server", "the settings file: must be settings by name, not ['server']"),
        ("server: {port: 1", "is not YAML in line 1"),
        ("a: 2020-99-99", "is not YAML"),
        ("a: !!python/name:os.system 1", "is not YAML in line 1"),
        (b"a: \xff\xfe", "is not YAML"),
        ('"two\\nlines": 1', "two lines: unknown section"),
        ("server:\n  port: 1\n  host: a\n  port: 2\n", "has a mistake in line 4: port is given twice"),
        ("server: {port: 1}\nserver: {port: 2}\n", "has a mistake in line 2: server is given twice"),
        ("server: &a {port: 1}\njson: *a\n", "has a mistake in line 2: *a refers to another value"),
        (ALIAS_BOMB, "has a mistake in line 2: *x0 refers to another value"),
        ("#" * 2**20 + "\n", "is not YAML: it is larger than 1048576 bytes"),
    ],
)
def test_a_malformed_file_is_named_with_what_is_wrong(text: str | bytes, words: str, tmp_path: Path) -> None:
    path = yaml_file(tmp_path, text)
    line = refusal_line(["--config-file", path])
    assert words in line
    assert path in line


def test_an_unreadable_file_is_named_with_who_named_it(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.yaml")
    line = refusal_line(environ={"QB_CONFIG_FILE": missing})
    named = f"settings file {missing!r} (from environment QB_CONFIG_FILE)"
    assert line == f"{named} cannot be read: No such file or directory"
    assert refusal_line(["--config-file", str(tmp_path)]).endswith("cannot be read: Is a directory")


def test_the_switches_of_the_caller_are_passed_over_and_offered_as_guesses() -> None:
    assert load(["--print-config", "--port", "1"], {}, ["--print-config"]).settings.server.port == 1
    with pytest.raises(SettingsError, match="--print-config: this flag takes no value"):
        load(["--print-config=1"], {}, ["--print-config"])
    with pytest.raises(SettingsError, match="did you mean --print-config"):
        load(["--print-confg"], {}, ["--print-config"])


def test_the_debug_variable_is_known() -> None:
    assert load([], {"QB_DEBUG": "1"}).settings == Settings()


def test_render_shows_each_value_and_where_it_came_from() -> None:
    lines = render(load(["--port", "0"], {"QB_TAIL_BYTES": "1000"})).splitlines()
    assert [line.split()[0] for line in lines] == [setting.name for setting in TABLE]
    shown = {line.split()[0]: line.split(maxsplit=2)[1:] for line in lines}
    assert shown["server.port"] == ["0", "flag --port"]
    assert shown["storage.tail_bytes"] == ["1000", "environment QB_TAIL_BYTES"]
    assert shown["storage.segment_bytes"] == ["128MiB", "default"]
    assert shown["storage.fsync_on_write"] == ["true", "default"]


def test_the_help_lists_every_flag_and_variable() -> None:
    words = describe_flags().replace(",", " ").split()
    assert {word for word in words if word.startswith("--")} == {
        "--config-file", "--config", *(flag for setting in TABLE for flag in setting.flags)
    }  # fmt: skip
    assert {word for word in words if word.startswith("QB_")} == {
        "QB_CONFIG_FILE", *(setting.environment for setting in TABLE)
    }  # fmt: skip


def test_yaml_is_imported_only_for_a_file() -> None:
    program = "import sys; from qb.core.settings import load; load([], {}); sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=30).returncode == 0


def rows_of(document: str) -> list[list[str]]:
    lines = [line for line in document.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_the_document_lists_exactly_the_settings_of_the_table() -> None:
    settings, _, programs = (ROOT / "docs" / "CONFIGURATION.md").read_text().partition("\n## Programs")
    assert rows_of(settings) == [
        [row.name, row.environment, "`, `".join(row.flags), row.kind.show(row.default), row.help] for row in TABLE
    ]
    assert [[name, default, help] for name, _, default, help in rows_of(programs)] == [
        [row.name, "" if row.default is None else row.kind.show(row.default), row.help] for row in PROGRAM_TABLE
    ]
