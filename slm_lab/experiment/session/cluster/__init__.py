"""Objects for Sessions on the nodes of a Ray cluster: the sink for rows, the shared arrays, and the parameter server."""
