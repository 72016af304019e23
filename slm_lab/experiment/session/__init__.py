"""The Session, which trains one agent, and the process that it runs in."""
