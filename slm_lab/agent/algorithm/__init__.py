"""Algorithms, one file per family, in the order of the paper; formulas are in ops."""
