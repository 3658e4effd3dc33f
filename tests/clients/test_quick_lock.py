"""The lock of hot paths, which stands for a threading.Lock."""

from __future__ import annotations

from threading import Condition, Thread

from qb.clients.quick_lock import QuickLock


def test_it_is_taken_once_until_it_is_released() -> None:
    lock = QuickLock()
    assert lock.acquire()
    assert not lock.acquire(blocking=False)
    assert not lock.acquire(timeout=0.001)
    lock.release()
    with lock:
        assert not lock.acquire(blocking=False)
    assert lock.acquire(blocking=False)


def test_what_threads_do_with_it_held_is_done_one_after_another() -> None:
    lock, counted = QuickLock(), [0]

    def count() -> None:
        for number in range(2_000):
            if number % 2:
                lock.get()
                counted[0] = int(str(counted[0])) + 1
                lock.put(None)
            else:
                with lock:
                    counted[0] = int(str(counted[0])) + 1

    threads = [Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted == [8_000]


def test_a_condition_waits_and_notifies_with_it() -> None:
    changed = Condition(QuickLock())  # type: ignore[arg-type]
    said = list[str]()

    def answer() -> None:
        with changed:
            changed.wait_for(lambda: said)
            said.append("answer")
            changed.notify_all()

    thread = Thread(target=answer)
    thread.start()
    with changed:
        said.append("question")
        changed.notify_all()
        assert changed.wait_for(lambda: len(said) == 2, timeout=30)
    thread.join()
