"""The memory of a step: measured to the byte, and on the CPU counted and capped."""
