"""Sessions on the nodes of a Ray cluster: their sink, shared arrays and parameter server."""
