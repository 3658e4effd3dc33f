"""Run the broker: settings, wiring, the one nursery tree."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Protocol

import trio

from qb.core.broker.message_broker import MessageBroker, log_ins_of
from qb.core.broker.ownership import Ownership
from qb.core.log_lines import start_logging
from qb.core.rights.log_ins import LogIns
from qb.core.rights.user_changes import check_admin_remains
from qb.core.rights.users_file import BadWord, UsersFileError, read_users
from qb.core.settings import SecuritySettings, Settings, SettingsError, describe_flags, load, render
from qb.core.wire.version import __version__
from qb.doors.exposure import exposed, refusal_of_cluster_port, refusal_of_users_file, refusal_to_listen
from qb.doors.http.starting_answers import (
    SHORT,
    StartingAnswers,
    StartingDoor,
    answer_to_frames,
    answer_to_http,
    answer_to_lines,
)
from qb.doors.json_lines.json_door import JsonDoor
from qb.doors.listening import BinaryDoor, Door, ListeningDoor, Peers, listen
from qb.doors.tls_transport import ServerTls
from qb.storage.engine import Engine
from qb.storage.file_limit import file_limit, most_connections, raise_file_limit
from qb.storage.files import CannotOpen
from qb.storage.local_engine import LocalEngine

log = logging.getLogger("qb.server")
OUTPUT_CLOSED = 141  # exit code as if SIGPIPE had ended us, like other tools in a pipe

PROMISES = {
    "fsynced": "fsynced before every ack",
    "written": "NOT fsynced before acks",
    "replicated": "acks mean that most NATS nodes have it on disk",
}  # by the durability of the engine

USAGE = """usage: qb-server [--print-config] [--version] [--SETTING VALUE ...]
       qb-server cluster --data-dir DIR [--nodes 3] [--base-port 9999]   a whole cluster on this machine

