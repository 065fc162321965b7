"""`redistribute_state`: all tensors of a model's state as one batch plan.

Reading order:

- `move`  `redistribute_state`, which calls the others
- `names` states as trees, their names, and the layouts that patterns give them
- `ties`  tensors that share storage on this rank
- `view`  what the ranks hold, joined
- `plan`  the plans of the moves, and their runs
"""
