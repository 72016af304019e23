"""The Session, which trains the policies of a spec with one random seed, and the process in which a Session runs."""