Runs the broker until SIGINT or SIGTERM, or until its terminal closes. Flags win over the environment, the environment
over the file named by QB_CONFIG_FILE or --config-file, the file over the defaults."""


async def serve(
    settings: Settings,
    engine: Engine,
    listening: Sequence[ListeningDoor],
    stop: trio.Event,
    *,
    started: Callable[[MessageBroker], None] = lambda broker: None,
    tls: ServerTls | None = None,
    ownership: Ownership | None = None,
    relays: Relays | None = None,
    log_ins: LogIns | None = None,
    starting: StartingAnswers | None = None,
) -> None:
    """Start every long-lived task of the server; returns when `stop` is set and everything received is finished.

    `starting` answers peers until the doors open.
    `ownership`, `relays` and `log_ins`: of a broker of a cluster. Raises CannotOpen if the first users cannot be read.
    """
    broker = MessageBroker(engine, settings, ownership, log_ins)
    with broker.metrics.event_loop.watching():
        await _serve(broker, listening, stop, started, tls, relays, starting)


class Relays(Protocol):
    """Where the peers come from that other brokers pass on."""

    def open(self, peers: Peers, doors: Sequence[Door], sessions: trio.Nursery) -> None:
        """Take them from now on."""

    def close(self) -> None:
        """Take no more."""


async def _serve(
    broker: MessageBroker,
    listening: Sequence[ListeningDoor],
    stop: trio.Event,
    started: Callable[[MessageBroker], None],
    tls: ServerTls | None,
    relays: Relays | None,
    starting: StartingAnswers | None,
) -> None:
    engine, settings = broker.engine, broker.settings
    peers = Peers(broker, tls)
    async with trio.open_nursery() as storage:  # outlives every task that stores
        storage.start_soon(engine.run)
        await begin_users(broker)
        await broker.transactions.finish_all()
        await broker.subscriptions.restore()
        if starting is not None:
            await starting.end()
        async with trio.open_nursery() as keepers:  # outlive all peers
            keepers.start_soon(broker.run)
            keepers.start_soon(peers.read)
            async with trio.open_nursery() as sessions:  # given grace to finish
                async with trio.open_nursery() as doors:  # shut first
                    doors.start_soon(peers.keep_alive)
                    opened = [each.door(broker) for each in listening]
                    for each, door in zip(listening, opened, strict=True):
                        for listener in each.listeners:
                            doors.start_soon(peers.accept, listener, door, sessions)
                    if relays is not None:
                        relays.open(peers, opened, sessions)
                    started(broker)
                    await stop.wait()
                    doors.cancel_scope.cancel()
                if relays is not None:
                    relays.close()
                for each in listening:
                    each.close()
                broker.drain()
                sessions.cancel_scope.deadline = trio.current_time() + settings.server.shutdown_grace
                peers.drain()
            keepers.cancel_scope.cancel()
        storage.cancel_scope.cancel()


async def begin_users(broker: MessageBroker) -> None:
    """Have the users of a file be the first ones, if that is wanted and there are none. Raises CannotOpen."""
    try:
        await broker.users.begin(broker.settings.security.first_users_file)
    except UsersFileError as error:
        raise CannotOpen(str(error)) from None


def heeded_signals(*, reloads: bool) -> list[signal.Signals]:
    """Return the signals that we act on: SIGHUP if it is not ignored already, as under nohup, or if we then reload."""
    hangs_up = reloads or not ignores_hangup()
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangs_up else [])]


def ignores_hangup() -> bool:
    """Return whether this process was started to go on when its terminal closes."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def has_terminal() -> bool:
    """Return whether there is a controlling terminal: SIGHUP then means that it was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


async def stop_on_signal(
    signals: AsyncIterator[int],
    stop: trio.Event,
    *,
    hangup_stops: bool,
    reload: Callable[[], None] | None = None,
) -> None:
    """Set `stop` at the first signal; at the second, exit at once: everything acked is on disk already.

    A SIGHUP is the first signal if `hangup_stops`, and never the second: a terminal that closes may send several. With
    something to `reload`, it only stops a broker whose terminal has gone.
    """
    async for number in signals:
        if number == signal.SIGHUP and reload is not None and not stop.is_set():
            if not hangup_stops or has_terminal():
                reload()
                continue
        elif number == signal.SIGHUP and (stop.is_set() or not hangup_stops):
            log.info("SIGHUP: ignored; there is nothing to reload")
            continue
        if stop.is_set():
            os._exit(128 + number)
        log.info("%s: finishing what was received", signal.Signals(number).name)
        stop.set()


async def run(settings: Settings) -> None:
    """Open the storage and the doors, and serve until a signal. Raises CannotOpen, OSError."""
    tls = tls_of(settings)
    reloads = bool(settings.security.users_file or tls)
    ignored = ignores_hangup()
    hangup_stops, heeded = has_terminal() and not ignored, heeded_signals(reloads=reloads)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what holds again when we listen no more: one may come as we exit
    with trio.open_signal_receiver(*heeded) as signals, open_doors(settings) as listening:
        if settings.storage.engine != "local":
            await run_node(settings, listening, signals, hangup_stops, ignored)
            return
        stop, starting = trio.Event(), StartingAnswers(starting_doors(settings, listening))
        brokers: list[MessageBroker] = []  # the one, once it has started

        def started(broker: MessageBroker) -> None:
            brokers.append(broker)
            announce(settings, listening, broker)

        reload = partial(reload_all, brokers, tls) if reloads else None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(stop_on_signal, signals, stop, hangup_stops=hangup_stops, reload=reload))
            nursery.start_soon(starting.run)
            engine = await trio.to_thread.run_sync(LocalEngine.open, settings.storage)
            try:
                look_for_garbage_less_often()
                await serve(settings, engine, listening, stop, started=started, tls=tls, starting=starting)
            finally:
                engine.close()
            nursery.cancel_scope.cancel()
    log.info("stopped")


async def run_node(
    settings: Settings,
    listening: Sequence[ListeningDoor],
    signals: AsyncIterator[int],
    hangup_stops: bool,
    hangup_ignored: bool,
) -> None:
    """Be one broker of a cell until a signal. Raises CannotOpen, OSError.

    `hangup_ignored`: the process was started so, and stays so when it begins anew.
    """
    from qb.cluster import process_end
    from qb.cluster.cell_node import CellNode, cluster_listeners

    look_for_garbage_less_often()
    process_end.hangup_ignored = hangup_ignored
    process_end.heed_stops()
    stop, tls = trio.Event(), tls_of(settings)
    started = partial(announce, settings, listening)
    log_ins = log_ins_of(settings.security)

    async def serve_cell(engine: Engine, stop: trio.Event, ownership: Ownership, relays: Relays) -> None:
        serving = partial(serve, started=started, tls=tls, ownership=ownership, relays=relays, log_ins=log_ins)
        await serving(settings, engine, listening, stop)

    with ExitStack() as opened:
        others = [opened.enter_context(listener) for listener in cluster_listeners(settings)]
        node = CellNode(settings, listening, others, stop, serve_cell, log_ins, tls)
        reload = partial(reload_all, (), tls) if tls else None
        stopping = partial(stop_on_signal, hangup_stops=hangup_stops, reload=reload)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stopping, signals, stop)
            await node.run()
            nursery.cancel_scope.cancel()
    log.info("stopped")


def tls_of(settings: Settings) -> ServerTls | None:
    """Return the certificate of the broker, if it has one. Raises OSError with words for the operator."""
    security = settings.security
    if not security.tls_cert:
        if security.tls_key or security.tls_client_ca:
            raise OSError("QB_TLS_KEY and QB_TLS_CLIENT_CA need QB_TLS_CERT beside them")
        return None
    return ServerTls(security.tls_cert, security.tls_key, security.tls_client_ca)


def reload_all(brokers: Sequence[MessageBroker], tls: ServerTls | None) -> None:
    """Read again what can change while the broker runs. What cannot be read stays as it was, and the log says so."""
    for broker in brokers:
        try:
            log.info("SIGHUP: read %s again", counted(broker.access.users.reload(), "user"))
            broker.access.audit.note("", "", "signal", "read users again", [], "ok")
        except UsersFileError as error:
            log.error("SIGHUP: the users stay as they were: %s", error)
    try:
        if tls is not None:
            tls.reload()
            log.info("SIGHUP: read the certificate again; new connections use it")
    except OSError as error:
        log.error("SIGHUP: the certificate stays as it was: %s", error)


@contextmanager
def open_doors(settings: Settings) -> Iterator[Sequence[ListeningDoor]]:
    """Listen wherever the settings say, the binary door first. Raises OSError with words for the operator."""
    with ExitStack() as opened:

        def listening_door(title: str, door: Callable[[MessageBroker], Door], host: str, port: int) -> ListeningDoor:
            return ListeningDoor(title, door, [opened.enter_context(listener) for listener in listen(host, port)])

        listening = [listening_door("frames", BinaryDoor, settings.server.host, settings.server.port)]
        for title, section, door in (("JSON lines", settings.json, JsonDoor), ("HTTP", settings.http, http_door)):
            if section.port:
                try:
                    listening.append(listening_door(title, door, section.host, section.port))
                except OSError as error:
                    variable = f"QB_{title.split()[0].upper()}_PORT"
                    raise OSError(f"{error}; {variable} chooses another port for {title}, 0 none") from None
        if settings.http.port:
            import qb.doors.http.http_door  # noqa: F401 - now: it takes 90 ms, and no peer waits yet
        yield listening


def http_door(broker: MessageBroker) -> Door:
    """Return the HTTP door; a broker without it does not load its dependencies."""
    from qb.doors.http.http_door import HttpDoor

    return HttpDoor(broker)


def starting_doors(settings: Settings, listening: Sequence[ListeningDoor]) -> list[StartingDoor]:
    """Return what each door answers while the broker starts; a peer that speaks TLS waits until the broker can."""
    if settings.security.tls_cert:
        return []
    answers: dict[object, Callable[[bytes], bytes | None]]
    answers = {BinaryDoor: answer_to_frames, JsonDoor: answer_to_lines, http_door: answer_to_http}
    return [
        StartingDoor(each.listeners, answers[each.door], 0.0 if each.door is http_door else SHORT) for each in listening
    ]


def announce(settings: Settings, listening: Sequence[ListeningDoor], broker: MessageBroker) -> None:
    """Log for the operator what runs where, and what the start found."""
    found = broker.engine.recovery
    if where := exposed(settings):
        log.warning("%s can be reached without users or without TLS: --insecure was given", ", ".join(where))
    for note in (*found.notes, *broker.transactions.notes):
        log.warning("%s", note)
    try:
        greet(settings, listening, broker.engine)
    except BrokenPipeError:  # the greeting is not read, which is no reason to stop
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def greet(settings: Settings, listening: Sequence[ListeningDoor], engine: Engine) -> None:
    """Print where we are and what we have."""
    found, promise = engine.recovery, PROMISES[engine.durability]
    print(f"QB {__version__} listens on {listening[0].addresses}", flush=True)
    for each in listening[1:]:
        print(f"{each.title} on {each.addresses}", flush=True)
    print(f"data in {os.path.abspath(settings.storage.data_dir)}, {promise}", flush=True)
    print(f"{counted(found.topics, 'topic')}, {counted(found.messages, 'message')} recovered", flush=True)


def look_for_garbage_less_often() -> None:
    """Search for cycles when 20,000 objects have piled up instead of 700, and not among what the start has left.

    Publishes of many peers in one batch are more objects than 700, and none of them is garbage. What has stayed is
    searched once more after three such searches, not ten: the event loop waits meanwhile, and it took 42 ms after 5,000
    connections, now 13. Searches of everything are as rare as they were.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 2, 50)


