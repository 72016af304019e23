"""Modules that all other subpackages use: records, clock, random numbers, shared arrays, messages.

The modules in `slm_lab.lib` import only numpy and the standard library.
"""
