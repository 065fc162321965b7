"""Tables derived: how a framework stores a model, read off what its own loader makes of tensors that carry their index.

Reading order:

- `trials`       one run of a loader, and which logical element stands at every place of what it made
- `wholes`       what one rank has of a dim, as a product and sum of atoms
- `cuts`         which part of it every rank has, as cuts over mesh axes
- `holes`        what stands in names: families, their numbers, and which rank has which
- `sides`        all trials together, and the sizes of atoms in each
- `family_form`  the expression of a family that fits all of them
- `tables`       the table, checked on every trial
"""

from shardplan.movement.weights.derive.tables import derive_table
from shardplan.movement.weights.derive.trials import LoaderTrial

__all__ = ["LoaderTrial", "derive_table"]
