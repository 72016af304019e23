"""Sessions on the nodes of a Ray cluster: their process, sink and parameter server."""
