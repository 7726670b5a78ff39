"""Compile side of flashkda: kernels in CuTe DSL -> cubins, their manifest, and the audit of their machine code."""
