"""Comparisons, one a file, one command each."""
