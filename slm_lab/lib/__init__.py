"""What every layer uses: records, clock, random streams, shared arrays, notices. numpy and the standard library only."""
