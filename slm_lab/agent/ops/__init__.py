"""Formulas as pure functions. T = time, N = envs, B = batch, A = actions, P = distribution parameters."""
