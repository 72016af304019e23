"""Synchronous and asynchronous RL: rollout workers collect, a learner trains (arXiv:2006.11751).

    RolloutWorker → slot (shared memory) → Batcher → dataset → learner → Weights (shared memory) → RolloutWorker

A worker fills a slot with a rollout and says so; what it has written is copied into the dataset under way, and the slot is free again.
Messages carry numbers of slots; transitions and weights stay in shared memory.
"""
