from __future__ import annotations
class Prober:
    notes: tuple[str, ...] = ()
    def __init__(self, program, inputs): ...
    def costs(self, samples): return None
