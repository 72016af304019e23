"""Algorithms, one file per family; each follows the order of its paper. The formulas are in `ops`."""
