"""The store of the default process group."""

from __future__ import annotations

import datetime

import torch


class RankStore:
    """Values by key, that every rank may write and read without the others."""

    def __init__(self, store: torch.distributed.Store):
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Writes a value."""
        self._store.set(key, value)

    def get(self, key: str) -> str:
        """Returns a value; waits for it if nobody has written it."""
        return self._store.get(key).decode()

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""
        return self._store.check(keys)

    def wait_for(self, keys: list[str], seconds: float) -> bool:
        """Waits until all keys have values; returns False if some have none after that time."""
        try:
            self._store.wait(keys, datetime.timedelta(seconds=seconds))
        except RuntimeError:  # DistStoreError; a FileStore raises its parent
            return self._store.check(keys)
        return True


def store_of_ranks() -> RankStore | None:
    """Returns the store of the default group; None for groups without one, as of the fake backend."""
    if torch.distributed.get_backend() == "fake":
        return None
    store = torch.distributed.distributed_c10d._get_default_store()
    return None if store is None else RankStore(store)
