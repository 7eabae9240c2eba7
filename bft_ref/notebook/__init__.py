"""What the notebooks of the book use: recorded facts, figures, sliders."""

from bft_ref.notebook.facts import chapter, fact
from bft_ref.notebook.figures import figure
from bft_ref.notebook.sliders import Frame, slider

__all__ = ["Frame", "chapter", "fact", "figure", "slider"]
