"""Agents: policy and algorithm, memory, nets and optimizers. Knows no file, no process and no env."""
