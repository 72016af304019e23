"""Modules that all other subpackages use: records, clock, random numbers, shared arrays, messages.

These modules import only numpy and the standard library.
"""
