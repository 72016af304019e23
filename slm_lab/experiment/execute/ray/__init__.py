"""Sessions, Hogwild workers and rollout workers on the nodes of a Ray cluster. Nothing here is imported unless `--cluster` is given."""
