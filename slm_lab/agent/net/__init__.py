"""Networks: bodies (observation → features) and heads, one definition each; a numpy twin for acting is generated from it."""
