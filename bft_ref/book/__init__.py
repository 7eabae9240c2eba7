"""What the notebooks of the book use: recorded facts, figures, sliders."""

from bft_ref.book.facts import chapter, fact
from bft_ref.book.figures import figure
from bft_ref.book.sliders import Frame, slider

__all__ = ["Frame", "chapter", "fact", "figure", "slider"]
