"""What other systems know of a sharded tensor, read and written.

`safetensors` is the checkpoint format, with numpy alone. Nothing is imported here: a module that needs a framework is
imported by the one who has it.
"""
