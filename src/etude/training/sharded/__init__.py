"""A learner over several ranks: FSDP2 on a device mesh, experts by a mesh of their own, texts cut where they are long.

Every rank has a `TorchLearner` with a `Sharded` group and is called alike; torchrun, Ray or anything that sets torch's
environment variables starts them. In a run the conductor's learner is rank 0 and starts the others (`loop.ranks`).

    group = Sharded(join(config))
    learner = TorchLearner(config, channel=group.channel(store), group=group)
"""

from etude.training.sharded.mesh import Mesh, join
from etude.training.sharded.process_group import ShardedProcessGroup

__all__ = ["Mesh", "ShardedProcessGroup", "join"]
