"""Reinforcement-learning algorithms, one file for each family of algorithms.

The code of an algorithm follows the order of the steps in its paper. The formulas are functions in `agent/ops`.
"""
