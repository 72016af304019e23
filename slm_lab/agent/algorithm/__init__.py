"""Algorithms, one file per family. The code follows the order of the steps in the paper; the formulas are in `agent/ops`."""
