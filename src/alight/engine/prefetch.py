"""Batches fetched by a thread of their own, so that loading goes on while the network runs."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any

DEPTH = 2  # batches that wait ready


def prefetch(source: Iterable[Any]) -> Iterator[Any]:
    """What the source gives, in its order, fetched before it is asked for; its errors come when their turn comes.

    >>> list(prefetch(range(5)))
    [0, 1, 2, 3, 4]
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=DEPTH)
    stop = threading.Event()

    def put(kind: str, item: Any) -> None:
        while not stop.is_set():
            try:
                return ready.put((kind, item), timeout=0.1)
            except queue.Full:
                continue
        return None

    def fetch() -> None:
        try:
            for item in source:
                put("item", item)
                if stop.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    thread = threading.Thread(target=fetch, name="alight-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, item = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
