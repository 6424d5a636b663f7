"""A harness (agent program) that shows the repository to the model before its first turn."""

from dataclasses import dataclass

from etude.harness import Episode, run_agent


@dataclass(frozen=True)
class Oriented:
    """The built-in loop; the instruction also has the names and first lines of all files."""

    lines: int = 2  # per file

    async def run(self, episode: Episode) -> None:
        parts = [episode.task.instruction]
        for path in sorted(episode.task.files):
            text = (await episode.machine.read(path)).decode(errors="replace")
            parts.append("\n".join([path, *text.splitlines()[: self.lines]]))
        episode.messages[0]["content"] = "\n\n".join(parts)
        await run_agent(episode)
