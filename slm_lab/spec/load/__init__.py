"""Functions that load spec files as Spec objects, or report all problems of a spec file."""
