"""Start and monitor processes, on this machine (`local`) or on a Ray cluster (`ray`)."""
