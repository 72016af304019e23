"""Algorithms, a file per family: the flow as in the paper; formulas are in ops."""
