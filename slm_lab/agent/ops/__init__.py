"""Formulas of the algorithms as pure functions.

The suffix of an array's name gives its axes: T = time, N = envs, B = batch, A = actions, P = distribution parameters.
"""
