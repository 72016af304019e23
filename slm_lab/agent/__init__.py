"""Agents: policy and algorithm, memory, nets and optimizers. Independent of files, processes and envs."""
