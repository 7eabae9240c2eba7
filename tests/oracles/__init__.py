"""Independent oracles: loops and dense algebra from the book's formulas.

Nothing here imports bft_ref or torch: NumPy in float64, one sum at a time.
"""
