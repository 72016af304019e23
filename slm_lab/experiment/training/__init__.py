"""Training of policies in a Session: learners, observers, evaluation, self-play, and spec values that depend on the env."""
