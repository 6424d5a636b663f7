"""Training on production use: captured conversations become episodes, signals of users become their rewards.

    found = find_episodes(privacy_folder, since=0.0, until=time.time() - settle_s)
    reward_of({"kept": [1.0, 0.0]}, {"kept": 1.0})                # 0.5, None without a signal that counts
    Baselines().advantages([("kind", 1.0), ("kind", 0.0)])        # of single rollouts: no siblings are needed

- `find_episodes` joins answers that continue each other to a conversation, token by token. Nothing is tokenised again.
- Only answers of subjects that allow training now are in an episode.
- `Baselines` has the mean reward of each kind of work, since a production episode has no siblings to compare it with.

The program that trains on them is `etude.loop.production`, the command `etude learn`."""

from etude.production.baselines import Baselines
from etude.production.episodes import Episode, episodes_of, find_episodes, rollout_of
from etude.production.outcomes import choose, graded_of, reward_of
from etude.production.settings import LearnSettings, read_settings

__all__ = [
    "Baselines",
    "Episode",
    "LearnSettings",
    "choose",
    "episodes_of",
    "find_episodes",
    "graded_of",
    "read_settings",
    "reward_of",
    "rollout_of",
]
