"""Experience from rollout workers, synchronously or asynchronously (arXiv:2006.11751).

    RolloutWorker → slot → RolloutAssembler → dataset → learner → PublishedWeights → RolloutWorker

A worker fills a slot with a rollout and reports it; the assembler copies the rollout into the current dataset, which frees the slot. On one
machine slots and weights are in shared memory, and messages contain slot numbers; on a cluster both are sent (link.py).
"""
