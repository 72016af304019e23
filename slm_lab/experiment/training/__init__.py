"""What a Session trains with: the learner, its observers, evaluation, and the values that the env decides."""
