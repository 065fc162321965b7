"""All tensors of a model's state as one batch plan.

- `names`      states as trees, their names, and the layouts that patterns give them
- `view`       what the ranks hold, joined
- `ties`       tensors that share storage
- `plan`       the plans of the moves
- `move`       `redistribute_state`, which calls them
"""
