"""Collection of experience by rollout workers, synchronously or asynchronously (arXiv:2006.11751).

    RolloutWorker → slot → RolloutAssembler → dataset → learner → PublishedWeights → RolloutWorker

A slot is storage for one rollout. A worker fills a slot with a rollout and sends a report to the learner's process. The assembler copies
the rollout into the current dataset, and the worker may then overwrite the slot. On one machine, slots and weights are in shared memory,
and messages contain only slot numbers. On a cluster, rollouts and weights are sent in messages (link.py).
"""
