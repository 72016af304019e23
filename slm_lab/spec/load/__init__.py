"""Load the text of a spec file as a Spec, or report all its problems."""
