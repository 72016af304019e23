"""Modules for every layer: records, clock, random streams, shared arrays, notices. They import only numpy and the standard library."""
