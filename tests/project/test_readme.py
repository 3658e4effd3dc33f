"""The README's commands do what they say when they are pasted, and what it names is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brokers import ROOT as PROJECT
from tests.support.brokers import free_port
from tests.support.local_cluster import LocalClusterProcess

README = (PROJECT / "README.md").read_text()
SERVE, PUBLISH, FOR_TRANSACTION, *_, HTTP, TEST = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
PYTHON, CONSUMER, TRANSACTION = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def curl_options() -> str:
    curl = shutil.which("curl")
    return subprocess.run([curl, "--help", "all"], capture_output=True, text=True).stdout if curl else ""


pytestmark = pytest.mark.timeout(180)  # the first test builds the wheel


@pytest.fixture(params=["checkout", "wheel"])
def home(request: pytest.FixtureRequest, crowded: Path) -> Path:
    """A program's directory with the `.venv` that the README's first command makes.

    It is the environment that runs these tests, or a fresh one with the wheel. The program has packages of its own
    with the names of our folders.
    """
    (crowded / ".venv").symlink_to(sys.prefix if request.param == "checkout" else request.getfixturevalue("installed"))
    assert (crowded / ".venv/bin/qb-server").exists(), "the tests run in an environment that has QB installed"
    return crowded


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QB_")}
    return kept | {"QB_SERVER_PORT": "0", "QB_JSON_PORT": "0", "QB_HTTP_PORT": "0", "QB_DATA_DIR": str(home / "data")}


@pytest.fixture
def http_port() -> int:
    return free_port()


@pytest.fixture
def port(home: Path, http_port: int) -> Iterator[int]:
    """The port of a broker started by the last part of the README's first command."""
    command = SERVE.strip().split(" && ")[-1]
    settings = environment(home) | {"QB_HTTP_PORT": str(http_port)}
    with subprocess.Popen(command.split(), cwd=home, env=settings, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"listens on \S+:(\d+)", server.stdout.readline())
            assert found
            yield int(found[1])
            server.terminate()
            assert server.wait(timeout=20) == 0
        finally:
            server.kill()


def run(command: list[str], home: Path) -> str:
    done = subprocess.run(command, cwd=home, env=environment(home), capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.process
def test_the_first_screen_works_when_pasted(home: Path, port: int) -> None:
    shell = PUBLISH.replace(".venv/bin/qb ", f".venv/bin/qb --port {port} ")
    shown = run(["bash", "-euo", "pipefail", "-c", shell], home)
    assert '{"id": 1, "item": "tea"}\none\ntwo\nthree\n' in shown, "the messages were pushed"
    python = PYTHON.replace("BrokerClient()", f"BrokerClient(port={port})")
    receipt, *pushed = run([".venv/bin/python", "-c", python], home).splitlines()
    assert receipt == "0 4 fsynced"
    assert pushed[0] == '0 customer-7 {"id": 1, "item": "tea"} 1'
    assert [line.split()[0] for line in pushed] == [str(offset) for offset in range(8)]
    consumer = CONSUMER.replace('["orders"])', f'["orders"], port={port})')
    assert "b'tea'" in run([".venv/bin/python", "-c", consumer], home)
    assert "b'tea'" not in run([".venv/bin/python", "-c", consumer], home), "what was handled is committed"


@pytest.mark.cluster
@pytest.mark.process
def test_the_commands_for_three_machines_work_when_pasted(home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    section = README.partition("\n## Three machines\n")[2].partition("\n## ")[0]
    start, use = re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    program = start.strip().split(" && ")[-1].split()
    assert program[:5] == [".venv/bin/qb-server", "cluster", "--secure", "--nodes", "3"]
    directory = tmp_path_factory.mktemp("cluster")
    cluster = LocalClusterProcess(directory, "--secure", program=[str(home / program[0]), "cluster"])
    try:
        use = use.replace(" cluster/", f" {directory}/").replace("=cluster/", f"={directory}/")
        shown = run(["bash", "-euo", "pipefail", "-c", use], home)
        assert "tea\ncoffee\n" in shown
        assert "3 of 3 NATS nodes" in shown
        assert cluster.stop() == 0
    finally:
        cluster.kill()


@pytest.mark.process
def test_the_transaction_works_when_pasted(home: Path, port: int) -> None:
    qb = [".venv/bin/qb", "--port", str(port)]
    run(["bash", "-euc", FOR_TRANSACTION.replace(".venv/bin/qb ", f".venv/bin/qb --port {port} ")], home)
    for _ in range(2):  # the second time adds nothing
        python = TRANSACTION.replace("BrokerClient()", f"BrokerClient(port={port})")
        run([".venv/bin/python", "-c", python], home)
    assert run([*qb, "fetch", "audit", "--offset", "0"], home) == "a\nb\n"
    assert "1 committed transaction " in run([*qb, "transactions", "list"], home)


@pytest.mark.process
@pytest.mark.skipif("--json" not in curl_options(), reason="there is no curl with --json, which is 7.82 or newer")
@pytest.mark.usefixtures("port")
def test_the_http_commands_work_when_pasted(home: Path, http_port: int) -> None:
    lines = HTTP.replace(":8080/", f":{http_port}/").splitlines()
    (stream,) = [line for line in lines if "/stream" in line]
    at = lines.index(stream)
    shown = run(["bash", "-euo", "pipefail", "-c", "\n".join(lines[:at]).replace("curl ", "curl -sSf ")], home)
    assert '"value":"tea"' in shown
    with subprocess.Popen(["bash", "-c", f"exec {stream}"], cwd=home, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert any('"value":"tea"' in line for line in reader.stdout), "the message was pushed"
        reader.kill()
    assert "qb_" in run(["bash", "-euc", lines[-1]], home)


def test_no_two_sections_make_the_same_topic_so_that_all_can_be_pasted() -> None:
    made = re.findall(r"create-topic ([\w-]+)$", README, re.MULTILINE)
    made += re.findall(r'"createTopic","topic":"([^"]+)"', README)
    made += re.findall(r"""--json '{"name":"([^"]+)".* http://\S+/topics$""", README, re.MULTILINE)
    assert sorted(made) == ["audit", "events", "invoices", "orders", "safe", "visits"]


@pytest.mark.process
def test_print_config_shows_the_defaults_that_the_readme_gives(home: Path) -> None:
    done = subprocess.run(
        [".venv/bin/qb-server", "--print-config"],
        cwd=home,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    for default in ("127.0.0.1", "9999", "./storage/data", "true"):
        assert default in done.stdout


def test_continuous_integration_installs_and_tests_as_the_readme_says() -> None:
    script = (PROJECT / ".ci/run").read_text()
    *install, pytest_command = TEST.strip().split(" && ")
    assert pytest_command == ".venv/bin/python -m pytest -n 3"
    assert [line for line in README.splitlines() if "-m pytest" in line] == [TEST.strip()]
    assert "grep -m1 -- '-m pytest' README.md" in script
    assert set(install) <= set(script.splitlines())
    assert SERVE.strip().split(" && ")[:-1] == [re.sub(r"-e '\.\[.+\]'", ".", part) for part in install]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/ARCHITECTURE.md"])
def test_every_link_of_the_front_page_documents_leads_somewhere(document: str) -> None:
    path = PROJECT / document
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()) if "://" not in link]
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []
