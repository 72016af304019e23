"""Agents: their policies, algorithms, memories, nets and optimizers. This package does not depend on files, processes or envs."""
