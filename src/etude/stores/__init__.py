"""Blob stores: immutable objects under keys, and pointers that move by compare-and-swap. Usable alone.

etude publishes weights through one of these stores. A key is a relative path; a pointer is a small value, such as the
key of the newest object, that is replaced atomically. Every store passes the contract tests in
`tests/contracts/test_blob_store.py`.

>>> store = MemoryStore()
>>> store.put("objects/greeting", b"hello")
>>> store.get("objects/greeting")
b'hello'
"""

from etude.stores.bucket import BucketStore
from etude.stores.cached import CachedStore
from etude.stores.directory import DirectoryStore
from etude.stores.keys import check_key
from etude.stores.memory import MemoryStore
from etude.stores.opening import open_store

__all__ = ["BucketStore", "CachedStore", "DirectoryStore", "MemoryStore", "check_key", "open_store"]
