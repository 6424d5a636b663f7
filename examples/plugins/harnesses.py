"""Harnesses: agent programs. This one shows the model the repository before its first turn."""

from dataclasses import dataclass

from etude.harness import Episode, run_agent


@dataclass(frozen=True)
class Oriented:
    """The built-in loop, with the names of the files and the head of each in the instruction."""

    lines: int = 2  # of each file

    async def run(self, episode: Episode) -> None:
        parts = [episode.task.instruction]
        for path in sorted(episode.task.files):
            text = (await episode.machine.read(path)).decode(errors="replace")
            parts.append("\n".join([path, *text.splitlines()[: self.lines]]))
        episode.messages[0]["content"] = "\n\n".join(parts)
        await run_agent(episode)
