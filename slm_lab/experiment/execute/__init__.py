"""Start and watch processes: on this machine (`local`) or on a Ray cluster (`ray`)."""
