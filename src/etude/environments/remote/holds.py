"""What an account has the runtime hold: the states of its paused machines, and those that it has named.

The runtime lets go of any other state when there are too many, whoever's they are. What is held is counted against the
account's quota instead, so nobody can push out what is another's.
"""

from __future__ import annotations

from etude.environments.remote.keys import Account
from etude.seams import Holding, Runtime


class Hold:
    """A state of the runtime's that stays until it is released. `Refused` (429) where the account has no room for it,
    `MachineError` where the runtime has lost it already."""

    def __init__(self, runtime: Runtime, account: Account, state: str) -> None:
        self.state, self._account = state, account
        self._runtime = runtime if isinstance(runtime, Holding) else None  # one that holds nothing has its own bounds
        self._num_bytes = 0 if self._runtime is None else self._runtime.hold(state)
        try:
            account.take_bytes(self._num_bytes)
        except BaseException:
            self._num_bytes = 0
            self.release()
            raise

    def release(self) -> None:
        """Idempotent."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            runtime.release(self.state)
            self._account.give_bytes_back(self._num_bytes)
