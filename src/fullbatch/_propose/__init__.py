"""What would make a step take less memory: each change is tried on a copy, predicted, and left to the user."""
