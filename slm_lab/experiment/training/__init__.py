"""Training in a Session: the learner, its observers, evaluation, and the spec values that depend on the env."""
