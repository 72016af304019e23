"""Contract suites and fakes for a package that extends slm_lab: subclass a suite in your tests, and pytest runs it on your class."""
