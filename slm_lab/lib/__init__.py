"""Modules that every layer uses: records, clock, random streams, shared arrays, notices. They import only numpy and the standard
library."""
