"""Sessions, Hogwild workers and rollout workers on the nodes of a Ray cluster. These modules are imported only with `--cluster`."""
