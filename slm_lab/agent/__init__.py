"""Policies, algorithms, memories, nets and optimizers of agents. This package does not depend on files, processes or envs."""
