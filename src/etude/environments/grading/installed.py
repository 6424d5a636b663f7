"""Modules that a task's machine has outside its working folder: what a verifier imports, and means those.

A new file of that name beside the verifier would be found instead. A machine of the image is asked which there are, as
it may have anything; what the image has under such a name in the working folder is the task's, and may be handed in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection

from etude.errors import MachineError
from etude.records.image import Image
from etude.seams import Runtime

_BYTES = 4 << 20
_LIST = """import json, os, pkgutil, sys
here = os.path.realpath(os.getcwd())
away = [p for p in sys.path if p and not (os.path.realpath(p) + os.sep).startswith(here + os.sep)]
there, own = ({m[1] for m in pkgutil.iter_modules(paths)} for paths in (away, sys.argv[1:]))
print(json.dumps(sorted(there - own)))"""
_LEFT_OUT = sys.stdlib_module_names | {"test", "tests"}  # known without asking; anybody's own


async def installed(runtime: Runtime, image: Image | None, folders: Collection[str], python: str) -> frozenset[str]:
    """Names of modules that new files in these folders could hide. None where there is no Python to import any.
    Raises `MachineError`."""
    [machine] = await runtime.fork(await runtime.prepare({}, image=image), 1)
    try:
        argv = [python, "-c", _LIST, *sorted(folders)]
        listed = await machine.exec(argv, key="installed", deadline_s=60.0, output_bytes=_BYTES)
    finally:
        await machine.close()
    if listed.timed_out:
        raise MachineError("the modules of a task's machine were not listed", "not within 60 s", hint="grade again")
    try:
        return frozenset(json.loads(listed.output)) - _LEFT_OUT if listed.exit_code == 0 else frozenset()
    except (ValueError, TypeError):
        return frozenset()  # a Python that says something else beside
