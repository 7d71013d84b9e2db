"""Looks at the GPUs while a run goes on: how busy, how full."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SECONDS_BETWEEN_LOOKS = 0.2


@contextmanager
def watched(path: Path, gpus: Sequence[int]) -> Iterator[None]:
    """Append to a file, again and again: time, idle share of each of the run's GPUs, memory of the fullest."""
    ended = threading.Event()
    thread = threading.Thread(target=_look, args=(path, gpus, ended), daemon=True)
    if gpus:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if gpus:
            thread.join()


def _look(path: Path, gpus: Sequence[int], ended: threading.Event) -> None:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in gpus]
    with path.open("w") as file:
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            idle = [1 - pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
            full = max(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
            look = {"time": time.time(), "idle": idle, "memory_gib": full / 2**30}
            file.write(json.dumps(look) + "\n")
    pynvml.nvmlShutdown()