def counted(number: int, noun: str) -> str:
    """Return `1 topic`, `2 topics`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server as a command; returns the exit code."""
    try:
        code = carry_out(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        code = OUTPUT_CLOSED
    return code


def carry_out(argv: Sequence[str]) -> int:
    """Do what the flags say; returns the exit code. Raises BrokenPipeError when standard output is closed."""
    if argv[:1] != ["cluster"] and ("--help" in argv or "-h" in argv):
        print(f"{USAGE}\n\n{describe_flags()}")
        return 0
    if "--version" in argv:
        print(f"QB {__version__}")
        return 0
    if argv[:1] == ["cluster"]:
        from qb.cluster import local_cluster

        program = sys.orig_argv[1 : len(sys.orig_argv) - len(argv)]
        return local_cluster.main(argv[1:], [sys.executable, *program])
    try:
        loaded = load(argv, os.environ, switches=["--print-config"])
    except SettingsError as error:
        print(f"qb-server: {error}", file=sys.stderr)
        return 2
    if "--print-config" in argv:
        print(render(loaded))
        return 0
    settings = loaded.settings
    if refusal := refusal_of_users_file(settings):
        print(f"qb-server: {refusal}", file=sys.stderr)
        return 2
    try:
        check_users(settings.security)
        tls_of(settings)
    except (UsersFileError, OSError) as error:
        print(f"qb-server: {error}", file=sys.stderr)
        return 2
    if exposed(settings) and not settings.security.insecure:
        print(f"qb-server: {refusal_to_listen(settings)}", file=sys.stderr)
        return 2
    if (refusal := refusal_of_cluster_port(settings)) and not settings.security.insecure:
        print(f"qb-server: {refusal}", file=sys.stderr)
        return 2
    start_logging(settings.server.log_level)
    raise_file_limit()
    if most_connections() < settings.server.max_connections:
        few = "the limit of open files is %d: that allows %d connections, not %d; to raise it: ulimit -n"
        log.warning(few, file_limit(), most_connections(), settings.server.max_connections)
    problems: list[BaseException] = []
    try:
        trio.run(run, settings)
    except* (CannotOpen, OSError) as failed:
        problems = leaves(failed)
    for problem in problems:
        print(f"qb-server: {problem}", file=sys.stderr)
    return 1 if problems else 0


def check_users(security: SecuritySettings) -> None:
    """See that the file of users can be used. Raises UsersFileError."""
    if security.users_file:
        read_users(security.users_file)
    if security.first_users_file:
        try:
            check_admin_remains([*read_users(security.first_users_file).users.values()])
        except BadWord as error:
            raise UsersFileError(f"users file {security.first_users_file!r}: {error}") from None


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """Return the single errors in a group of groups."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


if __name__ == "__main__":
    sys.exit(main())
