"""Experience from rollout workers, synchronously or asynchronously (arXiv:2006.11751).

    RolloutWorker → slot (shared memory) → RolloutAssembler → dataset → learner → PublishedWeights (shared memory) → RolloutWorker

A worker fills a slot with a rollout and reports it; the assembler copies the rollout into the current dataset, and the slot is free
again. Messages carry slot numbers; transitions and weights stay in shared memory.
"""
