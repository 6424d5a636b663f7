"""Tasks from sessions of a product's users: what was asked, the files at the start, and the files that the user kept.

A session is a folder that the product writes (`folders`), about a captured conversation whose subject allows training.
The instruction is what the user wrote. Hidden tests, or the product's own check, verify a solution: they must fail
with the files of the start and pass with those that the user kept, in machines. Only such a session becomes a task;
all others are quarantined with the reason. Tasks are encrypted with the key of their subject, in the privacy folder, so
an erasure makes them unreadable (`store`). `SessionSource` is the task source.
"""

from etude.tasks.sessions.folders import Session, read_session
from etude.tasks.sessions.making import ImportedSession, import_sessions
from etude.tasks.sessions.source import SessionSource
from etude.tasks.sessions.store import SessionStore, StoredSession

__all__ = [
    "ImportedSession",
    "Session",
    "SessionSource",
    "SessionStore",
    "StoredSession",
    "import_sessions",
    "read_session",
]
