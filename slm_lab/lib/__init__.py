"""Modules that every layer of the package uses: records, clock, random numbers, shared arrays, messages.

These modules import only numpy and the standard library.
"""
