"""A tool: search the files in the machine."""

from typing import ClassVar

from etude.harness.commands import Parameter, Signature
from etude.harness.tools import Workbench


class Grep:
    """Returns the lines that contain a text, as ``path:line``."""

    signature: ClassVar[Signature] = Signature("grep", "Find a text in the files.", (Parameter("text"),))

    def __init__(self, most: int = 20) -> None:
        self.most = most  # lines

    async def run(self, bench: Workbench, text: str) -> str:
        found = []
        for path in sorted(bench.files or ()):
            for number, line in enumerate((await bench.machine.read(path)).decode(errors="replace").splitlines(), 1):
                if text in line:
                    found.append(f"{path}:{number} {line.strip()}")
        return "\n".join(found[: self.most]) or "nothing found"
