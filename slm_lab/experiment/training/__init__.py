"""Training in a Session: the learner, its observers, evaluation, and the values that depend on the env."""
