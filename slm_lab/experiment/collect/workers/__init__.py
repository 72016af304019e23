"""Experience from rollout workers, synchronously or asynchronously (arXiv:2006.11751).

    RolloutWorker → slot → RolloutAssembler → dataset → learner → PublishedWeights → RolloutWorker

A worker fills a slot with a rollout and reports this. The assembler copies the rollout into the current dataset, which makes the slot free
again. On one machine, slots and weights are in shared memory, and messages contain only slot numbers; on a cluster, rollouts and weights
are sent in messages (link.py).
"""
