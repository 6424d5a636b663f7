"""A learner over several ranks: FSDP2 on a device mesh, with expert and context parallelism.

Every rank has a `TorchLearner` with a `ShardedProcessGroup`, and all ranks make the same calls. torchrun, Ray or
anything that sets torch's environment variables starts the ranks. In a run, the conductor's learner is rank 0 and
starts the others (`loop.ranks`).

    group = ShardedProcessGroup(join(config))
    learner = TorchLearner(config, channel=group.channel(store), group=group)"""

from etude.training.sharded.mesh import Mesh, join
from etude.training.sharded.process_group import ShardedProcessGroup

__all__ = ["Mesh", "ShardedProcessGroup", "join"]
