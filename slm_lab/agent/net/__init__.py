"""Networks: bodies, which map observations to features, and heads, which map features to outputs."""
