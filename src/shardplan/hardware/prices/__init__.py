"""Prices: resources and their loads, algorithms, library models, and when the steps of a program run."""
