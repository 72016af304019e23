"""Networks: bodies (observation → features) and heads."""
