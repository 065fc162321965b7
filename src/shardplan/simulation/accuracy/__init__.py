"""Predictions of steps beside measurements: rows, errors, parameters fitted to them, and intervals.

Reading order:

- `step_rows`        rows of measured steps, as their files say them
- `subject`          what a row measured: its model, strategy and topology
- `metrics`          errors, ranks and regret
- `forecast`         rows predicted, with intervals
- `step_fitting`     parameters of a machine fitted to its rows
- `machine_timings`  the same by kernels and collectives that were timed on it
- `step_validation`  the report
"""
