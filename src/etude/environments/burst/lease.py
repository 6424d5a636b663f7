"""A host's side of its lease: how long it may run machines without an answer from whoever placed them there."""

from __future__ import annotations


class Lease:
    """The host kills its machines itself when this has run out.

    >>> lease = Lease(10.0, now_s=0.0)
    >>> lease.answered(sent_s=4.0)
    >>> lease.is_over(13.9), lease.is_over(14.0)
    (False, True)
    """

    def __init__(self, lease_s: float, *, now_s: float) -> None:
        self._lease_s, self.ends_s = lease_s, now_s + lease_s

    def answered(self, *, sent_s: float) -> None:
        """The heartbeat that was sent then was answered. What counts is when it was sent: it came later."""
        self.ends_s = max(self.ends_s, sent_s + self._lease_s)

    def is_over(self, now_s: float) -> bool:
        """Whether nothing may run here any more."""
        return now_s >= self.ends_s
