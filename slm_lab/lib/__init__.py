"""The vocabulary that every room speaks: records, clock, random streams, notices. numpy and the standard library only."""
