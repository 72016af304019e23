"""The executor of a Ray cluster, which runs Sessions and rollout workers on the nodes of the cluster."""
