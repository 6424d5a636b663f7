"""What a task's machine calls its Python: our runners are run by it.

Debian's images have ``python3`` and no ``python``; others have it the other way round. A machine of the image is asked
once, with nothing of the agent's in it. Knows nothing of what is run.
"""

from __future__ import annotations

from etude.errors import MachineError
from etude.records.image import Image
from etude.seams import Runtime

NAMES = ("python", "python3")


class Pythons:
    """The word for Python of each image of a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._known: dict[str, str] = {}  # by the image's digest

    async def of(self, image: Image | None) -> str:
        """The first of `NAMES` that works in machines of this image. The first of all where none does or none can be
        asked: whoever runs it is told what is wrong."""
        if image is None:
            return NAMES[0]
        if image.digest not in self._known:
            try:
                found = await self._asked(image)
            except MachineError:
                found = ""
            if not found:
                return NAMES[0]
            self._known[image.digest] = found
        return self._known[image.digest]

    async def _asked(self, image: Image) -> str:
        [machine] = await self._runtime.fork(await self._runtime.prepare({}, image=image), 1)
        try:
            for name in NAMES:
                if (await machine.exec([name, "-c", ""], key=name, deadline_s=60.0)).exit_code == 0:
                    return name
            return ""
        finally:
            await machine.close()
