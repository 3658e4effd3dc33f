"""A token is nowhere that Spark shows or keeps: UI, REST API, plans, event log, checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qb import BrokerClient
from qb.core.rights.users_file import hash_of, make_token, parse_user, write_users
from tests.spark.conftest import QUICK
from tests.support.brokers import ROOT, BrokerProcess, free_port

pytestmark = [pytest.mark.spark, pytest.mark.process, pytest.mark.timeout(240)]

# A batch and a stream with a token; then every page of the UI that another one links to, and the REST API, are read.
SCRIPT = """
import io, json, re, sys, urllib.request
from contextlib import redirect_stdout
from urllib.error import HTTPError
from urllib.parse import urljoin
import pyspark_qb

servers, token_file, directory = sys.argv[1:]
token = open(token_file).read().strip()
spark = pyspark_qb.session("tokens", "local[2]", **{settings!r})
shown = io.StringIO()
about = {{"servers": servers, "tokenFile": token_file}}
rows = spark.read.format("qb").options(subscribe="events", **about).load()
with redirect_stdout(shown):
    for mode in ("extended", "formatted", "codegen", "cost"):
        rows.where("offset > 2").explain(mode=mode)
    print(rows, repr(rows), rows.count())
    rows.createOrReplaceTempView("events")
    spark.sql("EXPLAIN FORMATTED SELECT count(*) FROM events").show(truncate=False)
stream = spark.readStream.format("qb").options(subscribe="events", startingOffsets="earliest", **about).load()
where = {{"topic": "copied", "checkpointLocation": directory + "/checkpoint"}}
query = stream.select("value").writeStream.format("qb").options(**where, **about)
running = query.trigger(availableNow=True).start()
running.awaitTermination()
with redirect_stdout(shown):
    running.explain(extended=True)
    print(running, running.lastProgress, running.recentProgress, running.status)
    try:
        spark.read.format("qb").options(servers=servers, subscribe="events", token=token).load().count()
    except Exception as error:
        refusal = str(error)
    print(refusal)
assert "token" in refusal, refusal

def read(url):
    try:
        return urllib.request.urlopen(url, timeout=60).read().decode(errors="replace")
    except HTTPError as error:
        return error.read().decode(errors="replace")

base = spark.sparkContext.uiWebUrl
pages, wanted = {{}}, [base + "/jobs/", base + "/SQL/", base + "/StreamingQuery/", base + "/environment/"]
api = base + "/api/v1/applications/" + spark.sparkContext.applicationId
wanted += [api + each for each in ("", "/jobs", "/stages?details=true", "/executors", "/environment", "/storage/rdd")]
wanted += [api + "/sql?details=true&planDescription=true&length=1000"]
while wanted:
    url = wanted.pop().partition("#")[0]
    ends = url.endswith((".js", ".css", ".png"))
    if url in pages or not url.startswith(base) or "kill" in url or "sort=" in url or ends:
        continue
    pages[url] = text = read(url.replace(" ", "%20"))
    if "/api/" not in url and "/static/" not in url:
        links = re.findall('href="([^"]+)"', text)
        wanted += [urljoin(url, link.replace("&amp;", "&")) for link in links]
spark.stop()
texts = pages | {{"plans": shown.getvalue()}}
print(json.dumps({{
    "pages": len(pages), "with token": [name for name, text in texts.items() if token in text],
    "with servers": [name for name, text in texts.items() if servers in text],
    "plans": sum("SQL/execution" in name for name in pages), "refusal": refusal,
}}))
"""


def test_spark_shows_no_token_in_its_ui_its_api_its_plans_and_keeps_none(tmp_path: Path) -> None:
    token = make_token()
    write_users(str(tmp_path / "users"), [parse_user(["user", "ops", f"sha256:{hash_of(token)}", "admin:*"])])
    (tmp_path / "token").write_text(f"{token}\n")
    (tmp_path / "spark").mkdir()
    broker = BrokerProcess(tmp_path, users_file=tmp_path / "users", audit_file="-")
    try:
        with BrokerClient(port=broker.port, token=token) as client:
            for topic in ("events", "copied"):
                client.create_topic(topic)
            client.publish_many("events", [b"x"] * 10)
            logs = {"spark.eventLog.enabled": True, "spark.eventLog.dir": f"file://{tmp_path}/spark"}
            settings = QUICK | logs | {"spark.ui.enabled": True, "spark.ui.port": free_port()}
            settings |= {"spark.sql.ui.explainMode": "extended", "spark.eventLog.compress": False}
            arguments = [f"127.0.0.1:{broker.port}", str(tmp_path / "token"), str(tmp_path / "spark")]
            done = subprocess.run(
                [sys.executable, "-c", SCRIPT.format(settings=settings), *arguments],
                env=os.environ
                | {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "SPARK_LOCAL_IP": "127.0.0.1"},
                cwd=ROOT,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-5000:]
            assert client.offsets("copied").next == 10
        print(done.stdout.splitlines()[-1])
    finally:
        broker.kill()

    found = json.loads(done.stdout.splitlines()[-1])
    assert found["with token"] == []
    assert (found["pages"] > 20, found["plans"] > 2) == (True, True), found
    assert token not in done.stdout + done.stderr + broker.log
    kept = [path for path in (tmp_path / "spark").rglob("*") if path.is_file()]
    assert any("local-" in path.name for path in kept), "there is an event log"
    assert [path for path in kept if token.encode() in path.read_bytes()] == []
