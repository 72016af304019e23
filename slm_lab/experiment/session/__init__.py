"""The Session, which trains one agent, and the process in which it runs."""
