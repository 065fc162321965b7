"""The table of a model class that no table knows: trials of its own loader, made from its config.

Reading order:

- `forked_ranks`   ranks as forked processes over gloo
- `model_class`    a class or a function by name, the models that it makes, and what they save and load
- `disk_table`     the table of what is saved, from names and shapes at several configs, whose fields sizes follow
- `class_table`    the table of what a class holds after loading, on one rank and on several
"""

from shardplan.interop.derivation.class_table import ClassTable, derive_class_table

__all__ = ["ClassTable", "derive_class_table"]
