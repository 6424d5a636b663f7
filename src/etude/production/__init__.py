"""Training on production use: captured conversations become episodes, signals of users become their rewards.

    found = OpenEpisodes(privacy_folder).find(since=0.0)
    reward_of({"kept": [1.0, 0.0]}, {"kept": 1.0})                # 0.5, None without a signal that counts
    Baselines().advantages([("kind", 1.0), ("kind", 0.0)])        # of single rollouts: no siblings are needed

- `OpenEpisodes` joins answers that continue each other to a conversation, token by token. Nothing is tokenised again.
- Only answers of subjects that allow training now are in an episode.
- `Baselines` has the mean reward of each kind of work, since a production episode has no siblings to compare it with.

The program that trains on them is `etude.loop.production`, the command `etude learn`."""

from etude.production.baselines import Baselines
from etude.production.episodes import Episode, OpenEpisodes, episodes_of, rollout_of
from etude.production.outcomes import choose, graded_of, reward_of
from etude.production.settings import LearnSettings, read_settings

__all__ = [
    "Baselines",
    "Episode",
    "LearnSettings",
    "OpenEpisodes",
    "choose",
    "episodes_of",
    "graded_of",
    "read_settings",
    "reward_of",
    "rollout_of",
]
