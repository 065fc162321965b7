"""Running a program for real: one file a backend, one line in the table of `run`."""
